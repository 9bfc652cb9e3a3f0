"""Carries out a plan: rounds of point-to-point messages through bounded buckets.

Senders convert to the destination's dtype. A large contiguous slice is sent straight from its storage; the rest is
packed into a staging buffer. The receiver's bucket is filled in place, so that it can be memory which another process
maps (POSIX shared memory, CUDA IPC), and is complete when it is handed out.

The same plan runs once a training step over the same tensors, and a large model has tens of thousands of slices. So all
views and messages are made on the first run and kept for as long as the tensors stay where they are: what remains of a
run are calls of send, receive and copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from rlscale.reshard.layout import Piece
from rlscale.reshard.plan import STAGING_ALIGN, Copy, Message, Plan

Tensors = Mapping[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]  # destination and source of a local copy


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


def default_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where a rank that holds nothing keeps its buffers: where the group can send from."""
    if dist.is_initialized() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def region(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The view of a local buffer that holds a piece, in the shape of the slice."""
    extra = len(piece.at) - len(piece.index)
    lead = tuple(lo for lo, _ in piece.at[:extra])  # leading dimensions are one element long
    return tensor.detach()[lead + tuple(slice(lo, hi) for lo, hi in piece.at[extra:])]


def execute(
    plan: Plan, sources: Tensors, buffers: Sequence[torch.Tensor], *,
    group: dist.ProcessGroup | None = None, staging: torch.Tensor | None = None,
) -> Iterator[Bucket]:  # fmt: skip
    """Run the plan once and yield this rank's bucket of every round: `Transfer.buckets`."""
    return Transfer(plan, group=group, buffers=buffers, staging=staging).buckets(sources)


def execute_into(
    plan: Plan, sources: Tensors, destinations: Tensors, *, group: dist.ProcessGroup | None = None
) -> None:  # fmt: skip
    """Run the plan once and write every piece to its place in this rank's ``destinations``: `Transfer.into`."""
    Transfer(plan, group=group).into(sources, destinations)


class Transfer:
    """A plan on this rank, with the buffers and views that its runs share; every run is collective over ``group``.

    Args:
        buffers: for `buckets`: one or two uint8 tensors of ``plan.buffer_bytes(rank)`` each, on the device of the
            sources. With two, the next round travels while the caller works on this one.
        staging: reusable uint8 tensor of ``plan.staging_bytes(rank)``; otherwise allocated as large as is needed.
    """

    def __init__(
        self, plan: Plan, *, group: dist.ProcessGroup | None = None, buffers: Sequence[torch.Tensor] = (),
        staging: torch.Tensor | None = None,
    ):  # fmt: skip
        self.plan, self.group, self.buffers, self.staging = plan, group, list(buffers), staging
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.rounds: list[_Round] = []
        self.made_for: object = None
        self.ahead = False
        self.kept: list[torch.Tensor] = []  # temporary memory that this object allocated

    @property
    def temporary_bytes(self) -> int:
        """Size of all buffers of this rank, given or allocated."""
        given = [*self.buffers, *([self.staging] if self.staging is not None else [])]
        return sum(tensor.nbytes for tensor in [*given, *self.kept])

    def buckets(self, sources: Tensors) -> Iterator[Bucket]:
        """Yield this rank's bucket of every round.

        All ranks of the group must exhaust the iterator: all see ``plan.rounds`` buckets.

        Args:
            sources: this rank's local buffers by key, as in the source layout.

        Raises:
            ValueError: a local buffer that is missing or too small for its pieces, plans that differ between ranks; on
                every rank, before anything is sent.
        """
        self._ready(sources, None)
        return self._deliver()

    @torch.no_grad()
    def into(self, sources: Tensors, destinations: Tensors) -> None:
        """Write every piece to its place in this rank's ``destinations``, which must not overlap ``sources``.

        Own copies go straight from source to destination; large contiguous slices are received in place, the others
        through buffers that, with the staging buffer, take at most twice ``plan.bucket_bytes`` (and some alignment).
        Raises ValueError as `buckets`, for destinations as for sources.
        """
        self._ready(sources, destinations)
        for bucket in self._deliver():
            for to, values in self.rounds[bucket.number].unpacks:
                to.copy_(values)

    def _deliver(self) -> Iterator[Bucket]:
        """With two buffers, two rounds are on their way at one time: gloo and NCCL are fastest with much to do."""
        posted: dict[int, list[Any]] = {}
        for number, this in enumerate(self.rounds):
            if number not in posted:
                posted[number] = self._post(number)
            # the caller has left the bucket of the round before; only the staging buffer may still be in use
            following = self.rounds[number + 1] if self.ahead and number + 1 < len(self.rounds) else None
            if following is not None and not (this.packs and following.packs):
                posted[number + 1] = self._post(number + 1)
            for work in posted.pop(number):
                work.wait()
            if following is not None and number + 1 not in posted:
                posted[number + 1] = self._post(number + 1)
            if this.used.device.type == "cuda":  # another process may read the bucket: it must be there, not queued
                torch.cuda.current_stream(this.used.device).synchronize()
            yield Bucket(number, this.pieces, this.offsets, this.dtypes, this.used)

    @torch.no_grad()
    def _post(self, number: int) -> list[Any]:
        """Start a round; returns what to wait for."""
        this = self.rounds[number]
        for to, values in this.packs:
            to.copy_(values)
        works = dist.batch_isend_irecv(this.operations) if this.operations else []
        for to, values in this.own:
            to.copy_(values)
        return works

    def _ready(self, sources: Tensors, destinations: Tensors | None) -> None:
        """Check what the caller gave, together with the other ranks, and make the views of a run if it is new."""
        made_for = [_places(sources), None if destinations is None else _places(destinations)]
        if made_for == self.made_for:
            self._agree(None, sources)
            return
        self.made_for, self.rounds, self.kept = None, [], []
        self._agree(self._violation(sources, destinations), sources)
        device = next((t.device for t in [*sources.values(), *(destinations or {}).values(), *self.buffers]), None)
        self._make(sources, destinations, device or default_device(self.group))
        self.made_for = made_for

    def _make(self, sources: Tensors, destinations: Tensors | None, device: torch.device) -> None:
        def allocate(nbytes: int) -> torch.Tensor:
            self.kept.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
            return self.kept[-1]

        parts = [_Parts(self.plan, self.rank, number, sources, destinations) for number in range(self.plan.rounds)]
        room = max((part.staging_bytes for part in parts), default=0)
        if destinations is None:
            buffers = self.buffers or [allocate(self.plan.buffer_bytes(self.rank))]
        else:  # what is received in place needs none
            need = max((part.buffer_bytes for part in parts), default=0)
            buffers = [allocate(need)]
            if 2 * need + room <= 2 * self.plan.bucket_bytes:
                buffers.append(allocate(need))
        self.ahead = len(buffers) > 1
        staging = self.staging
        if staging is None or staging.numel() < room:
            staging = allocate(room)
        for number, part in enumerate(parts):
            self.rounds.append(part.make(buffers[number % len(buffers)], staging, self.group))

    def _violation(self, sources: Tensors, destinations: Tensors | None) -> str | None:
        """The first thing that is wrong with what the caller gave on this rank."""
        for copy in self.plan.from_rank(self.rank):
            if (problem := _misfit("source", sources, copy.source)) is not None:
                return problem
        if destinations is not None:
            for number in range(self.plan.rounds):
                for copy in self.plan.bucket(self.rank, number):
                    if (problem := _misfit("destination", destinations, copy.destination)) is not None:
                        return problem
        need = self.plan.buffer_bytes(self.rank)
        if any(buffer.numel() < need or buffer.dtype != torch.uint8 for buffer in self.buffers):
            return f"buffers must be uint8 tensors of at least {need} bytes"
        return None

    def _agree(self, problem: str | None, sources: Tensors) -> None:
        """Raise on every rank what is wrong on any, before anyone waits for a message that will not come."""
        others = False
        if dist.is_initialized():
            digest = self.plan.digest
            local = [*sources.values(), *self.buffers]
            device = local[0].device if local else default_device(self.group)
            flags = torch.tensor([digest, -digest, int(problem is not None)], dtype=torch.int64, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
            high, low, failed = flags.tolist()
            others = bool(failed)
            if problem is None and high != -low:
                problem = "the ranks computed different plans (do their layouts differ?)"
        if problem is not None:
            raise ValueError(f"reshard, rank {self.rank}: {problem}")
        if others:
            raise ValueError(f"reshard, rank {self.rank}: stopped because of an error on another rank")


@dataclass
class _Round:
    """One round on one rank, ready to run."""

    used: torch.Tensor  # the bucket, cut to the bytes in use
    pieces: list[Piece] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    packs: list[Pair] = field(default_factory=list)  # into the staging buffer, before sending
    own: list[Pair] = field(default_factory=list)  # copies within this rank
    operations: list[Any] = field(default_factory=list)
    unpacks: list[Pair] = field(default_factory=list)  # out of the bucket, when it is complete


class _Parts:
    """What has to happen on a rank in a round; knows the room it needs before the buffers exist."""

    def __init__(self, plan: Plan, rank: int, number: int, sources: Tensors, destinations: Tensors | None):
        self.plan, self.rank, self.number = plan, rank, number
        self.sources, self.destinations = sources, destinations
        self.incoming = [(message, self._landing(message)) for message in plan.messages_to(rank, number)]
        self.outgoing = [(message, self._straight(message)) for message in plan.messages_from(rank, number)]
        self.buffer_bytes = sum(message.nbytes + STAGING_ALIGN for message, target in self.incoming if target is None)
        packed = {self._slice(message): message.nbytes for message, values in self.outgoing if values is None}
        self.staging_bytes = sum(-(-nbytes // STAGING_ALIGN) * STAGING_ALIGN for nbytes in packed.values())

    def make(self, buffer: torch.Tensor, staging: torch.Tensor, group: dist.ProcessGroup | None) -> _Round:
        copies = self.plan.bucket(self.rank, self.number)
        used = copies[-1].offset + copies[-1].nbytes if copies else 0
        if self.destinations is None:
            round_ = _Round(buffer[:used], [c.destination for c in copies], [c.offset for c in copies],
                            [c.dtype for c in copies])  # fmt: skip
        else:
            round_ = _Round(buffer)
        self._receive(round_, buffer, group)
        self._send(round_, staging, group)
        for copy in copies:
            if copy.sender == self.rank:
                values = region(self.sources[copy.source.key], copy.source)
                if self.destinations is None:
                    round_.own.append((_typed(buffer, copy.offset, copy), values))
                else:
                    round_.own.append((region(self.destinations[copy.destination.key], copy.destination), values))
        return round_

    def _receive(self, round_: _Round, buffer: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        at = 0
        for message, target in self.incoming:
            start = message.offset
            if target is None:
                if self.destinations is not None:  # the buffer holds nothing but these
                    start, at = at, at + -(-message.nbytes // STAGING_ALIGN) * STAGING_ALIGN
                    for copy in message.copies:
                        values = _typed(buffer, start + copy.offset - message.offset, copy)
                        to = region(self.destinations[copy.destination.key], copy.destination)
                        round_.unpacks.append((to, values))
                target = buffer[start : start + message.nbytes]
            round_.operations.append(dist.P2POp(dist.irecv, target, message.source, group))

    def _send(self, round_: _Round, staging: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """Messages that cannot be sent straight are packed, each slice once even if several ranks want it."""
        packed: dict[Any, torch.Tensor] = {}
        at = 0
        for message, values in self.outgoing:
            key = self._slice(message)
            if values is None and key not in packed:
                out = packed[key] = staging[at : at + message.nbytes]
                at += -(-message.nbytes // STAGING_ALIGN) * STAGING_ALIGN
                for copy in message.copies:
                    piece = region(self.sources[copy.source.key], copy.source)
                    round_.packs.append((_typed(out, copy.offset - message.offset, copy), piece))
            if values is None:
                values = packed[key]
            round_.operations.append(dist.P2POp(dist.isend, values, message.destination, group))

    def _landing(self, message: Message) -> torch.Tensor | None:
        """The destination's own memory (uint8) if a message can be received straight into it."""
        if self.destinations is None or len(message.copies) > 1:
            return None
        copy = message.copies[0]
        return _bytes_of(region(self.destinations[copy.destination.key], copy.destination), copy.dtype)

    def _straight(self, message: Message) -> torch.Tensor | None:
        """The source's own memory (uint8) if a message can be sent straight from it."""
        if len(message.copies) > 1:
            return None
        copy = message.copies[0]
        return _bytes_of(region(self.sources[copy.source.key], copy.source), copy.dtype)

    @staticmethod
    def _slice(message: Message) -> Any:
        """Equal for messages with the same bytes."""
        return tuple((c.source.key, c.source.at, c.dtype, c.offset - message.offset) for c in message.copies)


def _bytes_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    return values.reshape(-1).view(torch.uint8) if values.dtype == dtype and values.is_contiguous() else None


def _places(tensors: Tensors) -> dict[str, Any]:
    """Where tensors lie: equal if views of one set are views of the other."""
    return {key: (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for key, t in tensors.items()}


def _typed(buffer: torch.Tensor, offset: int, copy: Copy) -> torch.Tensor:
    return buffer[offset : offset + copy.nbytes].view(copy.dtype).view(copy.destination.shape)


def _misfit(end: str, tensors: Mapping[str, torch.Tensor], piece: Piece) -> str | None:
    tensor = tensors.get(piece.key)
    if tensor is None:
        return f"{end} has no buffer {piece.key}, which holds part of {piece.name}"
    if tensor.dim() != len(piece.at) or any(hi > n for (_, hi), n in zip(piece.at, tensor.shape, strict=False)):
        return f"{end} buffer {piece.key} has shape {list(tensor.shape)}, too small for its part of {piece.name}"
    return None
