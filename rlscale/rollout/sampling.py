"""How responses are drawn, and which replica draws which: seeds of the sample alone, claims through a counter.

A sample's seed follows from the run's seed, the prompt's place in the step and the sample's number, so that it does not
matter which engine takes it, when, or together with which other samples. (Bit for bit this holds where the model's
kernels are independent of the batch; in bf16 a near tie between two tokens may still fall differently. With
``trainer.deterministic`` each replica has a fixed share instead, which it receives in one batch.)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class Sampling:
    """Parameters of one call of `Rollout.generate`, and, with a seed of its own, of each request in it.

    Attributes:
        n: responses to each prompt; a request is always for one response.
        temperature: 0 is greedy.
        top_p, top_k: nucleus and top-k truncation; 1 and -1 switch them off. Log-probs are those of the distribution
            that was sampled from, after temperature and truncation: with truncation they are at least the full
            softmax's.
        max_tokens: of a response, its end-of-sequence token included.
        seed: of this call; give every step its own.
        stop_token_ids: tokens that end a response; none: those of the `Rollout`.
    """

    n: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


def sample_seed(seed: int, prompt_index: int, sample_index: int) -> int:
    """A seed in ``[0, 2**63)`` of one response; unrelated for neighbouring arguments."""
    text = f"{seed}/{prompt_index}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Claims:
    """Positions of a list that several processes work off together, each position claimed exactly once.

    Args:
        counter: shared by all processes.
        key: of this list; new for every list.
        positions: the list, the same in all processes.
    """

    def __init__(self, counter: Store, key: str, positions: range):
        self.counter, self.key, self.positions = counter, key, positions
        self.exhausted = not positions

    def take(self, count: int) -> range:
        """The next ``count`` positions, fewer at the end, none when all are claimed."""
        assert count > 0
        if self.exhausted:
            return range(0)
        stop = self.counter.add(self.key, count)
        self.exhausted = stop >= len(self.positions)
        return self.positions[stop - count : stop]
