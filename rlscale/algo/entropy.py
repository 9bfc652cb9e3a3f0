"""Entropy of the policy: as a bonus in the loss, with a scheduled coefficient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rlscale.algo.segments import weighted_sum


def entropy_sum(entropy: Tensor, mask: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """`weighted_sum` of the token entropies: subtract it from the loss, times the coefficient. All ``[t]``."""
    return weighted_sum("entropy", entropy, mask, weights)


@dataclass(frozen=True)
class EntropySchedule:
    """Coefficient of the entropy bonus by step.

    ``kind``: ``constant``; ``linear`` or ``cosine`` from ``coeff`` to ``final`` over ``decay_steps``; ``piecewise``:
    linear between the ``points`` ``(step, coefficient)``, constant outside. For ``warmup_steps`` steps the
    coefficient first rises linearly from 0 (warm start); the decay begins after them. Steps count from 0.
    """

    kind: str = "constant"
    coeff: float = 0.0
    final: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 0
    points: Sequence[tuple[int, float]] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine", "piecewise"):
            raise ValueError(f"unknown entropy schedule {self.kind!r}; known: constant, cosine, linear, piecewise")
        if self.kind in ("linear", "cosine") and self.decay_steps < 1:
            raise ValueError(f"entropy schedule {self.kind} needs decay_steps >= 1, got {self.decay_steps}")
        steps = [s for s, _ in self.points]
        if self.kind == "piecewise" and (not steps or steps != sorted(set(steps))):
            raise ValueError(f"entropy schedule piecewise needs points with rising steps, got {list(self.points)}")

    def __call__(self, step: int) -> float:
        """The coefficient in the given step."""
        warm = 1.0 if step >= self.warmup_steps else (step + 1) / (self.warmup_steps + 1)
        if self.kind == "constant":
            return warm * self.coeff
        if self.kind == "piecewise":
            return warm * self._piecewise(step)
        done = min(max((step - self.warmup_steps) / self.decay_steps, 0.0), 1.0)
        share = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return warm * (self.final + (self.coeff - self.final) * share)

    def _piecewise(self, step: int) -> float:
        if step <= self.points[0][0]:
            return self.points[0][1]
        for (s0, c0), (s1, c1) in zip(self.points, self.points[1:], strict=False):
            if step <= s1:
                return c0 + (c1 - c0) * (step - s0) / (s1 - s0)
        return self.points[-1][1]

    @property
    def used(self) -> bool:
        """Whether the coefficient is ever non-zero: otherwise the entropy need not be computed for the loss."""
        reached = {"constant": [self.coeff], "piecewise": [c for _, c in self.points]}
        return any(reached.get(self.kind, [self.coeff, self.final]))
