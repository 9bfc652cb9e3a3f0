"""Whole runs of the README's command on tiny models: what they write, and that the layout changes no number."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlscale.testing.models import tiny_model
from tests.e2e.program import SCORERS, Ended, Program, launch, small, striking

ACTOR = [
    f"actor/{name}"
    for name in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "kl_loss", "entropy", "grad_norm", "lr")
]
BATCH = [
    "critic/score/mean",
    "critic/rewards/mean",
    "critic/advantages/mean",
    "critic/returns/mean",
    "response_length/mean",
    "response_length/max",
    "prompt_length/mean",
    "batch/num_samples",
    "batch/num_tokens",
    "group/reward_std",
    "group/zero_std_frac",
    "timing_s/step",
    "timing_s/gen",
    "timing_s/update_actor",
    "timing_s/sync",
    "perf/throughput",
]
CRITIC = ["critic/vf_loss", "critic/vf_clipfrac", "critic/vf_explained_var", "critic/values/mean", "critic/grad_norm"]
FIRST = ["rollout/logprob_diff_mean", "rollout/logprob_diff_max"]
# what the same samples must give on every layout (fp32)
SAME = [
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "critic/score/mean",
    "critic/advantages/std",
    "group/reward_std",
    "response_length/mean",
    "batch/num_tokens",
]


def ran(ended: Ended, steps: int = 2, names: list[str] = ACTOR + BATCH) -> Ended:
    """The run, after checking what every run has to show."""
    assert ended.status == 0, ended.output
    assert not ended.left
    metrics = ended.metrics
    assert [m["step"] for m in metrics] == list(range(1, steps + 1))
    for m in metrics:
        missing = [name for name in names if name not in m]
        assert not missing, missing
        assert all(math.isfinite(v) for v in m.values() if isinstance(v, float | int)), m
        assert m["batch/num_samples"] == 16 and m["actor/grad_norm"] > 0
    assert all(name in metrics[0] for name in FIRST) and metrics[0]["rollout/logprob_diff_max"] <= 2e-5
    return ended


def layout(tp: int = 1, pp: int = 1, sp: bool = False, zero: int = 1, ulysses: int = 1) -> dict[str, Any]:
    return {
        "actor__parallel__tensor_model_parallel_size": tp,
        "actor__parallel__pipeline_model_parallel_size": pp,
        "actor__parallel__ulysses_sequence_parallel_size": ulysses,
        "actor__parallel__sequence_parallel": sp,
        "actor__parallel__zero_stage": zero,
    }


@pytest.fixture(scope="module")
def model() -> str:
    return tiny_model("qwen2", tied=False, layers=2)


@pytest.fixture(scope="module")
def data_parallel(model: str, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """GRPO over two data-parallel ranks, with everything that a run writes switched on."""
    whole = {
        "trainer__val_before_train": True,
        "trainer__test_freq": 0,
        "trainer__save_freq": 0,
        "trainer__export": "end",
        "trainer__plots": True,
        "data__val": [{"task": "addition", "size": 4, "seed": 2, "params": {"split": "val"}}],
    }
    folder = tmp_path_factory.mktemp("dp2") / "run"
    return launch(folder, small(model, rollout__logprob_check_freq=1, **whole, **layout()))


def test_run_folder_holds_what_the_readme_says(data_parallel: Ended) -> None:
    ran(data_parallel)
    folder = data_parallel.folder
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["rollout"]["n"] == 4 and config["model"]["dtype"] == "float32"
    assert list(folder.rglob("events.out.tfevents.*"))
    assert len(list(folder.glob("plots/*.png"))) >= 8
    assert all(path.stat().st_size > 1000 for path in folder.glob("plots/*.png"))
    assert "val/addition/mean@1" in data_parallel.metrics[-1]
    for step in (1, 2):
        rows = data_parallel.rollouts(step)
        assert len(rows) == 16
        assert all(
            row["prompt"] and row["response_ids"] and len(row["advantage"]) == len(row["response_ids"]) for row in rows
        )
        rewards = [row["reward"] for row in rows]
        assert data_parallel.metrics[step - 1]["critic/score/mean"] == pytest.approx(sum(rewards) / 16, abs=1e-6)


def test_engines_sample_from_the_new_weights(data_parallel: Ended) -> None:
    first, second = ran(data_parallel).metrics
    assert second["rollout/logprob_diff_max"] <= 2e-5  # after one update and one sync
    assert second["actor/kl_loss"] > 10 * abs(first["actor/kl_loss"])  # and the policy has moved


def test_exported_policy_opens_in_transformers_and_differs_from_the_start(data_parallel: Ended, model: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    [exported] = ran(data_parallel).folder.glob("export/step_*")
    start, end = (
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).state_dict() for p in (model, str(exported))
    )
    assert start.keys() == end.keys()
    moved = {name: float((start[name] - end[name]).abs().max()) for name in start}
    assert all(0 < change < 1e-3 for change in moved.values()), moved  # two steps of Adam with lr 1e-4
    assert AutoTokenizer.from_pretrained(exported).chat_template


@pytest.mark.parametrize(
    "parallel",
    [
        layout(pp=2) | {"actor__parallel__param_offload": True, "actor__parallel__optimizer_offload": True},
        layout(tp=2, sp=True),
        layout(ulysses=2, zero=2),
    ],
    ids=["pp2-offload", "tp2-sp", "ulysses2-zero2"],
)
def test_layout_changes_nothing(parallel: dict[str, Any], data_parallel: Ended, model: str, tmp_path: Path) -> None:
    other = ran(launch(tmp_path / "run", small(model, **parallel)))
    for step in (1, 2):
        ids, expected_ids = ([row["response_ids"] for row in run.rollouts(step)] for run in (other, data_parallel))
        if step == 2 and ids != expected_ids:
            continue  # weights that differ in the last bit may sample another token
        assert ids == expected_ids
        got, expected = (run.metrics[step - 1] for run in (other, data_parallel))
        for name in SAME:
            assert got[name] == pytest.approx(expected[name], rel=2e-4, abs=2e-6), (step, name)


def test_ppo_with_a_critic_and_a_flawed_scorer_outlives_an_engine(tmp_path: Path) -> None:
    """The critic is split into stages and waits on the host; the engine of rank 1 dies as it samples for step 2."""
    settings = small(
        tiny_model("llama", layers=2),
        trainer__critic_warmup=1,
        data__max_response_length=256,  # no engine is done with all prompts before the other has begun
        reward__scorer=f"{SCORERS}:flawed",
        trainer__total_training_steps=3,
        critic__parallel__pipeline_model_parallel_size=2,
        critic__parallel__param_offload=True,
        critic__parallel__optimizer_offload=True,
    )
    fault = striking(tmp_path / "note", "kill-engine", 1, phase="gen", step=2)
    run = launch(tmp_path / "run", settings, yaml="yamls/ppo_cpu.yaml", environment=fault)
    assert run.status == 0 and not run.left, run.output
    first, second, third = run.metrics
    for m in run.metrics:
        missing = [name for name in BATCH[:13] + CRITIC + ["reward/failures"] if name not in m]
        assert not missing, missing
    assert not any(name.startswith("actor/pg_loss") for name in first)  # the critic learns alone
    assert all(name in m for m in (second, third) for name in ACTOR)
    for step, m in enumerate(run.metrics, 1):
        failed = [row for row in run.rollouts(step) if row["reward_error"]]
        assert m["reward/failures"] == len(failed) > 0
        assert all(row["reward"] == 0 for row in failed)
        assert m["batch/num_samples"] == 16
    assert second["rollout/engine_restarts"] == 1 and 0 < second["rollout/resampled"] <= 16
    assert "warning: rank 1: the vLLM engine died during" in run.output


def test_death_of_an_engine_ends_the_run(model: str, tmp_path: Path) -> None:
    settings = small(model, trainer__total_training_steps=1000, rollout__engine_restarts=0)
    with Program(tmp_path / "run", settings, ranks=1) as program:
        program.wait_for_step(1, limit=120)
        engine = next(pid for pid, command in program.processes().items() if "EngineCore" in command)
        os.kill(engine, signal.SIGKILL)
        ended = program.wait(limit=60)
    assert ended.status != 0 and not ended.left
    assert any("engine" in error.lower() for error in ended.errors), ended.output[-3000:]
