"""Checksums: independent of slicing and order, and different for whatever may go wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.cluster.mesh import ParallelDims
from rlscale.reshard.layout import Piece
from rlscale.reshard.megatron import megatron_layout
from rlscale.reshard.plan import plan
from rlscale.reshard.transport import Transfer, region
from rlscale.reshard.verify import MASK, add, differences, expected, position_checksum
from rlscale.testing.models import make_spec
from tests import worlds
from tests.reshard.models import blank, canonical, megatron_shards, vllm_layout, vllm_shards


def sliced(tensor: torch.Tensor, cuts: list[list[int]], order: list[int]) -> int:
    """Sum of the checksums of a grid of slices."""
    boxes: list[tuple[tuple[int, int], ...]] = [()]
    for n, cut in zip(tensor.shape, cuts, strict=True):
        edges = sorted({0, n, *(c % n for c in cut)})
        boxes = [(*box, pair) for box in boxes for pair in zip(edges, edges[1:], strict=False)]
    total = 0
    for i in sorted(range(len(boxes)), key=lambda i: order[i % len(order)]):
        total += position_checksum(tensor[tuple(slice(lo, hi) for lo, hi in boxes[i])], boxes[i])
    return total & MASK


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    cuts=st.lists(st.lists(st.integers(0, 8), max_size=3), min_size=3, max_size=3),
    order=st.lists(st.integers(), min_size=1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_slicing_and_order_make_no_difference(
    shape: list[int], cuts: list[list[int]], order: list[int], dtype: torch.dtype, seed: int
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    box = tuple((0, n) for n in shape)
    assert sliced(tensor, cuts[: len(shape)], order) == position_checksum(tensor, box)
    strided = tensor.mT.contiguous().mT if len(shape) > 1 else tensor
    assert position_checksum(strided, box) == position_checksum(tensor, box)


@settings(max_examples=100, deadline=None)
@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3), bit=st.integers(0, 31), data=st.data())
def test_one_flipped_bit_or_two_exchanged_elements_change_it(shape: list[int], bit: int, data: st.DataObject) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    box, n = tuple((0, n) for n in shape), tensor.numel()
    i, j = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    flipped = tensor.clone()
    flipped.view(torch.int32).view(-1)[i] ^= torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)
    assert position_checksum(flipped, box) != position_checksum(tensor, box)
    if i != j:
        exchanged = tensor.clone()
        exchanged.view(-1)[i], exchanged.view(-1)[j] = tensor.view(-1)[j], tensor.view(-1)[i]
        assert position_checksum(exchanged, box) != position_checksum(tensor, box)
    negative_zero = torch.zeros(shape)
    negative_zero.view(-1)[i] = -0.0
    assert position_checksum(negative_zero, box) != position_checksum(torch.zeros(shape), box), "bits count, not values"


def test_large_tensors_come_in_chunks() -> None:
    tensor = torch.randn(700, 300)
    whole = position_checksum(tensor, ((0, 700), (0, 300)), torch.bfloat16)
    assert whole == position_checksum(tensor.to(torch.bfloat16), ((0, 700), (0, 300)))
    halves = [position_checksum(tensor[:, a:b], ((0, 700), (a, b)), torch.bfloat16) for a, b in ((0, 151), (151, 300))]
    assert sum(halves) & MASK == whole


def held(pieces: list[Piece], tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    out: dict[str, int] = {}
    for piece in pieces:
        value = position_checksum(region(tensors[piece.key], piece), piece.index)
        out[piece.name] = (out.get(piece.name, 0) + value) & MASK
    return out


def both_ends(tp: int, fault: str) -> list[str]:
    """Sender's sums against those of what arrived, with a fault on the way to rank 1; names that differ here."""
    rank, spec, dtype = dist.get_rank(), make_spec(qkv_bias=True, kv_heads=2), torch.bfloat16
    dims = ParallelDims(tp=2, pp=2)
    hf = canonical(spec)
    shards = megatron_shards(spec, dims, rank, hf)
    wanted = vllm_layout(spec, tp, 4)
    made = plan(megatron_layout(spec, dims), wanted, dtype=dtype, bucket_bytes=900)
    got = blank({key: value.to(dtype) for key, value in vllm_shards(spec, tp, rank, hf).items()})
    buffer = torch.empty(made.buffer_bytes(rank), dtype=torch.uint8)
    for bucket in Transfer(made, buffers=[buffer]).buckets(shards):
        for number, (piece, values) in enumerate(bucket.tensors()):
            if rank == 1 and bucket.number == 2 and number == 1:
                name = piece.name
                if fault == "byte":
                    values.view(torch.uint8).view(-1)[0] ^= 1
                if fault == "slice":
                    continue
            region(got[piece.key], piece).copy_(values)
    shares: list[dict[tuple[int, str], int]] = [{} for _ in range(4)]
    dist.all_gather_object(shares, expected(made, rank, shards))
    sent = {name: value for (receiver, name), value in add(shares).items() if receiver == rank}
    wrong = differences(sent, held(wanted.of_rank(rank), got))
    return wrong if rank != 1 or fault == "none" else ["faulty: " + name, *wrong]


@pytest.mark.parametrize("tp", [1, 4])
def test_both_ends_agree(tp: int) -> None:
    assert worlds.run(4, both_ends, tp, "none") == [[], [], [], []]


@pytest.mark.parametrize("fault", ["byte", "slice"])
def test_a_fault_on_the_way_is_found_and_the_tensor_named(fault: str) -> None:
    first, second, third, fourth = worlds.run(4, both_ends, 2, fault)
    assert not first and not third and not fourth
    assert len(second) == 2 and second[0] == "faulty: " + second[1]
