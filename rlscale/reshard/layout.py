"""Who holds which slice of which tensor, and where: the one algebra behind loading, syncing, exporting and resuming.

Canonical tensors are those of a Hugging Face checkpoint. A `Piece` says that a rectangular slice of one of them lies in
a rectangular region of a local buffer of one rank; a `Layout` is the list of all pieces of all ranks. Processes,
devices and dtypes play no part here, so that a layout of 256 ranks can be reasoned about on one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
        at = self.at[:extra] + tuple(
            (here + lo - start, here + hi - start)
            for (lo, hi), (start, _), (here, _) in zip(index, self.index, self.at[extra:], strict=True)
        )
        return Piece(self.name, self.rank, index, self.key, at)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice in the canonical tensor."""
        return tuple(hi - lo for lo, hi in self.index)


@dataclass
class Layout:
    """All pieces of all ranks, and the shapes of the canonical tensors they are slices of.

    The order of the pieces of one rank is the order in which a transfer delivers them. Ranks are global ranks.

    Raises:
        ValueError: a piece of an unknown tensor, out of bounds, or with different shapes on its two sides; a tensor of
            which some element is held by nobody.
    """

    shapes: dict[str, tuple[int, ...]]
    pieces: list[Piece]

    def __post_init__(self) -> None:
        self.shapes = {name: tuple(shape) for name, shape in self.shapes.items()}
        for piece in self.pieces:
            self._check(piece)
        for name, shape in self.shapes.items():
            missing = subtract([whole(shape)], self.boxes.get(name, {}))
            if missing:
                raise ValueError(f"layout: {name}{_text(missing[0])} is held by no rank")

    def _check(self, piece: Piece) -> None:
        shape = self.shapes.get(piece.name)
        if shape is None:
            raise ValueError(f"layout: rank {piece.rank} holds {piece.name}, which is not a tensor of this model")
        inside = len(piece.index) == len(shape) and all(
            0 <= lo < hi <= n for (lo, hi), n in zip(piece.index, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"layout: {piece.name}{_text(piece.index)} of rank {piece.rank} is outside {list(shape)}")
        extra = len(piece.at) - len(shape)
        same = extra >= 0 and all(lo >= 0 for lo, _ in piece.at)
        same = same and [hi - lo for lo, hi in piece.at] == [1] * extra + [hi - lo for lo, hi in piece.index]
        if not same:
            raise ValueError(
                f"layout: {piece.name}{_text(piece.index)} does not fit {piece.key}{_text(piece.at)}, rank {piece.rank}"
            )

    @cached_property
    def boxes(self) -> dict[str, dict[Box, list[Piece]]]:
        """For each tensor its distinct slices, each with the pieces that hold it (in the order of the layout)."""
        out: dict[str, dict[Box, list[Piece]]] = {}
        for piece in self.pieces:
            out.setdefault(piece.name, {}).setdefault(piece.index, []).append(piece)
        return out

    @cached_property
    def by_rank(self) -> dict[int, list[Piece]]:
        """The pieces of each rank, in the order of the layout."""
        out: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            out.setdefault(piece.rank, []).append(piece)
        return out

    def of_rank(self, rank: int) -> list[Piece]:
        """The pieces of one rank; none if it holds nothing."""
        return self.by_rank.get(rank, [])

    def only(self, names: Iterable[str]) -> Layout:
        """The same layout of some of the tensors."""
        keep = set(names)
        shapes = {name: shape for name, shape in self.shapes.items() if name in keep}
        return Layout(shapes, [piece for piece in self.pieces if piece.name in keep])


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
    return Layout({name: tuple(shape) for name, shape in shapes.items() if name in names}, pieces)


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, n) for n in shape)


def volume(box: Box) -> int:
    """Number of elements of a box (1 for a scalar's empty box)."""
    out = 1
    for lo, hi in box:
        out *= hi - lo
    return out


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


def subtract(boxes: Iterable[Box], holes: Iterable[Box]) -> list[Box]:
    """Disjoint boxes that cover what ``holes`` leave of ``boxes``."""
    rest = list(boxes)
    for hole in holes:
        if not rest:
            break
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
