"""Ties the processes of an engine to the trainer process that started them.

vLLM's processes notice an orderly shutdown, but not a trainer that was killed: they would stay, with all their memory.
A `Lifeline` travels inside the engine's configuration, and acts in every process in which that is unpickled, which is
before anything of the engine has started: it pins the process to its cores and starts a thread that ends the process as
soon as the trainer is gone.
"""

from __future__ import annotations

import os
from typing import Any

from rlscale.cluster.process import follow

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
        _followed.add(pid)
        follow(pid)
    return Lifeline(pid, cores)
