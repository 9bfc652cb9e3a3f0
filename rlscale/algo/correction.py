"""Correction for data that another policy sampled: the engine's numbers differ from the trainer's, or the sample is
stale.

With ``q = log pi_train - log pi_rollout`` of the sampled tokens. All statistics are those of the whole batch that is
given (it is global), so nothing depends on how it is divided later. Rewards and advantages use the original response
mask: correction only weighs tokens in the loss, or removes them from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlscale.algo.segments import check_shapes, segment_sum, spread
from rlscale.algo.tokens import LIMIT

REJECTIONS = tuple(
    f"{level}_{stat}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for stat in ("k1", "k2", "k3")
)


def _clean(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``q`` with 0 at masked positions ``[T]``, validity ``[T]``, policy tokens ``[B]``."""
    check_shapes(cu_seqlens, per_token={"log_ratio": log_ratio, "mask": mask})
    valid = mask > 0
    q = torch.where(valid, log_ratio.detach(), 0.0)
    return q, valid, segment_sum(valid.to(q.dtype), cu_seqlens)


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    level: str = "token",
    kind: str = "truncate",
    upper: float = 2.0,
    lower: float | None = None,
    batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Importance weights ``pi_train / pi_rollout``, 0 at masked positions.

    Args:
        log_ratio: ``[T]`` ``q``; mask: ``[T]``; cu_seqlens: ``[B+1]``.
        level: ``token``: ``exp(q_t)``; ``sequence``: ``exp(sum q)`` at each token of the sequence.
        kind: ``truncate``: ``min(raw, upper)`` (Ionides 2008; Yao et al. 2025); ``icepop``: raw inside ``[lower,
            upper]``, else 0 (two-sided masking, Ling team 2025).
        lower: default ``1 / upper``.
        batch_normalize: divide by the mean weight (over tokens, or over sequences).

    Returns:
        ``[T]`` weights, and metrics of the weights before normalisation: ``mean``, ``std``, ``eff_sample_size``
        (share), ``fraction_high``, ``fraction_low`` (of raw weights, over tokens or sequences), ``fraction_outside``
        (tokens).

    Raises:
        ValueError: unknown level or kind, bounds out of order, shapes that disagree.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"unknown level of importance weights {level!r}; known: sequence, token")
    if kind not in ("truncate", "icepop"):
        raise ValueError(f"unknown kind of importance weights {kind!r}; known: icepop, truncate")
    low = 1.0 / upper if lower is None else lower
    if not 0.0 <= low <= upper:
        raise ValueError(f"bounds of importance weights must satisfy 0 <= lower <= upper, got [{low}, {upper}]")
    q, valid, n = _clean(log_ratio, mask, cu_seqlens)
    tokens, sequences = n.sum().clamp(min=1.0), n > 0
    by_token = level == "token"
    units = torch.exp((q if by_token else segment_sum(q, cu_seqlens)).clamp(-LIMIT, LIMIT))
    raw, counted = (units, valid) if by_token else (spread(units, cu_seqlens), sequences)
    w = raw.clamp(max=upper) if kind == "truncate" else torch.where((raw >= low) & (raw <= upper), raw, 0.0)
    w = torch.where(valid, w, 0.0)
    mean, square = w.sum() / tokens, w.square().sum() / tokens
    count = counted.sum().clamp(min=1)
    metrics = {
        "mean": float(mean),
        "std": math.sqrt(max(float(square - mean.square()), 0.0)),
        "eff_sample_size": float(mean.square() / square) if float(square) > 0 else 0.0,
        "fraction_high": float(((units > upper) & counted).sum() / count),
        "fraction_low": float(((units < low) & counted).sum() / count),
        "fraction_outside": float((((raw > upper) | (raw < low)) & valid).sum() / tokens),
    }
    if batch_normalize:
        by_sequence = (segment_sum(w, cu_seqlens) / n.clamp(min=1.0)).sum() / sequences.sum().clamp(min=1)
        factor = mean if by_token else by_sequence
        metrics["batch_norm_factor"] = float(factor)
        w = w / factor if float(factor) > 0 else w
    return w, metrics


