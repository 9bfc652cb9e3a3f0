"""ZeRO-3, which partitions the weights themselves: training and passes equal one process, and no rank needs the whole.

The models are small, so the size below which weights stay whole is far below that of their matrices (see `zero.py`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlscale.config.schema import ParallelConfig
from rlscale.testing.batches import random_batch
from rlscale.testing.models import tiny_model
from tests import worlds
from tests.train.helpers import make_engine, squared_error
from tests.train.reference import check, policy_gradient

TP, SP, ULYSSES = "tensor_model_parallel_size", "sequence_parallel", "ulysses_sequence_parallel_size"
LAYOUTS = {  # name: world, fields of the layout, architecture, tied
    "dp2": (2, {}, "qwen2", False),
    "dp2-tied": (2, {}, "qwen3", True),
    "ulysses2": (2, {ULYSSES: 2}, "qwen3", True),
    "tp2-alone": (2, {TP: 2}, "llama", False),
    "tp2-dp2": (4, {TP: 2}, "qwen3", False),
    "tp2-dp2-sp-tied": (4, {TP: 2, SP: True}, "qwen3", True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(name: str) -> None:
    world, fields, arch, tied = LAYOUTS[name]
    layout = ParallelConfig(zero_stage=3, **fields)
    options = dict(max_tokens=48, recompute=name == "dp2-tied")
    check(tiny_model(arch, tied=tied, layers=4), layout, world, random_batch(), options, temperature=0.7)


def test_one_response_over_two_ranks_of_which_one_is_empty() -> None:
    batch = random_batch(groups=1, n=1, seed=3)
    folder = tiny_model("mistral", tied=False, layers=4)
    check(folder, ParallelConfig(zero_stage=3), 2, batch, dict(max_tokens=64), temperature=1.0)


def train_critic(folder: str) -> list[Any]:
    """Values before and after two updates, and gradient norms, under ZeRO-1 and ZeRO-3."""
    out: list[Any] = []
    for stage in (1, 3):
        engine, batch = make_engine(folder, dict(zero_stage=stage), torch.float32, "critic"), random_batch()
        before = engine.values(batch)
        norms = [engine.update(batch, squared_error)["grad_norm"] for _ in range(2)]
        out.append((before, engine.values(batch), norms))
    return out


def test_a_critic_equals_its_own_under_zero_1() -> None:
    for one, three in worlds.run(2, train_critic, tiny_model("qwen3", tied=True, layers=4)):
        torch.testing.assert_close(three[0], one[0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(three[1], one[1], atol=1e-5, rtol=1e-5)
        assert three[2] == pytest.approx(one[2], rel=1e-5)


def test_comparison_catches_marks_of_split_weights_taken_out() -> None:
    layout = ParallelConfig(tensor_model_parallel_size=2, zero_stage=3)
    with pytest.raises(AssertionError):
        check(tiny_model("qwen3", tied=False, layers=4), layout, 4, random_batch(), dict(max_tokens=48), 1.0, "marks")


def hold_and_hand_out(folder: str, fields: dict[str, Any], dtype: torch.dtype, output: str) -> dict[str, Any]:
    """After two updates: elements held between passes; weights as gathered by DeepSpeed, exported, and as a plan
    brings them to a model split over tensor-parallel ranks."""
    import deepspeed

    from rlscale.cluster.mesh import ParallelDims
    from rlscale.reshard.hf_export import export_hf
    from rlscale.reshard.megatron import megatron_layout
    from rlscale.reshard.plan import plan
    from rlscale.reshard.transport import Transfer, region

    engine, batch = make_engine(folder, fields, dtype), random_batch()
    for _ in range(2):
        engine.update(batch, policy_gradient)
    engine.logprobs(batch)
    parameters = engine.parameters()
    held = sum(p.numel() for p in parameters.values()), sum(t.numel() for t in engine.tensors().values())
    export_hf(output, engine.layout, engine.tensors(), reference_folder=folder, dtype=dtype)

    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        whole = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    gathered = [
        (p.name, p.index, region(whole[p.key], p)) for p in engine.model_layout.of_rank(engine.device.rank)
    ]  # fmt: skip
    wanted = megatron_layout(engine.spec, ParallelDims(tp=engine.device.world))
    copies = plan(engine.layout, wanted, dtype=dtype, bucket_bytes=65_536)
    rank = engine.device.rank
    buffer = torch.empty(copies.buffer_bytes(rank), dtype=torch.uint8)
    planned = []
    for bucket in Transfer(copies, buffers=[buffer]).buckets(engine.tensors()):
        planned += [(p.name, p.index, values.clone()) for p, values in bucket.tensors()]
    size = sum(p.ds_numel for p in parameters.values())
    return {"held": held, "size": size, "gathered": gathered, "planned": planned, "dp": engine.mesh.dims.dp}


@pytest.mark.parametrize("world, fields, dtype", [(2, {}, torch.float32), (4, {TP: 2}, torch.bfloat16)])
def test_weights_leave_straight_from_the_partitions(
    world: int, fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    folder, output = tiny_model("qwen3", tied=True, layers=2), tmp_path / "export"
    results = worlds.run(world, hold_and_hand_out, folder, dict(zero_stage=3, **fields), dtype, str(output))
    exported = load_file(output / "model.safetensors")
    for result in results:
        open_between_passes, parts = result["held"]
        assert open_between_passes == 0
        assert parts <= math.ceil(result["size"] / result["dp"])
        assert sum(values.numel() for _, _, values in result["planned"]) >= result["size"] / world / 2
        for name, index, values in result["gathered"] + result["planned"]:
            assert torch.equal(values, exported[name][tuple(slice(lo, hi) for lo, hi in index)]), name
