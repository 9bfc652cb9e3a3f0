"""Ulysses sequence parallelism: a rank holds a part of the sequence, and for attention all of it in some heads.

The ranks of a group hold consecutive, equally long parts of one packed sequence, so that everything outside attention
(projections, norms, MLP, head) touches 1/N of the tokens. Attention mixes tokens but not heads, so an all-to-all turns
"my tokens, all heads" into "all tokens, my heads" before it and back after it (Jacobs et al. 2023, arXiv 2309.14509).
Each token crosses twice per layer, whatever N is.

Key-value heads fewer than N are repeated as often as the query heads of a rank need them, not more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    """Part i of dimension 0 goes to rank i of the group, whose part for this rank takes its place; its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, ctx.group), None


def _exchange(x: Tensor, group: Any) -> Tensor:
    # a gradient may arrive as a transposed view, whose strides empty_like would take over: the received bytes would
    # then be read in another order, silently
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def kv_repeats(heads: int, kv_heads: int, size: int) -> int:
    """How often each key-value head is repeated so that rank r's share belongs to its query heads.

    Args:
        heads, kv_heads: of this tensor-parallel rank, before the exchange. size: ranks of the group, divides ``heads``.
    """
    if kv_heads % size == 0:
        return 1
    shared = heads // kv_heads  # query heads that share a key-value head
    per_rank = heads // size
    # all query heads of a rank share one key-value head: that one; otherwise one for each query head
    return size // kv_heads if shared % per_rank == 0 else shared


def scatter_heads(query: Tensor, key: Tensor, value: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """From this rank's tokens in all heads to all tokens in this rank's heads, in one exchange.

    Args:
        query: [s, H, D]; key, value: [s, G, D], with s the same on all N ranks of the group.

    Returns:
        query [N s, H / N, D]; key and value [N s, G', D], G' dividing H / N.
    """
    size = dist.get_world_size(group)
    repeats = kv_repeats(query.shape[1], key.shape[1], size)
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    by_rank = [x.unflatten(1, (size, -1)) for x in (query, key, value)]  # [s, N, h, D]
    counts = [x.shape[2] for x in by_rank]
    sent = torch.cat(by_rank, dim=2).transpose(0, 1)  # [N, s, h + 2 g, D]
    received = _AllToAll.apply(sent, group).flatten(0, 1)
    query, key, value = received.split(counts, dim=1)
    return query, key, value


def gather_heads(out: Tensor, group: Any) -> Tensor:
    """The way back: from all tokens in this rank's heads ``[N s, h, D]`` to its tokens in all heads ``[s, N h, D]``."""
    size = dist.get_world_size(group)
    received = _AllToAll.apply(out.unflatten(0, (size, -1)), group)  # [N, s, h, D]
    return received.transpose(0, 1).flatten(1, 2)


class _Collect(torch.autograd.Function):
    """See `collect`."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(places)
        out = part.new_zeros(part.shape[0], count)
        out[:, places] = part
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad[:, places], None, None, None


def collect(part: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
    """From the outputs ``part`` [k, t'] of this rank's tokens to those of the sequence, [k, count], on every rank.

    Every rank then computes the whole loss of the sequence, alike (a sequence-level ratio needs all of its tokens), and
    backward hands each rank the gradient of its own tokens: parameter gradients are sums over the group.

    Args:
        places: [t'] int64, where this rank's outputs stand among the sequence's.
    """
    return _Collect.apply(part, places, count, group)
