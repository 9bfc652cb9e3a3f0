"""Runs that lose an engine, or are ended from outside: how they go on, what they leave."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.program import Program, launch, small
from tests.tiny import tiny_model


def test_a_run_outlives_an_engine(tmp_path: Path) -> None:
    arranged = small(
        tiny_model("qwen2", tied=False, layers=2), trainer__total_training_steps=3, data__max_response_length=256
    )
    fault = {"FAULT": "kill-engine gen 2 1", "FAULT_NOTE": str(tmp_path / "note")}
    ended = launch(tmp_path / "run", arranged, script="tests/e2e/faulty_train.py", environment=fault)
    assert ended.status == 0 and not ended.left, ended.output
    assert [m["batch/num_samples"] for m in ended.metrics] == [16, 16, 16]
    assert ended.metrics[1]["rollout/engine_restarts"] == 1
    assert 0 < ended.metrics[1]["rollout/resampled"] <= 16
    assert "warning: rank 1: the vLLM engine died during" in ended.output


@pytest.mark.skipif(not os.environ.get("RLSCALE_ALL_CASES"), reason="RLSCALE_ALL_CASES=1 runs all")
def test_a_stalled_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    arranged = small(tiny_model("qwen2", tied=False, layers=2), trainer__collective_timeout_s=15)
    fault = {"FAULT": "hang update_actor 2 1", "FAULT_NOTE": str(tmp_path / "note")}
    ended = launch(tmp_path / "run", arranged, script="tests/e2e/faulty_train.py", environment=fault, limit=120)
    assert ended.status not in (0, 75) and not ended.left, ended.output
    assert "what the ranks are doing" in ended.output
    assert "rank 1: in update_actor of step 2 since" in ended.output


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm"])
def test_interrupt_saves_and_leaves_nothing_behind(how: str, tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches every process of the group; a scheduler's SIGTERM only the outermost one."""
    settings = small(
        tiny_model("qwen2", tied=False, layers=2), trainer__total_training_steps=1000, trainer__save_freq=0
    )
    with Program(tmp_path / "run", settings) as program:
        program.wait_for_step(1, limit=120)
        if how == "ctrl-c":
            os.killpg(program.process.pid, signal.SIGINT)
        else:
            program.process.terminate()  # ends at once; the ranks see that it is gone, and have their time to save
        ended = program.wait(limit=40, gone_within=40)
    assert ended.status != 0 and not ended.left
    [saved] = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == f"step_{len(ended.metrics):06d}"
