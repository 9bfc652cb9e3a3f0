"""Runs that are interrupted and started again with the same command end with the numbers of an unbroken run.

A few interruptions are part of the suite. All of them:

    python -m pytest tests/e2e/test_resume.py -m exhaustive              # signals and failures in every phase
    python -m pytest tests/e2e/test_resume.py -m exhaustive -k killed --kills 20 --kill-seed 20  # at drawn moments
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlscale.checkpoint.store import Store, read_manifest
from rlscale.testing.models import tiny_model
from tests import leftovers
from tests.disk import small_file_system
from tests.e2e.program import GONE_WITHIN, MARK, ROOT, Ended, Program, launch, small, striking
from tests.worlds import busy

STEPS, MANY_STEPS = 6, 12  # of a run that is interrupted a few times, and in every phase
MOMENTS = ("rollout", "scoring", "update", "sync", "save", "publish")
# until the advantages nothing of a step has changed anything, and it is given up
GIVEN_UP = ("gen", "score", "old_log_prob", "ref", "values")
PHASES = (*GIVEN_UP, "adv", "update_critic", "update_actor", "sync", "validate", "export", "save")
GRACE, WITHIN = 25.0, 30.0  # seconds: trainer.stop_grace_s; for all processes to be gone after a failure


def settings(steps: int = STEPS, **overrides: Any) -> dict[str, Any]:
    """PPO with a critic and everything that has a state: adaptive KL, schedules, epochs, validation."""
    model = tiny_model("qwen2", tied=False, layers=2)
    return small(
        model,
        **{
            "trainer__total_training_steps": steps,
            "trainer__deterministic": True,
            "trainer__save_freq": 1,
            "trainer__async_save": True,
            "trainer__export": "save",
            "trainer__resume_mode": "auto",
            "trainer__test_freq": 1,
            "trainer__val_before_train": True,
            "data__train": [{"task": "addition", "size": 10, "seed": 1}],  # an epoch ends in the middle of a step
            "data__val": [{"task": "addition", "size": 4, "seed": 2, "params": {"split": "val"}}],
            "actor__ppo_mini_batch_size": 2,
            "actor__ppo_epochs": 2,
            "actor__optim__lr_scheduler": "cosine",
            "algorithm__adv_estimator": "gae",
            "algorithm__use_kl_in_reward": True,
            "algorithm__kl_ctrl__type": "adaptive",
            "algorithm__kl_ctrl__horizon": 100,
            **overrides,
        },
    )


def killed(folder: Path, steps: int, moment: str, count: int, seconds: float) -> bool:
    """Start the run and kill it; False where it ended before the moment came. Nothing of it is left."""
    note = folder.parent / "killed"
    environment = striking(note, "die-all", call=moment, count=count, after_s=seconds)
    with Program(folder, settings(steps), environment=environment) as program:
        status = program.process.wait(180 * busy())
        assert status in (0, -signal.SIGKILL), program.last_words
        mark = f"{MARK}={program.mark}"
        for line in leftovers.still_left(lambda: leftovers.left(mark, program.shm), GONE_WITHIN * busy()):
            assert line.startswith("file /dev/shm/"), line
            Path(line.removeprefix("file ")).unlink(missing_ok=True)  # nobody was left to do it
    return note.exists()


def moments(number: int, seed: int) -> Iterator[tuple[str, int, float]]:
    """Moments for kills: every kind in turn, at a random call of it and a random time after the call began."""
    draw = random.Random(seed)
    kinds = [MOMENTS[(i + seed) % len(MOMENTS)] for i in range(number)]
    draw.shuffle(kinds)
    for kind in kinds:
        calls = {"rollout": 2, "scoring": 20, "update": 8, "sync": 2, "save": 2, "publish": 2}[kind]
        yield kind, draw.randint(1, calls), draw.choice([0.0, draw.uniform(0, 0.3)])


def struck(
    folder: Path,
    what: str,
    phase: str,
    rank: int,
    limit: float,
    steps: int,
    then: Callable[[Program], None] = lambda _: None,
) -> Ended:
    """Start the run, let something happen in a phase of the next step, the second at least, and wait for its end."""
    note = folder.parent / "struck"
    step = max(Store(folder / "checkpoints").steps(), default=1) + 1
    environment = striking(note, what, rank, phase=phase, step=step)
    with Program(folder, settings(steps), environment=environment) as program:
        deadline = time.monotonic() + 120 * busy()
        while not note.exists() and program.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        then(program)
        ended = program.wait(limit, gone_within=limit)
    assert note.exists() and not ended.left, ended.output
    return ended


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of the unbroken run of so many steps."""

    @functools.cache
    def run(steps: int) -> Path:
        folder = tmp_path_factory.mktemp("unbroken") / "run"
        ended = launch(folder, settings(steps), limit=180.0 + 10 * steps)
        assert ended.status == 0 and not ended.left, ended.output
        return folder

    return run


