"""Carries out a plan: rounds of point-to-point messages through bounded buckets.

Senders convert to the destination's dtype. A large contiguous slice is sent straight from its storage; the rest is
packed into one staging buffer. The receiver's bucket is filled in place, so that it can be memory which another process
maps (POSIX shared memory, CUDA IPC), and is complete when it is handed out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlscale.reshard.layout import Piece
from rlscale.reshard.plan import STAGING_ALIGN, Copy, Message, Plan


@dataclass
class Bucket:
    """What one rank received in one round; may be empty.

    ``buffer`` is the caller's, cut to the bytes in use (uint8 ``[n]``); ``pieces[i]`` lies at ``offsets[i]`` bytes as a
    contiguous tensor of ``dtypes[i]`` and shape ``pieces[i].shape``. A destination piece may come in several parts,
    each a `Piece` of its own. Valid until the next bucket is asked for.
    """

    number: int
    pieces: list[Piece]
    offsets: list[int]
    dtypes: list[torch.dtype]
    buffer: torch.Tensor

    def tensors(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Every piece with a view of its values."""
        for piece, offset, dtype in zip(self.pieces, self.offsets, self.dtypes, strict=True):
            nbytes = math.prod(piece.shape) * dtype.itemsize
            yield piece, self.buffer[offset : offset + nbytes].view(dtype).view(piece.shape)


