"""Plans carried out over gloo by four processes, against the same oracle."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from rlscale.cluster.mesh import ParallelDims
from rlscale.model.arch import ModelSpec
from rlscale.reshard.canonical import hf_layout
from rlscale.reshard.layout import Layout, Piece
from rlscale.reshard.megatron import megatron_layout
from rlscale.reshard.plan import DIRECT_BYTES, plan
from rlscale.reshard.transport import Transfer, region
from rlscale.testing.models import make_spec
from rlscale.testing.transfers import buffered, deliver, temporary_bytes
from tests import worlds
from tests.reshard.models import assert_equal, blank, canonical, megatron_shards, vllm_layout, vllm_shards

SMALL = make_spec(qkv_bias=True)
LARGE = make_spec(hidden=128, ffn=512, heads=8, kv_heads=2, head_dim=16, vocab=5003, num_layers=2, tied=True)
TP2_PP2, TP4, DP4, PP2_DP2 = (
    ParallelDims(tp=2, pp=2), ParallelDims(tp=4), ParallelDims(dp=4), ParallelDims(pp=2, dp=2),
)  # fmt: skip


def to_vllm(spec: ModelSpec, source: ParallelDims, tp: int, dtype: torch.dtype, bucket: int, buffers: int) -> list[int]:
    """Through buckets into the layout of an engine; the buckets must be complete, bounded and equally many."""
    rank = dist.get_rank()
    hf = canonical(spec)
    shards = {key: torch.nn.Parameter(value) for key, value in megatron_shards(spec, source, rank, hf).items()}
    made = plan(megatron_layout(spec, source), vllm_layout(spec, tp, 4), dtype=dtype, bucket_bytes=bucket)
    expected = vllm_shards(spec, tp, rank, {name: value.to(dtype) for name, value in hf.items()})
    memory = [torch.full((bucket,), 255, dtype=torch.uint8) for _ in range(buffers)]
    for _ in range(2):  # twice with the same plan and memory
        got, seen = blank(expected), []
        for bucket_ in Transfer(made, buffers=memory).buckets(shards):
            assert bucket_.buffer.numel() <= bucket
            assert bucket_.buffer.untyped_storage().data_ptr() in {m.data_ptr() for m in memory}
            for piece, values in bucket_.tensors():
                assert values.dtype == dtype and piece.rank == rank
                region(got[piece.key], piece).copy_(values)
            seen.append(bucket_.number)
        assert_equal(got, expected)
        assert seen == list(range(made.rounds))
    return seen


@pytest.mark.parametrize(
    ("spec", "source", "tp", "dtype", "bucket", "buffers"),
    [
        (SMALL, TP2_PP2, 2, torch.float32, 600, 1),
        (SMALL, TP2_PP2, 1, torch.bfloat16, 600, 2),
        (SMALL, DP4, 2, torch.float32, 10**6, 1),
        (LARGE, TP2_PP2, 2, torch.float32, 2**20, 2),
        (LARGE, PP2_DP2, 4, torch.bfloat16, 3 * 2**18, 1),
        (replace(SMALL, kv_heads=2, tied=True), TP4, 4, torch.float32, 10**4, 2),
    ],
)
def test_buckets(spec: ModelSpec, source: ParallelDims, tp: int, dtype: torch.dtype, bucket: int, buffers: int) -> None:
    rounds = worlds.run(4, to_vllm, spec, source, tp, dtype, bucket, buffers)
    assert rounds[0] == rounds[1] == rounds[2] == rounds[3]


def into(spec: ModelSpec, source: ParallelDims, destination: ParallelDims, dtype: torch.dtype, bucket: int) -> int:
    rank = dist.get_rank()
    hf = canonical(spec)
    made = plan(megatron_layout(spec, source), megatron_layout(spec, destination), dtype=dtype, bucket_bytes=bucket)
    expected = megatron_shards(spec, destination, rank, {name: value.to(dtype) for name, value in hf.items()})
    got = blank(expected)
    deliver(buffered(made, rank), megatron_shards(spec, source, rank, hf), got)
    assert_equal(got, expected)
    return max(copy.nbytes for rank in range(4) for copies in made.incoming(rank) for copy in copies)


@pytest.mark.parametrize(
    ("spec", "source", "destination", "dtype"),
    [
        (SMALL, TP2_PP2, TP4, torch.float32),
        (SMALL, DP4, TP2_PP2, torch.bfloat16),
        (LARGE, TP4, PP2_DP2, torch.float32),
        (LARGE, TP2_PP2, DP4, torch.bfloat16),
        (replace(SMALL, value_head=True), TP2_PP2, ParallelDims(sp=2, dp=2), torch.float32),
    ],
)
def test_into_tensors(spec: ModelSpec, source: ParallelDims, destination: ParallelDims, dtype: torch.dtype) -> None:
    largest = worlds.run(4, into, spec, source, destination, dtype, 2**21)
    assert (max(largest) >= DIRECT_BYTES) == (spec is LARGE), "the large model must exercise unpacked messages"


def reused(spec: ModelSpec, held: torch.dtype, dtype: torch.dtype, bucket: int) -> tuple[int, int]:
    """One transfer, run again: with new values in the same tensors, with other tensors, with what is wrong."""
    rank, hf = dist.get_rank(), canonical(spec, held)
    made = plan(megatron_layout(spec, TP2_PP2), vllm_layout(spec, 1, 4), dtype=dtype, bucket_bytes=bucket)
    transfer = buffered(made, rank)
    got = blank(vllm_shards(spec, 1, rank, {name: value.to(dtype) for name, value in hf.items()}))
    shards = megatron_shards(spec, TP2_PP2, rank, hf)
    for turn in range(4):
        hf = {name: value + turn for name, value in hf.items()}
        expected = vllm_shards(spec, 1, rank, {name: value.to(dtype) for name, value in hf.items()})
        if turn < 2:
            for key, value in megatron_shards(spec, TP2_PP2, rank, hf).items():
                shards[key].copy_(value)
        elif turn == 2:
            shards = megatron_shards(spec, TP2_PP2, rank, hf)
        else:
            got = blank(expected)
            for key, value in megatron_shards(spec, TP2_PP2, rank, hf).items():
                shards[key].copy_(value)
        rounds = transfer.rounds
        deliver(transfer, shards, got)
        assert_equal(got, expected)
        assert (transfer.rounds is rounds) == (turn in (1, 3)), "views are made again only for other tensors"
    lost = {key: value for key, value in shards.items() if rank != 1 or "fc2" not in key}
    with pytest.raises(ValueError, match="linear_fc2.weight" if rank == 1 else "an error on another rank"):
        deliver(transfer, lost, got)
    deliver(transfer, shards, got)
    assert_equal(got, expected)
    return temporary_bytes(transfer), len(transfer.rounds)


@pytest.mark.parametrize(
    ("held", "dtype", "bucket"),
    [
        (torch.float32, torch.float32, 2**20),
        (torch.float32, torch.bfloat16, 2**18),
        (torch.bfloat16, torch.float32, 2**19),
    ],
)
def test_a_transfer_is_used_again_within_two_buckets(held: torch.dtype, dtype: torch.dtype, bucket: int) -> None:
    for temporary, rounds in worlds.run(4, reused, LARGE, held, dtype, bucket):
        assert rounds > 3
        assert 0 < temporary <= 2 * bucket + 4096


def apart(dtype: torch.dtype) -> list[int]:
    """Trainers on ranks 0 and 1, an engine with ranks of its own, 2 and 3."""
    rank, hf = dist.get_rank(), canonical(LARGE)
    engine = vllm_layout(LARGE, 2, 2)
    wanted = Layout(engine.shapes, [replace(piece, rank=piece.rank + 2) for piece in engine.pieces])
    made = plan(megatron_layout(LARGE, ParallelDims(tp=2)), wanted, dtype=dtype, bucket_bytes=2**20)
    trains = rank < 2
    expected = {} if trains else vllm_shards(LARGE, 2, rank - 2, {name: value.to(dtype) for name, value in hf.items()})
    got = blank(expected)
    deliver(buffered(made, rank), megatron_shards(LARGE, ParallelDims(tp=2), rank, hf) if trains else {}, got)
    assert_equal(got, expected)
    return [made.received.get(rank, 0), made.sent.get(rank, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_on_ranks_of_its_own(dtype: torch.dtype) -> None:
    traffic = worlds.run(4, apart, dtype)
    assert [received > 0 for received, _ in traffic] == [False, False, True, True]
    assert [sent > 0 for _, sent in traffic] == [True, True, False, False]


@pytest.mark.parametrize(("buffers", "ahead"), [(1, 0), (2, 1)])
def test_with_two_buffers_the_next_round_is_on_its_way_while_the_caller_works(buffers: int, ahead: int) -> None:
    hf = canonical(LARGE)
    made = plan(megatron_layout(LARGE, ParallelDims()), vllm_layout(LARGE, 1, 1), dtype=torch.float32,
                bucket_bytes=2**20)  # fmt: skip
    transfer = buffered(made, 0, buffers)
    posted, post = [], transfer._post
    transfer._post = lambda number: (posted.append(number), post(number))[1]  # type: ignore[method-assign]
    for bucket in transfer.buckets(megatron_shards(LARGE, ParallelDims(), 0, hf)):
        assert posted[-1] == min(bucket.number + ahead, made.rounds - 1)
    assert posted == list(range(made.rounds)) and made.rounds > 3


def mixed() -> None:
    """Norms in fp32, the rest in bf16, out of one rank that holds everything."""
    rank = dist.get_rank()
    hf = canonical(SMALL)
    want = vllm_layout(SMALL, 2, 4)
    dtypes = {name: torch.float32 if "norm" in name else torch.bfloat16 for name in want.shapes}
    made = plan(hf_layout(want.shapes, rank=2), want, dtype=dtypes, bucket_bytes=601)
    expected = vllm_shards(SMALL, 2, rank, {name: value.to(dtypes[name]) for name, value in hf.items()})
    got = blank(expected)
    deliver(buffered(made, rank), hf if rank == 2 else {}, got)
    assert_equal(got, expected)


def test_mixed_dtypes_from_one_rank() -> None:
    worlds.run(4, mixed)


def stacked() -> None:
    """A slice of a stack of experts goes into a plain tensor."""
    rank = dist.get_rank()
    stack = torch.arange(24.0).reshape(2, 4, 3) + 100 * rank
    pieces = [Piece(f"expert.{rank}.{e}", rank, ((0, 4), (0, 3)), "stack", ((e, e + 1), (0, 4), (0, 3)))
              for rank in range(4) for e in range(2)]  # fmt: skip
    shapes = {piece.name: (4, 3) for piece in pieces}
    wanted = [Piece(p.name, (p.rank + 1) % 4, p.index, p.name, p.index) for p in pieces]
    got = {p.name: torch.empty(4, 3) for p in wanted if p.rank == rank}
    made = plan(Layout(shapes, pieces), Layout(shapes, wanted), dtype=torch.float32)
    deliver(buffered(made, rank), {"stack": stack}, got)
    for e in range(2):
        before = (rank - 1) % 4
        assert torch.equal(got[f"expert.{before}.{e}"], torch.arange(24.0).reshape(2, 4, 3)[e] + 100 * before)


def test_stacked_slices() -> None:
    worlds.run(4, stacked)


def broken(fault: str) -> str:
    """One rank is wrong; all must say so, none may wait."""
    rank, hf = dist.get_rank(), canonical(SMALL)
    shards = megatron_shards(SMALL, TP4, rank, hf)
    made = plan(megatron_layout(SMALL, TP4), vllm_layout(SMALL, 1, 4), dtype=torch.float32)
    size = made.buffer_bytes(rank)
    if rank == 2 and fault == "missing":
        del shards["decoder.layers.1.mlp.linear_fc2.weight"]
    if rank == 2 and fault == "shape":
        shards["decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(3, 3)
    if rank == 2 and fault == "buffer":
        size -= 1
    if rank == 2 and fault == "plan":
        made = plan(megatron_layout(SMALL, TP4), vllm_layout(SMALL, 1, 4), dtype=torch.float32, bucket_bytes=999)
    with pytest.raises(ValueError) as error:
        Transfer(made, buffers=[torch.empty(size, dtype=torch.uint8)]).buckets(shards)
    return str(error.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "source has no buffer decoder.layers.1.mlp.linear_fc2.weight"),
        ("shape", r"source buffer decoder.layers.1.mlp.linear_fc2.weight has shape \[3, 3\], too small"),
        ("buffer", "buffers must be uint8 tensors of at least"),
        ("plan", "the ranks computed different plans"),
    ],
)
def test_an_error_of_one_rank_stops_all(fault: str, message: str) -> None:
    errors = worlds.run(4, broken, fault)
    assert re.search(message, errors[2]) and errors[2].startswith("reshard, rank 2")
    if fault != "plan":
        assert all("stopped because of an error on another rank" in errors[rank] for rank in (0, 1, 3))


def test_without_a_process_group() -> None:
    """One process needs no torch.distributed."""
    hf = canonical(LARGE)
    expected = vllm_shards(LARGE, 1, 0, hf)
    got = blank(expected)
    made = plan(megatron_layout(LARGE, ParallelDims()), vllm_layout(LARGE, 1, 1), dtype=torch.float32)
    deliver(buffered(made, 0), megatron_shards(LARGE, ParallelDims(), 0, hf), got)
    assert_equal(got, expected)
