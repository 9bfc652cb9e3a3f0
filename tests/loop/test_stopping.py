"""Requests to stop: from one rank to all, at a common point; at once when asked twice; never later than promised."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time

import pytest

from tests import worlds


def stopped(number: int | None, max_time: float | None = None) -> tuple[int, str, list[str]]:
    """Rank 1 gets a signal in the middle of a loop of steps: how many steps each rank did, and what it was told."""
    import torch.distributed as dist

    from rlscale.loop.stopping import Stopped, Watch

    watch = Watch(grace_s=60, max_time_s=max_time)
    watch.start()
    steps = 0
    try:
        while steps < 500:
            watch.phase(f"step {steps}")
            dist.barrier()
            if number is not None and steps == 5 and dist.get_rank() == 1:
                os.kill(os.getpid(), number)
            time.sleep(0.02)
            steps += 1
            watch.agree()
    except Stopped as stop:
        return steps, str(stop), watch.report().splitlines()
    finally:
        watch.close()
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # a world's own use of it
    raise AssertionError("nobody was stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_on_one_rank_stops_all_at_the_same_step(number: int) -> None:
    (steps, reason, where), other = worlds.run(2, stopped, int(number))
    assert 5 < steps < 500
    assert (steps, reason) == other[:2]
    assert reason == f"{signal.Signals(number).name} on rank 1"
    assert len(where) == 2 and all(f"rank {rank}: in step {steps - 1} since" in where[rank] for rank in (0, 1))


def test_a_limit_of_time_stops_all() -> None:
    (steps, reason, _), other = worlds.run(2, stopped, None, 0.5)
    assert 5 < steps < 500 and (steps, reason) == other[:2]
    assert reason == "trainer.max_time of 0.5 s is over"


STUBBORN = """
import sys, time
from rlscale.cluster.device import init_distributed
init_distributed("cpu")
from rlscale.loop.stopping import Watch
watch = Watch(grace_s=float(sys.argv[1]))
watch.start()
print("ready", flush=True)
while True:
    time.sleep(0.1)  # never asks
"""


@pytest.mark.parametrize("grace, again", [(1.0, False), (300.0, True)], ids=["grace period", "second signal"])
def test_a_rank_that_does_not_stop_is_ended(grace: float, again: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN, str(grace)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)  # an echo of the launcher, not a second request
            if again:
                time.sleep(2.0)
                assert process.poll() is None
                process.send_signal(signal.SIGTERM)
            assert process.wait(30) in (128 + signal.SIGTERM, 128 + signal.SIGINT)
            assert ("SIGTERM again" if again else "after the request") in process.stderr.read()
        finally:
            process.kill()
