"""Checksums by which two ends of a transfer find out whether they hold the same weights, without sending them again.

The checksum of a slice is a sum over its elements: the raw bits, as an integer, times a number that follows from the
element's place in the canonical tensor, modulo 2**64. So the sums of any parts, in any order, add up to that of the
whole, however ranks cut the tensor; and a flipped bit, a part that is missing, comes twice or lies in the wrong place
changes the result. Integer sums are exact: nothing depends on threads or devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from rlscale.reshard.layout import Box
from rlscale.reshard.plan import Plan
from rlscale.reshard.transport import region

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = {"cpu": 2**16, "cuda": 2**24}  # elements widened to 64 bits at a time: on CPU they should stay in the cache
MASK = 2**64 - 1

Sums = dict[tuple[int, str], int]  # by receiving rank and canonical tensor


def position_checksum(values: torch.Tensor, index: Box, dtype: torch.dtype | None = None) -> int:
    """Checksum of slice ``index`` of a canonical tensor, in [0, 2**64).

    Args:
        values: the slice, in its shape; need not be contiguous.
        dtype: converts to it first, if given (a chunk at a time).
    """
    values = values.detach()
    dims = max(1, values.dim())
    values = values.reshape(1) if values.dim() == 0 else values
    starts = [lo for lo, _ in index] or [0]
    totals = [torch.zeros(n, dtype=torch.int64, device=values.device) for n in values.shape[1:]]
    weighted = 0
    rows = max(1, CHUNK.get(values.device.type, CHUNK["cuda"]) * values.shape[0] // max(1, values.numel()))
    for lo in range(0, values.shape[0], rows):
        part = values[lo : lo + rows].to(dtype or values.dtype).contiguous()
        bits = part.view(BITS[part.element_size()]).to(torch.int64)
        by_row = bits.reshape(bits.shape[0], -1).sum(1)
        weighted += int((by_row * _weights(0, starts[0] + lo, by_row.numel(), by_row.device)).sum())
        for dim, total in enumerate(totals, start=1):
            total += bits.sum([d for d in range(dims) if d != dim])
    for dim, total in enumerate(totals, start=1):
        weighted += int((total * _weights(dim, starts[dim], total.numel(), total.device)).sum())
    return weighted & MASK


def _weights(dim: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """A pseudo-random odd number for every place along a dimension (int64, wrapping round)."""
    place = torch.arange(start, start + count, dtype=torch.int64, device=device)
    mixed = (place * 8 + dim + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return mixed | 1


def expected(plan: Plan, rank: int, sources: Mapping[str, torch.Tensor]) -> Sums:
    """This rank's share of what every receiver must hold in the end: sums over the copies that it sends.

    Computed from the local buffers, in the destination's dtype. The shares of all ranks add up modulo 2**64.
    """
    known: dict[tuple[object, ...], int] = {}  # several ranks may want the same slice
    shares: list[Sums] = []
    for copy in plan.from_rank(rank):
        source = copy.source
        key = (source.key, source.at, copy.dtype)
        if key not in known:
            known[key] = position_checksum(region(sources[source.key], source), copy.index, copy.dtype)
        shares.append({(copy.wanted.rank, source.name): known[key]})
    return add(shares)


def add(shares: Iterable[Sums]) -> Sums:
    """The sums of shares."""
    out: Sums = {}
    for share in shares:
        for place, value in share.items():
            out[place] = (out.get(place, 0) + value) & MASK
    return out


def differences(sent: Mapping[str, int], held: Mapping[str, int]) -> list[str]:
    """Names of the tensors whose checksums differ, or that only one end has; sorted."""
    return sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
