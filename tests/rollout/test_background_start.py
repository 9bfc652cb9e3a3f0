"""The start of engines in the background. Its file comes first of those with shared engines, and starts them."""

from __future__ import annotations

import os
from typing import Any

from tests import worlds
from tests.rollout.helpers import PROMPTS, START, alive, close, new_rollout, prompts


def state_of_process() -> tuple[Any, ...]:
    return dict(os.environ), [os.fstat(fd).st_ino for fd in (1, 2)], os.sched_getaffinity(0)


def start_in_the_background(run_dir: str) -> tuple[bool, list[int]]:
    """Begin a start and close in the middle of it; begin another, and generate."""
    from rlscale.rollout.sampling import Sampling

    rollout = new_rollout("replicas", run_dir)
    try:
        before = state_of_process()
        rollout.backend.begin_start()
        assert rollout.backend is not None and not rollout.backend.alive
        kept = state_of_process() == before
        abandoned = [process.pid for process in rollout.backend._started()]
        rollout.close()
        rollout.backend.begin_start()
        kept &= state_of_process() == before
        rollout.start()
        assert kept and len(rollout.generate(prompts(PROMPTS), Sampling(n=1, max_tokens=4))) <= len(PROMPTS)
        return kept, abandoned
    except BaseException:
        close("replicas")
        raise


def test_a_start_goes_on_in_the_background_and_can_be_given_up(run_dir: str) -> None:
    for kept, abandoned in worlds.run(2, start_in_the_background, run_dir, timeout=START):
        assert kept, "variables, output or cores of this process have changed"
        assert abandoned and not any(map(alive, abandoned))
