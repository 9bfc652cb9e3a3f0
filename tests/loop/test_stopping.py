"""Requests to stop: from one rank to all, at a common point; at once when asked twice; never later than promised."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

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
            watch.raise_if_stopped()
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
    assert len(where) == 2 and all(f"rank {rank}: in step {steps - 1} for" in where[rank] for rank in (0, 1))


def test_a_limit_of_time_stops_all() -> None:
    started = time.monotonic()
    (steps, reason, _), other = worlds.run(2, stopped, None, 0.5)
    assert time.monotonic() - started >= 0.5
    assert steps < 500 and (steps, reason) == other[:2]
    assert reason == "trainer.max_time of 0.5 s has elapsed"


def failing() -> list[int | None]:
    """Rank 1 fails, then rank 0, then rank 1 again: what each is told of the first."""
    import torch.distributed as dist

    from rlscale.loop.stopping import Watch

    watch = Watch(grace_s=60)
    told = []
    for rank in (1, 0, 1):
        if dist.get_rank() == rank:
            told.append(watch.failed(RuntimeError()))
        dist.barrier()
    return told


def test_a_rank_that_fails_later_knows_who_was_first() -> None:
    assert worlds.run(2, failing) == [[1], [None, None]]


STUBBORN = """
import sys, time
from rlscale.cluster.device import init_distributed, prepare_process
prepare_process("cpu")
init_distributed("cpu")
from rlscale.loop.stopping import Watch
watch = Watch(grace_s=float(sys.argv[1]))
watch.start()
print("ready", flush=True)
while True:
    time.sleep(0.1)  # never asks
"""


@pytest.mark.parametrize(
    "grace, again, reader",
    [(1.0, False, True), (300.0, True, True), (1.0, False, False)],
    ids=["grace period", "second signal", "nobody reads its messages"],
)
def test_a_rank_that_does_not_stop_is_ended(grace: float, again: bool, reader: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN, str(grace)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "ready\n"
            if not reader:
                process.stderr.close()
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)  # an echo of the launcher, not a second request
            if again:
                time.sleep(2.0)
                assert process.poll() is None
                process.send_signal(signal.SIGTERM)
            assert process.wait(30) in (128 + signal.SIGTERM, 128 + signal.SIGINT)
            if reader:
                said = "received SIGTERM a second time" if again else "after the stop request"
                assert said in process.stderr.read()
        finally:
            process.kill()


def group_limits() -> list[float]:
    import torch
    import torch.distributed as dist

    from rlscale.cluster import device
    from rlscale.cluster.mesh import ParallelDims, mesh_of
    from rlscale.config.schema import ParallelConfig
    from rlscale.loop.stopping import Watch

    dims = ParallelDims.of(ParallelConfig(tensor_model_parallel_size=2), dist.get_world_size())
    before, device._timeout = device._timeout, timedelta(seconds=77)
    try:
        mesh_of.cache_clear()
        mesh = mesh_of(dims)
        watch = Watch(grace_s=1)
        groups = [mesh.tp_group, mesh.pp_group, mesh.dp_group, mesh.mp_group, mesh.embd_group, watch.control]
        return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]
    finally:
        device._timeout = before
        mesh_of.cache_clear()


def test_every_group_has_the_time_limit_of_the_run() -> None:
    for limits in worlds.run(2, group_limits):
        assert limits == [77.0] * 6
