"""A model that is saved under one layout and goes on under another takes the same steps as one that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlscale.batch.types import PackedBatch
from rlscale.checkpoint import Content, Retention, Saver, Shards, Store
from rlscale.config.schema import OptimConfig, ParallelConfig
from rlscale.train.engine import Batching, Engine
from tests import worlds
from tests.tiny import tiny_model
from tests.train.reference import random_batch

OPTIM = OptimConfig(
    lr=1e-3, eps=1e-4, weight_decay=0.01, grad_clip=0.05, lr_scheduler="cosine", lr_warmup_steps=2
)  # fmt: skip
LAYOUTS = {  # name: world, TP, PP, sequence parallel, Ulysses, ZeRO stage
    "dp1": (1, 1, 1, False, 1, 1),
    "tp2": (2, 2, 1, False, 1, 1),
    "pp2": (2, 1, 2, False, 1, 1),
    "dp2": (2, 1, 1, False, 1, 2),
    "sp2": (2, 1, 1, False, 2, 1),
    "zero3": (2, 1, 1, False, 1, 3),
    "tp2-pp2": (4, 2, 2, True, 1, 1),
    "tp2-dp2": (4, 2, 1, True, 1, 2),
}


def layout_of(name: str) -> tuple[int, ParallelConfig]:
    world, tp, pp, sp, ulysses, zero = LAYOUTS[name]
    return world, ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        ulysses_sequence_parallel_size=ulysses,
        sequence_parallel=sp,
        zero_stage=zero,
    )


def policy_gradient(out, micro):
    return (-out.logprobs * micro.advantages * micro.weights).sum(), {}


def run_steps(
    folder: str, parallel: ParallelConfig, dtype: str, batches: list[PackedBatch], resume: str | None, save: str | None
) -> list[dict[str, float]]:
    """On every rank: an engine, continued from a checkpoint if there is one, takes a step for each batch."""
    from rlscale.cluster.device import init_distributed
    from rlscale.loop.checkpoint import engine_state, load_engine, model_states
    from rlscale.model.arch import ModelSpec

    device, spec = init_distributed("cpu"), ModelSpec.from_hf(folder)
    engine = Engine(
        "actor", spec, folder, parallel, OPTIM, Batching(max_tokens=48), device, dtype=getattr(torch, dtype),
        total_steps=8,
    )  # fmt: skip
    if resume is not None:
        record = Store(resume).open(1)
        record.verify()
        load_engine(Shards(record), "actor", engine, record.json("run.json"))
    records = [engine.update(batch, policy_gradient) for batch in batches]
    if save is not None:
        Saver(Store(save), Retention()).save(1, Content(model_states({"actor": engine}), engine_state(engine)))
    return records


def chain(tmp_path: Path, names: list[str], dtype: str = "float32", tied: bool = True) -> list[list[dict[str, float]]]:
    """Two steps under each layout, each continued from the one before it; the records of rank 0."""
    folder = tiny_model("qwen3", tied=tied, layers=4, heads=4, kv_heads=2)
    records, before = [], None
    for number, name in enumerate(names):
        world, parallel = layout_of(name)
        batches = [random_batch(seed=2 * number + i) for i in (0, 1)]
        after = str(tmp_path / str(number))
        results = worlds.run(world, run_steps, folder, parallel, dtype, batches, before, after)
        assert all(result == results[0] for result in results)
        records.append(results[0])
        before = after
    return records


def unbroken(name: str, parts: int, dtype: str = "float32", tied: bool = True) -> list[list[dict[str, float]]]:
    folder = tiny_model("qwen3", tied=tied, layers=4, heads=4, kv_heads=2)
    world, parallel = layout_of(name)
    batches = [random_batch(seed=i) for i in range(2 * parts)]
    records = worlds.run(world, run_steps, folder, parallel, dtype, batches, None, None)[0]
    return [records[2 * i : 2 * i + 2] for i in range(parts)]


@pytest.mark.parametrize(
    "names",
    [
        ["tp2", "pp2", "dp2", "tp2-pp2"],
        ["tp2-pp2", "zero3", "sp2", "tp2-dp2"],
    ],
    ids=lambda names: "-to-".join(names),
)
def test_another_layout_goes_on_with_the_same_numbers(tmp_path: Path, names: list[str]) -> None:
    got, expected = chain(tmp_path, names), unbroken("dp1", len(names))
    for part, other in zip(got, expected, strict=True):
        for mine, theirs in zip(part, other, strict=True):
            assert mine["lr"] == theirs["lr"]
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("name, dtype", [("dp2", "float32"), ("tp2-dp2", "bfloat16"), ("pp2", "bfloat16")])
def test_the_same_layout_goes_on_bit_for_bit(tmp_path: Path, name: str, dtype: str) -> None:
    assert chain(tmp_path, [name, name], dtype) == unbroken(name, 2, dtype)


@pytest.mark.parametrize("lost", ["exp_avg", "exp_avg_sq", "adam_step", "steps"])
def test_what_is_lost_shows(tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the state counts: without it the continued run takes other steps."""
    monkeypatch.setattr(worlds, "run", _losing(lost))
    got, expected = chain(tmp_path, ["dp1", "dp1"]), unbroken("dp1", 2)
    assert got[0] == expected[0]
    assert got[1] != expected[1]


def _losing(lost: str):
    real = worlds.run

    def run(world: int, function, *args):
        return real(world, lossy_steps if args[-2] is not None else function, *args, *[lost] * (args[-2] is not None))

    return run


def lossy_steps(*args) -> list[dict[str, float]]:
    """`run_steps` from a checkpoint of which one part is not put back."""
    from unittest import mock

    from rlscale.train import zero

    *args, lost = args
    if lost == "adam_step":
        patch = mock.patch.object(zero, "set_optimizer_step", lambda *_: None)
    elif lost == "steps":
        patch = mock.patch.object(Engine, "steps", property(lambda _: 0, lambda *_: None), create=True)
    else:
        real = Shards.read
        patch = mock.patch.object(
            Shards, "read", lambda self, state, *rest: 0 if state.endswith(lost) else real(self, state, *rest)
        )
    with patch:
        return run_steps(*args)
