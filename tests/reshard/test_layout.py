"""The layout algebra: boxes, and what a layout refuses."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.cluster.mesh import ParallelDims
from rlscale.reshard.canonical import hf_shapes
from rlscale.reshard.layout import Layout, Piece, intersect, rank_pieces_from_dicts, subtract
from rlscale.reshard.megatron import megatron_layout
from rlscale.testing.models import make_spec

SHAPE = (6, 5)
intervals = [st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda r: r[0] < r[1]) for n in SHAPE]
boxes = st.tuples(*intervals)


def mask(*many: tuple[tuple[int, int], ...]) -> torch.Tensor:
    out = torch.zeros(SHAPE, dtype=torch.int)
    for box in many:
        out[tuple(slice(lo, hi) for lo, hi in box)] += 1
    return out


@given(boxes, st.lists(boxes, max_size=4))
@settings(max_examples=100, deadline=None)
def test_subtract_and_intersect_are_set_operations(box: tuple, holes: list) -> None:
    rest = mask(*subtract([box], holes))
    assert torch.equal(rest, mask(box) * (mask(*holes) == 0)), "disjoint, and exactly what the holes leave"
    for hole in holes:
        common = intersect(box, hole)
        assert torch.equal(mask(*([common] if common else [])), mask(box) * mask(hole))


def test_cut_follows_a_piece_into_a_stack() -> None:
    piece = Piece("w", 1, ((2, 6), (0, 5)), "experts", ((3, 4), (10, 14), (1, 6)))
    assert piece.cut(((3, 5), (1, 2))).at == ((3, 4), (11, 13), (2, 3))
    assert piece.shape == (4, 5)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Piece("v", 0, ((0, 6), (0, 5)), "k", ((0, 6), (0, 5))), "holds v, which is not a tensor"),
        (Piece("w", 3, ((0, 7), (0, 5)), "k", ((0, 7), (0, 5))), r"w\[0:7, 0:5\] of rank 3 is outside \[6, 5\]"),
        (Piece("w", 0, ((2, 2), (0, 5)), "k", ((0, 0), (0, 5))), "outside"),
        (Piece("w", 0, ((0, 6),), "k", ((0, 6),)), "outside"),
        (Piece("w", 0, ((0, 6), (0, 5)), "k", ((0, 5), (0, 6))), r"does not fit k\[0:5, 0:6\], rank 0"),
        (Piece("w", 0, ((0, 6), (0, 5)), "k", ((0, 2), (0, 6), (0, 5))), "does not fit"),
        (Piece("w", 0, ((0, 6), (0, 4)), "k", ((0, 6), (0, 4))), r"w\[0:6, 4:5\] is held by no rank"),
    ],
)
def test_a_layout_refuses(piece: Piece, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout({"w": SHAPE}, [piece])


def test_pieces_survive_json() -> None:
    spec = make_spec(qkv_bias=True)
    layout = megatron_layout(spec, ParallelDims(tp=2, pp=2))
    again = rank_pieces_from_dicts(json.loads(json.dumps([asdict(p) for p in layout.pieces])), hf_shapes(spec))
    assert again == layout
