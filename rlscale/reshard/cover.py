"""What each rank lacks of what it wants, cut into copies: the part of planning that is geometry.

A *case* is a set of receivers that hold the same slices and want the same ones. A *pattern* is the list of copies that
fill one wanted slice, computed once for all tensors of which the source and the receiver hold the same cuts (such as
the layers of a model). A model of 80 layers on 256 ranks has a few hundred patterns; all else is columns of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from rlscale.reshard.layout import Box, Ints, Layout, divide, intersect, subtract, volume


@dataclass
class Copies:
    """All copies that fill a layout, one row each: by receiver, in the order of delivery. Row ``i`` fills one box of
    one chunk; a chunk is what arrives in one round.

    Attributes:
        receivers: ranks that want something, in order.
        receiver, nbytes: of each row (rank, bytes of the destination's dtype).
        own: number of the receiver's own slice that holds the box; -1 where another rank must send it.
        held: number of the source slice that holds the box (see ``slices``); -1 for own copies.
        chunk: number of the chunk; all its rows have the same receiver.
        place: number of the row's box in ``boxes``.
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


def cover(source: Layout, destination: Layout, itemsizes: Mapping[str, int], bucket_bytes: int) -> Copies:
    """Cut every wanted slice into boxes that lie inside one source slice each, own slices first.

    Args:
        itemsizes: bytes of an element, by tensor.
        bucket_bytes: a chunk is a run of rows of at most half of this (or one row).

    Raises:
        ValueError: a row larger than a bucket.
    """
    cases = _Cases(source, destination, itemsizes, bucket_bytes)
    case_of = {rank: cases.of(rank) for rank in sorted(destination.shard_of)}
    columns = np.array(cases.rows, np.int64).reshape(-1, 6).T.copy()
    turns = _turns(destination)
    places, chunks, start = [columns[0, :0]], [columns[0, :0]], 0
    for rank, case in case_of.items():
        place, chunk = case.rotated(columns, turns[rank])
        places.append(place)
        chunks.append(chunk + start)
        start += case.chunks
    place = np.concatenate(places)
    wanted, _, _, nbytes, own, held = columns
    return Copies(
        receivers=list(case_of),
        receiver=np.repeat(np.array(list(case_of), np.int64), [case.stop - case.start for case in case_of.values()]),
        nbytes=nbytes[place],
        own=own[place],
        held=held[place],
        chunk=np.concatenate(chunks),
        place=place,
        boxes=cases.boxes,
        wanted=wanted,
        slices=cases.slices,
        holders=[tuple(sorted(r for shard in of for r in source.shards[shard].ranks)) for of in cases.slices],
        lower_bound={rank: case.lacking for rank, case in case_of.items()},
    )


class _Case(NamedTuple):
    """Rows ``[start, stop)`` of `_Cases`, in the order of what is wanted, and their number of chunks."""

    start: int
    stop: int
    chunks: int
    lacking: int  # bytes

    def rotated(self, columns: Ints, share: float) -> tuple[Ints, Ints]:
        """The rows, and the chunks they belong to, starting after ``share`` of the elements."""
        _, chunk, elements, *_ = columns[:, self.start : self.stop]
        before = np.cumsum(elements) - elements
        row = int(np.searchsorted(before, share * elements.sum()))
        begin = int(chunk[row if row < len(before) else 0])
        rows = np.roll(np.arange(len(before)), -int(np.searchsorted(chunk, begin)))
        return rows + self.start, (chunk[rows] - begin) % self.chunks


class _Cases:
    """The copies of all cases, one row each; one case follows the other.

    Attributes:
        rows: wanted slice, chunk (both counted in the case), elements, bytes, own and held slice (as in `Copies`).
        boxes: what each row fills.
        slices: as in `Copies`.
    """

    def __init__(self, source: Layout, destination: Layout, itemsizes: Mapping[str, int], bucket_bytes: int):
        self.source, self.destination, self.itemsizes = source, destination, itemsizes
        self.bucket_bytes = bucket_bytes
        self.rows: list[tuple[int, ...]] = []
        self.boxes: list[Box] = []
        self.slices: list[dict[int, int]] = []
        self.first: dict[str, int] = {}  # number of each tensor's first slice
        for name in destination.shapes:
            self.first[name] = len(self.slices)
            self.slices += source.holders[name].values()
        self.cuts = {name: tuple(source.holders[name]) for name in destination.shapes}
        self.pattern = cache(_pattern)
        self.known: dict[tuple[int, int], _Case] = {}

    def of(self, rank: int) -> _Case:
        """The case of a receiver."""
        key = self.destination.shard_of[rank], self.source.shard_of.get(rank, -1)
        if key not in self.known:
            self.known[key] = self._case(*key)
        return self.known[key]

    def _case(self, wanting: int, holding: int) -> _Case:
        start, chunks, lacking = len(self.rows), 0, 0
        own: dict[str, dict[int, Box]] = {}
        for position, (name, index, _, _) in enumerate(self.source.shards[holding].slices if holding >= 0 else ()):
            own.setdefault(name, {})[position] = index
        for number, (name, index, _, _) in enumerate(self.destination.shards[wanting].slices):
            positions, itemsize = own.get(name, {}), self.itemsizes[name]
            row_bytes = volume(index[1:]) * itemsize
            if row_bytes > self.bucket_bytes:
                raise ValueError(f"plan: bucket_bytes {self.bucket_bytes} is smaller than one row of {name}")
            step = max(1, self.bucket_bytes // 2 // row_bytes)
            copies, elements = self.pattern(index, step, tuple(positions.values()), self.cuts[name])
            numbers = list(positions)
            for box, chunk, size, held_here, other in copies:
                of = (-1, self.first[name] + other) if held_here < 0 else (numbers[held_here], -1)
                self.rows.append((number, chunks + chunk, size, size * itemsize, *of))
                self.boxes.append(box)
            chunks = self.rows[-1][1] + 1
            lacking += elements * itemsize
        return _Case(start, len(self.rows), chunks, lacking)


def _pattern(
    index: Box, step: int, own: tuple[Box, ...], others: tuple[Box, ...]
) -> tuple[list[tuple[Box, int, int, int, int]], int]:
    """Copies that fill a slice (box, chunk, elements, number in ``own`` or -1, number in ``others``), and how many
    elements ``own`` lacks. The slice is split along the first dimension into nearly equal chunks of at most ``step``
    rows: they pack well.
    """
    copies = []
    for chunk, part in enumerate(divide(index, -(-(index[0][1] - index[0][0]) // step)) if index else [index]):
        open_boxes = [part]
        for number, held in enumerate(own + others):
            if not open_boxes:
                break
            common = [box for box in (intersect(box, held) for box in open_boxes) if box is not None]
            held_here = number if number < len(own) else -1
            copies += [(box, chunk, volume(box), held_here, number - len(own)) for box in common]
            open_boxes = subtract(open_boxes, [held]) if common else open_boxes
        assert not open_boxes, f"{part}: a validated layout covers every element"
    return copies, sum(map(volume, subtract([index], own)))


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
