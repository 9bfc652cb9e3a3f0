"""Plans against the oracle "put whole tensors together, then slice", on all ranks in one process, and their cost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.cluster.mesh import ParallelDims
from rlscale.model.arch import ModelSpec
from rlscale.reshard.canonical import hf_layout
from rlscale.reshard.layout import Layout, Piece
from rlscale.reshard.megatron import megatron_layout
from rlscale.reshard.plan import Plan, plan
from rlscale.testing.models import make_spec
from tests.reshard.models import (
    assert_equal,
    blank,
    canonical,
    dims,
    megatron_shards,
    simulate,
    specs,
    vllm_layout,
    vllm_shards,
)

FP32 = torch.float32
plan_module = import_module("rlscale.reshard.plan")


def lower_bound(source: Layout, destination: Layout, itemsize: int) -> dict[int, int]:
    """Bytes that each rank must receive: elements it wants less those it holds, counted one by one."""
    need = {}
    for rank in sorted(destination.shard_of):
        count = 0
        for piece in destination.of_rank(rank):
            wanted = torch.zeros(destination.shapes[piece.name], dtype=torch.bool)
            wanted[tuple(slice(*r) for r in piece.index)] = True
            for held in source.of_rank(rank):
                if held.name == piece.name:
                    wanted[tuple(slice(*r) for r in held.index)] = False
            count += int(wanted.sum())
        need[rank] = count * itemsize
    return need


def check_limits(made: Plan) -> None:
    """No rank receives or sends more than a bucket a round; offsets neither overlap nor leave the bucket."""
    for number in range(made.rounds):
        sent: dict[int, int] = defaultdict(int)
        for rank in made.copies.receivers:
            end = 0
            for copy in made.incoming(rank)[number]:
                assert copy.offset == end
                end += copy.nbytes
            assert end <= made.bucket_bytes
            messages = made.messages_to(rank, number)
            assert sum(m.nbytes for m in messages) == sum(
                c.nbytes for c in made.incoming(rank)[number] if c.sender != rank
            )
            for message in messages:
                sent[message.source] += message.nbytes
                assert message in made.messages_from(message.source, number)
        assert all(nbytes <= made.bucket_bytes for nbytes in sent.values())


@given(spec=specs(), source=dims(), destination=dims(), bucket=st.sampled_from([256, 1000, 10**6]))
@settings(max_examples=60, deadline=None)
def test_megatron_to_megatron(spec: ModelSpec, source: ParallelDims, destination: ParallelDims, bucket: int) -> None:
    hf = canonical(spec)
    have, want = megatron_layout(spec, source), megatron_layout(spec, destination)
    made = plan(have, want, dtype=FP32, bucket_bytes=bucket)
    shards = {rank: megatron_shards(spec, source, rank, hf) for rank in range(source.world)}
    expected = {rank: megatron_shards(spec, destination, rank, hf) for rank in range(destination.world)}
    got = {rank: blank(tensors) for rank, tensors in expected.items()}
    simulate(made, shards, got)
    for rank, tensors in expected.items():
        assert_equal(got[rank], tensors)
    assert made.received == lower_bound(have, want, 4)
    assert sum(made.sent.values()) == sum(made.received.values())
    check_limits(made)


@given(spec=specs(), source=dims(), tp=st.sampled_from([1, 2, 4]), replicas=st.integers(1, 2))
@settings(max_examples=60, deadline=None)
def test_megatron_to_vllm(spec: ModelSpec, source: ParallelDims, tp: int, replicas: int) -> None:
    hf = canonical(spec)
    have, want = megatron_layout(spec, source), vllm_layout(spec, tp, tp * replicas)
    made = plan(have, want, dtype=FP32, bucket_bytes=1000)
    shards = {rank: megatron_shards(spec, source, rank, hf) for rank in range(source.world)}
    expected = {rank: vllm_shards(spec, tp, rank, hf) for rank in range(tp * replicas)}
    got = {rank: blank(tensors) for rank, tensors in expected.items()}
    simulate(made, shards, got)
    for rank, tensors in expected.items():
        assert_equal(got[rank], tensors)
    assert made.received == lower_bound(have, want, 4)
    check_limits(made)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_arbitrary_boxes(data: st.DataObject) -> None:
    """Overlapping, replicated and stacked slices that no model has, but the algebra allows."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    world = data.draw(st.integers(1, 4))

    def draw_pieces(end: str) -> list[Piece]:
        pieces = []
        for i in range(data.draw(st.integers(0, 5))):
            index = tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape)
            index = tuple((lo, hi) if lo < hi else (0, n) for (lo, hi), n in zip(index, shape, strict=True))
            shift = data.draw(st.integers(0, 2))
            at = ((shift, shift + 1), *((lo + shift, hi + shift) for lo, hi in index))  # one expert of a stack
            pieces.append(Piece("w", data.draw(st.integers(0, world - 1)), index, f"{end}{i}", at))
        whole = tuple((0, n) for n in shape)
        return [*pieces, Piece("w", data.draw(st.integers(0, world - 1)), whole, f"{end}whole", whole)]

    have, want = Layout({"w": shape}, draw_pieces("s")), Layout({"w": shape}, draw_pieces("d"))
    whole = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=FP32).reshape(shape)

    def fill(layout: Layout, with_values: bool) -> dict[int, dict[str, torch.Tensor]]:
        out: dict[int, dict[str, torch.Tensor]] = {rank: {} for rank in range(world)}
        for p in layout.pieces:
            out[p.rank][p.key] = torch.zeros([hi for _, hi in p.at])
            if with_values:
                place = tuple(slice(lo, hi) for lo, hi in p.at)
                values = whole[tuple(slice(lo, hi) for lo, hi in p.index)]
                out[p.rank][p.key][place] = values.reshape([hi - lo for lo, hi in p.at])
        return out

    got = fill(want, False)
    made = plan(have, want, dtype=FP32, bucket_bytes=max(4 * torch.Size(shape[1:]).numel(), 40))
    simulate(made, fill(have, True), got)
    for rank, tensors in fill(want, True).items():
        assert_equal(got[rank], tensors)
    assert made.received == lower_bound(have, want, 4)
    check_limits(made)


