"""The trainer's end of a weight update: a plan from the actor's shards to the engines', and buckets both can see.

Every trainer rank receives exactly the slices that the vLLM worker on its device needs, one bounded bucket after the
other, in memory that the worker has mapped: an anonymous memory file on CPU (nothing that could stay behind in
/dev/shm), an exported allocation on CUDA. Layout, plan and mapping are made once and used for every update.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from rlscale.reshard.layout import Layout
from rlscale.reshard.plan import Copy, Plan, plan
from rlscale.reshard.transport import Bucket, Transfer


class Destination:
    """What all engines' workers need, as a layout over the trainer ranks that share their devices.

    Args:
        described: by rank, what its worker answered to ``rlscale_targets``.
    """

    def __init__(self, described: list[list[dict[str, Any]]]):
        from rlscale.reshard.layout import rank_pieces_from_dicts

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
        """For `worker.Mailbox`: the memories and, by round, (key, name, at, shape, offset, nbytes, dtype)."""
        rounds = [[_entry(copy) for copy in self.plan.bucket(self.rank, n)] for n in range(self.plan.rounds)]
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

    ``tensor`` is this process's view (uint8 ``[nbytes]``), ``address`` what `rlscale.rollout.worker.open_memory` needs.
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


def gather(value: Any, control: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value, on every rank; a single process is a world of its own."""
    if not dist.is_initialized():
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value, group=control)
    return out
