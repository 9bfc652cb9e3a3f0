"""The program of the README with one fault: FAULT = "<what> <phase> <step> <rank>" happens as that phase begins there.

What: raise (an exception), die (SIGKILL), hang, wait (2 s, for somebody else to do something), kill-engine (the
rank's, as soon as it samples), or a signal's name.
Phase: as the run reports it, or "score" for the first response of the step that is scored. FAULT_NOTE, a file, is
written just before.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def strike(what: str) -> None:
    if what == "raise":
        raise RuntimeError("a fault that was asked for")
    if what in ("hang", "wait"):
        time.sleep(3600 if what == "hang" else 2)
        return
    if what == "kill-engine":
        kill_engine_that_samples()
        return
    os.kill(os.getpid(), signal.SIGKILL if what == "die" else signal.Signals[what])


def kill_engine_that_samples() -> None:
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


def main() -> None:
    from rlscale.loop.stopping import Watch
    from rlscale.reward.pool import RewardPool

    what, phase, step, rank = os.environ["FAULT"].split()
    begin, score = Watch.phase, RewardPool.score
    now = [""]

    def reached(self: Any, name: str) -> None:
        begin(self, name)
        now[0] = name
        if name == f"{phase} of step {step}" and self.rank == int(rank):
            happen()

    async def scored(*args: Any) -> Any:
        if now[0] == f"gen of step {step}":
            happen()
        return await score(*args)

    def happen() -> None:
        Watch.phase, RewardPool.score = begin, score  # type: ignore[method-assign]
        Path(os.environ["FAULT_NOTE"]).touch()
        strike(what)

    Watch.phase = reached  # type: ignore[method-assign]
    if phase == "score" and os.environ["RANK"] == rank:
        RewardPool.score = scored  # type: ignore[method-assign, assignment]


if __name__ == "__main__":  # vLLM's processes import this file, too
    main()
    runpy.run_path(str(ROOT / "launchers" / "train.py"), run_name="__main__")
