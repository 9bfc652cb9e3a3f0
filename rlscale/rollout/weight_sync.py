"""The weights of the trainer on their way to the engines: a plan between two layouts, buckets that both ends see, and
the protocol of an update.

Every trainer rank receives exactly the slices that the worker on its device needs, one bounded bucket after the other,
in memory that the worker has mapped: an anonymous memory file on CPU (nothing that could stay behind in /dev/shm), an
exported allocation on CUDA. Layout, plan and mapping are made once and used for every update.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rlscale.cluster.collective import gather
from rlscale.config.schema import RolloutConfig
from rlscale.reshard import verify
from rlscale.reshard.layout import Layout, rank_pieces_from_dicts
from rlscale.reshard.plan import Copy, Plan, plan
from rlscale.reshard.transport import Bucket, Transfer
from rlscale.rollout.backend import Backend
from rlscale.rollout.ranks import RolloutRanks

if TYPE_CHECKING:
    from rlscale.cluster.device import Device


class WeightSync:
    """The steps of an update, each of them collective over the world.

    Attributes:
        stale: the engines hold no valid weights: an update has not come to its end, or they have lost them.
    """

    def __init__(self, cfg: RolloutConfig, device: Device, ranks: RolloutRanks, backend: Backend | None):
        self.cfg, self.device, self.ranks, self.backend = cfg, device, ranks, backend
        self.destination: Destination | None = None
        self.buckets: Buckets | None = None
        self.source: Layout | None = None
        self.stale = self.verified = False

    def describe(self) -> None:
        """Learn what slices the workers of all engines need."""
        described: list[list[dict[str, Any]]] = []
        self.ranks.together(lambda: described.extend(self._engine.targets()), "asking the engine's workers")
        self.destination = Destination([t for of_leader in gather(described, self.ranks.control) for t in of_leader])

    def forget(self) -> None:
        """Some engines are new: plan and connect again, and compare the next update."""
        self.stale, self.verified, self.source, self.buckets = True, False, None, None

    @property
    def check_due(self) -> bool:
        """Whether the next update is to be compared (``rollout.sync_verify``)."""
        how = self.cfg.sync_verify
        return how == "always" or (how == "first" and not self.verified)

    @property
    def bytes_taken(self) -> int:
        """Bytes that an update brings to this rank's worker."""
        assert self.buckets is not None
        plan, rank = self.buckets.plan, self.ranks.rank
        return plan.received.get(rank, 0) + plan.local.get(rank, 0)

    def send(self, source: Layout, tensors: Mapping[str, torch.Tensor], checked: bool) -> None:
        """One whole update; afterwards all engines are awake. The weights stay ``stale`` until the caller says else.

        Raises:
            ValueError, EngineError: as `Rollout.sync`.
        """
        self._prepare(source)
        assert self.buckets is not None
        self.stale = True
        errors: list[Exception] = []
        attempt = self.ranks.attempt
        attempt(errors, lambda: self._engine.begin_update(checked))
        for bucket in self.buckets.fill(tensors):
            self.ranks.barrier()
            if self._needed(bucket.number):
                attempt(errors, lambda number=bucket.number: self._engine.take(number))
            self.ranks.barrier()
        attempt(errors, lambda: self._engine.finish_update())
        self.ranks.raise_together(errors, "the weight update")

    def compare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise EngineError on every rank where what a worker holds is not what the trainer has."""
        assert self.buckets is not None
        held: list[dict[str, int]] = []
        rank, control = self.ranks.rank, self.ranks.control
        self.ranks.together(lambda: held.extend(self._engine.checksums()), "asking for checksums")
        sent = verify.add(gather(verify.expected(self.buckets.plan, rank, tensors), control))
        errors: list[Exception] = []
        for receiver, of_worker in enumerate(held, start=rank):
            expected = {name: n for (place, name), n in sent.items() if place == receiver}
            names = verify.differences(expected, of_worker)
            if names:
                listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                errors.append(RuntimeError(
                    f"rank {receiver}: after the weight update the engine holds other weights than the trainer: "
                    f"{len(names)} tensor(s) differ: {listed}"
                ))  # fmt: skip
        self.ranks.raise_together(errors, "the weight update")
        self.verified = True

    def _prepare(self, source: Layout) -> None:
        """Plan, and give the workers their buckets' addresses; once for a layout."""
        if source is self.source or (self.source is not None and source == self.source):
            return
        assert self.destination is not None, "the engines have not started"
        rank = self.ranks.rank
        bucket = self.cfg.sync_bucket_mb * 2**20
        the_plan = self.destination.plan(source, bucket, ranks_per_node=self.device.local_world)
        self.buckets = Buckets(the_plan, rank, self.device.torch_device)
        mailboxes = gather(self.buckets.mailbox(), self.ranks.control)[rank : rank + self.ranks.tp]
        self.ranks.together(lambda: self._engine.connect(mailboxes), "connecting the engine's workers")
        self.buckets.mapped()
        self.source = source

    @property
    def _engine(self) -> Backend:
        assert self.backend is not None, "only leaders have an engine"
        return self.backend

    def _needed(self, number: int) -> bool:
        assert self.buckets is not None
        return any(self.buckets.plan.incoming(self.ranks.rank + k)[number] for k in range(self.ranks.tp))


