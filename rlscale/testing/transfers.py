"""Transfers between buffers of any two layouts, and what they take beside the tensors that they move."""

from __future__ import annotations

import torch

from rlscale.reshard.plan import Plan
from rlscale.reshard.transport import Tensors, Transfer, region


def buffered(plan: Plan, rank: int, count: int = 1) -> Transfer:
    """A transfer through ``count`` buffers of its own on the CPU."""
    return Transfer(plan, buffers=[torch.empty(plan.buffer_bytes(rank), dtype=torch.uint8) for _ in range(count)])


def deliver(transfer: Transfer, sources: Tensors, destinations: Tensors) -> None:
    """Run a transfer and copy every bucket into this rank's ``destinations``."""
    for bucket in transfer.buckets(sources):
        for piece, values in bucket.tensors():
            region(destinations[piece.key], piece).copy_(values)


def temporary_bytes(transfer: Transfer) -> int:
    """Size of the buffers through which a transfer ran on this rank, given or its own."""
    views = [view for this in transfer.rounds for view in (this.bucket.buffer, *(to for to, _ in this.packs))]
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in views}
    return sum(storages.values())
