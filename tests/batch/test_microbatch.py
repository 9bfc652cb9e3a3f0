"""Micro-batches: budget kept, every sample once, equal counts over ranks, few of them, shared prompts together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.batch.microbatch import pack_by_budget, plan_micro_batches
from rlscale.batch.types import PackedBatch


def batch(prompts: list[int], group: list[int], responses: list[int]) -> PackedBatch:
    def cu(x: list[int]) -> torch.Tensor:
        return torch.tensor([0, *x]).cumsum(0)

    t = sum(responses)
    return PackedBatch(
        prompt_tokens=torch.zeros(sum(prompts), dtype=torch.int64),
        prompt_cu_seqlens=cu(prompts),
        group=torch.tensor(group, dtype=torch.int64),
        tokens=torch.zeros(t, dtype=torch.int64),
        cu_seqlens=cu(responses),
        mask=torch.ones(t),
        rewards=torch.zeros(len(group)),
    )


def cost(b: PackedBatch, rows: list[int], share: bool) -> int:
    prompts = [int(b.group[r]) for r in rows]
    prompts = sorted(set(prompts)) if share else prompts
    return sum(int(b.prompt_lengths[g]) for g in prompts) + sum(int(b.response_lengths[r]) for r in rows)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), ranks=st.integers(1, 5), share=st.booleans())
def test_invariants(data: st.DataObject, ranks: int, share: bool) -> None:
    prompts = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    group = data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=0, max_size=25))
    responses = [data.draw(st.integers(1, 40)) for _ in group]
    tokens = data.draw(st.sampled_from([None, 70, 100, 200]))
    rows = data.draw(st.sampled_from([None, 1, 3] if tokens else [1, 3]))
    b = batch(prompts, group, responses)
    plan = plan_micro_batches(b, ranks, max_tokens=tokens, max_sequences=rows, share_prefix=share)
    assert len(plan) == ranks and len({len(p) for p in plan}) == 1
    micro = [m.tolist() for p in plan for m in p]
    assert sorted(r for m in micro for r in m) == list(range(len(group))) and all(m == sorted(m) for m in micro)
    assert all(m.dtype == torch.int64 for p in plan for m in p)
    assert all((tokens is None or cost(b, m, share) <= tokens) and (rows is None or len(m) <= rows) for m in micro)


def test_prompts_are_shared_and_kept_together() -> None:
    b = batch([100, 100], [0, 1] * 8, [10] * 16)
    plan = plan_micro_batches(b, 2, max_tokens=180, max_sequences=None, share_prefix=True)
    assert sorted(m.tolist() for p in plan for m in p) == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    alone = plan_micro_batches(b, 2, max_tokens=220, max_sequences=None, share_prefix=False)
    assert [len(p) for p in alone] == [4, 4]


def test_a_rank_without_work_gets_empty_micro_batches() -> None:
    plan = plan_micro_batches(batch([5], [0], [5]), 3, max_tokens=10, max_sequences=None, share_prefix=True)
    assert sorted(m.numel() for p in plan for m in p) == [0, 0, 1]
    assert plan_micro_batches(batch([5], [], []), 2, max_tokens=10, max_sequences=None, share_prefix=True) == [[], []]


def test_one_large_group_is_divided_over_ranks() -> None:
    plan = plan_micro_batches(
        batch([10], [0] * 16, [50] * 16), 4, max_tokens=10_000, max_sequences=None, share_prefix=True
    )
    assert [[m.numel() for m in p] for p in plan] == [[4]] * 4


def test_ranks_are_balanced() -> None:
    rng = np.random.default_rng(0)
    b = batch(
        rng.integers(50, 300, 64).tolist(),
        [g for g in range(64) for _ in range(8)],
        rng.lognormal(5, 1, 512).astype(int).clip(1, 2000).tolist(),
    )
    plan = plan_micro_batches(b, 8, max_tokens=8192, max_sequences=None, share_prefix=True)
    work = [sum(cost(b, m.tolist(), True) for m in p) for p in plan]
    assert max(work) <= 1.05 * sum(work) / 8


@pytest.mark.parametrize("seed", range(5))
def test_packing_is_within_two_percent_of_the_bound(seed: int) -> None:
    costs = np.random.default_rng(seed).lognormal(6.5, 1.0, 4000).astype(int).clip(1, 8192).tolist()
    bins = pack_by_budget(costs, 16384)
    assert max(sum(costs[i] for i in b) for b in bins) <= 16384
    assert len(bins) <= 1.02 * -(-sum(costs) // 16384)


@pytest.mark.parametrize("budget,lengths,count", [(8, [7] * 8, 8), (10, [6] * 3, 3), (20, [5] * 3, 1)])
def test_budget_is_hard(budget: int, lengths: list[int], count: int) -> None:
    assert len(pack_by_budget(lengths, budget)) == count


def test_errors() -> None:
    b = batch([10, 3], [0, 1], [5, 18])
    with pytest.raises(
        ValueError, match=r"sample 1 has 21 tokens \(prompt 3, response 18\), more than the budget of 20"
    ):
        plan_micro_batches(b, 1, max_tokens=20, max_sequences=None, share_prefix=True)
    with pytest.raises(ValueError, match="sample 1 has 21 tokens, more than the budget of 20"):
        pack_by_budget([5, 21], 20)
    with pytest.raises(ValueError, match="a limit"):
        plan_micro_batches(b, 1, max_tokens=None, max_sequences=None, share_prefix=True)
    with pytest.raises(ValueError, match="max_sequences must be at least 1"):
        plan_micro_batches(b, 1, max_tokens=None, max_sequences=0, share_prefix=True)
