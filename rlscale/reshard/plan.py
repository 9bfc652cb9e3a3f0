"""The least set of copies that turns one layout into another, cut into rounds of bounded size.

Every destination slice is cut against the slices that exist: what its rank already holds stays there, the rest crosses
once, from a holder on the same node or the one that has least to do. Then the copies are dealt into rounds, in which no
rank receives, nor sends, more than one bucket. A rank's pieces come nearly in the order of its layout (see
`rlscale.reshard.rounds.schedule`), but each rank enters that order at another place. A plan is a pure function of its
arguments: every rank computes the same one and knows its part.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rlscale.reshard.cover import cover
from rlscale.reshard.layout import Box, Ints, Layout, Piece, piece_of
from rlscale.reshard.rounds import schedule
from rlscale.reshard.senders import choose

if TYPE_CHECKING:  # a plan can be made without torch: all it needs of a dtype is its ``itemsize``
    import torch

DEFAULT_BUCKET_BYTES = 64 * 2**20
DIRECT_BYTES = 256 * 2**10  # copies of this size or more travel as a message of their own, without being packed
STAGING_ALIGN = 16  # messages start at multiples of this in a sender's staging buffer
KEPT = 4  # plans kept for a second call with equal arguments


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


class Traffic:
    """Which rank sends what to which, and what that costs.

    Attributes:
        received, sent, local: payload bytes by rank (of the destination's dtype): from others, to others, own copies.
        lower_bound: bytes by rank that no plan can save: each wanted slice less what the rank already holds.
        links: bytes by the link that they take: ``device`` (own copies), ``node`` and ``network`` (between nodes; none
            where ``ranks_per_node`` is not known).
        from_network: bytes by rank that come from other nodes.
    """

    def __init__(
        self, source: Layout, destination: Layout, dtypes: Mapping[str, torch.dtype], bucket_bytes: int,
        ranks_per_node: int | None,
    ):  # fmt: skip
        itemsizes = {name: dtypes[name].itemsize for name in destination.shapes}
        table = self.copies = cover(source, destination, itemsizes, bucket_bytes)
        senders = sorted(source.shard_of)
        self.sender: Ints = choose(table, len(senders), ranks_per_node)
        stays = self.sender == table.receiver
        self.local = self._by_rank(table.receivers, table.receiver, stays)
        self.received = self._by_rank(table.receivers, table.receiver, ~stays)
        self.sent = self._by_rank(senders, self.sender, ~stays)
        self.lower_bound = table.lower_bound
        between_nodes = np.zeros(len(stays), bool)
        if ranks_per_node is not None:
            between_nodes = self.sender // ranks_per_node != table.receiver // ranks_per_node
        self.from_network = self._by_rank(table.receivers, table.receiver, between_nodes)
        total, network, device = (sum(by.values()) for by in (self.received, self.from_network, self.local))
        self.links = {"device": device, "node": total - network, "network": network}

    def _by_rank(self, ranks: list[int], column: Ints, rows: np.ndarray) -> dict[int, int]:
        sums = np.zeros(max(ranks, default=0) + 1, np.int64)
        np.add.at(sums, column[rows], self.copies.nbytes[rows])
        return {rank: int(sums[rank]) for rank in ranks}


class Plan(Traffic):
    """Copies by receiving rank and round; every rank goes through all the rounds, also where it has nothing to do.

    The copies of all ranks are columns of numbers; those of a rank become `Copy` objects when they are asked for.

    Attributes:
        bucket_bytes: most bytes that a rank receives in a round, and most that it needs to pack what it sends, both
            with alignment; only a chunk as large as a bucket may exceed it, by its alignment.
        rounds: number of rounds.
    """

    def __init__(
        self, source: Layout, destination: Layout, dtypes: Mapping[str, torch.dtype], bucket_bytes: int,
        ranks_per_node: int | None,
    ):  # fmt: skip
        super().__init__(source, destination, dtypes, bucket_bytes, ranks_per_node)
        self.source, self.destination, self.dtypes, self.bucket_bytes = source, destination, dtypes, bucket_bytes
        self._incoming: dict[int, list[list[Copy]]] = {}
        self._outgoing: dict[int, dict[int, list[Message]]] = {}
        self._schedule()

    def _schedule(self) -> None:
        """Set each row's round, the order of rows in the buckets, and their offsets there."""
        table, sender = self.copies, self.sender
        kinds = set(self.dtypes.values())
        align = max(t.itemsize for t in kinds) if len(kinds) > 1 else 1
        sizes = aligned(table.nbytes, align)
        chunks = int(table.chunk[-1]) + 1 if len(table.chunk) else 0
        sent = np.flatnonzero(sender != table.receiver)
        ranks = int(sender.max()) + 1 if len(sender) else 1
        pairs, pair_of = np.unique(table.chunk[sent] * ranks + sender[sent], return_inverse=True)
        room = aligned(sizes)  # what staging takes at most
        shares, of_chunk = np.zeros(len(pairs), np.int64), np.zeros(chunks, np.int64)
        np.add.at(shares, pair_of, room[sent])
        np.add.at(of_chunk, table.chunk, room)
        starts = np.searchsorted(table.receiver, table.receivers)
        bounds = np.append(table.chunk[starts] if chunks else starts, chunks)
        first = np.searchsorted(pairs // ranks, np.arange(chunks + 1))
        rounds, self.rounds = schedule(bounds, of_chunk, pairs % ranks, shares, first, self.bucket_bytes)
        self._round = rounds[table.chunk]
        # in the order of the buckets: by receiver, round and sender, then as they are delivered
        receiver = np.searchsorted(table.receivers, table.receiver)
        key = (receiver * max(1, self.rounds) + self._round) * ranks + sender
        self._order = np.argsort(key, kind="stable")
        bucket = key[self._order] // ranks
        ends = np.cumsum(sizes[self._order])
        begins = ends - sizes[self._order]
        starts = np.searchsorted(bucket, bucket)
        self._offset = np.zeros(len(key), np.int64)
        self._offset[self._order] = begins - begins[starts]

    def incoming(self, rank: int) -> list[list[Copy]]:
        """What fills the bucket of a rank in each round, in its order: copies of one sender stand together."""
        if rank not in self._incoming:
            rows = self._rows_of(rank)
            rounds = self._incoming[rank] = [[] for _ in range(self.rounds)]
            for copy, number in zip(self._objects(rows), self._round[rows].tolist(), strict=True):
                rounds[number].append(copy)
        return self._incoming[rank]

    def messages_to(self, rank: int, number: int) -> list[Message]:
        """Messages that ``rank`` receives in a round, in the order of its bucket; own copies are none."""
        return _messages(rank, self.incoming(rank)[number])

    def messages_from(self, rank: int, number: int) -> list[Message]:
        """Messages that ``rank`` sends in a round, by receiver, each receiver's in the order of its bucket."""
        if rank not in self._outgoing:
            rows = self._order[self.sender[self._order] == rank]
            to: dict[tuple[int, int], list[Copy]] = {}
            for copy, number_ in zip(self._objects(rows), self._round[rows].tolist(), strict=True):
                if copy.wanted.rank != rank:
                    to.setdefault((copy.wanted.rank, number_), []).append(copy)
            messages = self._outgoing[rank] = {}
            for (receiver, number_), copies in to.items():
                messages.setdefault(number_, []).extend(_messages(receiver, copies))
        return self._outgoing[rank].get(number, [])

    def buffer_bytes(self, rank: int) -> int:
        """Size of the largest bucket of ``rank``: what a buffer for it must hold."""
        rows = self._rows_of(rank)
        return int((self._offset[rows] + self.copies.nbytes[rows]).max(initial=0))

    def from_rank(self, rank: int) -> Iterator[Copy]:
        """All copies that read buffers of ``rank``, its own included."""
        return self._objects(np.flatnonzero(self.sender == rank))

    @cached_property
    def digest(self) -> int:
        """32 bits that differ, in all likelihood, where two ranks computed different plans."""
        ends = f"{self.source.fingerprint} {self.destination.fingerprint} {self.bucket_bytes} {self.rounds}"
        out = zlib.crc32(ends.encode())
        for column in (self.copies.nbytes, self.sender, self._round, self._offset):
            out = zlib.crc32(np.ascontiguousarray(column).tobytes(), out)
        return out

    def _rows_of(self, rank: int) -> Ints:
        receiver = self.copies.receiver
        return self._order[np.searchsorted(receiver, rank) : np.searchsorted(receiver, rank, side="right")]

    def _objects(self, rows: Ints) -> Iterator[Copy]:
        """Rows as copies."""
        table = self.copies
        columns = (self.sender, table.receiver, table.place, table.own, table.held, table.nbytes, self._offset)
        values = zip(*(column[rows].tolist() for column in columns), strict=True)
        for sender, receiver, place, own, held, nbytes, offset in values:
            shard = self.source.shard_of[sender]
            source = self.source.shards[shard].slices[own if own >= 0 else table.slices[held][shard]]
            wanted = self.destination.shards[self.destination.shard_of[receiver]].slices[table.wanted[place]]
            yield Copy(
                table.boxes[place],
                piece_of(sender, source),
                piece_of(receiver, wanted),
                self.dtypes[wanted[0]],
                nbytes,
                offset,
            )


@lru_cache(KEPT)
def _made(source: Layout, destination: Layout, dtypes: tuple[torch.dtype, ...], *rest: Any) -> Plan:
    return Plan(source, destination, dict(zip(destination.shapes, dtypes, strict=True)), *rest)


def plan(
    source: Layout,
    destination: Layout,
    *,
    dtype: torch.dtype | Mapping[str, torch.dtype],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ranks_per_node: int | None = None,
    complete: bool = False,
) -> Plan:
    """Plan the copies that fill every piece of ``destination`` from ``source``.

    The last few plans are kept: equal arguments give the same object, which must not be changed.

    Args:
        source: who holds what; replicas are used to stay within a node and to balance the senders.
        destination: the slices that each rank needs; ranks that hold nothing are allowed.
        dtype: of the destination, one for all or by tensor name. Senders convert.
        bucket_bytes: a piece larger than this is cut along its first dimension.
        ranks_per_node: ranks ``[n * ranks_per_node, (n + 1) * ranks_per_node)`` share a node; None: all do.
        complete: refuse a destination that leaves out tensors of the source.

    Raises:
        ValueError: a tensor that the source lacks or holds in another shape, or (if ``complete``) that only the source
            has; a bucket smaller than one row.
    """
    _check_same_model(source, destination, complete)
    if ranks_per_node is not None and ranks_per_node < 1:
        raise ValueError(f"plan: ranks_per_node {ranks_per_node} is not positive")
    of = dtype if isinstance(dtype, Mapping) else dict.fromkeys(destination.shapes, dtype)
    return _made(source, destination, tuple(of[name] for name in destination.shapes), bucket_bytes, ranks_per_node)


def _check_same_model(source: Layout, destination: Layout, complete: bool) -> None:
    have, want = source.shapes, destination.shapes
    if lacking := [name for name in want if name not in have]:
        raise ValueError(
            f"plan: the destination asks for {_names(lacking)}, which the source does not hold: other architectures?"
        )
    if extra := [name for name in have if name not in want and complete]:
        raise ValueError(
            f"plan: the source holds {_names(extra)}, which the destination has no place for: other architectures?"
        )
    differ = [name for name, shape in want.items() if have[name] != shape]
    for name in differ[:1]:
        more = f" ({len(differ) - 1} more tensors differ)" if len(differ) > 1 else ""
        raise ValueError(f"plan: {name} has shape {list(have[name])} in the source, {list(want[name])} here{more}")


def _names(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def aligned(nbytes: Any, align: int = STAGING_ALIGN) -> Any:
    """The next multiple of ``align``."""
    return -(-nbytes // align) * align


def _messages(rank: int, copies: list[Copy]) -> list[Message]:
    """Small copies of one sender that lie behind each other are one message; large ones go alone."""
    out: list[Message] = []
    for copy in copies:
        if copy.sender == rank:
            continue
        last = out[-1] if out and copy.nbytes < DIRECT_BYTES else None
        if last is not None and last.source == copy.sender and last.copies[-1].nbytes < DIRECT_BYTES:
            last.copies.append(copy)
            last.nbytes = copy.offset + copy.nbytes - last.offset
        else:
            out.append(Message(copy.sender, rank, [copy], copy.offset, copy.nbytes))
    return out