def test_same_layout_moves_nothing() -> None:
    spec, layout_dims = make_spec(), ParallelDims(tp=2, dp=2, pp=2)
    layout = megatron_layout(spec, layout_dims)
    made = plan(layout, layout, dtype=FP32)
    assert not any(made.received.values()) and not any(made.sent.values())
    assert all(n > 0 for n in made.local.values())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_senders_are_balanced_where_replicas_allow_a_choice(tp: int) -> None:
    """Eight replicas send the model to eight ranks that have nothing: no one sends more than 1.25 times the mean."""
    spec = make_spec(hidden=64, ffn=128, heads=8, head_dim=8, vocab=512, num_layers=8)
    source, n = megatron_layout(spec, ParallelDims(tp=tp, dp=8 // tp)), 8
    shifted = [Piece(p.name, p.rank + n, p.index, p.key, p.at) for p in vllm_layout(spec, 1, n).pieces]
    made = plan(source, Layout(source.shapes, shifted), dtype=torch.bfloat16)
    mean = sum(made.sent.values()) / n
    assert set(made.sent) == set(range(n)) and max(made.sent.values()) <= 1.25 * mean


PLAN = """
import sys, numpy
from rlscale.cluster.mesh import ParallelDims
from rlscale.model.arch import ModelSpec
from rlscale.reshard.megatron import megatron_layout
from rlscale.reshard.plan import plan
from rlscale.reshard.vllm import vllm_layout
spec = ModelSpec("Qwen3ForCausalLM", 4, 8, 16, 8, 2, 2, 37, 1e-6, (), qk_norm=True)
made = plan(megatron_layout(spec, ParallelDims(tp=2, pp=2, dp=2)), vllm_layout(spec, 4, 1, 2),
            dtype=numpy.dtype("float32"), bucket_bytes=500, ranks_per_node=4)
print(made.digest, [(c.sender, c.offset, c.index) for rank in range(8) for cs in made.incoming(rank) for c in cs])
assert "torch" not in sys.modules
"""


def test_every_process_makes_the_same_plan_and_needs_no_torch() -> None:
    outputs = {
        subprocess.run([sys.executable, "-c", PLAN], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True,
                       text=True, check=True).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1 and len(outputs.pop()) > 1000


def test_equal_arguments_give_the_kept_plan_and_the_digest_tells_plans_apart() -> None:
    spec = make_spec()

    def make(**arguments: Any) -> Plan:
        source, destination = megatron_layout(spec, ParallelDims(tp=2, dp=2)), vllm_layout(spec, 1, 4)
        return plan(source, destination, **(dict(dtype=FP32, bucket_bytes=500) | arguments))

    one = make()
    assert make() is one
    others = [make(bucket_bytes=600), make(dtype=torch.bfloat16)]
    assert len({one.digest, *(other.digest for other in others)}) == 3
    plan_module._made.cache_clear()
    assert make() is not one and make().digest == one.digest
    assert all(make().incoming(rank) == one.incoming(rank) for rank in range(4))


def test_mixed_dtypes_start_on_whole_elements() -> None:
    spec = make_spec(hidden=3, vocab=13)
    want = vllm_layout(spec, 1, 2)
    dtypes = {name: FP32 if "norm" in name else torch.bfloat16 for name in want.shapes}
    made = plan(hf_layout(want.shapes), want, dtype=dtypes, bucket_bytes=200)
    for number in range(made.rounds):
        assert all(copy.offset % copy.dtype.itemsize == 0 for copy in made.incoming(1)[number])
    assert made.received[1] == sum(torch.Size(s).numel() * dtypes[n].itemsize for n, s in want.shapes.items())


def test_bad_ends_are_named() -> None:
    spec = make_spec()
    have = megatron_layout(spec, ParallelDims(tp=2))
    with pytest.raises(ValueError, match=r"asks for model.layers.4.* which the source does not hold"):
        plan(have, megatron_layout(make_spec(num_layers=5), ParallelDims()), dtype=FP32)
    with pytest.raises(
        ValueError, match=r"model.embed_tokens.weight has shape \[37, 8\] in the source, \[38, 8\] here"
    ):
        plan(have, megatron_layout(make_spec(vocab=38), ParallelDims()), dtype=FP32)
    tied = megatron_layout(make_spec(tied=True), ParallelDims())
    assert plan(have, tied, dtype=FP32).rounds  # part of the tensors may be asked for
    with pytest.raises(ValueError, match=r"the source holds lm_head.weight, which the destination has no place for"):
        plan(have, tied, dtype=FP32, complete=True)
    with pytest.raises(ValueError, match=r"asks for model.layers.0.self_attn.q_proj.bias and 11 more, which"):
        plan(have, megatron_layout(make_spec(qkv_bias=True), ParallelDims()), dtype=FP32)
    with pytest.raises(ValueError, match=r"ranks_per_node 0 is not positive"):
        plan(have, have, dtype=FP32, ranks_per_node=0)
    with pytest.raises(ValueError, match=r"bucket_bytes 16 is smaller than one row of model.embed_tokens.weight"):
        plan(have, megatron_layout(spec, ParallelDims()), dtype=FP32, bucket_bytes=16)
