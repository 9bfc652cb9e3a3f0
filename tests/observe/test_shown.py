"""What a run shows: progress, timers, plots, summary, and the check that it learned."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlscale.observe.plots import PANELS, draw
from rlscale.observe.progress import Progress, duration, shown
from rlscale.observe.summary import print_summary, summarize
from rlscale.observe.timers import Timers
from rlscale.observe.writers import METRICS

ROOT = Path(__file__).parents[2]
STEP = {
    "critic/score/mean": 0.5,
    "actor/ref_kl": 0.01,
    "actor/entropy": 1.2,
    "response_length/mean": 20.25,
    "perf/throughput": 512.0,
    "timing_s/step": 8.0,
}


def records(
    rewards: list[float], before: float | None = 0.5, after: float | None = 0.75, **more: float
) -> list[dict[str, Any]]:
    """A run's metrics: validation before and after, and these rewards."""
    out: list[dict[str, Any]] = [] if before is None else [{"step": 0, "val/addition/mean@1": before}]
    for i, reward in enumerate(rewards, 1):
        out.append(
            {
                "step": i,
                "critic/score/mean": reward,
                "batch/num_tokens": 100,
                "batch/num_samples": 4,
                "timing_s/step": 2.0,
            }
            | more
        )
    if after is not None:
        out[-1]["val/addition/mean@1"] = after
    return out


