"""A model that is saved under one layout and goes on under another takes the same steps as one that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlscale.batch.types import PackedBatch
from rlscale.checkpoint.saver import CheckpointData, Saver
from rlscale.checkpoint.shards import Shards
from rlscale.checkpoint.store import Retention, Store, read_manifest
from rlscale.testing.batches import random_batch
from rlscale.testing.models import tiny_model
from rlscale.train.engine import Engine
from tests import worlds
from tests.train.helpers import make_engine, squared_error
from tests.train.reference import OPTIM as COMMON

OPTIM = COMMON | dict(lr_scheduler="cosine", lr_warmup_steps=2)
LAYOUTS = {  # name: world, layout
    "dp1": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {"zero_stage": 2}),
    "sp2": (2, {"ulysses_sequence_parallel_size": 2}),
    "zero3": (2, {"zero_stage": 3}),
    "ep2": (2, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    "offload": (2, {"param_offload": True, "optimizer_offload": True}),
    "tp2-pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}),
    "tp2-dp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "zero_stage": 2}),
}
MODELS = {  # name: role, model
    "actor": ("actor", dict(arch="qwen3", layers=4)),
    "critic": ("critic", dict(arch="llama", layers=2)),
    "experts": ("actor", dict(arch="qwen3_moe", tied=False, layers=2, hidden=64, ffn=32)),
}


def policy_gradient(out, micro):
    return (-out.logprobs * micro.advantages * micro.weights).sum(), {}


def run_steps(
    model: str, layout: str, dtype: str, batches: list[PackedBatch], resume: str | None, save: str | None
) -> list[dict[str, float]]:
    """On every rank: an engine, continued from a checkpoint if there is one, takes a step for each batch."""
    from rlscale.loop.checkpoint import load_engine, model_states

    role, shape = MODELS[model]
    folder = tiny_model(**shape)
    engine = make_engine(folder, LAYOUTS[layout][1], getattr(torch, dtype), role, optim=OPTIM, total_steps=8)
    engine.release_device()
    if resume is not None:
        manifest = read_manifest(Store(resume).path(1))
        manifest.verify()
        load_engine(Shards(manifest), role, engine, manifest.json("run.json"))
    records = []
    for batch in batches:
        records.append(engine.update(batch, squared_error if role == "critic" else policy_gradient))
        engine.release_device()
    if save is not None:
        Saver(Store(save), Retention()).save(1, CheckpointData(model_states({role: engine}), engine.counters()))
    return records


def chain(tmp_path: Path, names: list[str], dtype: str = "float32", model: str = "actor") -> list[dict[str, float]]:
    """Two steps under each layout, each continued from the one before it."""
    tiny_model(**MODELS[model][1])  # made once, before the ranks ask for it
    records, before = [], None
    for number, name in enumerate(names):
        batches = [random_batch(seed=2 * number + i) for i in (0, 1)]
        after = str(tmp_path / str(number))
        results = worlds.run(LAYOUTS[name][0], run_steps, model, name, dtype, batches, before, after)
        assert all(result == results[0] for result in results)
        records += results[0]
        before = after
    return records


def unbroken(name: str, steps: int, dtype: str = "float32", model: str = "actor") -> list[dict[str, float]]:
    batches = [random_batch(seed=i) for i in range(steps)]
    return worlds.run(LAYOUTS[name][0], run_steps, model, name, dtype, batches, None, None)[0]


@pytest.mark.parametrize(
    "model, names",
    [
        ("actor", ["tp2", "pp2", "dp2", "tp2-pp2"]),
        ("actor", ["tp2-pp2", "zero3", "sp2", "tp2-dp2"]),
        ("critic", ["tp2", "offload", "pp2"]),
        ("experts", ["ep2", "pp2", "tp2"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-to-".join(value),
)
def test_another_layout_goes_on_with_the_same_numbers(tmp_path: Path, model: str, names: list[str]) -> None:
    got, expected = chain(tmp_path, names, model=model), unbroken("dp1", 2 * len(names), model=model)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine["lr"] == theirs["lr"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("name, dtype", [("dp2", "float32"), ("tp2-dp2", "bfloat16"), ("pp2", "bfloat16")])
def test_the_same_layout_goes_on_bit_for_bit(tmp_path: Path, name: str, dtype: str) -> None:
    assert chain(tmp_path, [name, name], dtype) == unbroken(name, 4, dtype)


@pytest.mark.parametrize("lost", ["exp_avg", "exp_avg_sq", "adam_step", "steps"])
def test_what_is_lost_shows(tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the state counts: without it the continued run takes other steps."""
    monkeypatch.setattr(worlds, "run", _losing(lost))
    got, expected = chain(tmp_path, ["dp1", "dp1"]), unbroken("dp1", 4)
    assert got[:2] == expected[:2]
    assert got[2:] != expected[2:]


def _losing(lost: str):
    real = worlds.run

    def run(world: int, function, *args):
        return real(world, lossy_steps if args[-2] is not None else function, *args, *[lost] * (args[-2] is not None))

    return run


def lossy_steps(*args) -> list[dict[str, float]]:
    """`run_steps` from a checkpoint of which one part is not put back."""
    from unittest import mock

    from rlscale.train.zero import ShardedOptimizer

    *args, lost = args
    if lost == "adam_step":
        patch = mock.patch.object(ShardedOptimizer, "adam_step", property(lambda _: 0, lambda *_: None))
    elif lost == "steps":
        patch = mock.patch.object(Engine, "steps", property(lambda _: 0, lambda *_: None), create=True)
    else:
        real = Shards.read
        patch = mock.patch.object(
            Shards, "read", lambda self, state, *rest: 0 if state.endswith(lost) else real(self, state, *rest)
        )
    with patch:
        return run_steps(*args)
