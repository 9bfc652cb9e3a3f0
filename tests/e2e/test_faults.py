"""Runs in which a rank hangs, or that are stopped before they have begun."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from rlscale.testing.models import tiny_model
from tests.e2e.program import Program, launch, small, striking
from tests.worlds import busy


@pytest.mark.exhaustive
def test_a_stalled_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    arranged = small(tiny_model("qwen2", tied=False, layers=2), trainer__collective_timeout_s=15)
    fault = striking(tmp_path / "note", "hang", 1, phase="update_actor", step=2)
    ended = launch(tmp_path / "run", arranged, environment=fault, limit=120)
    assert ended.status not in (0, 75) and not ended.left, ended.output
    assert "what the ranks are doing" in ended.output
    assert "rank 1: in update_actor of step 2 for" in ended.output


@pytest.mark.parametrize("moment", [0.5, 4.0])  # before and after the engine is a process of its own, without load
def test_a_signal_while_engines_start_leaves_nothing_behind(tmp_path: Path, moment: float) -> None:
    with Program(tmp_path / "run", small(tiny_model("qwen2", tied=False, layers=2))) as program:
        deadline = time.monotonic() + 60 * busy()
        while not (program.folder / "engines/rank_1.log").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(moment)
        ranks = [pid for pid, command in program.processes().items() if "train.py --local_rank=1" in command]
        os.kill(ranks[0], signal.SIGTERM)
        ended = program.wait(limit=30)
    assert ended.status not in (0, 75) and not ended.left, ended.output
    assert "error: rank 1: stopped by a signal before the first step" in ended.output
    assert "Traceback" not in ended.output