def run_folder(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


# ---- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_plain_line_a_step_without_a_terminal() -> None:
    out = io.StringIO()
    with contextlib.closing(Progress(40, stream=out)) as progress:
        progress.phase("gen")
        progress.step(1, STEP)
        progress.message("val 0.5")
        progress.step(2, {})
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 and lines[1] == "val 0.5"
    assert re.fullmatch(
        r"step  1/40 \| reward 0\.500 \| kl 0\.0100 \| entropy 1\.200 \| length 20\.2 \| tokens/s 512 \| s/step 8\.0"
        r" \| left \d+:\d\d",
        lines[0],
    )


def test_the_display_of_a_terminal_shows_the_same_numbers() -> None:
    out = Terminal()
    with contextlib.closing(Progress(40, stream=out)) as progress:
        progress.step(3, STEP)
        progress.message("[not markup]")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "3/40" in text and "[not markup]" in text
    assert "reward 0.500" in text.replace("\n", " ")


def test_a_reader_that_is_gone_does_not_end_the_run() -> None:
    """``... | tee log`` dies of the Ctrl-C that asks the run to save its state."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out, contextlib.closing(Progress(4, stream=out)) as progress:
        progress.step(1, STEP)
        progress.message("x")
        with contextlib.suppress(OSError):
            out.close()


def test_other_ranks_are_silent() -> None:
    out = Terminal()
    with contextlib.closing(Progress(4, rank=1, stream=out)) as progress:
        progress.step(1, STEP)
        progress.message("x")
    assert out.getvalue() == ""


def test_time_left_is_the_median_step_times_the_steps_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(10, stream=io.StringIO())
    assert progress.seconds_left() == 0.0
    for step, seconds in enumerate((60.0, 2.0, 3.0), 1):  # the first step compiles
        now[0] += seconds
        progress.step(step, {})
    assert progress.seconds_left() == 7 * 3.0
    now[0] += 100.0
    progress.restart_clock()
    now[0] += 3.0
    progress.step(4, {})
    assert progress.seconds_left() == 6 * 3.0


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.6, 61, 3599, 3600, 100000)] == [
        "0:00",
        "1:00",
        "1:01",
        "59:59",
        "1:00:00",
        "27:46:40",
    ]


# ---- timers


def test_timers_add_up_nest_and_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    phases: list[str] = []
    timers = Timers(on_phase=phases.append)
    with timers("step"):
        for seconds in (1.0, 2.0):
            with timers("gen"):
                now[0] += seconds
        with pytest.raises(KeyError), timers("adv"):
            now[0] += 0.5
            raise KeyError
    assert timers.take() == {"timing_s/gen": 3.0, "timing_s/adv": 0.5, "timing_s/step": 3.5}
    assert timers.take() == {}
    assert phases == ["step", "gen", "gen", "adv"]


def test_queued_work_is_waited_for_at_both_ends() -> None:
    calls: list[str] = []
    timers = Timers(synchronize=lambda: calls.append("sync"))
    with timers("gen"):
        calls.append("work")
    assert calls == ["sync", "work", "sync"]


# ---- plots


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_plots_are_drawn_for_what_a_run_has(tmp_path: Path) -> None:
    full = {name: 0.5 for panel in PANELS for _, name in panel.series}
    full |= {"response_length/min": 1.0, "response_length/max": 9.0, "timing_s/gen": 1.0, "timing_s/update_actor": 0.5}
    drawn = draw(run_folder(tmp_path / "full", records([0.1, 0.3, 0.5, 0.4, 0.6, 0.7], **full)))
    assert {p.stem for p in drawn} == {p.file for p in PANELS} | {"validation", "time_by_phase"}
    assert {p.stem for p in drawn} >= {
        "reward",
        "kl_reference",
        "kl_old",
        "clip_fraction",
        "entropy",
        "deviation",
        "lengths",
        "time_by_phase",
    }
    assert all(png_size(p)[0] > 600 for p in drawn)
    few = draw(run_folder(tmp_path / "few", records([0.1], None, None)))  # one step: no validation, no phases
    assert [p.stem for p in few] == ["reward"]
    assert draw(run_folder(tmp_path / "none", [{"step": 0, "a": 1.0}])) == []


def test_a_plot_shows_its_data(tmp_path: Path) -> None:
    """Other numbers give another picture; the same numbers the same."""
    pictures = []
    for name, rewards in (("a", [0.1, 0.5]), ("b", [0.5, 0.1]), ("c", [0.1, 0.5])):
        (path,) = draw(run_folder(tmp_path / name, records(rewards, None, None)))
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[2] != pictures[1]


# ---- summary


def test_summary(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", records([0.0, 0.1, 0.2, 0.3, 0.4, 0.9, 0.9, 0.9, 0.9, 0.9]))
    summary = summarize(folder, seconds=65.0)
    assert summary["reward_first"] == pytest.approx(0.2) and summary["reward_last"] == pytest.approx(0.9)
    assert (summary["steps"], summary["samples"], summary["tokens"]) == (10, 40, 1000)
    assert summary["tokens_per_second"] == pytest.approx(50.0)
    assert summary["accuracy"] == {"addition/mean@1": {"before": 0.5, "after": 0.75}}
    assert json.loads((folder / "summary.json").read_text()) == summary
    lines: list[str] = []
    print_summary(summary, lines.append)
    text = "\n".join(lines)
    assert "held-out addition/mean@1: 0.500 before, 0.750 after" in text
    assert "0.200 in the first steps, 0.900 in the last" in text
    assert "10 steps, 40 samples, 1000 tokens (50 tokens/s)" in text and "0:20 in steps of 1:05 in all" in text
    assert summary["skipped_steps"] == 0 and "skipped" not in text


def test_skipped_optimizer_steps_are_shown(tmp_path: Path) -> None:
    rows = records([0.1, 0.2, 0.3])
    rows[-1]["actor/skipped_steps"], rows[-2]["actor/skipped_steps"], rows[-1]["critic/skipped_steps"] = 2.0, 0.0, 1.0
    summary = summarize(run_folder(tmp_path / "run", rows))
    lines: list[str] = []
    print_summary(summary, lines.append)
    assert summary["skipped_steps"] == 3 and any("skipped" in line and line.endswith(": 3") for line in lines)
    assert ("SKIPPED", "2") in shown(rows[-1]) and ("SKIPPED by the critic", "1") in shown(rows[-1])
    assert not any("SKIPPED" in label for label, _ in shown(rows[-2]))


def test_summary_of_a_run_without_steps(tmp_path: Path) -> None:
    summary = summarize(run_folder(tmp_path / "run", [{"step": 0, "val/a/b/best@4": 1.0}]))
    assert summary["accuracy"] == {"a/b/best@4": {"before": 1.0, "after": None}}
    assert summary["reward_first"] is summary["tokens_per_second"] is None
    lines: list[str] = []
    print_summary(summary, lines.append)
    assert lines[-2:] == ["  0 steps", "  time: 0:00 in steps"]


def test_a_short_run_is_summarised_by_its_halves(tmp_path: Path) -> None:
    summary = summarize(run_folder(tmp_path / "run", records([0.0, 0.1, 0.3, 0.4])))
    assert (summary["reward_first"], summary["reward_last"]) == pytest.approx((0.05, 0.35))


def test_a_task_with_other_metrics_shows_them() -> None:
    assert shown({"sft/nll": 2.5, "sft/mean": 1.0}) == [("sft/nll", "2.5"), ("sft/mean", "1")]


# ---- tools/check_run.py

GOOD = [0.2, 0.3, 0.25, 0.5, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8]


@pytest.mark.parametrize(
    ("rows", "args", "complaint"),
    [
        (records(GOOD), [], ""),
        (records(GOOD[::-1]), [], "has not risen"),
        (records([0.8] * 10), [], "has not risen"),
        (records([r - 0.1 for r in GOOD]), [], "below 0.75"),
        (records([r - 0.1 for r in GOOD]), ["--min-reward", "0.6"], ""),
        (records(GOOD, 0.8, 0.79), [], "held-out addition/mean@1 fell"),
        (records(GOOD, 0.8, 0.79), ["--tolerance", "0.02"], ""),
        (records(GOOD, 0.8, None), [], "not measured after"),
        (records(GOOD, None, 0.8), [], "not measured before"),
        (records(GOOD, None, None), [], "no held-out accuracy"),
        (records([0.1, 0.9]), [], "2 steps"),
        ([], [], "0 steps"),
        (None, [], "no such file"),
    ],
)
def test_check_run(tmp_path: Path, rows: list[dict[str, Any]] | None, args: list[str], complaint: str) -> None:
    folder = tmp_path / "run" if rows is None else run_folder(tmp_path / "run", rows)
    command = [sys.executable, str(ROOT / "tools/check_run.py"), str(folder), *args]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == (1 if complaint else 0), run.stderr
    assert complaint in run.stderr and (complaint or not run.stderr)
    assert "Traceback" not in run.stderr
