"""Any two ends of resharding on up to eight ranks: the planned result is that of "broadcast everything, then slice".

What a rank should hold is cut out of whole tensors by plain reshapes (`tests.reshard.models`); what it gets is carried
out copy by copy in one process, and in a few cases by a world of processes. Bytes are compared with a count of
elements, and the loads of the senders with the best that any choice of senders could reach.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.cluster.mesh import ParallelDims
from rlscale.model.arch import ModelSpec
from rlscale.reshard.canonical import hf_layout, hf_shapes
from rlscale.reshard.layout import Layout
from rlscale.reshard.megatron import megatron_layout
from rlscale.reshard.plan import Plan, plan
from rlscale.reshard.vllm import layers_of_stage, vllm_layout
from rlscale.testing.models import make_spec
from rlscale.testing.transfers import buffered, deliver
from tests import worlds
from tests.reshard import models
from tests.reshard.models import Tensors, assert_equal, blank, canonical, dims, megatron_shards, simulate, specs
from tests.reshard.test_plan import check_limits, lower_bound


@dataclass(frozen=True)
class End:
    """Megatron ranks, vLLM engines, or a folder on one rank; exactly one of the three is given."""

    megatron: ParallelDims | None = None
    vllm: tuple[int, int, int] | None = None  # TP, PP, replicas
    folder: int | None = None

    @property
    def ranks(self) -> list[int]:
        if self.megatron is not None:
            return list(range(self.megatron.world))
        if self.vllm is not None:
            return list(range(self.vllm[0] * self.vllm[1] * self.vllm[2]))
        return [self.folder or 0]

    def layout(self, spec: ModelSpec) -> Layout:
        if self.megatron is not None:
            return megatron_layout(spec, self.megatron)
        if self.vllm is None:
            return hf_layout(hf_shapes(spec), self.folder or 0)
        if spec.experts:  # what live engines say of themselves
            return models.vllm_layout(spec, self.vllm[0], len(self.ranks))
        return vllm_layout(spec, *self.vllm)

    def shards(self, spec: ModelSpec, rank: int, hf: Tensors) -> Tensors:
        """What a rank holds, from whole tensors."""
        if self.megatron is not None:
            return megatron_shards(spec, self.megatron, rank, hf)
        if self.vllm is None:
            return {name: value.clone() for name, value in hf.items()}
        tp, pp, _ = self.vllm
        stage = rank // tp % pp
        layers = layers_of_stage(spec.num_layers, pp, stage)
        ends = {"model.embed_tokens.weight": stage == 0 or (spec.tied and stage == pp - 1)}
        ends |= dict.fromkeys(("model.norm.weight", "lm_head.weight"), stage == pp - 1)
        mine = {n: v for n, v in hf.items() if (ends[n] if n in ends else int(n.split(".")[2]) in layers)}
        return models.vllm_shards(spec, tp, rank, mine)


@st.composite
def ends(draw: st.DrawFn, spec: ModelSpec) -> End:
    kind = draw(st.sampled_from(["megatron", "megatron", "vllm", "vllm", "folder"]))
    if kind == "megatron":
        return End(megatron=draw(dims()))
    if kind == "folder":
        return End(folder=draw(st.integers(0, 7)))
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([1, 2])) if not spec.experts else 1
    return End(vllm=(tp, pp, draw(st.integers(1, 8 // tp // pp))))


def check_bytes(made: Plan, have: Layout, want: Layout, itemsize: int, ranks_per_node: int | None) -> None:
    assert made.received == lower_bound(have, want, itemsize) == made.lower_bound
    assert sum(made.sent.values()) == sum(made.received.values()) == made.links["node"] + made.links["network"]
    far = defaultdict(int)
    for copies in (copies for rank in made.copies.receivers for copies in made.incoming(rank)):
        for copy in copies:
            rank = copy.wanted.rank
            if ranks_per_node and copy.sender // ranks_per_node != rank // ranks_per_node:
                far[rank] += copy.nbytes
    assert made.links["network"] == sum(far.values())
    assert made.from_network == {rank: far[rank] for rank in sorted(want.shard_of)}


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_the_plan_gives_what_broadcasting_everything_would(data: st.DataObject) -> None:
    spec = data.draw(specs())
    if data.draw(st.booleans()):
        spec = replace(spec, num_layers=spec.num_layers, value_head=False, head_bias=False)
        source, destination = data.draw(ends(spec)), data.draw(ends(spec))
    else:
        source, destination = End(megatron=data.draw(dims())), End(megatron=data.draw(dims()))
    dtype, nodes = (
        data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        data.draw(st.sampled_from([None, 1, 2, 4])),
    )
    hf = canonical(spec)
    have, want = source.layout(spec), destination.layout(spec)
    bucket = data.draw(st.sampled_from([256, 1000, 10**6]))
    made = plan(have, want, dtype=dtype, bucket_bytes=bucket, ranks_per_node=nodes, complete=True)
    converted = {name: value.to(dtype) for name, value in hf.items()}
    expected = {rank: destination.shards(spec, rank, converted) for rank in destination.ranks}
    got = {rank: blank(tensors) for rank, tensors in expected.items()}
    simulate(made, {rank: source.shards(spec, rank, hf) for rank in source.ranks}, got)
    for rank, tensors in expected.items():
        assert_equal(got[rank], tensors)
    check_bytes(made, have, want, dtype.itemsize, nodes)
    check_limits(made)
    for rank in range(8):  # one bucket to receive and one to pack; a chunk as large as the bucket adds its alignment
        assert made.buffer_bytes(rank) <= bucket
        for number in range(made.rounds):
            assert sum(-(-m.nbytes // 16) * 16 for m in made.messages_from(rank, number)) <= bucket + 16


def best_load(made: Plan, source: Layout) -> float:
    """The least that the busiest sender can send, whatever the choice: some set of ranks must send what only it has."""
    table, demand = made.copies, defaultdict(int)
    for held, nbytes in zip(table.held.tolist(), table.nbytes.tolist(), strict=True):
        if held >= 0:
            demand[sum(1 << rank for rank in table.holders[held])] += nbytes
    ranks = sum(1 << rank for rank in source.shard_of)
    subsets = [s for s in range(1, 256) if s & ranks == s]
    return max(sum(n for mask, n in demand.items() if mask & s == mask) / s.bit_count() for s in subsets)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_sender_does_much_more_than_the_best_choice_asks(data: st.DataObject) -> None:
    """Within 1.25 times that, up to one copy; where every slice has replicas everywhere this is 1.25 times the mean."""
    spec = make_spec(
        hidden=16, ffn=64, vocab=101, kv_heads=data.draw(st.sampled_from([2, 8])), tied=data.draw(st.booleans())
    )
    source, destination = data.draw(ends(spec)), data.draw(ends(spec))
    have, want = source.layout(spec), destination.layout(spec)
    nodes = data.draw(st.sampled_from([None, 2, 4]))
    made = plan(have, want, dtype=torch.float32, bucket_bytes=512, ranks_per_node=nodes)
    largest = int(made.copies.nbytes.max())
    assert max(made.sent.values()) <= 1.25 * best_load(made, have) + largest


def test_a_holder_on_the_same_node_sends_unless_it_has_too_much_to_do() -> None:
    spec = make_spec(hidden=16, ffn=64, vocab=101, num_layers=8)
    have = megatron_layout(spec, ParallelDims(tp=2, dp=4))
    want = vllm_layout(spec, 1, 1, 8)
    blind = plan(have, want, dtype=torch.float32, bucket_bytes=512)
    near = plan(have, want, dtype=torch.float32, bucket_bytes=512, ranks_per_node=2)
    assert near.links["network"] == 0 and near.received == blind.received
    assert all(copy.sender // 2 == rank // 2 for rank in range(8) for cs in near.incoming(rank) for copy in cs)
    # all receivers on the node of one of two replicas: it may do 1.2 times its share, the other one does the rest
    have = Layout(have.shapes, [replace(p, rank=rank) for rank in (0, 8) for p in hf_layout(have.shapes).pieces])
    made = plan(have, vllm_layout(spec, 1, 1, 8), dtype=torch.float32, bucket_bytes=512, ranks_per_node=8)
    mean = sum(made.sent.values()) / 2
    assert 1.15 * mean < made.sent[0] <= 1.25 * mean and made.sent[8] == made.links["network"] > 0


def carried_out(cases: list[tuple[ModelSpec, End, End, torch.dtype, int | None]]) -> int:
    """Every case over this world; returns how many."""
    rank = dist.get_rank()
    for spec, source, destination, dtype, nodes in cases:
        hf = canonical(spec)
        made = plan(source.layout(spec), destination.layout(spec), dtype=dtype, bucket_bytes=700, ranks_per_node=nodes)
        mine = source.shards(spec, rank, hf) if rank in source.ranks else {}
        whole = {name: value.to(dtype) for name, value in hf.items()}
        expected = destination.shards(spec, rank, whole) if rank in destination.ranks else {}
        got = blank(expected)
        deliver(buffered(made, rank), mine, got)
        assert_equal(got, expected)
    return len(cases)


@pytest.mark.parametrize("world", [2, 4])
def test_worlds_of_processes_agree(world: int) -> None:
    spec = make_spec(num_layers=2, kv_heads=1, vocab=29, qkv_bias=True)
    tied = replace(spec, tied=True, qkv_bias=False, qk_norm=True)
    all_ends = [
        End(megatron=ParallelDims(tp=2, pp=world // 2)), End(megatron=ParallelDims(tp=1, sp=2, dp=world // 2)),
        End(vllm=(2, world // 2, 1)), End(vllm=(world, 1, 1)), End(folder=world - 1),
    ]  # fmt: skip
    cases = [
        (model, source, destination, (torch.float32, torch.bfloat16)[i % 2], (None, 2)[j % 2])
        for model in (spec, tied) for i, source in enumerate(all_ends) for j, destination in enumerate(all_ends)
    ]  # fmt: skip
    assert worlds.run(world, carried_out, cases) == [len(cases)] * world
