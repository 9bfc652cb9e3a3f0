"""The least set of copies that turns one layout into another, cut into rounds of bounded size.

Every destination slice is cut against the slices that exist: what its rank already holds stays there, the rest crosses
once, from the sender that has least to do. Then the copies are dealt into rounds, in which no rank receives, nor sends,
more than one bucket. A rank's pieces come in the order of its layout, but each rank enters that order at another place.
A plan is a pure function of its arguments: every rank computes the same one and knows its part.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch

from rlscale.reshard.layout import Box, Layout, Piece, intersect, subtract, volume

DEFAULT_BUCKET_BYTES = 64 * 2**20
DIRECT_BYTES = 256 * 2**10  # copies of this size or more travel as a message of their own, without being packed
STAGING_ALIGN = 16  # messages start at multiples of this in a sender's staging buffer


@dataclass(slots=True)
class Copy:
    """One slice on its way: ``index`` of a canonical tensor, out of a source piece that contains it into a destination
    piece that contains it, ``offset`` bytes into the receiver's bucket."""

    index: Box
    held: Piece
    wanted: Piece
    dtype: torch.dtype
    nbytes: int
    offset: int = 0

    @property
    def sender(self) -> int:
        return self.held.rank

    @property
    def source(self) -> Piece:
        """The slice at the sender."""
        return self.held.cut(self.index)

    @property
    def destination(self) -> Piece:
        """The slice at the receiver."""
        return self.wanted.cut(self.index)


@dataclass
class Message:
    """Copies between two ranks that lie behind each other in the receiver's bucket, ``nbytes`` from ``offset`` on."""

    source: int
    destination: int
    copies: list[Copy]
    offset: int
    nbytes: int