def same(a: Path, b: Path) -> None:
    """What a user would run."""
    command = [sys.executable, "-m", "rlscale.cli", "compare", str(a), str(b)]
    compared = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert compared.returncode == 0, compared.stdout + compared.stderr


def continued(unbroken: Path, folder: Path, steps: int) -> Ended:
    """Let an interrupted run come to its end, and compare."""
    ended = launch(folder, settings(steps), limit=180.0 + 10 * steps)
    assert ended.status == 0 and not ended.left, ended.output
    same(unbroken, folder)
    times = [json.loads((run / "summary.json").read_text())["seconds"] for run in (unbroken, folder)]
    assert times[0] > 0 and times[1] is None  # what was lost between the parts is not counted
    for kind in ("step", "val"):
        names = [sorted(p.name for p in run.glob(f"rollouts/{kind}_*.jsonl")) for run in (unbroken, folder)]
        assert names[0] == names[1]
    return ended


def stop(folder: Path, name: str, phase: str, rank: int, steps: int = STEPS) -> None:
    """A signal: within the grace period the state is saved, and the status says so."""
    before = max(Store(folder / "checkpoints").steps(), default=1)
    ended = struck(folder, name, phase, rank, GRACE, steps)
    assert ended.status == 75, ended.output
    assert f"stopped: {name} on rank {rank}" in ended.output
    assert Store(folder / "checkpoints").steps()[-1] == before + (phase not in GIVEN_UP)


def interrupt(folder: Path, how: str, phase: str, steps: int = STEPS) -> None:
    """Ctrl-C in a terminal reaches every process of the group, a scheduler's SIGTERM only the outermost one."""

    def act(program: Program) -> None:
        if how == "ctrl-c":
            os.killpg(program.process.pid, signal.SIGINT)
        else:
            program.process.terminate()

    before = max(Store(folder / "checkpoints").steps(), default=1)
    ended = struck(folder, "wait", phase, 1, GRACE, steps, act)
    assert ended.status != 0, ended.output
    assert Store(folder / "checkpoints").steps()[-1] == before + (phase not in GIVEN_UP)


def fail(folder: Path, what: str, phase: str, rank: int, steps: int = STEPS) -> None:
    """An exception on one rank, or its death: all are gone soon, and the cause is on the last screen."""
    ended = struck(folder, what, phase, rank, WITHIN, steps)
    assert ended.status not in (0, 75), ended.output
    if what == "raise":
        last_screen = ended.output.splitlines()[-40:]
        cause = re.compile(rf"error: rank {rank}: .*RuntimeError: .*a fault that was asked for")
        assert any(cause.match(line) for line in last_screen), ended.output


def damage(folder: Path) -> tuple[Path, int]:
    """Flip a bit of the last checkpoint; the file, and the step of the checkpoint before."""
    store = Store(folder / "checkpoints")
    before, last = store.steps()
    file = store.path(last) / "rank_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file, before


