"""The scorer process: loads the scorers, then answers request after request over a pipe. Run by `rlscale.reward.pool`.

An ordinary program (`python -m rlscale.reward.worker FD PARENT`), not a fork or a spawned copy of the trainer: it
starts in a fraction of a second, holds none of the trainer's memory, and runs scorers on its main thread, which those
with an alarm (math-verify) need. It dies with its parent, even in the middle of a hanging scorer.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from rlscale.cluster.process import die_with_parent
from rlscale.config import functions


def main(fd: int, parent: int) -> None:
    """Serve until the pipe closes. Messages: targets -> error | None, then (target, kwargs) -> (value, error, extra)

    Args:
        fd: file descriptor of the pipe.
        parent: process id of the pool.
    """
    die_with_parent(parent)
    pipe = Connection(fd)
    try:
        targets: list[str] = pipe.recv()
        try:
            loaded = {target: functions.load_function("reward.scorer", target) for target in targets}
        except ValueError as error:
            pipe.send(str(error))
            return
        pipe.send(None)
        while True:
            target, arguments = pipe.recv()
            pipe.send(call(loaded[target], arguments))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the pool is closed or gone


def call(scorer: Callable[..., Any], arguments: dict[str, Any]) -> tuple[float, str, dict[str, float]]:
    """Run one scorer: its value, an error (empty where there is none), and its further numbers."""
    try:
        result = scorer(**arguments)
    except BaseException as error:  # SystemExit too: nothing a scorer raises may end the process
        return 0.0, f"{type(error).__name__}: {error}"[:500], {}
    extra: dict[str, float] = {}
    if isinstance(result, dict):
        extra = {str(k): number for k, v in result.items() if k != "score" and (number := as_number(v)) is not None}
        if "failures" in extra:  # of rlscale, which counts them
            return 0.0, "the scorer returned a number called 'failures', the name of a metric of every run", {}
        if "score" not in result:
            return 0.0, f"the scorer returned a dict without 'score': keys {sorted(map(str, result))}"[:500], extra
        result = result["score"]
    value = as_number(result)
    if value is None:
        return 0.0, f"the scorer returned {result!r:.200}, which isn't a finite number", extra
    return value, "", extra


def as_number(value: Any) -> float | None:
    """A finite float of a number or bool (numpy's too), None of anything else."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
        value = value.item() if hasattr(value, "item") else value
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
