"""Engines that are slow, lost, replaced, cannot start or outlive their trainer."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlscale.rollout.vllm.processes import last_error
from rlscale.testing.models import tiny_model
from tests import worlds
from tests.rollout.helpers import (
    EXACT,
    PROMPTS,
    START,
    alive,
    check,
    family,
    generate,
    model,
    prompts,
    rollout_of,
    together,
    weights,
)


def generate_too_slowly(run_dir: str) -> str:
    from rlscale.rollout.sampling import Sampling

    rollout = rollout_of("replicas", run_dir)
    patience, rollout.cfg.rollout.request_timeout_s = rollout.cfg.rollout.request_timeout_s, 0.01
    try:
        with pytest.raises(RuntimeError) as caught:
            rollout.generate(prompts(PROMPTS), Sampling(n=4, max_tokens=60))
    finally:
        rollout.cfg.rollout.request_timeout_s = patience
    return str(caught.value)


def test_generation_that_takes_too_long_is_an_error_and_the_engines_go_on(run_dir: str) -> None:
    for message in worlds.run(2, generate_too_slowly, run_dir, timeout=START):
        assert re.fullmatch(r"rank \d: generation took more than 0.01 s", message)
    check(together(worlds.run(2, generate, "replicas", run_dir, 1, timeout=START)), model("replicas", 1))


def lose_engines(run_dir: str) -> Any:
    """Rank 1 loses its engine while it generates: the samples without and with that, and how many it cost."""
    from rlscale.rollout.sampling import Claims, Sampling
    from rlscale.rollout.trajectory import sample_trajectory

    rollout = rollout_of("replicas", run_dir)
    rollout.cfg.rollout.engine_restarts = 1
    rank, begun, done = rollout.device.rank, [0], asyncio.Event()

    async def third_kills(*args: Any) -> Any:
        begun[0] += 1
        if rank == 1 and begun[0] == 3:
            await done.wait()
            os.kill(rollout.backend.processes[0].pid, signal.SIGKILL)
        trajectory = await sample_trajectory(*args)
        done.set()
        return trajectory

    sampling = Sampling(n=4, max_tokens=16, seed=11)
    expected = rollout.generate(prompts(PROMPTS), sampling)
    claims, counter = rollout._claims, torch.distributed.HashStore()
    # rank 1 has something to lose
    rollout._claims = lambda total: Claims(counter, f"{rollout.calls}", range(rank, total, 2))
    rollout.sample = third_kills
    try:
        got = rollout.generate(prompts(PROMPTS), sampling)
    finally:
        rollout._claims = claims
    assert rollout.restarts == 1
    return expected, got, rollout.resampled


def test_a_lost_engine_is_replaced_and_only_what_was_unfinished_is_sampled_again(run_dir: str) -> None:
    worlds.run(2, generate, "replicas", run_dir, 1, timeout=START)
    answers = worlds.run(2, lose_engines, run_dir, timeout=START)
    expected, got = (together([a[k] for a in answers]) for k in (0, 1))
    assert len(expected) == len(got) == 4 * len(PROMPTS)
    for one, other in zip(expected, got, strict=True):
        assert one.response_ids == other.response_ids
        assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=EXACT)
    assert answers[0][2] == answers[1][2] and 0 < answers[0][2] < len(expected)


def sync_while_dying(run_dir: str) -> tuple[str, float]:
    """The engine of rank 1 is killed between two buckets; the next update finds it dead and starts a new one."""
    rollout = rollout_of("replicas", run_dir)
    rollout.sync(lambda: weights("replicas", 0))
    transfer = rollout.weight_sync.transfer
    fill = transfer.buckets

    def faulty(tensors: Any) -> Any:
        for bucket in fill(tensors):
            if rollout.device.rank == 1 and bucket.number == 1:
                os.kill(rollout.backend.processes[0].pid, signal.SIGKILL)
            yield bucket

    transfer.buckets = faulty
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        rollout.sync(lambda: weights("replicas", 1))
    took = time.monotonic() - started
    transfer.buckets = fill
    rollout.cfg.rollout.engine_restarts = 1
    rollout.sync(lambda: weights("replicas", 1))
    assert rollout.restarts == 1
    return str(caught.value), took


def test_an_engine_that_dies_during_an_update_is_replaced(run_dir: str) -> None:
    before = [pids for pids, _ in worlds.run(2, family, run_dir, "replicas", timeout=START)]
    for message, took in worlds.run(2, sync_while_dying, run_dir, timeout=START):
        assert re.search(r"rank 1: the vLLM engine died during", message)
        assert took < 60, "a dead engine must not be waited for as long as a slow one"
    after = [pids for pids, _ in worlds.run(2, family, run_dir, "replicas", timeout=START)]
    assert after[0] == before[0] and not set(after[1]) & set(before[1]), "only the dead engine is replaced"
    assert not any(map(alive, before[1]))
    got = together(worlds.run(2, generate, "replicas", run_dir, None, temperature=0.0, timeout=START))
    check(got, model("replicas", 1), greedy=True)


def generate_while_dying(run_dir: str) -> str:
    from rlscale.rollout.sampling import Sampling

    rollout = rollout_of("replicas", run_dir)
    if rollout.device.rank == 1:
        os.kill(rollout.backend.processes[0].pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while rollout.backend.alive and time.monotonic() < deadline:  # or rank 0 may have done all before it is noticed
            time.sleep(0.05)
    with pytest.raises(RuntimeError) as caught:
        rollout.generate(prompts(PROMPTS), Sampling(n=4, max_tokens=60))
    rollout.close()
    rollout.close()
    return str(caught.value)


def test_a_dead_engine_is_named_on_every_rank_and_closing_leaves_nothing(run_dir: str) -> None:
    families = worlds.run(2, family, run_dir, "replicas", timeout=START)
    pids, shared = [pid for of_rank, _ in families for pid in of_rank], set().union(*(names for _, names in families))
    assert len(pids) >= 2 and all(map(alive, pids)) and shared <= set(os.listdir("/dev/shm")) and shared
    for message in worlds.run(2, generate_while_dying, run_dir, timeout=START):
        assert re.search(r"rank 1: the vLLM engine died during generation", message)
    assert not any(map(alive, pids))
    assert not set(os.listdir("/dev/shm")) & shared


# A world of one, in a process that ends badly.

SCRIPT = """
import sys, time
from pathlib import Path