@dataclass
class Plan:
    """Copies by receiving rank and round; every rank goes through all the rounds, also where it has nothing to do.

    Attributes:
        bucket_bytes: most bytes that a rank receives or sends in a round (mixed dtypes may add some alignment).
        rounds: number of rounds.
        incoming: ``incoming[rank][round]``, in the order of the bucket: copies of one sender stand together.
        received, sent, local: payload bytes by rank (of the destination's dtype): from others, to others, own copies.
    """

    bucket_bytes: int
    rounds: int
    incoming: dict[int, list[list[Copy]]]
    received: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    local: dict[int, int] = field(default_factory=dict)

    def bucket(self, rank: int, number: int) -> list[Copy]:
        """What fills the bucket of ``rank`` in round ``number``."""
        rounds = self.incoming.get(rank)
        return rounds[number] if rounds else []

    def messages_to(self, rank: int, number: int) -> list[Message]:
        """Messages that ``rank`` receives in a round, in the order of its bucket; own copies are none."""
        return list(_messages(rank, self.bucket(rank, number)))

    def messages_from(self, rank: int, number: int) -> list[Message]:
        """Messages that ``rank`` sends in a round, by receiver, each receiver's in the order of its bucket."""
        return self._outgoing.get((rank, number), [])

    def buffer_bytes(self, rank: int) -> int:
        """Size of the largest bucket of ``rank``: what a buffer for it must hold."""
        ends = [copies[-1].offset + copies[-1].nbytes for copies in self.incoming.get(rank, []) if copies]
        return max(ends, default=0)

    def staging_bytes(self, rank: int) -> int:
        """The most that ``rank`` sends in a round, messages rounded up to `STAGING_ALIGN`: room enough to pack it."""
        totals = (
            sum(-(-m.nbytes // STAGING_ALIGN) * STAGING_ALIGN for m in self.messages_from(rank, number))
            for number in range(self.rounds)
        )
        return max(totals, default=0)

    def from_rank(self, rank: int) -> Iterator[Copy]:
        """All copies that read buffers of ``rank``, its own included."""
        for rounds in self.incoming.values():
            for copies in rounds:
                yield from (copy for copy in copies if copy.sender == rank)

    @cached_property
    def _outgoing(self) -> dict[tuple[int, int], list[Message]]:
        out: dict[tuple[int, int], list[Message]] = defaultdict(list)
        for rank in sorted(self.incoming):
            for number in range(self.rounds):
                for message in self.messages_to(rank, number):
                    out[message.source, number].append(message)
        return dict(out)

    @cached_property
    def digest(self) -> int:
        """32 bits that differ, in all likelihood, where two ranks computed different plans."""
        sizes = [
            (rank, [(len(copies), sum(c.nbytes for c in copies)) for copies in rounds])
            for rank, rounds in sorted(self.incoming.items())
        ]
        return zlib.crc32(repr((self.bucket_bytes, self.rounds, sorted(self.sent.items()), sizes)).encode())


def plan(
    source: Layout,
    destination: Layout,
    *,
    dtype: torch.dtype | Mapping[str, torch.dtype],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Plan:
    """Plan the copies that fill every piece of ``destination`` from ``source``.

    Args:
        source: who holds what; replicas are used to balance the senders.
        destination: who wants what; may ask for part of the tensors, and on ranks that hold nothing.
        dtype: of the destination, one for all or by tensor name. Senders convert.
        bucket_bytes: a piece larger than this is cut along its first dimension.

    Raises:
        ValueError: a tensor that the source lacks or holds in another shape; a bucket smaller than one row.
    """
    for name, shape in destination.shapes.items():
        if name not in source.shapes:
            raise ValueError(f"plan: the destination asks for {name}, which the source does not hold")
        if source.shapes[name] != shape:
            raise ValueError(f"plan: {name} has shape {list(source.shapes[name])} in the source, {list(shape)} here")
    dtypes = {name: dtype if isinstance(dtype, torch.dtype) else dtype[name] for name in destination.shapes}
    chunks = [
        (rank, [_Chunk(piece.cut(index), dtypes[piece.name]) for piece in pieces
                for index in _cut(piece, dtypes[piece.name].itemsize, bucket_bytes)])
        for rank, pieces in sorted(destination.by_rank.items())
    ]  # fmt: skip
    chunks = [(rank, _rotate(of_rank, i / len(chunks))) for i, (rank, of_rank) in enumerate(chunks)]
    sent = _choose_senders(source, [chunk for _, of_rank in chunks for chunk in of_rank])
    align = max((t.itemsize for t in dtypes.values()), default=1) if len(set(dtypes.values())) > 1 else 1
    incoming, rounds = _schedule(dict(chunks), bucket_bytes, align)
    out = Plan(bucket_bytes, rounds, incoming, sent=dict(sorted(sent.items())))
    for rank, of_rank in chunks:
        copies = [copy for chunk in of_rank for copy in chunk.copies]
        out.local[rank] = sum(copy.nbytes for copy in copies if copy.sender == rank)
        out.received[rank] = sum(copy.nbytes for copy in copies) - out.local[rank]
    return out


class _Chunk:
    """A destination piece of at most one bucket, with the copies that fill it."""

    __slots__ = ("piece", "dtype", "copies")

    def __init__(self, piece: Piece, dtype: torch.dtype):
        self.piece, self.dtype = piece, dtype
        self.copies: list[Copy] = []

    def add(self, index: Box, source: Piece) -> int:
        copy = Copy(index, source, self.piece, self.dtype, volume(index) * self.dtype.itemsize)
        self.copies.append(copy)
        return copy.nbytes


def _rotate(chunks: list[_Chunk], share: float) -> list[_Chunk]:
    """Start after ``share`` of the elements: ranks that start apart don't all want the first stage at once."""
    sizes = [volume(chunk.piece.index) for chunk in chunks]
    start = bisect_left(list(accumulate(sizes, initial=0)), share * sum(sizes)) % max(1, len(chunks))
    return chunks[start:] + chunks[:start]


def _cut(piece: Piece, itemsize: int, bucket_bytes: int) -> list[Box]:
    """Split along the first dimension into nearly equal parts of at most half a bucket (or a row): they pack well."""
    (start, stop), rest = piece.index[0], piece.index[1:]
    row = volume(rest) * itemsize
    if row > bucket_bytes:
        raise ValueError(f"plan: bucket_bytes {bucket_bytes} is smaller than one row of {piece.name}")
    fits = max(1, bucket_bytes // 2 // row)
    if stop - start <= fits:
        return [piece.index]
    parts = -(-(stop - start) // fits)
    edges = [start + (stop - start) * i // parts for i in range(parts + 1)]
    return [((lo, hi), *rest) for lo, hi in zip(edges, edges[1:], strict=False)]


# boxes with the number of the own slice they come from; boxes that other ranks hold
Cover = tuple[list[tuple[Box, int]], list[tuple[Box, list[Piece]]]]


def _cover(source: Layout, name: str, index: Box, own: tuple[Box, ...]) -> Cover:
    """Cut ``index`` into disjoint boxes that lie inside one source slice each, own slices first."""
    mine, others = [], []
    rest = [index]
    for number, held in enumerate(own):
        mine += [(box, number) for box in _common(rest, held)]
        rest = subtract(rest, [held])
    for held, holders in source.boxes[name].items() if rest else ():
        boxes = _common(rest, held)
        if boxes:
            others += [(box, list({p.rank: p for p in reversed(holders)}.values())) for box in boxes]
            rest = subtract(rest, [held])
    assert not rest, f"{name}: a validated layout covers every element"
    return mine, others


def _common(boxes: Iterable[Box], held: Box) -> list[Box]:
    return [box for box in (intersect(box, held) for box in boxes) if box is not None]


def _choose_senders(source: Layout, chunks: list[_Chunk]) -> dict[int, int]:
    """Give every chunk its copies; returns the bytes that each rank sends.

    The own rank comes first. Of the rest, slices with the fewest holders are dealt out first and larger before smaller
    ones, each to the holder with the fewest bytes so far: where replicas allow a choice this evens out.
    """
    own: dict[tuple[str, int], list[Piece]] = defaultdict(list)
    for piece in source.pieces:
        own[piece.name, piece.rank].append(piece)
    covers: dict[tuple[str, Box, tuple[Box, ...]], Cover] = {}  # replicas ask for the same
    open_copies: list[tuple[int, int, int, Box, list[Piece]]] = []
    for number, chunk in enumerate(chunks):
        name, index = chunk.piece.name, chunk.piece.index
        held = own.get((name, chunk.piece.rank), [])
        key = (name, index, tuple([piece.index for piece in held]))
        if key not in covers:
            covers[key] = _cover(source, name, index, key[2])
        mine, others = covers[key]
        for box, which in mine:
            chunk.add(box, held[which])
        for box, holders in others:
            open_copies.append((len(holders), -volume(box) * chunk.dtype.itemsize, number, box, holders))
    sent = dict.fromkeys(sorted({piece.rank for piece in source.pieces}), 0)
    for _, _, number, box, holders in sorted(open_copies, key=lambda entry: entry[:4]):
        sender = min(holders, key=lambda piece: (sent[piece.rank], piece.rank))
        sent[sender.rank] += chunks[number].add(box, sender)
    return sent


def _schedule(
    chunks: dict[int, list[_Chunk]], bucket_bytes: int, align: int
) -> tuple[dict[int, list[list[Copy]]], int]:
    """Deal the chunks of every rank, in their order, into rounds within the limits of receivers and senders.

    Ranks take turns, one chunk each, so that a sender wanted by several serves them side by side. With mixed dtypes a
    copy takes a multiple of ``align`` bytes of the bucket, so that each starts on a whole element.
    """
    limits = (bucket_bytes, align)
    position = dict.fromkeys(chunks, 0)
    incoming: dict[int, list[list[Copy]]] = {rank: [] for rank in chunks}
    rounds = 0
    while any(position[rank] < len(chunks[rank]) for rank in chunks):
        filled = dict.fromkeys(chunks, 0)
        busy: dict[int, int] = defaultdict(int)
        taken: dict[int, list[Copy]] = {rank: [] for rank in chunks}
        active = [rank for rank in chunks if position[rank] < len(chunks[rank])]
        while active:
            active = [rank for rank in active if _take(rank, chunks[rank], position, filled, busy, taken, limits)]
        for rank, copies in taken.items():
            incoming[rank].append(_place(copies, align))
        rounds += 1
    return incoming, rounds


def _take(
    rank: int, chunks: list[_Chunk], position: dict[int, int], filled: dict[int, int], busy: dict[int, int],
    taken: dict[int, list[Copy]], limits: tuple[int, int],
) -> bool:  # fmt: skip
    """Add the rank's next chunk to this round if receiver and senders have room; False: no more for this round."""
    if position[rank] == len(chunks):
        return False
    bucket_bytes, align = limits
    copies = chunks[position[rank]].copies
    sizes = [-(-copy.nbytes // align) * align for copy in copies]
    load: dict[int, int] = defaultdict(int)
    for copy, size in zip(copies, sizes, strict=True):
        if copy.sender != rank:
            load[copy.sender] += size
    fits = filled[rank] + sum(sizes) <= bucket_bytes and all(busy[s] + n <= bucket_bytes for s, n in load.items())
    # a chunk as large as the bucket may outgrow it by alignment alone: then it has the round for itself
    if not fits and (filled[rank] or any(busy[s] for s in load)):
        return False
    filled[rank] += sum(sizes)
    for sender, size in load.items():
        busy[sender] += size
    taken[rank] += copies
    position[rank] += 1
    return True


def _place(copies: list[Copy], align: int) -> list[Copy]:
    """Order a bucket by sender (order of arrival within) and set the offsets."""
    copies = sorted(copies, key=lambda copy: copy.sender)
    offset = 0
    for copy in copies:
        copy.offset = offset
        offset += -(-copy.nbytes // align) * align
    return copies


def _messages(rank: int, copies: list[Copy]) -> Iterator[Message]:
    """Small copies of one sender that lie behind each other are one message; large ones go alone."""
    open_message: Message | None = None
    for copy in copies:
        alone = copy.nbytes >= DIRECT_BYTES
        if open_message is not None and (alone or copy.sender != open_message.source):
            yield open_message
            open_message = None
        if copy.sender == rank:
            continue
        if alone:
            yield Message(copy.sender, rank, [copy], copy.offset, copy.nbytes)
        elif open_message is None:
            open_message = Message(copy.sender, rank, [copy], copy.offset, copy.nbytes)
        else:
            open_message.copies.append(copy)
            open_message.nbytes = copy.offset + copy.nbytes - open_message.offset
    if open_message is not None:
        yield open_message
