"""Random batches: packed ones of prompts and responses for models, and flat ones of numbers for algorithms.

The same arguments give the same numbers, always.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Generator, Tensor

from rlscale.batch.types import PackedBatch, Trajectory, pack


def documents(
    lengths: Iterable[tuple[int, Iterable[int]]],
    tokens: tuple[int, int],
    mask: Callable[[int, int, int], list[int]],
    generator: Generator,
) -> PackedBatch:
    """Prompts with their responses, of random tokens.

    Args:
        lengths: of each prompt and of its responses; iterators may draw them from the same generator as they go.
        tokens: the first token id, and the one after the last.
        mask: ``(group, sample, length)`` -> 1 for each token of the policy, 0 for others; as long as the response, or
            longer: what is beyond is padding.
    """

    def drawn(count: int) -> list[int]:
        return [int(i) for i in torch.randint(*tokens, (count,), generator=generator).tolist()]

    out = []
    for group, (prompt_length, responses) in enumerate(lengths):
        prompt = drawn(prompt_length)
        for sample, length in enumerate(responses):
            response, keep = drawn(length), mask(group, sample, length)
            response += [0] * (len(keep) - length)
            out.append(Trajectory(group, sample, prompt, response, keep, [0.0] * len(keep), reward=float(sample)))
    return pack(out)


def random_batch(vocab: int = 300, groups: int = 4, n: int = 3, seed: int = 0, longest: int = 12) -> PackedBatch:
    """Ragged prompts and responses, some tokens masked out, random advantages and weights."""
    g = torch.Generator().manual_seed(seed)

    def size(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    def lengths() -> Iterator[tuple[int, Iterable[int]]]:
        for group in range(groups):
            yield size(3, 9), (1 if (group, sample) == (0, 0) else size(1, longest) for sample in range(n))

    def mask(group: int, sample: int, length: int) -> list[int]:
        keep = [int(x) for x in torch.rand(length, generator=g) > 0.2]
        return [*keep[:-1], 1]

    batch = documents(lengths(), (4, vocab), mask, g)
    batch.advantages = torch.randn(batch.tokens.numel(), generator=g)
    batch.weights = torch.rand(batch.tokens.numel(), generator=g) * batch.mask / batch.mask.sum()
    return batch


def difficult_batch(longest: int, groups: int = 6, order: int = 0, vocab: int = 250) -> PackedBatch:
    """Everything that has gone wrong somewhere: a prompt and a response of one token, a document of ``longest`` tokens,
    a response that is masked altogether, NaN as the advantage of masked tokens; values and returns, too.

    Args:
        groups: prompts, 1 to 6.
        order: seed of another order of the documents; 0: as drawn.
    """
    g = torch.Generator().manual_seed(0)

    def size(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=g))

    def mask(group: int, sample: int, length: int) -> list[int]:
        share = 1.0 if (group, sample) == (3, 1) else 0.2 if length > 1 else 0.0
        return [int(x) for x in torch.rand(length, generator=g) > share]

    prompts = [1, longest // 3, *(size(3, 9) for _ in range(4))]
    responses = [[1, 5, 2], [longest - longest // 3, 3], *([size(1, 12) for _ in range(3)] for _ in range(4))]
    batch = documents(list(zip(prompts, responses, strict=True))[:groups], (0, vocab), mask, g)
    batch.rewards.zero_()
    total = batch.tokens.numel()
    batch.weights = torch.rand(total, generator=g) * batch.mask / batch.mask.sum()
    advantages = torch.randn(total, generator=g) + 0.5  # not centred: a loss near 0 would be a difference of large sums
    batch.advantages = advantages.masked_fill(batch.mask == 0, math.nan)
    batch.values, batch.returns = torch.randn(total, generator=g), torch.randn(total, generator=g)
    if order:
        batch = batch.select(torch.randperm(batch.num_samples, generator=torch.Generator().manual_seed(order)))
    return batch


def lognormal_batch(
    vocab: int, sequences: int, prompt: int, median: float, sigma: float, longest: int, padded: bool, seed: int
) -> PackedBatch:
    """Sequences with a prompt of their own of ``prompt`` tokens and lognormal response lengths, all trained alike.

    Args:
        padded: fill every response up to the longest one with masked tokens; all other numbers stay the same.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.exp(torch.randn(sequences, generator=g) * sigma) * median
    lengths = lengths.round().long().clamp(1, longest)
    width = int(lengths.max())

    def mask(group: int, sample: int, length: int) -> list[int]:
        return [1] * length + [0] * (width - length if padded else 0)

    batch = documents([(prompt, [n]) for n in lengths.tolist()], (4, vocab), mask, g)
    batch.weights = batch.mask / batch.mask.sum()
    batch.advantages = torch.ones_like(batch.mask)
    batch.advantages[batch.mask != 0] = torch.randn(int(lengths.sum()), generator=g)
    return batch


# ---- flat batches, for algorithms alone

POISON = (float("nan"), float("inf"), -float("inf"))


@dataclass
class Flat:
    """``B`` sequences of ``T`` tokens; everything float64."""

    cu: Tensor
    group: Tensor
    mask: Tensor
    rewards: Tensor
    logp: Tensor
    old: Tensor
    ref: Tensor
    adv: Tensor
    values: Tensor
    returns: Tensor
    is_weights: Tensor

    @property
    def sequences(self) -> int:
        return self.group.numel()

    def tokens_of(self, rows: list[int]) -> Tensor:
        """Token positions of the given sequences, in the given order."""
        parts = [torch.arange(int(self.cu[r]), int(self.cu[r + 1])) for r in rows]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def take(self, rows: list[int]) -> Flat:
        """The batch of the given sequences, in the given order."""
        at = self.tokens_of(rows)
        lengths = self.cu.diff()[rows] if rows else torch.zeros(0, dtype=torch.int64)
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        token = {f.name: getattr(self, f.name)[at] for f in fields(self) if f.name not in ("cu", "group")}
        return Flat(cu=cu, group=self.group[rows], **token)

    def poisoned(self) -> Flat:
        """NaN, Inf and -Inf in turn at every masked position of every float tensor."""
        off = (self.mask == 0).nonzero().squeeze(1)
        bad = torch.tensor([POISON[i % 3] for i in range(off.numel())], dtype=torch.float64)
        changed = {}
        for f in fields(self):
            if f.name not in ("cu", "group", "mask"):
                x = getattr(self, f.name).clone()
                x[off] = bad
                changed[f.name] = x
        return replace(self, **changed)


def random_flat(seed: int, sequences: int = 9, longest: int = 11) -> Flat:
    """A random batch: some sequences empty or fully masked, observations in between, log-ratios up to about 1."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (sequences,), generator=g)
    lengths[0] = longest
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    t = int(cu[-1])

    def normal(scale: float = 1.0) -> Tensor:
        return torch.randn(t, generator=g, dtype=torch.float64) * scale

    mask = (torch.rand(t, generator=g) > 0.25).double()
    mask[int(cu[1]) : int(cu[2])] = 0.0  # sequence 1: observations only
    old = -torch.rand(t, generator=g, dtype=torch.float64) * 2 - 0.05
    return Flat(
        cu=cu,
        group=torch.randint(0, 4, (sequences,), generator=g) * 7 - 3,
        mask=mask,
        rewards=normal() * mask,
        logp=(old + normal(0.4)).clamp(max=-0.01),
        old=old,
        ref=old + normal(0.5),
        adv=normal(),
        values=normal(),
        returns=normal(),
        is_weights=torch.rand(t, generator=g, dtype=torch.float64) + 0.5,
    )
