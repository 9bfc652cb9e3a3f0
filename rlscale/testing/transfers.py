"""What a transfer costs beside the tensors that it moves."""

from __future__ import annotations

from rlscale.reshard.transport import Transfer


def temporary_bytes(transfer: Transfer) -> int:
    """Size of the buffers through which a transfer ran on this rank, given or its own."""
    views = [view for this in transfer.rounds for view in (this.bucket.buffer, *(to for to, _ in this.packs))]
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in views}
    return sum(storages.values())
