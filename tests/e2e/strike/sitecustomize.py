"""Lets one thing happen to a run, at a chosen moment. Python imports this module by itself in every process that has
its folder in PYTHONPATH: the program under test is the documented command, unchanged.

RLSCALE_TEST_STRIKE is a JSON object, the arguments of `arm`; `tests.e2e.program.striking` makes it.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Method = tuple[str, str, str]  # module, class, name
PHASE: Method = ("rlscale.loop.stopping", "Watch", "phase")
SCORE: Method = ("rlscale.reward.pool", "RewardPool", "score")
CALLS: dict[str, Method] = {
    "rollout": ("rlscale.rollout.rollout", "Rollout", "generate"),
    "scoring": SCORE,
    "update": ("rlscale.train.engine", "Engine", "update"),
    "sync": ("rlscale.rollout.rollout", "Rollout", "sync"),
    "save": ("rlscale.checkpoint.store", "Store", "begin"),
    "publish": ("rlscale.checkpoint.store", "Store", "publish"),
}


class Wrap:
    """Finds one module, and wraps one of its methods when it has been loaded."""

    def __init__(self, method: Method, wrap: Callable[[Any], Any]) -> None:
        (self.module, self.owner, self.method), self.wrap = method, wrap

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module  # type: ignore[union-attr]

        def exec_module(module: Any) -> None:
            load(module)
            owner = getattr(module, self.owner)
            setattr(owner, self.method, self.wrap(getattr(owner, self.method)))

        spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        return spec


def arm(
    what: str,
    rank: int,
    note: str,
    *,
    phase: str = "",
    step: int = 0,
    call: str = "",
    count: int = 0,
    after_s: float = 0,
) -> None:
    """Prepare for ``what`` to happen once on ``rank``; the file ``note`` is written just before.

    Args:
        what: raise (an exception), die (SIGKILL), die-all (SIGKILL to the launcher, ranks, engines and scorers), hang,
            wait (2 s, for somebody else to do something), kill-engine (the rank's, as soon as it samples), or a
            signal's name.
        phase, step: when it begins, as the run reports it; "score": with the first response of the step that is scored.
        call, count, after_s: instead of a phase, seconds after the count-th call of a method of `CALLS` has begun.
    """
    if os.environ.get("RANK") != str(rank):
        return
    reached, calls, happened = [""], [0], []

    def happen() -> None:
        if not happened:
            happened.append(True)
            Path(note).touch()
            strike(what)

    def reports(report: Any) -> Any:
        def wrapper(watch: Any, name: str) -> None:
            report(watch, name)
            reached[0] = name
            if name == f"{phase} of step {step}":
                happen()

        return wrapper

    def scores(score: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            if reached[0] == f"gen of step {step}":
                happen()
            return score(*args)

        return wrapper

    def counted(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == count:
                timer = threading.Timer(after_s, happen)
                timer.daemon = True
                timer.start()
            return function(*args, **kwargs)

        return wrapper

    wraps = [Wrap(CALLS[call], counted)] if call else [Wrap(PHASE, reports)]
    sys.meta_path[:0] = wraps + ([Wrap(SCORE, scores)] if phase == "score" else [])


def strike(what: str) -> None:
    if what == "raise":
        raise RuntimeError("a fault that was asked for")
    if what in ("hang", "wait"):
        time.sleep(3600 if what == "hang" else 2)
    elif what == "kill-engine":
        kill_engine_that_samples()
    elif what == "die-all":
        os.killpg(0, signal.SIGKILL)
    else:
        os.kill(os.getpid(), signal.SIGKILL if what == "die" else signal.Signals[what])


def kill_engine_that_samples() -> None:
    import psutil

    from rlscale.rollout.rollout import Rollout

    sample = Rollout._sample

    async def deadly(self: Any, *args: Any) -> Any:
        if Rollout._sample is deadly:
            Rollout._sample = sample  # type: ignore[method-assign]
            for child in psutil.Process().children(recursive=True):
                if any("EngineCore" in part for part in [child.name(), *child.cmdline()]):
                    child.kill()
        return await sample(self, *args)

    Rollout._sample = deadly  # type: ignore[method-assign, assignment]


if os.environ.get("RLSCALE_TEST_STRIKE"):
    arm(**json.loads(os.environ["RLSCALE_TEST_STRIKE"]))
