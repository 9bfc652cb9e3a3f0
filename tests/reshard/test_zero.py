"""Partitions of flattened parameters as layouts: every element once, in the right place."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.cluster.mesh import ParallelDims
from rlscale.model.arch import ModelSpec
from rlscale.reshard.layout import Layout, Piece, whole
from rlscale.reshard.megatron import megatron_layout
from rlscale.reshard.transport import region
from rlscale.reshard.zero_layout import Fragment, flat_blocks, zero_layout
from tests.reshard.models import Tensors, canonical, dims, megatron_shards, specs


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (1, 4), (4, 1), (2, 3, 4), (2, 2, 3, 2)])
def test_blocks_of_every_range(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    whole_tensor = torch.arange(size).reshape(shape)
    for start in range(size + 1):
        for stop in range(start, size + 1):
            blocks = flat_blocks(shape, start, stop)
            assert len(blocks) <= max(1, 2 * len(shape) - 1)
            parts = [whole_tensor[tuple(slice(lo, hi) for lo, hi in box)] for box in blocks]
            assert all(part.is_contiguous() for part in parts)
            assert [int(x) for part in parts for x in part.flatten()] == list(range(start, stop))


@settings(max_examples=60, deadline=None)
@given(spec=specs(), dims=dims(), seed=st.integers(0, 2**32))
def test_fragments_hold_every_element_as_often_as_the_model_without_replicas(
    spec: ModelSpec, dims: ParallelDims, seed: int
) -> None:
    """Each parameter is cut at random over its data-parallel and Ulysses ranks; some of them get nothing of it."""
    random_, hf = random.Random(seed), canonical(spec)
    model = megatron_layout(spec, dims)
    fragments: dict[int, list[Fragment]] = {rank: [] for rank in range(dims.world)}
    tensors: dict[int, Tensors] = {rank: {} for rank in range(dims.world)}
    for rank in range(dims.world):
        at = dims.coords(rank)
        if at.dp or at.sp:
            continue
        replicas = dims.ranks_along("dp", "sp", fixed=at)
        for key, local in megatron_shards(spec, dims, rank, hf).items():
            edges = [0, *sorted(random_.randrange(local.numel() + 1) for _ in replicas[1:]), local.numel()]
            for owner, start, stop in zip(replicas, edges, edges[1:], strict=False):
                fragment = Fragment(key, tuple(local.shape), start, stop)
                fragments[owner].append(fragment)
                tensors[owner].update(fragment.views(local.flatten()[start:stop]))
    layout = zero_layout(model, fragments)
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in layout.shapes.items()}
    for piece in layout.pieces:
        assert torch.equal(region(tensors[piece.rank][piece.key], piece), slice_of(hf, piece))
        slice_of(counts, piece).add_(dims.dp * dims.sp)
    for piece in model.pieces:
        slice_of(counts, piece).sub_(1)
    assert not any(count.any() for count in counts.values())


def slice_of(tensors: dict[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    return tensors[piece.name][tuple(slice(lo, hi) for lo, hi in piece.index)]


def test_a_stack_has_leading_dimensions_of_its_own() -> None:
    """Two experts of one buffer [2, 3, 4]; a fragment that begins in the first and ends in the second."""
    pieces = [Piece(f"e{i}", 0, whole((3, 4)), "experts", ((i, i + 1), (0, 3), (0, 4))) for i in range(2)]
    model = Layout({"e0": (3, 4), "e1": (3, 4)}, pieces)
    stack = torch.arange(24).reshape(2, 3, 4)
    fragments = [Fragment("experts", (2, 3, 4), 0, 6), Fragment("experts", (2, 3, 4), 6, 24)]
    layout = zero_layout(model, {0: fragments})
    tensors = {key: view for f in fragments for key, view in f.views(stack.flatten()[f.start : f.stop]).items()}
    for piece in layout.pieces:
        assert torch.equal(region(tensors[piece.key], piece), slice_of({"e0": stack[0], "e1": stack[1]}, piece))


def test_an_element_that_nobody_holds_is_named() -> None:
    model = Layout({"w": (2, 3)}, [Piece("w", 0, whole((2, 3)), "w", whole((2, 3)))])
    with pytest.raises(ValueError, match=r"w\[1:2, 1:2\] is held by no rank"):
        zero_layout(model, {0: [Fragment("w", (2, 3), 0, 4), Fragment("w", (2, 3), 5, 6)]})
