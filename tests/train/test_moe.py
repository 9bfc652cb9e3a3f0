"""A mixture of experts in the engine equals one process, with experts split by width and distributed whole."""

from __future__ import annotations

import pytest

from rlscale.config.schema import ParallelConfig
from rlscale.testing.batches import random_batch
from rlscale.testing.models import tiny_model
from tests.train.reference import check

pytestmark = pytest.mark.world

LAYOUTS = {  # name: world, tp, pp, ulysses, sequence parallel, ZeRO stage, ep
    "dp2-zero2": (2, 1, 1, 1, False, 2, 1),
    "dp2-zero1": (2, 1, 1, 1, False, 1, 1),
    "dp2-zero3": (2, 1, 1, 1, False, 3, 1),
    "tp2": (2, 2, 1, 1, False, 1, 1),
    "tp2-sp": (2, 2, 1, 1, True, 1, 1),
    "tp2-ep2": (2, 2, 1, 1, False, 1, 2),
    "tp2-sp-ep2": (2, 2, 1, 1, True, 2, 2),
    "pp2": (2, 1, 2, 1, False, 1, 1),
    "ulysses2": (2, 1, 1, 2, False, 1, 1),
    "tp2-pp2-sp-ep2": (4, 2, 2, 1, True, 1, 2),
}
RECOMPUTED = ("dp2-zero1", "tp2-sp", "tp2-pp2-sp-ep2")


def parallel(name: str) -> tuple[ParallelConfig, int]:
    world, tp, pp, ulysses, sp, zero, ep = LAYOUTS[name]
    layout = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        ulysses_sequence_parallel_size=ulysses,
        sequence_parallel=sp,
        zero_stage=zero,
        expert_model_parallel_size=ep,
    )
    return layout, world


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_equal_one_process(name: str) -> None:
    layout, world = parallel(name)
    arch = "mixtral" if name in ("tp2", "dp2-zero2", "pp2") else "qwen3_moe"
    folder = tiny_model(arch, tied=False, layers=2, hidden=64, ffn=32)
    check(folder, layout, world, random_batch(), dict(max_tokens=48, recompute=name in RECOMPUTED), temperature=0.7)


def test_a_rank_whose_experts_get_no_token_takes_part() -> None:
    """One response over two ranks, of which one has padding only; most experts of both have no gradient but zeros."""
    layout, world = parallel("dp2-zero2")
    folder = tiny_model("qwen3_moe", tied=False, layers=2, hidden=64, ffn=32, num_experts=8, num_experts_per_tok=1)
    check(folder, layout, world, random_batch(groups=1, n=1, seed=3), dict(max_tokens=64), temperature=1.0)


@pytest.mark.parametrize(
    "mutation, name",
    [("router-sum", "tp2-sp-ep2"), ("expert-marks", "tp2-ep2"), ("expert-input-sum", "tp2-ep2")],
)
def test_comparison_catches_a_sum_or_mark_taken_out(mutation: str, name: str) -> None:
    layout, world = parallel(name)
    folder = tiny_model("qwen3_moe", tied=False, layers=2, hidden=64, ffn=32)
    with pytest.raises(AssertionError):
        check(folder, layout, world, random_batch(), dict(max_tokens=48), temperature=0.7, mutation=mutation)
