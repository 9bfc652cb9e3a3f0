"""RMSNorm of a sequence that tensor-parallel ranks share, and of heads that are split over them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019) that is right under sequence parallelism.

    With sequence parallelism each tensor-parallel rank sees a part of the sequence, so the weight's gradient is a sum
    over ranks, made inside autograd: then it is complete before any ZeRO stage reads or partitions it.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        self.tp_group = config.rlscale_tp_group if config.sequence_parallel else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.tp_group is not None:
            weight = copy_to_tensor_model_parallel_region(weight, group=self.tp_group)
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps) if x.is_cuda else _RMSNorm.apply(x, weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm on the CPU that keeps its input and one number per token, where torch's keeps several fp32 copies.

    Arithmetic in fp32, rounded before the weight as transformers does it. Backward: with ``n = x / rms`` and ``h = g
    w``, ``dx = (h - n mean(h n)) / rms`` and ``dw = sum g n``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed, grad = x.float() * inverse, grad.float()
        to_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        scaled = grad * weight
        to_x = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * inverse
        return to_x.to(x.dtype), to_weight, None


class HeadNorm(RMSNorm):
    """The q and k norm of Qwen3. Heads are split over TP ranks, so its gradient is a sum over them."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(config, hidden_size, eps)
        self.tp_group = config.rlscale_tp_group if config.tensor_model_parallel_size > 1 else None
