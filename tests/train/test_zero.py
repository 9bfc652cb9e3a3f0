"""Master weights and AdamW moments as layouts: equal to one process, and loaded into other layouts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from rlscale.testing.batches import random_batch
from rlscale.testing.models import tiny_model
from tests import worlds
from tests.train.helpers import make_engine
from tests.train.reference import OPTIM, load_reference, policy_gradient, reference_logprobs

LAYOUTS = {  # world, and fields of the layout
    "dp2-zero1": (2, dict(zero_stage=1)),
    "dp2-zero2": (2, dict(zero_stage=2)),
    "tp2": (2, dict(tensor_model_parallel_size=2)),
    "pp2": (2, dict(pipeline_model_parallel_size=2)),
    "dp2-zero3": (2, dict(zero_stage=3)),
    "tp2-dp2-zero3": (4, dict(zero_stage=3, tensor_model_parallel_size=2)),
    "ulysses2-zero1": (2, dict(ulysses_sequence_parallel_size=2)),
}
STEPS = 2


def train_and_report(folder: str, fields: dict[str, Any], dtype: torch.dtype) -> tuple[int, dict[str, list[Any]], bool]:
    """On every rank: two updates; AdamW's step, this rank's slices of states, whether weights are rounded masters."""
    from rlscale.reshard.transport import region

    engine, batch = make_engine(folder, fields, dtype), random_batch()
    for _ in range(STEPS):
        engine.update(batch, policy_gradient)
    shards: dict[str, list[Any]] = {}
    for name, (layout, tensors) in engine.state().items():
        mine = layout.of_rank(engine.device.rank)
        shards[name] = [(p.name, p.index, region(tensors[p.key], p).clone()) for p in mine]
    rounded = all(
        torch.equal(part.of(part.flat).to(dtype), working(engine, part.fragment)) for part in engine.optimizer.parts()
    )
    return engine.optimizer.adam_step, shards, rounded


def working(engine: Any, fragment: Any) -> Tensor:
    """[n] working weights of the fragment, which under ZeRO-3 are the beginning of the rank's part."""
    if engine.parallel.zero_stage == 3:
        return engine.parameters()[fragment.key].ds_tensor.data[: fragment.stop - fragment.start]
    return engine.tensors()[fragment.key].flatten()[fragment.start : fragment.stop]


@functools.cache
def reference(arch: str, tied: bool) -> tuple[str, list[dict[str, dict[str, Tensor]]], list[float]]:
    """Model folder, states after each step of one process (by state and tensor), and the gradient norms."""
    folder = tiny_model(arch, tied=tied, layers=2)
    model, batch = load_reference(folder), random_batch()
    optim = torch.optim.AdamW(model.parameters(), lr=OPTIM["lr"], eps=OPTIM["eps"], weight_decay=OPTIM["weight_decay"])
    states, norms = [], []
    for _ in range(STEPS + 1):
        optim.zero_grad()
        logp, _ = reference_logprobs(model, batch)
        (-(logp * batch.advantages * batch.weights).sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM["grad_clip"])))
        optim.step()
        named = dict(model.named_parameters())
        state: dict[str, dict[str, Tensor]] = {"master": {name: p.detach().clone() for name, p in named.items()}}
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = {name: optim.state[p][key].clone() for name, p in named.items()}
        states.append(state)
    return folder, states, norms


def distance(mine: Tensor, expected: Tensor, scale: Tensor) -> float:
    return float((mine - expected).abs().max() / scale.abs().max())


@pytest.mark.parametrize("name", LAYOUTS)
def test_states_equal_those_of_one_process(name: str) -> None:
    world, fields = LAYOUTS[name]
    folder, states, _ = reference("qwen2" if name == "tp2" else "qwen3", name != "dp2-zero2")
    seen = {tensor: torch.zeros_like(value) for tensor, value in states[0]["master"].items()}
    for step, shards, rounded in worlds.run(world, train_and_report, folder, fields, torch.float32):
        assert step == STEPS and rounded
        for state, slices in shards.items():
            for tensor, index, mine in slices:
                whole = states[STEPS - 1][state][tensor]
                at = tuple(slice(lo, hi) for lo, hi in index)
                assert distance(mine, whole[at], whole) < 1e-5, (state, tensor)
                seen[tensor][at] = 1
    assert all(value.all() for value in seen.values())


