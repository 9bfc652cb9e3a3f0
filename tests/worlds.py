"""A pool of started gloo worlds, so that a test on several ranks costs what it computes and not a minute of imports.

    def check(shape):                     # a function at the top level of a test module, called on every rank
        rank = torch.distributed.get_rank()
        ...
        return something_picklable

    def test_check():
        results = worlds.run(4, check, (2, 2))      # one result per rank, in the order of ranks

Each world size has its own processes, because the size of a torch.distributed world is fixed once it is started. They
are started by the first test that asks for the size and live until the session ends. The default process group is
made as a run makes it (`rlscale.cluster.device.init_distributed`, CPU, gloo); meshes and Megatron's parallel state
belong to the test. Between two tasks the seeds, the default dtype and the gradient mode are reset. Where all ranks
raise the same type of exception and the world still answers a collective, it is kept; otherwise a failed world is
killed, and the next test starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tests import leftovers

ROOT = Path(__file__).resolve().parent.parent
MAX_PROCESSES = 8  # idle worlds beyond this many processes are closed, the longest unused first
START_TIMEOUT = 180.0  # seconds, on a machine that does other things too
EXIT_TIMEOUT = 3.0  # seconds that a process has to end by itself
GRACE = 3.0  # seconds that the other ranks have to report after one rank has failed


class WorldError(RuntimeError):
    """A world could not start, stalled or lost a process; the message holds the ranks' logs and stacks."""


class RankTraceback(Exception):
    """The cause of a re-raised exception: which rank it came from, and its traceback there."""