@pytest.mark.timeout(1200)
def test_interrupted_and_damaged_runs_end_as_if_they_had_not_been(
    unbroken: Callable[[int], Path], tmp_path: Path
) -> None:
    """One run, stopped in every way; at last its newest checkpoint loses a bit, and it resumes from the one before."""
    folder = tmp_path / "run"
    stop(folder, "SIGTERM", "gen", 1)
    interrupt(folder, "sigterm", "update_actor")
    stop(folder, "SIGUSR1", "validate", 0)
    fail(folder, "raise", "update_critic", 1)
    for moment in moments(1, seed=20):
        assert killed(folder, STEPS, *moment)
    interrupt(folder, "ctrl-c", "update_actor")
    file, before = damage(folder)
    ended = continued(unbroken(STEPS), folder, STEPS)
    assert f"{file}: its content has changed" in ended.output
    assert f"resuming after step {before}" in ended.output
    assert Store(folder / "checkpoints").steps() == [STEPS - 1, STEPS]
    exported(folder / "checkpoints" / f"step_{STEPS:06d}", folder / "export" / f"step_{STEPS:06d}", tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_killed_runs_end_as_if_they_had_not_been(
    unbroken: Callable[[int], Path], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    folder, kills = tmp_path / "run", pytestconfig.getoption("--kills")
    steps = max(STEPS, kills)
    for moment in moments(kills, pytestconfig.getoption("--kill-seed")):
        assert killed(folder, steps, *moment)
        kind, count, seconds = moment
        print(f"{kind} call {count} + {seconds:.3f} s: checkpoints {Store(folder / 'checkpoints').steps()}", flush=True)
    continued(unbroken(steps), folder, steps)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_run_that_was_stopped_in_every_phase(name: str, unbroken: Callable[[int], Path], tmp_path: Path) -> None:
    for number, phase in enumerate(PHASES):
        stop(tmp_path / "run", name, phase, number % 2, MANY_STEPS)
    continued(unbroken(MANY_STEPS), tmp_path / "run", MANY_STEPS)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["sigterm", "ctrl-c"])
def test_a_run_that_was_interrupted_from_outside_in_every_phase(
    how: str, unbroken: Callable[[int], Path], tmp_path: Path
) -> None:
    for phase in PHASES:
        interrupt(tmp_path / "run", how, phase, MANY_STEPS)
    continued(unbroken(MANY_STEPS), tmp_path / "run", MANY_STEPS)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", ["raise", "die"])
def test_a_run_that_has_failed_in_every_phase(what: str, unbroken: Callable[[int], Path], tmp_path: Path) -> None:
    for number, phase in enumerate(PHASES):
        fail(tmp_path / "run", what, phase, number % 2, MANY_STEPS)
    continued(unbroken(MANY_STEPS), tmp_path / "run", MANY_STEPS)


@pytest.mark.exhaustive
def test_a_run_whose_disk_is_full(unbroken: Callable[[int], Path], tmp_path: Path) -> None:
    """It ends with a message, or goes on where it is told to; the checkpoint before stands, and continues the run."""
    checkpoint = unbroken(STEPS) / "checkpoints" / f"step_{STEPS:06d}"
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    with small_file_system(tmp_path / "disk", size + size // 2 + 2 * 2**20) as disk:
        folder = disk / "run"
        full = settings(trainer__keep_last=1, trainer__export="never", trainer__async_save=False)
        ended = launch(folder, full)
        assert ended.status not in (0, 75) and not ended.left, ended.output
        store = Store(folder / "checkpoints")
        assert f"{store.path(2)} could not be written: rank" in "\n".join(ended.errors), ended.output
        assert "No space left on device" in "\n".join(ended.errors)
        assert [p.name for p in store.root.iterdir()] == ["step_000001"]
        ended = launch(folder, full | {"trainer.continue_on_save_error": True})
        assert ended.status == 0 and not ended.left, ended.output
        assert "resuming after step 1" in ended.output
        assert f"WARNING: checkpoint {store.path(STEPS)} could not be written" in ended.output
        same(unbroken(STEPS), folder)
        assert [p.name for p in store.root.iterdir()] == ["step_000001"]
        read_manifest(store.path(1)).verify()


def exported(checkpoint: Path, policy: Path, tmp_path: Path) -> None:
    """`rlscale export` makes of a checkpoint what the run has exported itself."""
    from safetensors.torch import load_file

    command = [sys.executable, "-m", "rlscale.cli", "export", str(checkpoint), str(tmp_path / "hf")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {p.name for p in (tmp_path / "hf").iterdir()} == {p.name for p in policy.iterdir()}
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", policy))
    assert ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)
