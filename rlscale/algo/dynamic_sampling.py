"""Dynamic sampling (DAPO, Yu et al. 2025): groups without contrast are dropped and refilled, up to a bound.

Pure decisions: which groups of a round stay, and how many prompts to ask for next. Generation is the caller's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.algo.segments import check_alike


def groups_with_contrast(scores: Tensor, group: Tensor) -> Tensor:
    """Groups that have at least two different finite scores. ``scores``, ``group``: ``[B]`` -> numbers, ascending.

    Raises:
        ValueError: shapes that disagree.
    """
    check_alike(scores=scores, group=group)
    names, index = torch.unique(group, return_inverse=True)
    finite = torch.isfinite(scores)
    low = scores.new_full((names.numel(),), torch.inf).scatter_reduce_(0, index[finite], scores[finite], "amin")
    high = scores.new_full((names.numel(),), -torch.inf).scatter_reduce_(0, index[finite], scores[finite], "amax")
    return names[high > low]


@dataclass
class DynamicSampling:
    """Collects groups until ``wanted`` have contrast or ``max_rounds`` rounds of generation are spent.

    Use: ``ask = s.wanted; while ask: generate ask prompts; ask = s.record(asked, kept)``.
    """

    wanted: int
    max_rounds: int
    asked: int = 0
    kept: int = 0
    rounds: int = 0

    def __post_init__(self) -> None:
        if self.wanted < 1 or self.max_rounds < 1:
            found = f"{self.wanted}, {self.max_rounds}"
            raise ValueError(f"dynamic sampling needs wanted >= 1 and max_rounds >= 1, got {found}")

    def record(self, asked: int, kept: int) -> int:
        """Count one round; the prompts to ask for in the next: what is missing divided by the share kept so far, at
        most ``wanted``; 0 when done (surplus groups are for the caller to cut off).

        Raises:
            ValueError: the rounds are spent and no group at all had contrast.
        """
        assert 0 <= kept <= asked
        self.asked, self.kept, self.rounds = self.asked + asked, self.kept + kept, self.rounds + 1
        missing = self.wanted - self.kept
        if missing <= 0:
            return 0
        if self.rounds >= self.max_rounds:
            if self.kept == 0:
                raise ValueError(
                    f"dynamic sampling found no group with different rewards in {self.rounds} rounds of generation "
                    f"({self.asked} prompts): the task is too easy or too hard, or the scorer is constant"
                )
            return 0
        share = self.kept / self.asked if self.asked else 0.0
        return self.wanted if share == 0 else min(self.wanted, math.ceil(missing / share))

    def metrics(self) -> dict[str, float]:
        return {
            "dynamic_sampling/rounds": float(self.rounds),
            "dynamic_sampling/kept_frac": self.kept / max(self.asked, 1),
            "dynamic_sampling/short": float(max(self.wanted - self.kept, 0)),
        }