def rejection_mask(
    log_ratio: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    options: Sequence[str],
    upper: Sequence[float] | float,
    lower: Sequence[float | None] | float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Mask of the tokens that stay in the loss: the response mask less what the options reject.

    An option is ``<level>_<statistic>``: ``token``, or the sum, mean or worst of a sequence's policy tokens (then whole
    sequences go), of ``k1 = -q``, ``k2 = q^2 / 2`` or ``k3 = exp(q) - 1 - q``. k2 and k3 stay up to ``upper``. For k1
    the bounds are on the ratio itself: ``lower <= exp(q statistic) <= upper``, ``lower`` default ``1 / upper``.

    Returns:
        ``[T]`` mask in the dtype of ``mask``; ``masked_fraction`` of tokens, ``seq_masked_fraction`` of sequences
        with a rejected token.

    Raises:
        ValueError: unknown option (with the list), bounds and options of different number.
    """
    q, valid, n = _clean(log_ratio, mask, cu_seqlens)
    uppers = upper if isinstance(upper, Sequence) else [upper] * len(options)
    lowers = lower if isinstance(lower, Sequence) else [lower] * len(options)
    if not len(options) == len(uppers) == len(lowers):
        raise ValueError(f"{len(options)} rejection options, but {len(uppers)} upper and {len(lowers)} lower bounds")
    keep = valid.clone()
    for option, high, low in zip(options, uppers, lowers, strict=True):
        if option not in REJECTIONS:
            raise ValueError(f"unknown rejection option {option!r}; known: {', '.join(REJECTIONS)}")
        level, kind = option.rsplit("_", 1)
        bounded = q.clamp(-LIMIT, LIMIT)
        stat = {"k1": -q, "k2": 0.5 * q.square(), "k3": torch.exp(bounded) - 1.0 - bounded}[kind]
        if level in ("seq_sum", "seq_mean"):
            total = segment_sum(torch.where(valid, stat, 0.0), cu_seqlens)
            stat = spread(total if level == "seq_sum" else total / n.clamp(min=1.0), cu_seqlens)
        if kind == "k1":
            inside = (-stat <= math.log(high)) & (-stat >= (-math.log(high) if low is None else math.log(low)))
        else:
            inside = stat <= high
        if level == "seq_max":  # the worst token decides
            inside = spread(segment_sum((valid & ~inside).to(q.dtype), cu_seqlens) == 0, cu_seqlens)
        keep &= inside
    rejected = valid & ~keep
    touched = segment_sum(rejected.to(q.dtype), cu_seqlens) > 0
    metrics = {
        "masked_fraction": float(rejected.sum() / n.sum().clamp(min=1.0)),
        "seq_masked_fraction": float(touched.sum() / (n > 0).sum().clamp(min=1)),
    }
    return torch.where(keep, mask, torch.zeros_like(mask)), metrics


def offpolicy_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor) -> dict[str, float]:
    """How far the sampling policy is from the trainer's, over policy tokens; sequence means are over sequences that
    have any.

    ``kl`` (k1) and ``k3_kl`` of rollout || train; perplexities of both, their log-difference (mean, absolute, max,
    min) and ratio; chi-square distances by token and by sequence. All inputs ``[T]``.
    """
    check_shapes(cu_seqlens, per_token={"logprobs": logprobs, "rollout_logprobs": rollout_logprobs, "mask": mask})
    valid = mask > 0
    train, rollout = (torch.where(valid, x.detach().double(), 0.0) for x in (logprobs, rollout_logprobs))
    n = segment_sum(valid.double(), cu_seqlens)
    filled, tokens = n > 0, n.sum()
    if not bool(filled.any()):
        return {}
    q = train - rollout
    bounded = q.clamp(-LIMIT, LIMIT)
    log_ppl, rollout_log_ppl = (-segment_sum(x, cu_seqlens)[filled] / n[filled] for x in (train, rollout))
    difference = log_ppl - rollout_log_ppl
    sequence_q = segment_sum(q, cu_seqlens)[filled].clamp(-LIMIT, LIMIT)
    return {
        "kl": float(-q.sum() / tokens),
        "k3_kl": float((torch.expm1(bounded) - bounded).sum() / tokens),
        "training_ppl": float(log_ppl.exp().mean()),
        "training_log_ppl": float(log_ppl.mean()),
        "rollout_ppl": float(rollout_log_ppl.exp().mean()),
        "rollout_log_ppl": float(rollout_log_ppl.mean()),
        "log_ppl_diff": float(difference.mean()),
        "log_ppl_abs_diff": float(difference.abs().mean()),
        "log_ppl_diff_max": float(difference.max()),
        "log_ppl_diff_min": float(difference.min()),
        "ppl_ratio": float(difference.exp().mean()),
        "chi2_token": float(torch.where(valid, torch.exp(2.0 * bounded), 0.0).sum() / tokens - 1.0),
        "chi2_seq": float(torch.exp(2.0 * sequence_q).mean() - 1.0),
    }


def off_policy_sequence_mask(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    threshold: float,
) -> tuple[Tensor, dict[str, float]]:
    """Off-policy sequence masking (DeepSeek-V3.2 2025): a sequence with a negative mean advantage that the policy has
    left behind, mean of ``log pi_behaviour - log pi`` above ``threshold``, is removed from the loss.

    All ``[T]``; returns the mask that remains and ``seq_masked_fraction``.
    """
    q, valid, n = _clean(logprobs - behaviour_logprobs, mask, cu_seqlens)
    check_shapes(cu_seqlens, per_token={"advantages": advantages})
    adverse = segment_sum(torch.where(valid, advantages, 0.0), cu_seqlens) < 0
    drop = adverse & (-segment_sum(q, cu_seqlens) / n.clamp(min=1.0) > threshold) & (n > 0)
    out = torch.where(spread(drop, cu_seqlens), torch.zeros_like(mask), mask)
    return out, {"seq_masked_fraction": float(drop.sum() / (n > 0).sum().clamp(min=1))}


@dataclass(frozen=True)
class CorrectionConfig:
    """What to do about the difference between the sampling policy and the trainer's.

    ``mode``: ``decoupled``: the trainer's own log-probs before the update are the old ones, importance weights and
    rejection mend the difference to the sampler (three policies; Hilton et al. 2022); ``bypass``: the sampler's
    log-probs are the old ones, the policy loss's own ratio mends it, and only rejection applies (the trainer's
    log-probs are still needed for it).
    ``weights``, ``reject``: keywords of `importance_weights` and of `rejection_mask`; ``None``: without it.
    """

    mode: str = "decoupled"
    weights: Mapping[str, Any] | None = field(default_factory=dict)
    reject: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("decoupled", "bypass"):
            raise ValueError(f"unknown correction mode {self.mode!r}; known: bypass, decoupled")


@dataclass
class Correction:
    """``old_logprobs`` for the policy loss, ``is_weights`` (or ``None``), ``mask`` of the tokens in the loss; all
    ``[T]``.
    """

    old_logprobs: Tensor
    is_weights: Tensor | None
    mask: Tensor
    metrics: dict[str, float]


def correct(
    config: CorrectionConfig, *, logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor
) -> Correction:
    """Apply a configured correction to a whole batch. ``logprobs``: of the trainer before the update, ``[T]``.

    The returned mask is for loss weights only: rewards and advantages keep the response mask.
    """
    metrics = offpolicy_metrics(logprobs, rollout_logprobs, mask, cu_seqlens)
    q = logprobs.detach() - rollout_logprobs
    weights, kept = None, mask
    if config.mode == "decoupled" and config.weights is not None:
        weights, found = importance_weights(q, mask, cu_seqlens, **config.weights)
        metrics |= {f"is_{k}": v for k, v in found.items()}
    if config.reject is not None:
        kept, found = rejection_mask(q, mask, cu_seqlens, **config.reject)
        metrics |= {f"rs_{k}": v for k, v in found.items()}
    old = rollout_logprobs if config.mode == "bypass" else logprobs.detach()
    return Correction(old, weights, kept, {f"rollout_corr/{k}": v for k, v in metrics.items()})
