"""What each rank lacks of what it wants, cut into copies: the part of planning that is geometry.

A *case* is a set of receivers that hold the same slices and want the same ones. A *pattern* is the list of copies that
fill one wanted slice, computed once for all tensors of which the source and the receiver hold the same cuts (such as
the layers of a model). A model of 80 layers on 256 ranks has a few hundred patterns; all else is columns of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rlscale.reshard.layout import Box, Held, Ints, Layout, divide, intersect, subtract, volume


@dataclass
class Copies:
    """All copies that fill a layout, a row each: by receiver, in the order of delivery. Row ``i`` fills one box of one
    chunk; a chunk is what arrives in one round.

    Attributes:
        receivers: ranks that want something, in order.
        receiver, nbytes: of each row (rank, bytes of the destination's dtype).
        own: number of the receiver's own slice that holds the box; -1 where another rank must send it.
        held: number of the source slice that holds the box (see ``slices``); -1 for own copies.
        chunk: number of the chunk; all its rows have the same receiver.
        place: number of the row's box and wanted slice in ``boxes`` and ``wanted``.
        boxes: elements of the canonical tensor.
        wanted: number of the wanted slice in its shard.
        slices: for every number in ``held`` its shards, and its position in them.
        holders: for every number in ``held`` the ranks that hold it.
        lower_bound: by rank, bytes wanted and not held: each wanted slice less what the rank has of it.
    """

    receivers: list[int]
    receiver: Ints
    nbytes: Ints
    own: Ints
    held: Ints
    chunk: Ints
    place: Ints
    boxes: list[Box]
    wanted: Ints
    slices: list[dict[int, int]]
    holders: list[tuple[int, ...]]
    lower_bound: dict[int, int]


def cover(
    source: Layout, destination: Layout, itemsizes: Mapping[str, int], bucket_bytes: int, spread: bool = True
) -> Copies:
    """Cut every wanted slice into boxes that lie inside one source slice each, own slices first.

    Args:
        itemsizes: bytes of an element, by tensor.
        bucket_bytes: a chunk is a run of rows of at most half of this (or one row).
        spread: let every rank enter the order of its pieces at another place.

    Raises:
        ValueError: a row larger than a bucket.
    """
    slices, holders, first = _source_slices(source, destination.shapes)
    patterns = _Patterns(source, itemsizes, bucket_bytes)
    cases: dict[tuple[int, int], list[int]] = {}
    for rank, wanted in sorted(destination.shard_of.items()):
        cases.setdefault((wanted, source.shard_of.get(rank, -1)), []).append(rank)
    made, boxes, start = [], [], 0
    case_of: dict[int, _Case] = {}
    for (wanted, own), ranks in cases.items():
        case = patterns.case(destination.shards[wanted].slices, own, first, start)
        start += len(case.nbytes)
        made.append(case)
        boxes += case.boxes
        case_of |= dict.fromkeys(ranks, case)
    receivers = sorted(case_of)
    turns = _turns(destination) if spread else dict.fromkeys(receivers, 0.0)
    rows = [_rotated(case_of[rank], turns[rank]) for rank in receivers]
    place = _joined([row for row, _ in rows])
    chunk_starts = np.cumsum([0] + [case_of[rank].chunks for rank in receivers])
    return Copies(
        receivers=receivers,
        receiver=np.repeat(np.array(receivers, np.int64), [len(row) for row, _ in rows]),
        nbytes=_joined([case.nbytes for case in made])[place],
        own=_joined([case.own for case in made])[place],
        held=_joined([case.held for case in made])[place],
        chunk=_joined([chunk + begin for (_, chunk), begin in zip(rows, chunk_starts, strict=False)]),
        place=place,
        boxes=boxes,
        wanted=_joined([case.wanted for case in made]),
        slices=slices,
        holders=holders,
        lower_bound={rank: case_of[rank].lacking for rank in receivers},
    )


def _joined(arrays: list[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def _source_slices(
    source: Layout, names: Iterable[str]
) -> tuple[list[dict[int, int]], list[tuple[int, ...]], dict[str, int]]:
    """Number the source's distinct slices: shards and ranks that hold each, and each tensor's first number."""
    slices: list[dict[int, int]] = []
    holders: list[tuple[int, ...]] = []
    first = {}
    ranks_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    for name in names:
        first[name] = len(slices)
        for shards in source.holders[name].values():
            key = tuple(shards)
            if key not in ranks_of:
                ranks_of[key] = tuple(sorted(rank for number in key for rank in source.shards[number].ranks))
            slices.append(shards)
            holders.append(ranks_of[key])
    return slices, holders, first


@dataclass
class _Pattern:
    """The copies that fill one wanted slice; ``own`` and ``held`` count the own and all slices of its tensor."""

    boxes: list[Box]
    chunk: Ints
    elements: Ints
    own: Ints
    held: Ints
    lacking: int  # elements


@dataclass
class _Case:
    """The copies of ranks that hold alike and want alike, in the order of what they want."""

    start: int  # number of the first row over all cases
    boxes: list[Box]
    wanted: Ints
    chunk: Ints
    chunks: int
    elements: Ints
    nbytes: Ints
    own: Ints
    held: Ints
    lacking: int  # bytes


class _Patterns:
    """Patterns by the geometry that they follow from."""

    def __init__(self, source: Layout, itemsizes: Mapping[str, int], bucket_bytes: int):
        self.source, self.itemsizes, self.bucket_bytes = source, itemsizes, bucket_bytes
        self.known: dict[tuple[Box, tuple[Box, ...], int, int], _Pattern] = {}
        numbers: dict[tuple[Box, ...], int] = {}
        self.cuts = {name: numbers.setdefault(tuple(of), len(numbers)) for name, of in source.holders.items()}

    def case(self, wanted: Iterable[Held], own: int, first: Mapping[str, int], start: int) -> _Case:
        mine: dict[str, tuple[list[int], list[Box]]] = {}
        for position, (name, index, _, _) in enumerate(self.source.shards[own].slices if own >= 0 else ()):
            numbers, cut = mine.setdefault(name, ([], []))
            numbers.append(position)
            cut.append(index)
        found, chunks, tables, begins, sizes, firsts = [], 0, [], [], [], []
        table_start = 0
        for name, index, _, _ in wanted:
            numbers, cut = mine.get(name, ([], []))
            pattern = self._pattern(name, index, tuple(cut))
            found.append(pattern)
            begins.append((chunks, table_start))
            chunks += int(pattern.chunk[-1]) + 1
            tables += numbers
            table_start += len(numbers)
            sizes.append(self.itemsizes[name])
            firsts.append(first[name])
        # for every copy: where the numbers of its pattern's chunks, own slices and source slices begin; its itemsize
        counts = [len(p.boxes) for p in found]
        each = np.repeat(np.array([(*begin, size, f) for begin, size, f in zip(begins, sizes, firsts, strict=True)]),
                         counts, axis=0).T  # fmt: skip
        elements, own_number, held = (
            _joined([getattr(p, what) for p in found]) for what in ("elements", "own", "held")
        )
        table = np.array([*tables, -1])
        return _Case(
            start=start,
            boxes=[box for p in found for box in p.boxes],
            wanted=np.repeat(np.arange(len(found)), counts),
            chunk=_joined([p.chunk for p in found]) + each[0],
            chunks=chunks,
            elements=elements,
            nbytes=elements * each[2],
            own=table[np.where(own_number < 0, len(tables), own_number + each[1])],
            held=np.where(held < 0, -1, held + each[3]),
            lacking=sum(p.lacking * size for p, size in zip(found, sizes, strict=True)),
        )

    def _pattern(self, name: str, index: Box, own: tuple[Box, ...]) -> _Pattern:
        itemsize = self.itemsizes[name]
        key = (index, own, self.cuts[name], itemsize)
        if key in self.known:
            return self.known[key]
        rows: list[tuple[Box, int, int, int]] = []
        for number, part in enumerate(_chunks(name, index, itemsize, self.bucket_bytes)):
            rest = [part]
            for mine, box in enumerate(own):
                rows += [(common, number, mine, -1) for common in _common(rest, box)]
                rest = subtract(rest, [box])
            for held, box in enumerate(self.source.holders[name] if rest else ()):
                if common_boxes := _common(rest, box):
                    rows += [(common, number, -1, held) for common in common_boxes]
                    rest = subtract(rest, [box])
            assert not rest, f"{name}: a validated layout covers every element"
        numbers = np.array([row[1:] for row in rows], np.int64).T
        elements = np.array([volume(box) for box, *_ in rows], np.int64)
        lacking = sum(volume(box) for box in subtract([index], own))
        self.known[key] = _Pattern([box for box, *_ in rows], numbers[0], elements, numbers[1], numbers[2], lacking)
        return self.known[key]


def _common(boxes: Iterable[Box], held: Box) -> list[Box]:
    return [box for box in (intersect(box, held) for box in boxes) if box is not None]


def _chunks(name: str, index: Box, itemsize: int, bucket_bytes: int) -> list[Box]:
    """Split along the first dimension into nearly equal parts of at most half a bucket (or a row): they pack well."""
    row = volume(index[1:]) * itemsize
    if row > bucket_bytes:
        raise ValueError(f"plan: bucket_bytes {bucket_bytes} is smaller than one row of {name}")
    if not index:
        return [index]
    start, stop = index[0]
    return divide(index, -(-(stop - start) // max(1, bucket_bytes // 2 // row)))


def _turns(destination: Layout) -> dict[int, float]:
    """Where each rank enters its order, as a share: ranks that want the same are evenly spread, neighbours far apart.

    Neighbours are often served by the same sender; far apart they want it at different times.
    """
    turns = {}
    for number, shard in enumerate(destination.shards):
        n = len(shard.ranks)
        bits = max(1, (n - 1).bit_length())
        order = sorted(range(n), key=lambda i: f"{i:0{bits}b}"[::-1])
        for position, i in enumerate(order):
            turns[shard.ranks[i]] = (position + number / len(destination.shards)) / n
    return turns


def _rotated(case: _Case, share: float) -> tuple[Ints, Ints]:
    """Rows of a case, and the chunks they belong to, starting after ``share`` of the elements."""
    before = np.cumsum(case.elements) - case.elements
    row = int(np.searchsorted(before, share * case.elements.sum()))
    row = row if row < len(before) else 0
    begin = int(case.chunk[row])
    row = int(np.searchsorted(case.chunk, begin))
    rows = np.concatenate([np.arange(row, len(before)), np.arange(row)])
    return rows + case.start, (case.chunk[rows] - begin) % case.chunks
