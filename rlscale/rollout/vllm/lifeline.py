"""Ties the processes of an engine to the trainer process that started them.

vLLM's processes notice an orderly shutdown, but not a trainer that was killed: they would stay, with all their memory.
A `Lifeline` travels inside the engine's configuration, and acts in every process in which that is unpickled, or that is
forked by the thread in `Lifeline.forks`, before anything of the engine has started: it pins the process to its cores
and starts a thread that ends the process as soon as the trainer is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from rlscale.cluster.process import follow, tune_malloc

_followed: set[int] = set()
_forking: tuple[int, Lifeline] | None = None  # the thread whose forks are an engine's, and the engine's lifeline


class Lifeline:
    """Put into an engine's configuration by the trainer.

    Args:
        pid: process to follow.
        cores: CPU cores of the engine's processes; none: leave them as they are.
    """

    def __init__(self, pid: int, cores: tuple[int, ...] = ()):
        self.pid, self.cores = pid, cores

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.pid, self.cores)

    @contextlib.contextmanager
    def forks(self) -> Iterator[None]:
        """What this thread forks meanwhile is a process of the engine."""
        global _forking
        _forking = (threading.get_ident(), self)
        try:
            yield
        finally:
            _forking = None


def _arrive(pid: int, cores: tuple[int, ...]) -> Lifeline:
    """Runs where the configuration is unpickled."""
    if os.getpid() != pid and pid not in _followed:
        if cores:
            os.sched_setaffinity(0, cores)
        _followed.add(pid)
        follow(pid)
    return Lifeline(pid, cores)


def _forked() -> None:
    """Runs in every process that is forked by this one."""
    global _forking
    if _forking is None or _forking[0] != threading.get_ident():
        return
    signal.set_wakeup_fd(-1)  # or its signals would be written to the trainer's pipe
    import torch

    (_, lifeline), _forking = _forking, None
    _arrive(lifeline.pid, lifeline.cores)
    torch.set_num_threads(max(1, len(lifeline.cores)))  # OpenMP has read its variable in the trainer,
    tune_malloc(engine=True)  # and glibc has read its own


os.register_at_fork(after_in_child=_forked)
