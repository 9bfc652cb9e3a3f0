"""The protocol of a weight update: a plan between two layouts, and buckets that a rank and the worker beside it share.

Every trainer rank receives exactly the slices that the worker on its device needs, one bounded bucket after the other,
in memory that the worker has mapped: an anonymous memory file on CPU (nothing that could stay behind in /dev/shm), an
exported allocation on CUDA. Layout, plan and mapping are made once and used for every update.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
from collections.abc import Mapping
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch

from rlscale.cluster.collective import gather
from rlscale.cluster.process import shorten
from rlscale.config.schema import RolloutConfig
from rlscale.reshard import verify
from rlscale.reshard.layout import Layout, rank_pieces_from_dicts
from rlscale.reshard.plan import Copy, Plan
from rlscale.reshard.plan import plan as make_plan
from rlscale.reshard.transport import Transfer
from rlscale.rollout.ranks import RolloutRanks

if TYPE_CHECKING:
    from rlscale.cluster.device import Device


class WeightSync:
    """The steps of an update, each of them collective over the world.

    Attributes:
        stale: the engines hold no valid weights: an update has not come to its end, or they have lost them.
        destination: what the engines' workers need, over the trainer ranks that share their devices.
        bytes_taken: what an update brings to this rank's worker.
    """

    def __init__(self, cfg: RolloutConfig, device: Device, ranks: RolloutRanks):
        self.cfg, self.device, self.ranks = cfg, device, ranks
        self.destination = Layout({})
        self.dtypes: dict[str, torch.dtype] = {}
        self.source: Layout | None = None
        self.transfer: Transfer | None = None
        self.stale = self.verified = False
        self.bytes_taken = 0

    def describe(self) -> None:
        """Learn what slices the workers of all engines need."""
        described = self.ranks.together(lambda backend: backend.targets(), "asking the engine's workers") or []
        by_rank = [targets for of_leader in gather(described, self.ranks.control) for targets in of_leader]
        pieces = [{**target, "rank": rank} for rank, targets in enumerate(by_rank) for target in targets]
        self.dtypes = {target["name"]: getattr(torch, target["dtype"]) for target in pieces}
        self.destination = rank_pieces_from_dicts(pieces, {t["name"]: tuple(t["shape"]) for t in pieces})

    def forget(self) -> None:
        """Some engines are new: plan and connect again, and compare the next update."""
        self.stale, self.verified, self.source, self.transfer = True, False, None, None

    def update(self, source: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        """One whole update, compared if ``rollout.sync_verify`` says so; afterwards all engines are awake.

        Raises:
            ValueError, EngineError: as `Rollout.sync`; after the latter the engines' weights are ``stale``.
        """
        how = self.cfg.sync_verify
        checked = how == "always" or (how == "first" and not self.verified)
        transfer, self.stale = self._connect(source), True
        errors: list[Exception] = []
        attempt, workers = self.ranks.attempt, range(self.ranks.rank, self.ranks.rank + self.ranks.dims.tp)
        attempt(errors, lambda backend: backend.begin_update(checked))
        for bucket in transfer.buckets(tensors):
            self.ranks.barrier()
            if any(transfer.plan.incoming(worker)[bucket.number] for worker in workers):
                attempt(errors, methodcaller("take", bucket.number))
            self.ranks.barrier()
        attempt(errors, lambda backend: backend.finish_update())
        self.ranks.raise_together(errors, "the weight update")
        if checked:
            self.compare(transfer.plan, tensors)
        self.stale = False

    def compare(self, plan: Plan, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise EngineError on every rank where what a worker holds is not what the trainer has."""
        rank, control = self.ranks.rank, self.ranks.control
        held = self.ranks.together(lambda backend: backend.checksums(), "asking for checksums") or []
        sent = verify.add(gather(verify.expected(plan, rank, tensors), control))
        errors: list[Exception] = []
        for receiver, of_worker in enumerate(held, start=rank):
            expected = {name: n for (place, name), n in sent.items() if place == receiver}
            names = verify.differences(expected, of_worker)
            if names:
                errors.append(RuntimeError(
                    f"rank {receiver}: after the weight update the engine holds other weights than the trainer: "
                    f"{len(names)} tensor(s) differ: {shorten(names)}"
                ))  # fmt: skip
        self.ranks.raise_together(errors, "the weight update")
        self.verified = True

    def plan(self, source: Layout) -> Plan:
        """Two buckets and a staging buffer of the same size together take twice ``rollout.sync_bucket_mb``.

        Raises:
            ValueError: the source lacks a tensor that an engine needs, has one that no engine has a place for, or has
                one in another shape.
        """
        size, per_node = self.cfg.sync_bucket_mb * 2**20 * 2 // 3, self.device.local_world
        return make_plan(
            source, self.destination, dtype=self.dtypes, bucket_bytes=size, ranks_per_node=per_node, complete=True
        )

    def _connect(self, source: Layout) -> Transfer:
        """Plan, and tell the workers where their buckets lie and what will be in them; once for a layout."""
        if self.transfer is not None and source == self.source:
            return self.transfer
        plan, rank = self.plan(source), self.ranks.rank
        self.bytes_taken = plan.received.get(rank, 0) + plan.local.get(rank, 0)
        # with two, the next one is on its way while the worker reads this one; own copies are not on any way
        count, nbytes = 2 if sum(plan.received.values()) else 1, max(1, plan.buffer_bytes(rank))
        rounds = [[_entry(copy) for copy in copies] for copies in plan.incoming(rank)]
        with contextlib.ExitStack() as paths:  # what is mapped stays until both processes have unmapped it or ended
            memories = [shared_memory(nbytes, self.device.torch_device, paths) for _ in range(count)]
            self.transfer = transfer = Transfer(plan, buffers=[buffer for buffer, _ in memories])
            mailbox = {"buffers": [address for _, address in memories], "rounds": rounds}
            mailboxes = gather(mailbox, self.ranks.control)[rank : rank + self.ranks.dims.tp]
            self.ranks.together(lambda backend: backend.connect(mailboxes), "connecting the engine's workers")
        self.source = source
        return transfer


def _entry(copy: Copy) -> tuple[Any, ...]:
    piece = copy.destination
    return piece.key, piece.name, piece.at, piece.shape, copy.offset, copy.nbytes, str(copy.dtype)[6:]


def shared_memory(
    nbytes: int, device: torch.device, paths: contextlib.ExitStack
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Memory for this process and a worker on the same machine, which can map it until ``paths`` is closed.

    Returns:
        This process's view (uint8 ``[nbytes]``), and what ``open_memory`` of the worker needs.
    """
    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return tensor, {"cuda": base64.b64encode(pickle.dumps(reduce_tensor(tensor))).decode()}
    handle = os.memfd_create("rlscale-weights")
    paths.callback(os.close, handle)
    os.ftruncate(handle, nbytes)
    path = f"/proc/{os.getpid()}/fd/{handle}"
    tensor = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    return tensor, {"path": path, "nbytes": nbytes}
