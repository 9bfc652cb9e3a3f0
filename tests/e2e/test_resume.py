"""Runs that are killed and started again with the same command end with the numbers of a run that never stopped.

One kill is part of the suite; RLSCALE_KILLS=20 python -m pytest tests/e2e/test_resume.py makes as many, one after the
other on one run, at moments drawn from RLSCALE_KILL_SEED.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlscale.checkpoint import Store
from tests import leftovers
from tests.e2e.program import GONE_WITHIN, MARK, ROOT, Program, launch, small
from tests.tiny import tiny_model

KILLS = int(os.environ.get("RLSCALE_KILLS", "1"))
SEED = int(os.environ.get("RLSCALE_KILL_SEED", "20"))
STEPS = max(5, KILLS)
MOMENTS = ("rollout", "scoring", "update", "sync", "save", "publish")


def settings(**overrides: Any) -> dict[str, Any]:
    model = tiny_model("qwen2", tied=False, layers=2)
    return small(
        model,
        **{
            "trainer__total_training_steps": STEPS,
            "trainer__save_freq": 1,
            "trainer__async_save": True,
            "trainer__resume_mode": "auto",
            "trainer__test_freq": 2,
            "trainer__val_before_train": True,
            "data__train": [{"task": "addition", "size": 10, "seed": 1}],  # an epoch ends in the middle of a step
            "data__val": [{"task": "addition", "size": 4, "seed": 2, "params": {"split": "val"}}],
            "actor__ppo_mini_batch_size": 2,
            "actor__ppo_epochs": 2,
            "actor__optim__lr_scheduler": "cosine",
            "algorithm__use_kl_in_reward": True,
            "algorithm__kl_ctrl__type": "adaptive",
            "algorithm__kl_ctrl__horizon": 100,
            **overrides,
        },
    )


def killed(folder: Path, moment: str, count: int, seconds: float) -> bool:
    """Start the run and kill it; False where it ended before the moment came. Nothing of it is left."""
    note = folder.parent / "killed"
    note.unlink(missing_ok=True)
    environment = {
        "RLSCALE_TEST_KILL": f"{moment}:{count}:{seconds}",
        "RLSCALE_TEST_KILLED": str(note),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/e2e/killer"), os.environ.get("PYTHONPATH", str(ROOT))]),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with Program(folder, settings()) as program:
            status = program.process.wait(180)
            assert status in (0, -signal.SIGKILL), program.output[-3000:]
            mark = f"{MARK}={program.mark}"
            for line in leftovers.still_left(lambda: leftovers.left(mark, program.shm), GONE_WITHIN):
                assert line.startswith("file /dev/shm/"), line
                Path(line.removeprefix("file ")).unlink(missing_ok=True)  # nobody was left to do it
    return note.exists()


def moments(number: int, seed: int) -> Iterator[tuple[str, int, float]]:
    """Moments for kills: every kind in turn, at a random call of it and a random time after the call began."""
    draw = random.Random(seed)
    kinds = [MOMENTS[(i + seed) % len(MOMENTS)] for i in range(number)]
    draw.shuffle(kinds)
    for kind in kinds:
        calls = {"rollout": 2, "scoring": 20, "update": 6, "sync": 2, "save": 2, "publish": 2}[kind]
        yield kind, draw.randint(1, calls), draw.choice([0.0, draw.uniform(0, 0.3)])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run = launch(folder, settings())
    assert run.status == 0 and not run.left, run.output
    return folder


def same(a: Path, b: Path) -> None:
    """What a user would run."""
    command = [sys.executable, "tools/compare_runs.py", str(a), str(b)]
    compared = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert compared.returncode == 0, compared.stdout + compared.stderr


def test_killed_runs_end_as_if_they_had_not_been(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for moment, count, seconds in moments(KILLS, SEED):
        hit = killed(folder, moment, count, seconds)
        print(f"{moment} call {count} + {seconds:.3f} s: {'killed' if hit else 'ended before'}, checkpoints "
              f"{Store(folder / 'checkpoints').steps()}")  # fmt: skip
    ended = launch(folder, settings())
    assert ended.status == 0 and not ended.left, ended.output
    same(unbroken, folder)
    for kind in ("step", "val"):
        names = [sorted(p.name for p in run.glob(f"rollouts/{kind}_*.jsonl")) for run in (unbroken, folder)]
        assert names[0] == names[1]


def test_damaged_checkpoint_is_named_and_the_one_before_it_used(unbroken: Path, tmp_path: Path) -> None:
    """On a copy of the finished run: its last checkpoint loses a bit, the run goes on from the one before."""
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", str(unbroken), str(folder)], check=True)
    store = Store(folder / "checkpoints")
    assert store.steps() == [STEPS - 1, STEPS]
    file = store.path(STEPS) / "rank_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    again = launch(folder, settings(trainer__export="end"))
    assert again.status == 0 and not again.left, again.output
    assert f"{file}: its content has changed" in again.output
    assert f"resuming after step {STEPS - 1}" in again.output
    same(unbroken, folder)
    assert store.steps() == [STEPS - 1, STEPS]
    exported(folder / "checkpoints" / f"step_{STEPS:06d}", folder / "export" / f"step_{STEPS:06d}", tmp_path)


def exported(checkpoint: Path, policy: Path, tmp_path: Path) -> None:
    """tools/export.py makes of a checkpoint what the run has exported itself."""
    from safetensors.torch import load_file

    command = [sys.executable, "tools/export.py", str(checkpoint), str(tmp_path / "hf")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {p.name for p in (tmp_path / "hf").iterdir()} == {p.name for p in policy.iterdir()}
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", policy))
    assert ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)
