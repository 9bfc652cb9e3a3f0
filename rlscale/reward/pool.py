"""Scoring beside generation: worker processes that run scorers, one response at a time each, under a time-out.

Scorers are other people's code on text that a policy under optimisation wrote: they hang (regular expressions, symbolic
algebra), crash and return nonsense. Each worker has a private pipe, so that a fault concerns one response: no answer in
time kills that worker and starts another, and a closed pipe means that it crashed. Whatever goes wrong is a score of 0
marked as failed, never an exception in the middle of a rollout.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from rlscale.reward import scorers

if TYPE_CHECKING:
    from rlscale.config.schema import RewardConfig
    from rlscale.data.dataset import Prompt

START_TIMEOUT_S = 120.0  # for importing the scorers, not for scoring


@dataclass
class Score:
    """What one response is worth. ``error``: why the scorer gave no valid number, and ``value`` is 0; else empty."""

    value: float
    error: str = ""
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return bool(self.error)


class RewardPool:
    """`num_workers` scorer processes.

    Args:
        cfg: which scorer (null: each prompt's own), its further arguments, the number of workers and the time-out.
        scorers: the specs of all prompts that will come (`Prompt.scorer`); loaded once by every worker.

    Raises:
        ValueError: a scorer doesn't exist or can't be imported.
    """

    def __init__(self, cfg: RewardConfig, scorers: set[str]):
        self.cfg = cfg
        self.targets = targets_of(cfg, scorers)
        self._workers = [Worker(sorted(set(self.targets.values()))) for _ in range(cfg.num_workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(cfg.num_workers, thread_name_prefix="reward")
        self._closed = False
        atexit.register(self.close)
        # workers are started by the threads that talk to them: a worker dies with the thread that started it
        for worker, error in zip(self._workers, list(self._threads.map(Worker.start, self._workers)), strict=True):
            if error:
                self.close()
                raise ValueError(error)
            self._idle.put(worker)

    async def score(self, prompt: Prompt, response_text: str) -> Score:
        """Score one response. Never raises for what the scorer does.

        The scorer is called with `data_source`, `solution_str`, `ground_truth`, `extra_info` (the prompt's, with the
        last user turn under `question` where the data has no such field) and `reward.scorer_args`.
        """
        question = next((turn["content"] for turn in reversed(prompt.messages) if turn["role"] == "user"), "")
        arguments = {
            "data_source": prompt.data_source,
            "solution_str": response_text,
            "ground_truth": prompt.ground_truth,
            "extra_info": {"question": question, **prompt.extra_info},
            **self.cfg.scorer_args,
        }
        target = self.targets[self.cfg.scorer or prompt.scorer]
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, target, arguments)
        except RuntimeError as error:  # the threads have been shut down
            return Score(0.0, f"the reward pool is closed ({error})")

    def _run(self, target: str, arguments: dict[str, Any]) -> Score:
        """Score in a thread of the pool."""
        worker = self._idle.get()
        try:
            if self._closed:
                return Score(0.0, "the reward pool is closed")
            if not worker.alive and (error := worker.start()):
                return Score(0.0, error)
            return worker.run(target, arguments, self.cfg.timeout_s)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers, busy ones too. May be called again."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.kill()  # one that a thread was just starting


class Worker:
    """The pool's end of one scorer process."""

    def __init__(self, targets: list[str]):
        self.targets = targets
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> str:
        """Start the process and load the scorers there. Returns why that didn't work, or an empty string."""
        self.kill()
        ours, theirs = Pipe()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        command = [sys.executable, "-m", "rlscale.reward.worker", str(theirs.fileno()), str(os.getpid())]
        try:
            # a process group of its own: killed together with whatever a scorer has started, out of reach of Ctrl-C
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), process_group=0
            )
        finally:
            theirs.close()
        self.pipe = ours
        try:
            ours.send(self.targets)
            if not ours.poll(START_TIMEOUT_S):
                error = f"loading the scorers {', '.join(self.targets)} takes more than {START_TIMEOUT_S:.0f} s"
            else:
                error = ours.recv() or ""
        except (EOFError, OSError):
            error = f"a scorer process ended while loading {', '.join(self.targets)} (exit status {self._status()})"
        if error:
            self.kill()
        return error

    def run(self, target: str, arguments: dict[str, Any], timeout: float) -> Score:
        """Score one response within `timeout` seconds."""
        pipe = self.pipe
        assert pipe is not None
        try:
            pipe.send((target, arguments))
            if not pipe.poll(timeout):
                self.kill()
                return Score(0.0, f"the scorer took more than {timeout:g} s")
            return Score(*pipe.recv())
        except (EOFError, OSError):
            status = self._status()
            self.kill()
            return Score(0.0, f"the scorer process died (exit status {status})")
        except Exception as error:  # arguments that can't be pickled: nothing has been sent
            return Score(0.0, f"{type(error).__name__}: {error}"[:500])

    def kill(self) -> None:
        """End the process and its children; nothing happens where there is none."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _status(self) -> int | None:
        try:
            return self.process.wait(5) if self.process else None
        except subprocess.TimeoutExpired:
            return None


def targets_of(cfg: RewardConfig, specs: set[str]) -> dict[str, str]:
    """spec -> expanded spec of every scorer in use, without importing any.

    Raises:
        ValueError: a spec is malformed or a data source has no scorer.
    """
    return {spec: scorers.expand(spec) for spec in sorted({cfg.scorer} if cfg.scorer else specs)}