def region(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The view of a local buffer that holds a piece, in the shape of the slice."""
    extra = len(piece.at) - len(piece.index)
    lead = tuple(lo for lo, _ in piece.at[:extra])  # leading dimensions are one element long
    return tensor.detach()[lead + tuple(slice(lo, hi) for lo, hi in piece.at[extra:])]


def execute(
    plan: Plan, sources: Mapping[str, torch.Tensor], buffers: Sequence[torch.Tensor], *,
    group: dist.ProcessGroup | None = None, staging: torch.Tensor | None = None,
) -> Iterator[Bucket]:  # fmt: skip
    """Run the plan and yield this rank's bucket of every round; collective over ``group``.

    All ranks of the group must exhaust the iterator: all see ``plan.rounds`` buckets.

    Args:
        sources: this rank's local buffers by key, as in the source layout.
        buffers: one or two uint8 tensors of ``plan.buffer_bytes(rank)`` each, on the device of the sources. With two,
            the next round travels while the caller works on this one.
        staging: reusable uint8 tensor of ``plan.staging_bytes(rank)``; allocated here if None.

    Raises:
        ValueError: a local buffer that is missing or too small for its pieces, plans that differ between ranks; on
            every rank, before anything is sent.
    """
    return _Run(plan, sources, group, staging, buffers, None).buckets()


def execute_into(
    plan: Plan, sources: Mapping[str, torch.Tensor], destinations: Mapping[str, torch.Tensor], *,
    group: dist.ProcessGroup | None = None, buffer: torch.Tensor | None = None, staging: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Run the plan and write every piece to its place in this rank's ``destinations``; collective over ``group``.

    Own copies go straight from source to destination (which must not overlap); large contiguous slices are received in
    place, the others through ``buffer``. Raises ValueError as `execute`, for destinations as for sources.
    """
    run = _Run(plan, sources, group, staging, [] if buffer is None else [buffer], destinations)
    for bucket in run.buckets():
        for piece, values in bucket.tensors():
            region(destinations[piece.key], piece).copy_(values)


class _Run:
    """One execution of a plan on one rank."""

    def __init__(
        self, plan: Plan, sources: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None,
        staging: torch.Tensor | None, buffers: Sequence[torch.Tensor], destinations: Mapping[str, torch.Tensor] | None,
    ):  # fmt: skip
        self.plan, self.sources, self.group, self.destinations = plan, sources, group, destinations
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        local = [*sources.values(), *(destinations or {}).values(), *buffers]
        self.device = local[0].device if local else torch.device("cpu")
        self._agree(self._violation(buffers))
        need = plan.buffer_bytes(self.rank)
        self.buffers = list(buffers) or [torch.empty(need, dtype=torch.uint8, device=self.device)]
        size = plan.staging_bytes(self.rank)
        if staging is None or staging.numel() < size:
            staging = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.staging = staging

    def buckets(self) -> Iterator[Bucket]:
        ahead = len(self.buffers) > 1
        pending = self._post(0) if ahead and self.plan.rounds else None
        for number in range(self.plan.rounds):
            works, through = pending or self._post(number)
            for work in works:
                work.wait()
            pending = self._post(number + 1) if ahead and number + 1 < self.plan.rounds else None
            if self.device.type == "cuda":  # another process may read the bucket: it must be there, not only queued
                torch.cuda.current_stream(self.device).synchronize()
            yield self._bucket(number, through)

    def _bucket(self, number: int, copies: list[Copy]) -> Bucket:
        used = copies[-1].offset + copies[-1].nbytes if copies else 0
        buffer = self.buffers[number % len(self.buffers)][:used]
        return Bucket(
            number, [c.destination for c in copies], [c.offset for c in copies], [c.dtype for c in copies], buffer
        )

    @torch.no_grad()
    def _post(self, number: int) -> tuple[list[Any], list[Copy]]:
        """Start a round; returns what to wait for, and the copies that will then lie in the buffer."""
        buffer = self.buffers[number % len(self.buffers)]
        operations, in_place = [], set()
        for message in self.plan.messages_to(self.rank, number):
            target = self._landing(message)
            if target is None:
                target = buffer[message.offset : message.offset + message.nbytes]
            else:
                in_place.add(id(message.copies[0]))
            operations.append(dist.P2POp(dist.irecv, target, message.source, self.group))
        packer = _Packer(self.staging, self.sources)
        for message in self.plan.messages_from(self.rank, number):
            operations.append(dist.P2POp(dist.isend, packer.pack(message), message.destination, self.group))
        works = dist.batch_isend_irecv(operations) if operations else []
        for copy in self.plan.bucket(self.rank, number):
            if copy.sender == self.rank:
                values = region(self.sources[copy.source.key], copy.source)
                if self.destinations is not None:
                    region(self.destinations[copy.destination.key], copy.destination).copy_(values)
                    in_place.add(id(copy))
                else:
                    _typed(buffer, copy.offset, copy).copy_(values)
        return works, [copy for copy in self.plan.bucket(self.rank, number) if id(copy) not in in_place]

    def _landing(self, message: Message) -> torch.Tensor | None:
        """The destination's own memory if a message can be received straight into it."""
        if self.destinations is None or len(message.copies) > 1:
            return None
        copy = message.copies[0]
        target = region(self.destinations[copy.destination.key], copy.destination)
        if target.dtype != copy.dtype or not target.is_contiguous():
            return None
        return target.reshape(-1).view(torch.uint8)

    def _violation(self, buffers: Sequence[torch.Tensor]) -> str | None:
        """The first thing that is wrong with what the caller gave on this rank."""
        for copy in self.plan.from_rank(self.rank):
            if (problem := _misfit("source", self.sources, copy.source)) is not None:
                return problem
        if self.destinations is not None:
            for number in range(self.plan.rounds):
                for copy in self.plan.bucket(self.rank, number):
                    if (problem := _misfit("destination", self.destinations, copy.destination)) is not None:
                        return problem
        need = self.plan.buffer_bytes(self.rank)
        if any(buffer.numel() < need or buffer.dtype != torch.uint8 for buffer in buffers):
            return f"buffers must be uint8 tensors of at least {need} bytes"
        return None

    def _agree(self, problem: str | None) -> None:
        """Raise on every rank what is wrong on any, before anyone waits for a message that will not come."""
        others = False
        if dist.is_initialized():
            digest = self.plan.digest
            flags = torch.tensor([digest, -digest, int(problem is not None)], dtype=torch.int64, device=self.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
            high, low, failed = flags.tolist()
            others = bool(failed)
            if problem is None and high != -low:
                problem = "the ranks computed different plans (do their layouts differ?)"
        if problem is not None:
            raise ValueError(f"reshard, rank {self.rank}: {problem}")
        if others:
            raise ValueError(f"reshard, rank {self.rank}: stopped because of an error on another rank")


class _Packer:
    """Lays the messages of one round into the staging buffer, each slice once even if several ranks want it."""

    def __init__(self, staging: torch.Tensor, sources: Mapping[str, torch.Tensor]):
        self.staging, self.sources = staging, sources
        self.used = 0
        self.packed: dict[tuple[Any, ...], torch.Tensor] = {}

    def pack(self, message: Message) -> torch.Tensor:
        """The bytes of a message (uint8 ``[nbytes]``), not copied if the slice is contiguous and of the right dtype."""
        if len(message.copies) > 1:
            return self._stage(message)
        copy = message.copies[0]
        values = region(self.sources[copy.source.key], copy.source)
        if values.dtype == copy.dtype and values.is_contiguous():
            return values.reshape(-1).view(torch.uint8)
        slice_ = (copy.source.key, copy.source.at, copy.dtype)
        if slice_ not in self.packed:
            self.packed[slice_] = self._stage(message)
        return self.packed[slice_]

    def _stage(self, message: Message) -> torch.Tensor:
        out = self.staging[self.used : self.used + message.nbytes]
        for copy in message.copies:
            values = region(self.sources[copy.source.key], copy.source)
            _typed(out, copy.offset - message.offset, copy).copy_(values)
        self.used += -(-message.nbytes // STAGING_ALIGN) * STAGING_ALIGN
        return out


def _typed(buffer: torch.Tensor, offset: int, copy: Copy) -> torch.Tensor:
    return buffer[offset : offset + copy.nbytes].view(copy.dtype).view(copy.destination.shape)


def _misfit(end: str, tensors: Mapping[str, torch.Tensor], piece: Piece) -> str | None:
    tensor = tensors.get(piece.key)
    if tensor is None:
        return f"{end} has no buffer {piece.key}, which holds part of {piece.name}"
    if tensor.dim() != len(piece.at) or any(hi > n for (_, hi), n in zip(piece.at, tensor.shape, strict=False)):
        return f"{end} buffer {piece.key} has shape {list(tensor.shape)}, too small for its part of {piece.name}"
    return None
