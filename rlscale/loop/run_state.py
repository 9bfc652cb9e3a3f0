"""What a run needs to resume, beside its models and random states: one small value that checkpoints save.

The optimizer's step counts stand with the models (the learning rate follows from them); the sampler's seeds follow from
seed, step, prompt and sample; which checkpoint is the best is read from the markers of those on the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlscale.algo.kl import FixedKL
    from rlscale.data.dataset import PromptData
    from rlscale.rollout.rollout import Rollout


@dataclass
class RunState:
    """Where a run is.

    Attributes:
        data: the training prompts, and the position in them.
        kl_controller: of the KL coefficient in the reward.
        rollout: counts the engines it has replaced, of which a run allows some, and the samples lost with them.
        step: steps done.
        unfinished: metrics of the last of them while it is not yet validated and recorded.
        tokens_seen: prompts and responses of all steps.
    """

    data: PromptData
    kl_controller: FixedKL
    rollout: Rollout
    step: int = 0
    unfinished: dict[str, float] | None = None
    tokens_seen: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank."""
        return {
            "step": self.step,
            "unfinished": self.unfinished and {name: float(value) for name, value in self.unfinished.items()},
            "data": self.data.state_dict(),
            "kl_controller": self.kl_controller.state_dict(),
            "tokens_seen": self.tokens_seen,
            "rollout": {"restarts": self.rollout.restarts, "resampled": self.rollout.resampled},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned.

        Raises:
            ValueError: it belongs to other data.
        """
        self.step, self.unfinished, self.tokens_seen = state["step"], state.get("unfinished"), state["tokens_seen"]
        self.data.load_state_dict(state["data"])
        self.kl_controller.load_state_dict(state["kl_controller"])
        lost = state.get("rollout", {})
        self.rollout.restarts, self.rollout.resampled = lost.get("restarts", 0), lost.get("resampled", 0)
