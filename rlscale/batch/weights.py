"""Loss weights are data: every aggregation mode is one weight per token, computed once from global counts.

A loss is then a plain weighted sum, so that any split of the mini-batch into micro-batches, data-parallel ranks or
sequence shards adds up to the same number. A token whose mask is 0 has weight 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def loss_weights(mask: Tensor, cu_seqlens: Tensor, mode: str, *, scale_factor: float | None = None) -> Tensor:
    """Weight of each token of a whole mini-batch.

    With ``N`` tokens of mask 1, ``S`` sequences that have at least one, ``n_i`` of them in sequence ``i``:
    token-mean ``1/N``; token-sum ``1``; seq-mean-token-sum ``1/S``; seq-mean-token-mean ``1/(S n_i)``;
    seq-mean-token-sum-norm ``1/(S C)`` (Dr. GRPO, Liu et al. 2025).

    Args:
        mask: ``[T]``, 1 = token of the policy that counts.
        cu_seqlens: ``[B+1]``.
        mode: one of ``MODES``.
        scale_factor: ``C``, a constant number of tokens (e.g. the longest response allowed).

    Returns:
        ``[T]`` in float64 if the mask is, else float32. All zero where no token counts.

    Raises:
        ValueError: unknown mode, missing ``scale_factor``, shapes that disagree.
    """
    if mode not in MODES:
        raise ValueError(f"unknown loss_agg_mode {mode!r}; known: {', '.join(MODES)}")
    if mask.dim() != 1 or mask.numel() != int(cu_seqlens[-1]):
        raise ValueError(f"mask has shape {tuple(mask.shape)}, but there are {int(cu_seqlens[-1])} tokens")
    dtype = torch.float64 if mask.dtype == torch.float64 else torch.float32
    valid = mask > 0
    counts = torch.zeros(mask.numel() + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(valid, 0, out=counts[1:])
    per_sample = counts[cu_seqlens].diff()
    tokens = max(float(per_sample.sum()), 1.0)
    samples = max(float((per_sample > 0).sum()), 1.0)
    if mode == "seq-mean-token-sum-norm" and (scale_factor is None or not scale_factor > 0):
        raise ValueError(f"loss_agg_mode {mode} needs loss_scale_factor > 0, got {scale_factor}")
    divisors: dict[str, float | Tensor] = {
        "token-mean": tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum": samples,
        "seq-mean-token-mean": samples * per_sample.clamp(min=1).double(),
        "seq-mean-token-sum-norm": samples * (scale_factor or 1.0),
    }
    sample_weight = torch.ones_like(per_sample, dtype=torch.float64) / divisors[mode]
    weight = torch.repeat_interleave(sample_weight, cu_seqlens.diff()).to(dtype)
    return torch.where(valid, weight, weight.new_zeros(()))
