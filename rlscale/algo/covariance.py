"""Policy losses that choose tokens by the covariance of advantage and log-prob (Cui et al. 2025, arXiv:2505.22617).

Which tokens are chosen depends on the whole mini-batch under the policy as it is before the update: every micro-batch
gets a few numbers of it, the statistic. Ties and draws are decided by a number that depends on the token alone, so that
they are the same in any split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rlscale.algo.registry import POLICY_LOSSES
from rlscale.algo.segments import spread
from rlscale.algo.tokens import LossAndFlags, Tokens, surrogates

_PAPER = "Cui et al. 2025, arXiv:2505.22617"


def _covariance(x: Tokens, statistic: Mapping[str, float]) -> Tensor:
    """``(A - mean A)(log pi - mean log pi)``, without gradient. ``[t]``."""
    return (x.adv - statistic["mean_adv"]) * (x.logp.detach() - statistic["mean_logp"])


def _means(x: Tokens) -> dict[str, float]:
    n = max(int(x.valid.sum()), 1)
    return {"mean_adv": float(x.adv.sum()) / n, "mean_logp": float(x.logp.detach().sum()) / n}


def _lottery(x: Tokens, seed: int) -> Tensor:
    """A number in [0, 1) per token that depends on its old log-prob, its position and the seed: the same in any
    micro-batch. ``[t]`` float64.
    """
    position = torch.arange(x.old.numel(), device=x.old.device) - spread(x.cu[:-1], x.cu)
    h = x.old.double().view(torch.int64) ^ ((position + 1) * -7046029254386353131)
    h = h ^ (seed * 0x2545F4914F6CDD1D & 0x7FFFFFFFFFFFFFFF)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        h = (h ^ ((h >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((h >> 11) & ((1 << 53) - 1)).double() / (1 << 53)


def _largest(x: Tokens, *, kl_cov_ratio: float) -> dict[str, float]:
    """Means and the covariance from which on a token is chosen: the ``max(1, floor(N ratio))`` largest are; of those
    that tie at the threshold, the ones with the lowest lottery numbers, up to ``tie``.
    """
    means = _means(x)
    cov, numbers = _covariance(x, means)[x.valid], _lottery(x, 0)[x.valid]
    if not cov.numel():
        return {**means, "threshold": math.inf, "tie": 0.0}
    chosen = max(1, int(cov.numel() * kl_cov_ratio))
    threshold = cov.topk(chosen).values[-1]
    tied = numbers[cov == threshold]
    left = chosen - int((cov > threshold).sum())
    return {**means, "threshold": float(threshold), "tie": float(tied.kthvalue(left).values)}


@POLICY_LOSSES.register(
    "kl_cov",
    needs={"old_logprobs"},
    prepare=_largest,
    paper=_PAPER,
    bounds={"kl_coef": {"min": 0}, "kl_cov_ratio": {"min": 0, "max": 1}},
)
def kl_cov(
    x: Tokens, *, statistic: Mapping[str, float], kl_coef: float = 1.0, kl_cov_ratio: float = 2e-4
) -> LossAndFlags:
    """KL-Cov: no clipping; ``L = -A r``, and ``+ kl_coef |d|`` at the tokens of largest covariance."""
    cov, threshold = _covariance(x, statistic), statistic["threshold"]
    chosen = ((cov > threshold) | ((cov == threshold) & (_lottery(x, 0) <= statistic["tie"]))) & x.valid
    distance = x.d.abs()
    loss = -x.adv * x.ratio
    flags = {"mean_abs_log_ratio": distance.detach(), "pg_clipfrac": chosen}
    return torch.where(chosen, loss + kl_coef * distance, loss), flags


def _drawable(
    x: Tokens, means: Mapping[str, float], clip_low: float, clip_high: float, cov_lb: float, cov_ub: float
) -> Tensor:
    """``[t]`` tokens that may be drawn: of a covariance in the range, and not clipped anyway."""
    cov = _covariance(x, means)
    unclipped, clipped = surrogates(x.adv, x.ratio.detach(), clip_low, clip_high)
    return (cov > cov_lb) & (cov < cov_ub) & ~(clipped > unclipped) & x.valid


def _last_drawn(
    x: Tokens, *, clip_low: float, clip_high: float, cov_lb: float, cov_ub: float, clip_cov_ratio: float, seed: int
) -> dict[str, float]:
    """Means and the lottery number up to which a token is drawn: at most ``max(1, floor(N ratio))`` are."""
    means = _means(x)
    numbers = _lottery(x, seed)[_drawable(x, means, clip_low, clip_high, cov_lb, cov_ub)]
    drawn = min(max(1, int(int(x.valid.sum()) * clip_cov_ratio)), numbers.numel())
    return {**means, "threshold": float(numbers.kthvalue(drawn).values) if drawn else -1.0}


@POLICY_LOSSES.register(
    "clip_cov",
    needs={"old_logprobs"},
    prepare=_last_drawn,
    paper=_PAPER,
    bounds={"clip_cov_ratio": {"min": 0, "max": 1}, "seed": {"min": 0}},
)
def clip_cov(
    x: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    statistic: Mapping[str, float],
    clip_cov_ratio: float = 2e-4,
    cov_lb: float = 1.0,
    cov_ub: float = 5.0,
    seed: int = 0,
) -> LossAndFlags:
    """Clip-Cov: PPO in which a share of the tokens with large covariance, drawn at random, gets no gradient.

    The draw depends on the token and ``seed`` only.
    """
    drawn = _drawable(x, statistic, clip_low, clip_high, cov_lb, cov_ub)
    drawn &= _lottery(x, seed) <= statistic["threshold"]
    loss = torch.maximum(*surrogates(x.adv, x.ratio, clip_low, clip_high))
    return torch.where(drawn, torch.zeros_like(loss), loss), {"pg_clipfrac": drawn}
