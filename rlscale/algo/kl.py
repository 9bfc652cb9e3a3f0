"""Per-token estimators of the KL divergence to a reference policy, and the controllers of its coefficient.

With ``d = log pi - log pi_ref`` of tokens sampled from ``pi`` (Schulman, "Approximating KL divergence", 2020):

========  =====================================  ==================================================================
k1        ``d``                                  reverse KL(pi || ref), unbiased, any sign
abs       ``|d|``
k2        ``d^2 / 2``                            biased, low variance; its gradient is that of the reverse KL
k3        ``exp(-d) - 1 + d``                    reverse KL, unbiased, never negative
reverse   the same as k3, by its direction
forward   ``r log r - r + 1``, ``r = exp(-d)``   forward KL(ref || pi), unbiased, never negative
========  =====================================  ==================================================================

A ``+`` after the name keeps the value and takes the gradient of k2 (straight-through), which is the right gradient of
the reverse KL for samples of ``pi``. Value and gradient are finite at any log-ratio: log-probs below -10,000 count as
-10,000, and an exponential is continued by its tangent beyond an exponent of 30.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.algo.registry import KL

_SCHULMAN = "Schulman 2020, Approximating KL divergence"
_LOWEST_LOGPROB = -1.0e4
_TANGENT_FROM = 30.0  # exp(30) = 1e13: its square still fits into float32 sums of gradients


def _exp_tangent(x: Tensor) -> Tensor:
    """``exp(x)``, continued by its tangent above ``_TANGENT_FROM``: finite with a gradient that never vanishes."""
    below = torch.exp(x.clamp(max=_TANGENT_FROM))
    return torch.where(x > _TANGENT_FROM, below.detach() * (1.0 + x - _TANGENT_FROM), below)


@KL.register("k1", "kl", paper=_SCHULMAN)
def k1(d: Tensor) -> Tensor:
    """``d``. ``[T]`` -> ``[T]``, as all of them."""
    return d


@KL.register("abs", paper=_SCHULMAN)
def absolute(d: Tensor) -> Tensor:
    """``|d|``."""
    return d.abs()


@KL.register("k2", "mse", paper=_SCHULMAN)
def k2(d: Tensor) -> Tensor:
    """``d^2 / 2``."""
    return 0.5 * d.square()


@KL.register("k3", "low_var_kl", "reverse", paper=_SCHULMAN)
def k3(d: Tensor) -> Tensor:
    """``exp(-d) - 1 + d``; near 0 the exponential's own rounding is avoided by ``expm1``."""
    return torch.where(d < -1.0, _exp_tangent(-d) - 1.0 + d, torch.expm1(-d.clamp(min=-1.0)) + d)


@KL.register("forward", paper=_SCHULMAN)
def forward(d: Tensor) -> Tensor:
    """``r log r - r + 1`` with ``r = exp(-d)``, continued by its tangent beyond an exponent of 30."""
    x = -d
    y = x.clamp(max=_TANGENT_FROM)
    value = y * torch.exp(y) - torch.expm1(y)
    slope = (y * torch.exp(y)).detach()
    return torch.where(x > _TANGENT_FROM, value.detach() + slope * (x - _TANGENT_FROM), value)


def kl(name: str, logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Per-token KL of the sampled tokens. ``logprob``, ``ref_logprob``: ``[T]`` -> ``[T]``; no gradient to the
    reference.

    Masked positions are the caller's: select them away with the loss weights (`rlscale.algo.kl.kl_loss`).

    Raises:
        ValueError: unknown name (with the list), shapes that disagree.
    """
    straight_through = name.endswith("+")
    estimator = KL.find(name).function
    if logprob.shape != ref_logprob.shape:
        raise ValueError(
            f"logprob {tuple(logprob.shape)} and ref_logprob {tuple(ref_logprob.shape)} have different shapes"
        )
    d = logprob.clamp(min=_LOWEST_LOGPROB) - ref_logprob.detach().clamp(min=_LOWEST_LOGPROB)
    if not straight_through:
        return estimator(d)
    surrogate = k2(d)
    return estimator(d).detach() + (surrogate - surrogate.detach())


def kl_loss(
    name: str, logprob: Tensor, ref_logprob: Tensor, mask: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL as a loss term: weighted sum over tokens, and the metric sum ``kl`` with its denominator ``tokens``.

    All ``[T]``. NaN at masked positions changes neither value nor gradient.
    """
    for what, x in (("mask", mask), ("weights", weights), ("ref_logprob", ref_logprob)):
        if x.shape != logprob.shape:
            raise ValueError(f"{what} has shape {tuple(x.shape)}, logprob {tuple(logprob.shape)}")
    valid = mask > 0
    zero = logprob.new_zeros(())
    per_token = kl(name, torch.where(valid, logprob, zero), torch.where(valid, ref_logprob.to(logprob.dtype), zero))
    loss = (per_token * torch.where(valid, weights, weights.new_zeros(()))).sum()
    return loss, {"kl": per_token.detach().sum(), "tokens": valid.sum()}


@dataclass
class FixedKL:
    """A constant coefficient."""

    coef: float

    def update(self, current_kl: float, n_steps: int) -> float:
        """The coefficient for the next step. ``current_kl`` in nats a token, ``n_steps``: sequences seen."""
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])


@dataclass
class AdaptiveKL(FixedKL):
    """Proportional controller towards a target KL (Ziegler et al. 2019, section 2.2).

    ``coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n_steps / horizon``; ``horizon`` in sequences.
    """

    target: float
    horizon: float

    def update(self, current_kl: float, n_steps: int) -> float:
        """The coefficient for the next step. ``current_kl`` in nats a token, ``n_steps``: sequences seen."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * n_steps / self.horizon
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
        """The coefficient for the next step. ``current_kl`` in nats a token, ``n_steps``: sequences seen."""
        if self.low <= current_kl <= self.high:
            return self.coef
        target = self.low if current_kl < self.low else self.high
        error = min(max(current_kl / target - 1.0, -0.2), 0.2)
        self.coef = min(max(self.coef * (1.0 + error * n_steps / self.horizon), self.min_coef), self.max_coef)
        return self.coef


def make_controller(
    type: str,
    *,
    kl_coef: float,
    target_kl: float = 0.1,
    horizon: float = 10000.0,
    target_low: float | None = None,
    target_high: float | None = None,
) -> FixedKL:
    """The controller of a configuration: ``fixed``, ``adaptive`` or ``interval``.

    Raises:
        ValueError: unknown type, or no interval given for ``interval``.
    """
    if type == "fixed":
        return FixedKL(kl_coef)
    if type == "adaptive":
        return AdaptiveKL(kl_coef, target_kl, horizon)
    if type == "interval":
        if target_low is None or target_high is None:
            raise ValueError("kl_ctrl.type interval needs target_low and target_high")
        return IntervalKL(kl_coef, target_low, target_high, horizon)
    raise ValueError(f"unknown kl_ctrl.type {type!r}; known: adaptive, fixed, interval")
