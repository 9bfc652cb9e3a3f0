"""Who holds which slice of which tensor, and where: the one algebra behind loading, syncing, exporting and resuming.

Canonical tensors are those of a Hugging Face checkpoint. A `Piece` says that a rectangular slice of one of them lies in
a rectangular region of a local buffer of one rank; a `Layout` is the list of all pieces of all ranks. Processes,
devices and dtypes play no part here, so that a layout of 256 ranks can be reasoned about on one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"
Box = tuple[tuple[int, int], ...]  # [start, stop) in each dimension


@dataclass(frozen=True, slots=True)
class Piece:
    """``index`` of canonical tensor ``name`` lies at ``at`` of local buffer ``key`` on ``rank``.

    ``at`` may have more leading dimensions than ``index`` (a stack of experts), each one element long; the trailing
    dimensions have the same lengths, and elements correspond in row-major order.
    """

    name: str
    rank: int
    index: Box
    key: str
    at: Box

    def cut(self, index: Box) -> Piece:
        """The part of this piece that holds ``index``, which lies inside ``self.index``."""
        if index == self.index:
            return self
        extra = len(self.at) - len(self.index)
        at = self.at[:extra] + moved(index, self.index, self.at[extra:])
        return Piece(self.name, self.rank, index, self.key, at)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice in the canonical tensor."""
        return lengths(self.index)


Held = tuple[str, Box, str, Box]  # a piece without its rank: name, index, key, at


class Shard(NamedTuple):
    """What all of ``ranks`` hold alike, in the order of delivery."""

    ranks: tuple[int, ...]
    slices: tuple[Held, ...]


class Layout:
    """All pieces of all ranks, and the shapes of the canonical tensors they are slices of.

    The order of the pieces of one rank is the order in which a transfer delivers them. Ranks are global ranks. Ranks
    that hold the same (data-parallel replicas) are kept as one `Shard`, so that what is said of it is said once.

    Args:
        shards: ranks, and what each of them holds besides its ``pieces``; a rank may stand in several.

    Raises:
        ValueError: a piece of an unknown tensor, out of bounds, or with different shapes on its two sides; a tensor
            with an element that no rank holds.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        pieces: Iterable[Piece] = (),
        shards: Iterable[tuple[Iterable[int], Sequence[Held]]] = (),
    ):
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in shapes.items()}
        held: dict[int, list[Held]] = {}
        for p in pieces:
            held.setdefault(p.rank, []).append((p.name, p.index, p.key, p.at))
        for ranks, slices in shards:
            for rank in ranks:
                held.setdefault(rank, []).extend(slices)
        alike: dict[tuple[Held, ...], list[int]] = {}
        for rank in sorted(held):
            alike.setdefault(tuple(held[rank]), []).append(rank)
        self.shards = [Shard(tuple(ranks), slices) for slices, ranks in alike.items() if slices]
        self._validate()

    def _validate(self) -> None:
        for shard in self.shards:
            for held in shard.slices:
                self._check(shard.ranks[0], held)
        complete: dict[tuple[tuple[int, ...], tuple[Box, ...]], list[Box]] = {}  # layers are cut alike
        for name, shape in self.shapes.items():
            case = shape, tuple(self.holders.get(name, {}))
            if case not in complete:
                complete[case] = subtract([whole(shape)], case[1])
            if complete[case]:
                raise ValueError(f"layout: {name}{_text(complete[case][0])} is held by no rank")

    def _check(self, rank: int, held: Held) -> None:
        name, index, key, at = held
        shape = self.shapes.get(name)
        if shape is None:
            raise ValueError(f"layout: rank {rank} holds {name}, which is not a tensor of this model")
        if len(index) != len(shape) or any(not 0 <= lo < hi <= n for (lo, hi), n in zip(index, shape, strict=True)):
            raise ValueError(f"layout: {name}{_text(index)} of rank {rank} is outside {list(shape)}")
        lead = (1,) * (len(at) - len(shape))
        if any(lo < 0 for lo, _ in at) or lengths(at) != lead + lengths(index):
            raise ValueError(f"layout: {name}{_text(index)} does not fit {key}{_text(at)}, rank {rank}")

    def __eq__(self, other: object) -> bool:
        """Whether the same ranks hold the same of the same model, in the same order."""
        return isinstance(other, Layout) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal layouts, in every process; different for different ones."""
        content = (list(self.shapes.items()), [(shard.ranks, shard.slices) for shard in self.shards])
        return hashlib.sha256(repr(content).encode()).hexdigest()

    @property
    def pieces(self) -> list[Piece]:
        """The pieces of all ranks, rank after rank."""
        return [piece for rank in sorted(self.shard_of) for piece in self.of_rank(rank)]

    @cached_property
    def holders(self) -> dict[str, dict[Box, dict[int, int]]]:
        """For each tensor its distinct slices, each with the shards that hold it: number of the shard, of the slice."""
        out: dict[str, dict[Box, dict[int, int]]] = {}
        for number, shard in enumerate(self.shards):
            for position, (name, index, _, _) in enumerate(shard.slices):
                out.setdefault(name, {}).setdefault(index, {}).setdefault(number, position)
        return out

    @cached_property
    def boxes(self) -> dict[str, dict[Box, list[Piece]]]:
        """For each tensor its distinct slices, each with the pieces that hold it, lowest rank first."""
        out: dict[str, dict[Box, list[Piece]]] = {}
        for piece in self.pieces:
            out.setdefault(piece.name, {}).setdefault(piece.index, []).append(piece)
        return out

    @cached_property
    def shard_of(self) -> dict[int, int]:
        """The number of each rank's shard; ranks that hold nothing have none."""
        return {rank: number for number, shard in enumerate(self.shards) for rank in shard.ranks}

    def of_rank(self, rank: int) -> list[Piece]:
        """The pieces of one rank, in the order of delivery; none if it holds nothing."""
        if rank not in self.shard_of:
            return []
        return [piece_of(rank, held) for held in self.shards[self.shard_of[rank]].slices]


