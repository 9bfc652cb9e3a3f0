"""The ZeRO end of resharding: partitions of flattened parameters as layouts.

ZeRO (Rajbhandari et al. 2020) gives each data-parallel rank a run of consecutive elements of a parameter, optimizer
states in stages 1 and 2, the weights too in stage 3. Row by row, such a run is part of a row, whole rows, and part of a
row: a few blocks, each of them a contiguous view. What the blocks have in common with the slices of canonical tensors
that the parameter consists of makes a layout like any other: partitions are saved, loaded, synced and given another
shape by plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from rlscale.reshard.layout import Box, Layout, Piece, intersect, lengths, moved, volume, whole


@dataclass(frozen=True)
class Fragment:
    """Elements ``[start, stop)`` of the local parameter ``key`` of this shape, counted in row-major order."""

    key: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def blocks(self) -> Iterator[tuple[str, int, Box]]:
        """Blocks that together are the fragment: key, place in the fragment, and region of the parameter."""
        place = 0
        for box in flat_blocks(self.shape, self.start, self.stop):
            yield f"{self.key}@{self.start + place}", place, box
            place += volume(box)

    def views(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """The blocks by key as views of ``values`` ``[stop - start]``, each in the shape of its region."""
        return {key: values[at : at + volume(box)].view(lengths(box)) for key, at, box in self.blocks()}


def flat_blocks(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Boxes of a tensor that hold its elements ``[start, stop)`` in row-major order, one after the other.

    Each is contiguous; there are at most ``2 dim - 1`` of them.
    """
    if start >= stop:
        return []
    if not shape:
        return [()]
    row, rest = math.prod(shape[1:]), shape[1:]
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        return [((last, last + 1), *box) for box in flat_blocks(rest, start - last * row, stop - last * row)]
    head = [((first - 1, first), *box) for box in flat_blocks(rest, start - (first - 1) * row, row)]
    tail = [((last, last + 1), *box) for box in flat_blocks(rest, 0, stop - last * row)]
    return head + [((first, last), *whole(rest))] * (first < last) + tail


def zero_layout(model: Layout, fragments: Mapping[int, Iterable[Fragment]]) -> Layout:
    """Layout of the fragments that the ranks hold of their local parameters; keys as in `Fragment.blocks`.

    Args:
        model: layout of the whole local parameters, without ZeRO.
        fragments: by rank; elements that belong to no canonical tensor (vocabulary padding) are in no piece.

    Raises:
        ValueError: an element of a tensor is in no rank's fragment.
    """
    pieces: list[Piece] = []
    for rank, of_rank in sorted(fragments.items()):
        by_key: dict[str, list[Piece]] = {}
        for piece in model.of_rank(rank):
            by_key.setdefault(piece.key, []).append(piece)
        for fragment in of_rank:
            for key, _, box in fragment.blocks():
                for piece in by_key.get(fragment.key, []):
                    if (common := intersect(piece.at, box)) is not None:
                        extra = len(piece.at) - len(piece.index)
                        index = moved(common[extra:], piece.at[extra:], piece.index)
                        pieces.append(Piece(piece.name, rank, index, key, moved(common, box, whole(lengths(box)))))
    return Layout(model.shapes, pieces)