def main():
    import torch
    from rlscale.cluster.device import Device
    from rlscale.rollout.rollout import Rollout
    from tests.rollout import helpers as t

    device = Device("cpu", 0, 0, 1, 2)  # half of the machine
    for path, arguments in {cases!r}:
        cfg = t.configuration("one", path, {run_dir!r}, engine_args=arguments)
        rollout = Rollout(cfg, device, [t.EOS])
        started = time.time()
        try:
            rollout.start()
        except RuntimeError as error:
            print("error", round(time.time() - started), error, flush=True)
            continue
        print("pids", *t.engine_processes(rollout), flush=True)
        time.sleep(600)

if __name__ == "__main__":
    main()
"""


def run_script(run_dir: str, cases: list[tuple[str, dict[str, Any]]]) -> subprocess.Popen[str]:
    script = Path(run_dir) / "one.py"
    script.write_text(SCRIPT.format(cases=cases, run_dir=run_dir))
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=run_dir,
        text=True,
        stdout=subprocess.PIPE,
    )


def test_a_start_that_fails_says_why_and_a_killed_trainer_takes_its_engine_along(run_dir: str) -> None:
    good = tiny_model("llama", tied=True)
    process = run_script(run_dir, [
        (good, {"no_such_argument": 1}),
        (tiny_model("llama", head_dim=16, heads=4, kv_heads=2), {}),
        (good, {}),
    ])  # fmt: skip
    assert process.stdout is not None
    try:
        unknown, head, started = (process.stdout.readline() for _ in range(3))
        for line, reason in ((unknown, "no_such_argument"), (head, "head_dim=16")):
            assert re.match(rf"error \d+ rank 0: vLLM cannot start: .*({reason})", line), line
        pids = [int(word) for word in started.split()[1:]]
        assert pids and all(map(alive, pids))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    deadline = time.monotonic() + 30.0
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def test_the_reason_is_the_error_that_came_first_in_the_innermost_process() -> None:
    log = """
(EngineCore pid=1) ERROR 11-30 10:00:00 [core.py:1] Traceback (most recent call last):
(EngineCore pid=1) ERROR 11-30 10:00:00 [core.py:1] ValueError: head size 16 is not supported
(EngineCore pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert last_error(log) == "ValueError: head size 16 is not supported"
    assert last_error("nothing here") is None
