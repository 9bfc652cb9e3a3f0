"""Carries out a plan: rounds of point-to-point messages through bounded buckets.

Senders convert to the destination's dtype. A large contiguous slice is sent straight from its storage; the rest is
packed into a staging buffer. The receiver's bucket is filled in place, so that it can be memory which another process
maps (POSIX shared memory, CUDA IPC), and is complete when it is handed out.

The same plan runs once per training step over the same tensors, and a large model has tens of thousands of slices. So
all views and messages are made on the first run and kept for as long as the tensors stay where they are: what remains
of a run are calls of send, receive and copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from rlscale.reshard.layout import Piece
from rlscale.reshard.plan import STAGING_ALIGN, Copy, Message, Plan, aligned

Tensors = Mapping[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]  # destination and source of a local copy


@dataclass
class Bucket:
    """What one rank received in one round; may be empty. Valid until the next bucket is asked for.

    ``buffer`` is the caller's, cut to the bytes in use (uint8 ``[n]``). A destination piece may come in several parts,
    each a copy of its own.
    """

    number: int
    copies: list[Copy]
    buffer: torch.Tensor

    def tensors(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Every piece with a view of its values."""
        for copy in self.copies:
            yield copy.destination, _typed(self.buffer, copy.offset, copy)


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


class Transfer:
    """A plan on this rank, with the buffers and views that its runs share; every run is collective over ``group``.

    Args:
        buffers: for `buckets`: one or two uint8 tensors of ``plan.buffer_bytes(rank)`` each, on the device of the
            sources. With two, the next round travels while the caller works on this one.
    """

    def __init__(self, plan: Plan, *, group: dist.ProcessGroup | None = None, buffers: Sequence[torch.Tensor] = ()):
        self.plan, self.group, self.buffers = plan, group, list(buffers)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.rounds: list[_Round] = []
        self.made_for: object = None
        self.ahead = False

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
            device = this.bucket.buffer.device
            if device.type == "cuda":  # another process may read the bucket: it must be there, not queued
                torch.cuda.current_stream(device).synchronize()
            yield this.bucket

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
            self._raise_on_any(None, sources)
            return
        self.made_for, self.rounds = None, []
        self._raise_on_any(self._violation(sources, destinations), sources)
        device = next((t.device for t in [*sources.values(), *(destinations or {}).values(), *self.buffers]), None)
        self._make(sources, destinations, device or default_device(self.group))
        self.made_for = made_for

    def _make(self, sources: Tensors, destinations: Tensors | None, device: torch.device) -> None:
        allocate = partial(torch.empty, dtype=torch.uint8, device=device)
        parts = [_Parts(self.plan, self.rank, number, sources, destinations) for number in range(self.plan.rounds)]
        room = max((part.staging_bytes for part in parts), default=0)
        if destinations is None:
            buffers = self.buffers or [allocate(self.plan.buffer_bytes(self.rank))]
        else:  # what is received in place needs none
            need = max((part.buffer_bytes for part in parts), default=0)
            buffers = [allocate(need) for _ in range(2 if 2 * need + room <= 2 * self.plan.bucket_bytes else 1)]
        self.ahead = len(buffers) > 1
        staging = allocate(room)
        self.rounds = [part.make(buffers[n % len(buffers)], staging, self.group) for n, part in enumerate(parts)]

    def _violation(self, sources: Tensors, destinations: Tensors | None) -> str | None:
        """The first thing that is wrong with what the caller gave on this rank."""
        for copy in self.plan.from_rank(self.rank):
            if (problem := _misfit("source", sources, copy.source)) is not None:
                return problem
        if destinations is not None:
            for copy in chain.from_iterable(self.plan.incoming(self.rank)):
                if (problem := _misfit("destination", destinations, copy.destination)) is not None:
                    return problem
        need = self.plan.buffer_bytes(self.rank)
        if any(buffer.numel() < need or buffer.dtype != torch.uint8 for buffer in self.buffers):
            return f"buffers must be uint8 tensors of at least {need} bytes"
        return None

    def _raise_on_any(self, problem: str | None, sources: Tensors) -> None:
        """Raise on every rank what is wrong on any, before anyone waits for a message that will not come."""
        if dist.is_initialized():
            digest = self.plan.digest
            local = [*sources.values(), *self.buffers]
            device = local[0].device if local else default_device(self.group)
            flags = torch.tensor([digest, -digest, int(problem is not None)], dtype=torch.int64, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
            high, low, failed = flags.tolist()
            if problem is None and high != -low:
                problem = "the ranks computed different plans (do their layouts differ?)"
            elif problem is None and failed:
                problem = "stopped because of an error on another rank"
        if problem is not None:
            raise ValueError(f"reshard, rank {self.rank}: {problem}")


@dataclass
class _Round:
    """One round on one rank, ready to run."""

    bucket: Bucket
    packs: list[Pair] = field(default_factory=list)  # into the staging buffer, before sending
    own: list[Pair] = field(default_factory=list)  # copies within this rank
    operations: list[Any] = field(default_factory=list)
    unpacks: list[Pair] = field(default_factory=list)  # out of the bucket, when it is complete


class _Parts:
    """What has to happen on a rank in a round; knows the room it needs before the buffers exist."""

    def __init__(self, plan: Plan, rank: int, number: int, sources: Tensors, destinations: Tensors | None):
        self.number, self.sources, self.destinations = number, sources, destinations
        self.copies = plan.incoming(rank)[number]
        self.own = [copy for copy in self.copies if copy.sender == rank]
        # each message with the memory (uint8) that it is received into, or sent from, where it need not be packed
        self.incoming = [
            (message, None if destinations is None else _whole(message, self._landing))
            for message in plan.messages_to(rank, number)
        ]
        self.outgoing = [(message, _whole(message, self._values)) for message in plan.messages_from(rank, number)]
        self.buffer_bytes = sum(message.nbytes + STAGING_ALIGN for message, target in self.incoming if target is None)
        packed = {_content(message): message.nbytes for message, values in self.outgoing if values is None}
        self.staging_bytes = sum(map(aligned, packed.values()))

    def make(self, buffer: torch.Tensor, staging: torch.Tensor, group: dist.ProcessGroup | None) -> _Round:
        copies = self.copies if self.destinations is None else []
        used = copies[-1].offset + copies[-1].nbytes if copies else 0
        round_ = _Round(Bucket(self.number, copies, buffer[:used]))
        self._receive(round_, buffer, group)
        self._send(round_, staging, group)
        for copy in self.own:
            to = _typed(buffer, copy.offset, copy) if self.destinations is None else self._landing(copy)
            round_.own.append((to, self._values(copy)))
        return round_

    def _receive(self, round_: _Round, buffer: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        at = 0
        for message, target in self.incoming:
            start = message.offset
            if target is None:
                if self.destinations is not None:  # the buffer holds nothing but these
                    start, at = at, at + aligned(message.nbytes)
                    for copy in message.copies:
                        values = _typed(buffer, start + copy.offset - message.offset, copy)
                        round_.unpacks.append((self._landing(copy), values))
                target = buffer[start : start + message.nbytes]
            round_.operations.append(dist.P2POp(dist.irecv, target, message.source, group))

    def _send(self, round_: _Round, staging: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """Messages that cannot be sent straight are packed, each slice once even if several ranks want it."""
        packed: dict[Any, torch.Tensor] = {}
        at = 0
        for message, values in self.outgoing:
            if values is None:
                key = _content(message)
                if key not in packed:
                    packed[key] = staging[at : at + message.nbytes]
                    at += aligned(message.nbytes)
                    for copy in message.copies:
                        to = _typed(packed[key], copy.offset - message.offset, copy)
                        round_.packs.append((to, self._values(copy)))
                values = packed[key]
            round_.operations.append(dist.P2POp(dist.isend, values, message.destination, group))

    def _values(self, copy: Copy) -> torch.Tensor:
        """What is copied, in the source."""
        return region(self.sources[copy.source.key], copy.source)

    def _landing(self, copy: Copy) -> torch.Tensor:
        """Its place in the destination."""
        assert self.destinations is not None
        return region(self.destinations[copy.destination.key], copy.destination)


def _whole(message: Message, view: Callable[[Copy], torch.Tensor]) -> torch.Tensor | None:
    """The memory of a message that is a single slice which lies contiguous and in its dtype; else None."""
    copy, *others = message.copies
    values = view(copy)
    if others or values.dtype != copy.dtype or not values.is_contiguous():
        return None
    return values.reshape(-1).view(torch.uint8)


def _content(message: Message) -> Any:
    """Equal for messages with the same bytes."""
    return tuple((c.source.key, c.source.at, c.dtype, c.offset - message.offset) for c in message.copies)


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