@pytest.mark.parametrize("name", ["dp2-zero1", "dp2-zero2", "pp2", "tp2-dp2-zero3"])
def test_states_of_bf16_weights_are_fp32_and_near(name: str) -> None:
    world, fields = LAYOUTS[name]
    folder, states, _ = reference("qwen2" if name == "tp2" else "qwen3", name != "dp2-zero2")
    for step, shards, rounded in worlds.run(world, train_and_report, folder, fields, torch.bfloat16):
        assert step == STEPS and rounded
        for state, slices in shards.items():
            for tensor, index, mine in slices:
                assert mine.dtype == torch.float32
                whole = states[STEPS - 1][state][tensor]
                expected = whole[tuple(slice(lo, hi) for lo, hi in index)]
                assert distance(mine, expected, whole) < (0.01 if state == "master" else 0.2), (state, tensor)


def hand_over(folder: str, before: dict[str, Any], after: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Two updates under one layout, then its states in a fresh engine of another one, which makes the third."""
    from rlscale.reshard.plan import plan
    from rlscale.reshard.transport import region
    from rlscale.testing.transfers import buffered, deliver

    batch = random_batch()
    old = make_engine(folder, before, dtype)
    for _ in range(STEPS):
        old.update(batch, policy_gradient)
    new = make_engine(folder, after, dtype)
    assert new.optimizer.adam_step == 0
    source = old.state()

    def read(name: str, layout: Any, tensors: dict[str, Tensor]) -> None:
        made = plan(source[name][0], layout, dtype=torch.float32)
        deliver(buffered(made, new.device.rank), source[name][1], tensors)

    new.load_state(read, old.counters())
    same = torch.equal(new.logprobs(batch)[0], old.logprobs(batch)[0])
    norms = [engine.update(batch, policy_gradient)["grad_norm"] for engine in (old, new)]
    shards = {}
    for name, (layout, tensors) in new.state().items():
        mine = layout.of_rank(new.device.rank)
        shards[name] = [(p.name, p.index, region(tensors[p.key], p).clone()) for p in mine]
    return {"same": same, "norms": norms, "shards": shards, "step": new.optimizer.adam_step}


HAND_OVERS = [  # by way of every layout of two ranks
    ("dp2-zero1", "tp2"),
    ("tp2", "pp2"),
    ("pp2", "dp2-zero3"),
    ("dp2-zero3", "dp2-zero2"),
    ("dp2-zero2", "ulysses2-zero1"),
]


@pytest.mark.parametrize("before, after", HAND_OVERS)
def test_the_next_update_under_another_layout_is_that_of_the_unbroken_run(before: str, after: str) -> None:
    folder, states, norms = reference("qwen3", "dp2-zero2" not in (before, after))
    for result in worlds.run(2, hand_over, folder, LAYOUTS[before][1], LAYOUTS[after][1], torch.float32):
        assert result["step"] == STEPS + 1
        assert result["norms"] == pytest.approx([norms[STEPS]] * 2, rel=1e-5)
        for state, slices in result["shards"].items():
            for tensor, index, mine in slices:
                whole = states[STEPS][state][tensor]
                assert distance(mine, whole[tuple(slice(lo, hi) for lo, hi in index)], whole) < 1e-5, (state, tensor)


@pytest.mark.parametrize("before, after", [(1, 2), (2, 3), (3, 1)])
def test_bf16_weights_follow_loaded_masters_exactly(before: int, after: int) -> None:
    """Each stage has another optimizer for bf16 weights; over equal ranks they compute the same."""
    folder, _, _ = reference("qwen3", True)
    for result in worlds.run(2, hand_over, folder, dict(zero_stage=before), dict(zero_stage=after), torch.bfloat16):
        assert result["same"]
        assert result["norms"][0] == pytest.approx(result["norms"][1], rel=1e-3)
