"""Per-token estimators of the KL divergence to a reference policy, and the controllers of its coefficient.

With ``d = log pi - log pi_ref`` of tokens sampled from ``pi`` (Schulman, "Approximating KL divergence", 2020). An
estimator maps ``d`` ``[T]`` to the KL of each token ``[T]``.

A ``+`` after the name keeps the value and takes the gradient of k2 (straight-through), which is the right gradient of
the reverse KL for samples of ``pi``. Value and gradient are finite at any log-ratio: log-probs below -10,000 count as
-10,000, and an exponential is continued by its tangent beyond an exponent of 30.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.algo.registry import KL
from rlscale.algo.segments import check_alike, weighted_sum
from rlscale.config.schema import KLControlConfig

_SCHULMAN = "Schulman 2020, Approximating KL divergence"
_LOWEST_LOGPROB = -1.0e4
_TANGENT_FROM = 30.0  # exp(30) = 1e13: its square still fits into float32 sums of gradients


def _exp_tangent(x: Tensor) -> Tensor:
    """``exp(x)``, continued by its tangent above ``_TANGENT_FROM``: finite with a gradient that never vanishes."""
    below = torch.exp(x.clamp(max=_TANGENT_FROM))
    return torch.where(x > _TANGENT_FROM, below.detach() * (1.0 + x - _TANGENT_FROM), below)


@KL.register("k1", "kl", paper=_SCHULMAN)
def k1(d: Tensor) -> Tensor:
    """``d``: the reverse KL(pi || ref), unbiased, any sign."""
    return d


@KL.register("abs", paper=_SCHULMAN)
def absolute(d: Tensor) -> Tensor:
    """``|d|``."""
    return d.abs()


@KL.register("k2", "mse", paper=_SCHULMAN)
def k2(d: Tensor) -> Tensor:
    """``d^2 / 2``: biased, low variance; its gradient is that of the reverse KL."""
    return 0.5 * d.square()


@KL.register("k3", "low_var_kl", "reverse", paper=_SCHULMAN)
def k3(d: Tensor) -> Tensor:
    """``exp(-d) - 1 + d``: the reverse KL, unbiased, never negative."""
    # expm1: near 0 the rounding of the exponential would be all there is
    return torch.where(d < -1.0, _exp_tangent(-d) - 1.0 + d, torch.expm1(-d.clamp(min=-1.0)) + d)


@KL.register("forward", paper=_SCHULMAN)
def forward(d: Tensor) -> Tensor:
    """``r log r - r + 1`` with ``r = exp(-d)``: the forward KL(ref || pi), unbiased, never negative."""
    x = -d
    y = x.clamp(max=_TANGENT_FROM)
    value = y * torch.exp(y) - torch.expm1(y)
    slope = (y * torch.exp(y)).detach()
    return torch.where(x > _TANGENT_FROM, value.detach() + slope * (x - _TANGENT_FROM), value)


def kl(name: str, logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Per-token KL of the sampled tokens, without gradient to the reference. ``logprob``, ``ref_logprob``: ``[T]`` ->
    ``[T]``. Masked positions are the caller's (`kl_loss`).

    Raises:
        ValueError: unknown name (with the list), shapes that disagree.
    """
    estimator = KL.find(name).function
    check_alike(logprob=logprob, ref_logprob=ref_logprob)
    d = logprob.clamp(min=_LOWEST_LOGPROB) - ref_logprob.detach().clamp(min=_LOWEST_LOGPROB)
    if not name.endswith("+"):
        return estimator(d)
    surrogate = k2(d)
    return estimator(d).detach() + (surrogate - surrogate.detach())


def kl_loss(
    name: str, logprob: Tensor, ref_logprob: Tensor, mask: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL as a loss term: `weighted_sum` of ``kl``. All ``[T]``; NaN at masked positions changes no gradient either.

    Raises:
        ValueError: unknown name (with the list), shapes that disagree.
    """
    check_alike(logprob=logprob, ref_logprob=ref_logprob, mask=mask, weights=weights)
    valid = mask > 0
    per_token = kl(name, *(torch.where(valid, x.to(logprob.dtype), 0.0) for x in (logprob, ref_logprob)))
    return weighted_sum("kl", per_token, mask, weights)


def _towards(target: float, coef: float, current_kl: float, n_steps: int, horizon: float) -> float:
    """``coef (1 + clip(kl / target - 1, -0.2, 0.2) n_steps / horizon)``."""
    error = min(max(current_kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * n_steps / horizon)


@dataclass
class FixedKL:
    """A constant coefficient."""

    coef: float

    def update(self, current_kl: float, n_steps: int) -> float:
        """The coefficient for the next step. ``current_kl`` in nats per token, ``n_steps``: sequences seen."""
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])


@dataclass
class AdaptiveKL(FixedKL):
    """Proportional controller towards a target KL (Ziegler et al. 2019, section 2.2); ``horizon`` in sequences."""

    target: float
    horizon: float

    def update(self, current_kl: float, n_steps: int) -> float:
        self.coef = _towards(self.target, self.coef, current_kl, n_steps, self.horizon)
        return self.coef


@dataclass
class IntervalKL(FixedKL):
    """Steers the KL into ``[low, high]`` and leaves the coefficient alone inside of it.

    Outside, it is the proportional controller towards the nearer end, so that noise inside the interval cannot make the
    coefficient drift; the coefficient stays within ``[min_coef, max_coef]``.
    """

    low: float
    high: float
    horizon: float
    min_coef: float = 1e-6
    max_coef: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise ValueError(f"a KL interval needs 0 < low < high, got [{self.low}, {self.high}]")

    def update(self, current_kl: float, n_steps: int) -> float:
        if not self.low <= current_kl <= self.high:
            end = self.low if current_kl < self.low else self.high
            coef = _towards(end, self.coef, current_kl, n_steps, self.horizon)
            self.coef = min(max(coef, self.min_coef), self.max_coef)
        return self.coef


def make_controller(c: KLControlConfig) -> FixedKL:
    """The controller of a configuration.

    Raises:
        ValueError: unknown type, or no interval given for ``interval``.
    """
    if c.type == "fixed":
        return FixedKL(c.kl_coef)
    if c.type == "adaptive":
        return AdaptiveKL(c.kl_coef, c.target_kl, c.horizon)
    if c.type == "interval":
        if c.target_low is None or c.target_high is None:
            raise ValueError("kl_ctrl.type interval needs target_low and target_high")
        return IntervalKL(c.kl_coef, c.target_low, c.target_high, c.horizon)
    raise ValueError(f"unknown kl_ctrl.type {c.type!r}; known: adaptive, fixed, interval")
