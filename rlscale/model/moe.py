"""The sparse MLP of a mixture-of-experts layer, split over tensor-parallel ranks by width or by whole experts.

Every tensor-parallel rank sees all tokens of the sequence, computes what its part of the experts adds to each of them,
and the parts are summed: the same two collectives as around a dense MLP. With expert parallelism off each rank holds a
slice of every expert, with it whole experts; either way its parameters are slices of the model that no other
tensor-parallel rank holds, and ZeRO and the gradient norm need to know no more.

An expert's weights lie in one stacked parameter per layer: an expert that no token chose gets a gradient of zeros, so
that every rank reduces the same tensors in the same order, and ZeRO keeps a few parameters instead of thousands.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn


class Router(nn.Module):
    """Chooses experts for each token: softmax over all, the ``top_k`` largest (Shazeer et al. 2017).

    Logits have the working dtype, as transformers and the rollout engines compute them, and the softmax is in fp32: a
    trainer with finer logits would choose other experts than the engine where two are nearly equal. Equal ones are
    taken in the order of their numbers.
    """

    def __init__(self, experts: int, hidden: int, top_k: int, normalize: bool, group: Any, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden, dtype=dtype))
        self.top_k, self.normalize = top_k, normalize
        self.group = group  # tensor-parallel ranks that each see a part of the sequence; None: all see all of it

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [s, hidden]. Returns the weights (fp32) and the numbers of the chosen experts, both [s, top_k]."""
        weight = self.weight
        if self.group is not None:  # summed inside autograd, as in RMSNorm
            weight = copy_to_tensor_model_parallel_region(weight, group=self.group)
        shares = F.linear(x, weight).softmax(-1, dtype=torch.float32)
        chosen = shares.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        weights = shares.gather(-1, chosen)
        return (weights / weights.sum(-1, keepdim=True) if self.normalize else weights), chosen


class Experts(nn.Module):
    """This rank's part of the experts of one layer: ``count`` of them from number ``first`` on, ``width`` wide."""

    def __init__(self, first: int, count: int, width: int, hidden: int, dtype: torch.dtype):
        super().__init__()
        self.first, self.count = first, count
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(count, hidden, width, dtype=dtype))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x: [S, hidden]; weights, chosen: [S, top_k]. Returns what these experts add to each token, [S, hidden]."""
        number = chosen.flatten() - self.first
        local = ((number >= 0) & (number < self.count)).nonzero()[:, 0]
        order = local[number[local].argsort(stable=True)]  # (token, choice) pairs, expert after expert
        counts = torch.bincount(number[order], minlength=self.count).tolist()
        token = order // chosen.shape[1]
        inner = bias_swiglu_impl(_each(x.index_select(0, token), counts, self.gate_up), None)
        parts = _each(inner, counts, self.down) * weights.flatten()[order][:, None]  # fp32
        out = torch.zeros(x.shape, dtype=parts.dtype, device=x.device).index_add(0, token, parts)
        return out.to(x.dtype)


def _each(rows: Tensor, counts: list[int], weight: Tensor) -> Tensor:
    """[n, in] -> [n, out]: the first ``counts[0]`` rows through ``weight[0]`` ([out, in]), the next through the next.

    `unbind` gives a single gradient of the stack; indexing expert by expert would give one of full size for each.
    """
    return torch.cat([F.linear(part, w) for part, w in zip(rows.split(counts), weight.unbind(0), strict=True)])


class SparseMLP(nn.Module):
    """Takes the place of Megatron's MLP in a layer. Hidden states are [s, 1, hidden], split by sequence parallelism."""

    def __init__(self, config: Any):
        super().__init__()
        spec, dtype, tp = config.rlscale_spec, config.params_dtype, config.tensor_model_parallel_size
        self.group = config.rlscale_tp_group if tp > 1 else None
        self.split_rows = bool(config.sequence_parallel)
        row_group = self.group if self.split_rows else None
        self.router = Router(
            spec.experts, spec.hidden, spec.experts_per_token, spec.normalize_experts, row_group, dtype
        )
        numbers, columns = spec.experts_of_rank(config.rlscale_tp_rank, tp, config.rlscale_ep)
        self.experts = Experts(numbers.start, len(numbers), len(columns), spec.hidden, dtype)

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Returns the sum of the chosen experts' outputs in the shape of ``hidden``, and no bias."""
        x = hidden.view(-1, hidden.shape[-1])
        weights, chosen = self.router(x)
        if self.group is None:
            return self.experts(x, weights, chosen).view(hidden.shape), None
        if self.split_rows:
            x, weights, chosen = (
                gather_from_sequence_parallel_region(t, group=self.group) for t in (x, weights, chosen)
            )
            out = reduce_scatter_to_sequence_parallel_region(self.experts(x, weights, chosen), group=self.group)
        else:
            # each rank knows its own part of the gradient of what it multiplies with: both are summed
            x, weights = (copy_to_tensor_model_parallel_region(t, group=self.group) for t in (x, weights))
            out = reduce_from_tensor_model_parallel_region(self.experts(x, weights, chosen), group=self.group)
        return out.view(hidden.shape), None
