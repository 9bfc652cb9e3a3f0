"""Runs that are asked to stop, or lose a rank or an engine: how they end, what they leave, and how they go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.program import Ended, Program, launch, small
from tests.tiny import tiny_model

SLOW = pytest.mark.skipif(
    not os.environ.get("RLSCALE_ALL_CASES"), reason="one of many like it; RLSCALE_ALL_CASES=1 runs all"
)


def faulty(folder: Path, fault: str, **settings: Any) -> Ended:
    arranged = small(tiny_model("qwen2", tied=False, layers=2), trainer__total_training_steps=3, **settings)
    return launch(folder, arranged, script="tests/e2e/faulty_train.py", environment={"FAULT": fault})


@pytest.mark.parametrize(
    "phase, rank, reached",
    [
        pytest.param("gen", 1, 1, id="rollout"),
        pytest.param("old_log_prob", 0, 1, id="log-probs", marks=SLOW),
        pytest.param("adv", 1, 2, id="advantages", marks=SLOW),
        pytest.param("update_actor", 0, 2, id="update"),
        pytest.param("sync", 1, 2, id="sync", marks=SLOW),
        pytest.param("validate", 0, 2, id="validation", marks=SLOW),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_its_state(phase: str, rank: int, reached: int, tmp_path: Path) -> None:
    """Before anything of the step has changed it is given up; after that it is finished."""
    extra: dict[str, Any] = {"trainer__save_freq": 0, "rollout__logprob_check_freq": 1}
    if phase == "validate":
        extra |= {"trainer__test_freq": 1, "data__val": [{"task": "addition", "size": 4, "params": {"split": "val"}}]}
    ended = faulty(tmp_path / "run", f"SIGUSR1 {phase} 2 {rank}", **extra)
    assert ended.status == 75, ended.output
    assert not ended.left
    assert f"stopped: SIGUSR1 on rank {rank}" in ended.output
    assert [m["step"] for m in ended.metrics] == list(range(1, reached + 1))
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert saved == [f"step_{reached:06d}"]


@pytest.mark.parametrize("what", ["raise", "die"])
@pytest.mark.parametrize("phase", [pytest.param("gen", marks=SLOW), "update_actor", pytest.param("sync", marks=SLOW)])
def test_a_failed_rank_ends_all_of_them(what: str, phase: str, tmp_path: Path) -> None:
    if what == "die" and phase == "update_actor":
        pytest.skip("as in the other phases, where it is slow")
    with Program(
        tmp_path / "run",
        small(tiny_model("qwen2", tied=False, layers=2), trainer__total_training_steps=1000),
        script="tests/e2e/faulty_train.py",
        environment={"FAULT": f"{what} {phase} 2 1"},
    ) as program:
        program.wait_for_step(1, limit=120)
        ended = program.wait(limit=30)
    assert ended.status not in (0, 75) and not ended.left
    if what == "raise":
        last_screen = ended.output.splitlines()[-40:]
        assert any("error: rank 1: RuntimeError: a fault that was asked for" in line for line in last_screen)


def test_a_run_outlives_an_engine(tmp_path: Path) -> None:
    ended = faulty(tmp_path / "run", "kill-engine gen 2 1", data__max_response_length=256)
    assert ended.status == 0 and not ended.left, ended.output
    assert [m["batch/num_samples"] for m in ended.metrics] == [16, 16, 16]
    assert ended.metrics[1]["rollout/engine_restarts"] == 1
    assert 0 < ended.metrics[1]["rollout/resampled"] <= 16
    assert "warning: rank 1: the vLLM engine died during" in ended.output


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
            program.process.terminate()
        ended = program.wait(limit=40)
    assert ended.status != 0 and not ended.left
    [saved] = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == f"step_{len(ended.metrics):06d}"
