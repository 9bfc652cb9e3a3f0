"""ZeRO-3, which partitions the weights themselves: training and passes equal one process, and no rank needs the whole.

The models are small, so the size below which weights stay whole is far below that of their matrices (see `zero.py`).
"""

from __future__ import annotations

import pytest

from rlscale.config.schema import ParallelConfig
from tests.tiny import tiny_model
from tests.train.reference import random_batch
from tests.train.test_engine import check

LAYOUTS = {  # name: world, tp, sequence parallel, architecture, tied, options
    "dp2": (2, 1, False, "qwen2", False, dict(max_tokens=48)),
    "dp2-tied-recompute": (2, 1, False, "qwen3", True, dict(max_tokens=48, recompute=True)),
    "tp2-dp2": (4, 2, False, "qwen3", False, dict(max_tokens=48)),
    "tp2-dp2-sp-tied": (4, 2, True, "qwen3", True, dict(max_tokens=48)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(name: str) -> None:
    world, tp, sp, arch, tied, options = LAYOUTS[name]
    layout = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sp, zero_stage=3)
    check(tiny_model(arch, tied=tied, layers=4), layout, world, random_batch(), options, temperature=0.7)


def test_one_response_over_two_ranks_of_which_one_is_empty() -> None:
    batch = random_batch(groups=1, n=1, seed=3)
    folder = tiny_model("mistral", tied=False, layers=4)
    check(folder, ParallelConfig(zero_stage=3), 2, batch, dict(max_tokens=64), temperature=1.0)


def test_comparison_catches_marks_of_split_weights_taken_out() -> None:
    layout = ParallelConfig(tensor_model_parallel_size=2, zero_stage=3)
    with pytest.raises(AssertionError):
        check(tiny_model("qwen3", tied=False, layers=4), layout, 4, random_batch(), dict(max_tokens=48), 1.0, "marks")
