"""The critic's objective: clipped squared error to the returns (PPO, Schulman et al. 2017), and its diagnostics."""

from __future__ import annotations

import torch
from torch import Tensor

from rlscale.algo.segments import check_alike


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, weights: Tensor, clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """``1/2 sum_t w_t max((v - R)^2, (clip(v, v_old +- clip) - R)^2)``, a weighted sum that adds up over micro-batches.

    Args:
        values: ``[T]`` new predictions (gradient flows here); old_values, returns, mask, weights: ``[T]``.
        clip: how far a value may move from the old one; ``None``: plain squared error.

    Returns:
        The loss, and sums over tokens ``vf_clipfrac``, ``value`` with their denominator ``tokens``. NaN at masked
        positions changes nothing.

    Raises:
        ValueError: shapes that disagree.
    """
    check_alike(values=values, old_values=old_values, returns=returns, mask=mask, weights=weights)
    valid = mask > 0
    v, v_old, target = (torch.where(valid, x.to(values.dtype), 0.0) for x in (values, old_values, returns))
    error = (v - target).square()
    clipped = error if clip is None else (torch.clamp(v, v_old - clip, v_old + clip) - target).square()
    loss = 0.5 * (torch.maximum(error, clipped) * torch.where(valid, weights, 0.0)).sum()
    metrics = {"vf_clipfrac": (clipped > error).sum(), "value": v.detach().sum(), "tokens": valid.sum()}
    return loss, metrics


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """``1 - Var(R - V) / Var(R)`` over the valid tokens of the whole batch; 0 where the returns do not vary."""
    valid = mask > 0
    r, v = returns[valid].double(), values[valid].double()
    if r.numel() < 2 or bool((r == r[0]).all()):
        return 0.0
    return float(1.0 - (r - v).var() / r.var())