def run(
    world_size: int, function: str | Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on every rank of a world and return the results in the order of ranks.

    Args:
        function: a function of the top level of a module, or its name as ``module:function``.
        timeout: seconds for the call (not for starting the world), more on a busy machine; then every rank's stack is
            in the error.

    Raises:
        WorldError: time-out, a process that died, or a world that did not start.
        Exception: the exception of the lowest rank that failed, with a `RankTraceback` as its cause.
    """
    world = _worlds.get(world_size)
    if world is None:
        _make_room(world_size)
        world = _worlds[world_size] = _start(world_size)
    world.used = time.monotonic()
    try:
        return world.call(_reference(function), pickle.dumps((args, kwargs)), timeout)
    finally:
        if not world.alive:
            del _worlds[world_size]


def busy() -> float:
    """Factor of time limits: 1, and more on a machine with more runnable processes than cores."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def started(world_size: int) -> bool:
    """Whether there is a world of this size."""
    return world_size in _worlds


def close() -> None:
    """End every world; the next `run` starts anew."""
    while _worlds:
        _worlds.popitem()[1].kill(idle=True)


def _make_room(wanted: int) -> None:
    by_age = sorted(_worlds, key=lambda size: _worlds[size].used)
    while by_age and sum(_worlds) + wanted > MAX_PROCESSES:
        _worlds.pop(by_age.pop(0)).kill(idle=True)


def _start(size: int) -> _World:
    """Start a world; a second time if the free port was taken by another process in between."""
    try:
        return _World(size)
    except WorldError:
        return _World(size)


def _reference(function: str | Callable[..., Any]) -> tuple[str, str, str]:
    """Name of the module, its file (empty: import by name) and qualified name of the function."""
    if isinstance(function, str):
        module, _, name = function.partition(":")
        return module, "", name
    if "<locals>" in function.__qualname__ or function.__name__ == "<lambda>":
        raise ValueError(f"worlds.run needs a function of a module's top level, not {function.__qualname__}")
    return function.__module__, inspect.getsourcefile(function) or "", function.__qualname__


class _World:
    """The processes of one world, seen from the test session."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.alive = True
        self.used = time.monotonic()
        self.folder = tempfile.TemporaryDirectory(prefix="rlscale-world-")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Connection] = []
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        for rank in range(size):
            ours, theirs = Pipe()
            with theirs, open(self._log(rank), "wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", __file__, str(theirs.fileno()), str(os.getpid())],
                        env=self._env(rank, port),
                        cwd=ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
                )
            leftovers.own_session(self.processes[-1].pid, leftovers.session_mark())
            self.pipes.append(ours)
        try:
            self._collect(START_TIMEOUT)
        except Exception as e:
            self.kill()
            raise WorldError(f"world of {size} did not start: {e}\n{e.__cause__ or ''}") from None

    def _env(self, rank: int, port: int) -> dict[str, str]:
        ours = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self.size,
            "LOCAL_WORLD_SIZE": self.size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": 1,
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": 1,
        }
        paths = [str(ROOT), *(p for p in sys.path if p.startswith(str(ROOT) + os.sep) and "site-packages" not in p)]
        return os.environ | {k: str(v) for k, v in ours.items()} | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}

    def _log(self, rank: int) -> Path:
        return Path(self.folder.name) / f"rank{rank}.log"

    def _logs(self) -> str:
        tails = ((rank, self._log(rank).read_text(errors="replace")[-6000:]) for rank in range(self.size))
        return "".join(f"\n--- log of rank {rank}\n{tail}" for rank, tail in tails if tail.strip())

    def call(self, reference: tuple[str, str, str], arguments: bytes, timeout: float) -> list[Any]:
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send((reference, arguments))
            except OSError:
                self._fail(
                    f"rank {rank} died before {reference[2]} was called (exit status {self.processes[rank].poll()})"
                )
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[Any]:
        """One answer of every rank, or the exception of the lowest failed one."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout * busy()
        while len(answers) < self.size:
            pending = [p for rank, p in enumerate(self.pipes) if rank not in answers]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                if any(not ok for ok, _ in answers.values()):
                    break
                missing = [rank for rank in range(self.size) if rank not in answers]
                self._stacks(missing)
                self._fail(f"no answer from ranks {missing} in {timeout:.0f} s")
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pickle.loads(self.pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.processes[rank].wait(5)
                    self._fail(f"rank {rank} died (exit status {self.processes[rank].poll()})")
                if not answers[rank][0]:  # the others may wait for ever for the failed one
                    deadline = min(deadline, time.monotonic() + GRACE)
        failed = {rank: answer for rank, (ok, answer) in sorted(answers.items()) if not ok}
        if failed:
            self._raise(failed)
        return [answers[rank][1] for rank in range(self.size)]

    def _raise(self, failed: dict[int, Any]) -> None:
        rank, (error, text) = next(iter(failed.items()))
        logs = self._logs()
        if not (len(failed) == self.size and len({type(e) for e, _ in failed.values()}) == 1 and self._answers()):
            self.kill()
        raise error from RankTraceback(f"rank {rank} of {self.size}:\n{text}{logs}")

    def _answers(self) -> bool:
        """Whether the world still agrees on a collective after every rank has failed alike."""
        try:
            return self.call((_check.__module__, "", "_check"), pickle.dumps(((), {})), 10.0) == [self.size] * self.size
        except Exception:
            return False

    def _stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            if self.processes[rank].poll() is None:
                self.processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(1.0)

    def _fail(self, message: str) -> None:
        logs = self._logs()
        self.kill()
        raise WorldError(message + logs)

    def kill(self, idle: bool = False) -> None:
        """End the processes and whatever they have started (each leads a session).

        A process that is ``idle`` ends by itself when its pipe closes. multiprocessing's resource trackers come last,
        when all others are gone: they remove the semaphores of a killed process from shared memory, and then end by
        themselves.
        """
        self.alive = False
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + EXIT_TIMEOUT
        while idle and any(process.poll() is None for process in self.processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        sessions = {process.pid for process in self.processes}
        for pid, command in leftovers.in_sessions(sessions).items():
            if "resource_tracker" not in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        deadline = time.monotonic() + EXIT_TIMEOUT
        while (rest := leftovers.in_sessions(sessions)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(FileNotFoundError):
            self.folder.cleanup()


_worlds: dict[int, _World] = {}
atexit.register(close)


# What follows runs in the processes of a world.


def _check() -> int:
    import torch

    one = torch.ones(1)
    torch.distributed.all_reduce(one)
    return int(one)


def _follow(parent: int) -> None:
    """End with everything this process has started when the session is gone, whatever the main thread waits for."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpid(), signal.SIGKILL)


def _initialise() -> None:
    from rlscale.cluster.device import init_distributed, prepare_process

    prepare_process("cpu")
    init_distributed("cpu", timeout_s=600.0)


def _load(module: str, file: str, name: str) -> Callable[..., Any]:
    """The function, from the same file as in the session, under the same module name (so that its classes unpickle)."""
    if module == "__main__" or (file == __file__):
        module = "tests.worlds"
    if module not in sys.modules and file and "." not in module:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None and spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[module])
        except BaseException:
            del sys.modules[module]
            raise
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


def _answer(reference: tuple[str, str, str], arguments: bytes) -> bytes:
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    try:
        function = _load(*reference)
        args, kwargs = pickle.loads(arguments)
        return pickle.dumps((True, function(*args, **kwargs)))
    except BaseException as e:
        text = traceback.format_exc()
        try:
            return pickle.dumps((False, (pickle.loads(pickle.dumps(e)), text)))
        except Exception:  # an exception that does not travel
            return pickle.dumps((False, (RuntimeError(f"{type(e).__name__}: {e}"), text)))


def _serve(pipe: Connection, parent: int) -> None:
    import faulthandler
    import gc

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    try:
        _initialise()
    except BaseException as e:
        pipe.send_bytes(pickle.dumps((False, (RuntimeError(f"{type(e).__name__}: {e}"), traceback.format_exc()))))
        return
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            reference, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send_bytes(_answer(reference, arguments))
        gc.collect()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
