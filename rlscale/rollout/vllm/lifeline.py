"""Ties the processes of an engine to the trainer process that started them.

vLLM's processes notice an orderly shutdown, but not a trainer that was killed: they would stay, with all their memory.
A `Lifeline` travels inside the engine's configuration, and acts in every process in which that is unpickled, which is
before anything of the engine has started: it pins the process to its cores and starts a thread that ends the process as
soon as the trainer is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from typing import Any

_followed: set[int] = set()


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


def _arrive(pid: int, cores: tuple[int, ...]) -> Lifeline:
    """Runs where the configuration is unpickled."""
    if os.getpid() != pid and pid not in _followed:
        if cores:
            os.sched_setaffinity(0, cores)
        follow(pid)
    return Lifeline(pid, cores)


def follow(pid: int) -> None:
    """End this process, without ceremony, when process ``pid`` ends (at once if it has ended)."""
    _followed.add(pid)
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except OSError:  # a kernel without pidfd: only the orderly ways to end remain
        return
    threading.Thread(target=_wait_and_end, args=(handle,), name="lifeline", daemon=True).start()


def _wait_and_end(handle: int) -> None:
    with contextlib.suppress(InterruptedError):
        select.select([handle], [], [])  # readable when the process has ended
    os.kill(os.getpid(), signal.SIGKILL)
