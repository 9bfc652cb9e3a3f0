"""What a run needs to resume, beside its models and random states: one small value that checkpoints save.

The optimizer's step counts stand with the models (the learning rate follows from them); the sampler's seeds follow from
seed, step, prompt and sample; which checkpoint is the best is read from the markers of those on the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Stateful(Protocol):
    """A part of a run that resumes from its state: plain values (JSON), the same on every rank."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Raises ValueError where the state belongs to something else."""


class Batches(Stateful, Protocol):
    """Training data, with a position in them that a step moves when it is done (`rlscale.data.dataset.PromptData`)."""

    def __len__(self) -> int:
        """Samples of an epoch, of which a step takes ``data.train_batch_size``."""

    def peek(self) -> list[Any]:
        """The next batch. `advance` moves to the next one."""

    def advance(self) -> None: ...


@dataclass
class RunState:
    """Where a run is.

    Attributes:
        data: the training data, and the position in them.
        parts: what else resumes, by its key: what the task names, and ``rollout``.
        step: steps done.
        unfinished: metrics of the last of them while it is not yet validated and recorded.
        tokens_seen: prompts and responses of all steps.
    """

    data: Batches
    parts: dict[str, Stateful] = field(default_factory=dict)
    step: int = 0
    unfinished: dict[str, float] | None = None
    tokens_seen: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank."""
        return {
            "step": self.step,
            "unfinished": self.unfinished and {name: float(value) for name, value in self.unfinished.items()},
            "data": self.data.state_dict(),
            "tokens_seen": self.tokens_seen,
            **{name: part.state_dict() for name, part in self.parts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned. A part that is not in it, because it is newer, stays as it is.

        Raises:
            ValueError: it belongs to other data.
        """
        self.step, self.unfinished, self.tokens_seen = state["step"], state.get("unfinished"), state["tokens_seen"]
        self.data.load_state_dict(state["data"])
        for name in self.parts.keys() & state.keys():
            self.parts[name].load_state_dict(state[name])
