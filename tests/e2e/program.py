"""The program of the README as a test starts it: the same command, a tiny model, and a look at what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlscale.cluster.process import free_port
from tests import leftovers
from tests.worlds import busy

ROOT = Path(__file__).resolve().parents[2]
MARK = "RLSCALE_TEST_PROGRAM"
SCORERS = "tests/e2e/scorers.py"
GONE_WITHIN = 5.0  # seconds after the program's end that its processes and shared memory have to be gone


@dataclass
class Ended:
    """A program that has ended.

    ``left``: processes and /dev/shm files that it has left behind, and libraries that it has compiled: one that is
    killed meanwhile leaves half a library in the user's cache, on which later runs fail.
    """

    folder: Path
    status: int
    seconds: float
    output: str
    left: list[str]

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One object a step, validation before training (step 0) excepted."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [m for m in map(json.loads, lines) if m["step"] > 0]

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        [file] = self.folder.glob(f"rollouts/step_*{step}.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error: ")]


@dataclass
class Program:
    """``deepspeed --num_gpus ranks script --yaml yaml overrides`` in a process group of its own."""

    folder: Path
    overrides: dict[str, Any]
    script: str = "launchers/train.py"
    yaml: str = "yamls/quickstart_cpu.yaml"
    ranks: int = 2
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __enter__(self) -> Program:
        self.shm = leftovers.shm_files()
        self.started = time.monotonic()
        self.compiled = self.folder.parent / f"{self.folder.name}.compiled"
        bin_folder = Path(sys.executable).parent
        values = [
            f"{key}={json.dumps(value)}"
            for key, value in ({"trainer.run_dir": str(self.folder)} | self.overrides).items()
        ]
        command = [
            str(bin_folder / "deepspeed"),
            "--num_gpus",
            str(self.ranks),
            "--master_port",
            str(free_port()),
            self.script,
            "--yaml",
            self.yaml,
            *values,
            *self.arguments,
        ]
        env = os.environ | {
            MARK: self.mark,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.compiled),
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            **self.environment,
        }
        self.log = self.folder.parent / f"{self.folder.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        leftovers.own_session(self.process.pid, f"{MARK}={self.mark}", leftovers.session_mark())
        return self

    def wait(self, limit: float, gone_within: float = GONE_WITHIN) -> Ended:
        """The ended program, and what is left of it after ``gone_within`` seconds more.

        Raises:
            TimeoutError: it still runs after ``limit`` seconds; with its output.
        """
        try:
            status = self.process.wait(limit * busy())
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the program still runs after {limit:.0f} s:\n{self.output[-6000:]}") from None
        seconds = time.monotonic() - self.started
        left = leftovers.still_left(lambda: leftovers.left(f"{MARK}={self.mark}", self.shm), gone_within * busy())
        left += [f"compiled {file}" for file in self.compiled.rglob("*.so")]
        return Ended(self.folder, status, seconds, self.output, left)

    def wait_for_step(self, step: int, limit: float) -> None:
        """Return when the metrics of a step have been written."""
        file = self.folder / "metrics.jsonl"
        deadline = time.monotonic() + limit * busy()
        while not (file.exists() and f'"step": {step},' in file.read_text()):
            if self.process.poll() is not None:
                raise RuntimeError(f"the program ended before step {step}:\n{self.output[-6000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step {step} after {limit:.0f} s:\n{self.output[-6000:]}")
            time.sleep(0.2)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def last_words(self) -> str:
        """The end of its output, and every line that names an error: the first rank's comes long before the end."""
        return "\n".join([self.output[-3000:], *(line for line in self.output.splitlines() if "rror: " in line)])

    def processes(self) -> dict[int, str]:
        """pid -> command line of all its processes."""
        return leftovers.processes(f"{MARK}={self.mark}")

    def __exit__(self, *_: Any) -> None:
        for sent in (signal.SIGTERM, signal.SIGKILL):  # a test that has failed leaves the program running
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sent)
            deadline = time.monotonic() + 5
            while self.processes() and time.monotonic() < deadline:
                self.process.poll()
                time.sleep(0.2)


def launch(folder: Path, overrides: dict[str, Any], *, limit: float = 180.0, **how: Any) -> Ended:
    """Run the program to its end."""
    with Program(folder, overrides, **how) as program:
        return program.wait(limit)


def striking(note: Path, what: str, rank: int = 0, **when: Any) -> dict[str, str]:
    """Environment of a program to which something happens; the arguments are those of `strike.sitecustomize.arm`."""
    note.unlink(missing_ok=True)
    return {
        "RLSCALE_TEST_STRIKE": json.dumps({"what": what, "rank": rank, "note": str(note), **when}),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/e2e/strike"), os.environ.get("PYTHONPATH", str(ROOT))]),
    }


def small(model: str, **overrides: Any) -> dict[str, Any]:
    """Settings of a run of 2 steps of 4 prompts x 4 responses of a tiny model in fp32. ``__`` in a key is a dot."""
    return {
        "model.path": model,
        "model.dtype": "float32",
        "trainer.total_training_steps": 2,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.export": "never",
        "trainer.plots": False,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 96,
        "data.max_response_length": 16,
        "actor.ppo_mini_batch_size": 4,
        "actor.optim.lr": 1e-4,
        "rollout.n": 4,
        "rollout.kv_cache_memory_gb": 0.1,
        "reward.scorer": f"{SCORERS}:spread",
    } | {key.replace("__", "."): value for key, value in overrides.items()}
