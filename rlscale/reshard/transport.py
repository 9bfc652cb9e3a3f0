"""Carries out a plan: rounds of point-to-point messages through bounded buckets.

Senders convert to the destination's dtype. A large contiguous slice is sent straight from its storage; the rest is
packed into a staging buffer. The receiver's bucket is filled in place, so that it can be memory which another process
maps (POSIX shared memory, CUDA IPC), and is complete when it is handed out.

The same plan runs once per training step over the same tensors, and a large model has tens of thousands of slices. So
all views and messages are made on the first run and kept for as long as the tensors stay where they are: what remains
of a run are calls of send, receive and copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from rlscale.reshard.layout import Piece
from rlscale.reshard.plan import Copy, Message, Plan, aligned

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
        buffers: one or two uint8 tensors of ``plan.buffer_bytes(rank)`` each, on the device of the sources. With two,
            the next round travels while the caller works on this one.
    """

    def __init__(self, plan: Plan, *, buffers: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None):
        self.plan, self.group, self.buffers = plan, group, list(buffers)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.rounds: list[_Round] = []
        self.made_for: object = None

    def buckets(self, sources: Tensors) -> Iterator[Bucket]:
        """Yield this rank's bucket of every round.

        All ranks of the group must exhaust the iterator: all see ``plan.rounds`` buckets.

        Args:
            sources: this rank's local buffers by key, as in the source layout.

        Raises:
            ValueError: a local buffer that is missing or too small for its pieces, plans that differ between ranks; on
                every rank, before anything is sent.
        """
        # where the sources lie: equal if views of one set are views of the other
        places = {key: (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for key, t in sources.items()}
        if places == self.made_for:
            self._raise_on_any(None)
        else:
            self.made_for, self.rounds = None, []
            self._raise_on_any(self._violation(sources))
            self._make(sources)
            self.made_for = places
        return self._deliver()

    def _deliver(self) -> Iterator[Bucket]:
        """With two buffers, two rounds are on their way at one time: gloo and NCCL are fastest with much to do."""
        posted: dict[int, list[Any]] = {}
        for number, this in enumerate(self.rounds):
            if number not in posted:
                posted[number] = self._post(number)
            # the caller has left the bucket of the round before; only the staging buffer may still be in use
            ahead = len(self.buffers) > 1 and number + 1 < len(self.rounds)
            following = self.rounds[number + 1] if ahead else None
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

    def _make(self, sources: Tensors) -> None:
        """The views and messages of all rounds."""
        # each message with the memory that it is sent from, or None where it must be packed
        outgoing = [
            [(message, _whole(message, sources)) for message in self.plan.messages_from(self.rank, number)]
            for number in range(self.plan.rounds)
        ]
        room = 0
        for messages in outgoing:
            packed = {_content(message): message.nbytes for message, values in messages if values is None}
            room = max(room, sum(map(aligned, packed.values())))
        staging = torch.empty(room, dtype=torch.uint8, device=self.buffers[0].device)
        self.rounds = [self._round(number, sources, messages, staging) for number, messages in enumerate(outgoing)]

    def _round(
        self, number: int, sources: Tensors, outgoing: list[tuple[Message, torch.Tensor | None]], staging: torch.Tensor
    ) -> _Round:
        copies, buffer = self.plan.incoming(self.rank)[number], self.buffers[number % len(self.buffers)]
        used = copies[-1].offset + copies[-1].nbytes if copies else 0
        this = _Round(Bucket(number, copies, buffer[:used]))
        for message in self.plan.messages_to(self.rank, number):
            target = buffer[message.offset : message.offset + message.nbytes]
            this.operations.append(dist.P2POp(dist.irecv, target, message.source, self.group))
        packed: dict[Any, torch.Tensor] = {}  # each slice once, even if several ranks want it
        at = 0
        for message, values in outgoing:
            if values is None and (values := packed.get(_content(message))) is None:
                values = packed[_content(message)] = staging[at : at + message.nbytes]
                at += aligned(message.nbytes)
                for copy in message.copies:
                    this.packs.append((_typed(values, copy.offset - message.offset, copy), _values(copy, sources)))
            this.operations.append(dist.P2POp(dist.isend, values, message.destination, self.group))
        own = [copy for copy in copies if copy.sender == self.rank]
        this.own = [(_typed(buffer, copy.offset, copy), _values(copy, sources)) for copy in own]
        return this

    def _violation(self, sources: Tensors) -> str | None:
        """The first thing that is wrong with what the caller gave on this rank."""
        for copy in self.plan.from_rank(self.rank):
            if (problem := _misfit(sources.get(copy.source.key), copy.source)) is not None:
                return problem
        need = self.plan.buffer_bytes(self.rank)
        if any(buffer.numel() < need or buffer.dtype != torch.uint8 for buffer in self.buffers):
            return f"buffers must be uint8 tensors of at least {need} bytes"
        return None

    def _raise_on_any(self, problem: str | None) -> None:
        """Raise on every rank what is wrong on any, before anyone waits for a message that will not come."""
        if dist.is_initialized():
            digest = self.plan.digest
            device = self.buffers[0].device
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


def _values(copy: Copy, sources: Tensors) -> torch.Tensor:
    """What is copied, in the source."""
    return region(sources[copy.source.key], copy.source)


def _whole(message: Message, sources: Tensors) -> torch.Tensor | None:
    """The memory of a message that is a single slice which lies contiguous and in its dtype; else None."""
    copy, *others = message.copies
    values = _values(copy, sources)
    if others or values.dtype != copy.dtype or not values.is_contiguous():
        return None
    return values.reshape(-1).view(torch.uint8)


def _content(message: Message) -> Any:
    """Equal for messages with the same bytes."""
    return tuple((c.source.key, c.source.at, c.dtype, c.offset - message.offset) for c in message.copies)


def _typed(buffer: torch.Tensor, offset: int, copy: Copy) -> torch.Tensor:
    return buffer[offset : offset + copy.nbytes].view(copy.dtype).view(copy.destination.shape)


def _misfit(tensor: torch.Tensor | None, piece: Piece) -> str | None:
    if tensor is None:
        return f"source has no buffer {piece.key}, which holds part of {piece.name}"
    if tensor.dim() != len(piece.at) or any(hi > n for (_, hi), n in zip(piece.at, tensor.shape, strict=False)):
        return f"source buffer {piece.key} has shape {list(tensor.shape)}, too small for its part of {piece.name}"
    return None