def piece_of(rank: int, held: Held) -> Piece:
    """What ``rank`` holds, as a piece."""
    name, index, key, at = held
    return Piece(name, rank, index, key, at)


def rank_pieces_from_dicts(dicts: Iterable[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """A layout out of pieces that other processes described, as JSON or pickled ``dataclasses.asdict(piece)``.

    Args:
        dicts: fields of `Piece`; lists in place of tuples are accepted.
        shapes: canonical shapes of (at least) the tensors that the pieces name.

    Raises:
        ValueError: as `Layout`; a tensor that no piece names is not part of the layout.
    """

    def box(value: Any) -> Box:
        return tuple((int(lo), int(hi)) for lo, hi in value)

    pieces = [Piece(str(d["name"]), int(d["rank"]), box(d["index"]), str(d["key"]), box(d["at"])) for d in dicts]
    names = {piece.name for piece in pieces}
    return Layout({name: shape for name, shape in shapes.items() if name in names}, pieces)


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, n) for n in shape)


def lengths(box: Box) -> tuple[int, ...]:
    """The shape of what a box holds."""
    return tuple(hi - lo for lo, hi in box)


def volume(box: Box) -> int:
    """Number of elements of a box (1 for a scalar's empty box)."""
    return math.prod([hi - lo for lo, hi in box])


def moved(box: Box, origin: Box, target: Box) -> Box:
    """``box``, which lies inside ``origin``, at the same place inside ``target``."""
    return tuple((lo - a + b, hi - a + b) for (lo, hi), (a, _), (b, _) in zip(box, origin, target, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of equal rank, or None."""
    if a == b:
        return a
    out = []
    for (lo, hi), (start, stop) in zip(a, b, strict=True):
        if lo >= stop or start >= hi:
            return None
        out.append((lo if lo > start else start, hi if hi < stop else stop))
    return tuple(out)


def divide(box: Box, parts: int) -> list[Box]:
    """Cut along the first dimension into nearly equal parts, at most one per row."""
    (start, stop), rest = box[0], box[1:]
    parts = min(parts, stop - start)
    edges = [start + (stop - start) * i // parts for i in range(parts + 1)]
    return [((lo, hi), *rest) for lo, hi in zip(edges, edges[1:], strict=False)]


def subtract(boxes: Iterable[Box], holes: Iterable[Box]) -> list[Box]:
    """Disjoint boxes that cover what ``holes`` leave of ``boxes``."""
    rest = list(boxes)
    for hole in holes:
        rest = [part for box in rest for part in _without(box, hole)]
    return rest


def _without(box: Box, hole: Box) -> list[Box]:
    common = intersect(box, hole)
    if common is None:
        return [box]
    if common == box:
        return []
    out = []
    for dim, ((lo, hi), (start, stop)) in enumerate(zip(box, common, strict=True)):
        for part in ((lo, start), (stop, hi)):
            if part[0] < part[1]:
                out.append(common[:dim] + (part,) + box[dim + 1 :])
    return out


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in box) + "]"