class Destination:
    """What all engines' workers need, as a layout over the trainer ranks that share their devices.

    Args:
        described: by rank, what its worker needs (`Backend.targets`).
    """

    def __init__(self, described: list[list[dict[str, Any]]]):
        pieces = [{**target, "rank": rank} for rank, targets in enumerate(described) for target in targets]
        shapes = {target["name"]: tuple(target["shape"]) for target in pieces}
        self.dtypes: dict[str, torch.dtype] = {target["name"]: getattr(torch, target["dtype"]) for target in pieces}
        self.layout = rank_pieces_from_dicts(pieces, shapes)

    def plan(self, source: Layout, bucket_bytes: int, ranks_per_node: int | None = None) -> Plan:
        """Two buckets and a staging buffer of the same size together take twice ``bucket_bytes``.

        Raises:
            ValueError: the source lacks a tensor that an engine needs, has one that no engine has a place for, or has
                one in another shape.
        """
        size = bucket_bytes * 2 // 3
        return plan(
            source, self.layout, dtype=self.dtypes, bucket_bytes=size, ranks_per_node=ranks_per_node, complete=True
        )


class Buckets:
    """This rank's buckets of one plan, and what its worker must know to map and read them."""

    def __init__(self, the_plan: Plan, rank: int, device: torch.device):
        self.plan, self.rank = the_plan, rank
        nbytes = max(1, the_plan.buffer_bytes(rank))
        # with two, the next one is on its way while the worker reads this one; own copies are not on any way
        count = 2 if sum(the_plan.received.values()) else 1
        self.memories = [Memory(nbytes, device) for _ in range(count)]
        self.transfer = Transfer(the_plan, buffers=[memory.tensor for memory in self.memories])

    def mailbox(self) -> dict[str, Any]:
        """For `Backend.connect`: the memories and, by round, (key, name, at, shape, offset, nbytes, dtype)."""
        rounds = [[_entry(copy) for copy in copies] for copies in self.plan.incoming(self.rank)]
        return {"buffers": [memory.address for memory in self.memories], "rounds": rounds}

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[Bucket]:
        """Fill one bucket after the other; collective over all ranks of the plan, and to be exhausted by all."""
        return self.transfer.buckets(tensors)

    def mapped(self) -> None:
        """The worker has mapped the memories."""
        for memory in self.memories:
            memory.close_handle()


def _entry(copy: Copy) -> list[Any]:
    piece = copy.destination
    at, dtype = [list(x) for x in piece.at], str(copy.dtype)[6:]
    return [piece.key, piece.name, at, list(piece.shape), copy.offset, copy.nbytes, dtype]


class Memory:
    """Memory that this process and a worker on the same machine both see.

    ``tensor`` is this process's view (uint8 ``[nbytes]``), ``address`` what ``open_memory`` of the worker needs.
    """

    def __init__(self, nbytes: int, device: torch.device):
        self.handle: int | None = None
        self.address: dict[str, Any]
        if device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.address = {"cuda": base64.b64encode(pickle.dumps(reduce_tensor(self.tensor))).decode()}
            return
        self.handle = os.memfd_create("rlscale-weights")
        os.ftruncate(self.handle, nbytes)
        path = f"/proc/{os.getpid()}/fd/{self.handle}"
        self.tensor = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        self.address = {"path": path, "nbytes": nbytes}

    def close_handle(self) -> None:
        """Take away the path; what is mapped stays until both processes have unmapped it or ended."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None

    def __del__(self) -> None:
        self.close_handle()
