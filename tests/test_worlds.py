"""The pool of worlds: results by rank, errors re-raised, failed and stalled worlds replaced, nothing left behind."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import subprocess
import sys
import time

import pytest
import torch

from tests import leftovers, worlds

pytestmark = pytest.mark.ends_worlds


@dataclasses.dataclass
class Sent:
    value: torch.Tensor


class Refused(Exception):
    """An exception that can't be pickled: its arguments are not those of its constructor."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} refused {number}")


def total(sent: Sent, scale: int = 1) -> tuple[int, int, Sent]:
    rank = torch.distributed.get_rank()
    mine = sent.value * (rank + 1) * scale
    torch.distributed.all_reduce(mine)
    return rank, os.getpid(), Sent(mine)


def fail_on(ranks: list[int]) -> None:
    rank = torch.distributed.get_rank()
    if rank in ranks:
        raise KeyError(f"rank {rank} fails")
    torch.distributed.barrier()


def refuse() -> None:
    raise Refused("world", torch.distributed.get_rank())


def stall_on(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        time.sleep(600)


def die_on(rank: int) -> None:
    print("last words", flush=True)
    if torch.distributed.get_rank() == rank:
        os._exit(7)
    torch.distributed.barrier()


def start_child() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def hold_semaphore() -> str:
    global semaphore
    semaphore = multiprocessing.get_context("spawn").Lock()
    return f"sem.{semaphore._semlock.name[1:]}"


def pids() -> list[int]:
    return [pid for _, pid, _ in worlds.run(2, total, Sent(torch.ones(1)))]


def test_results_come_in_the_order_of_ranks_from_the_same_processes() -> None:
    first = worlds.run(2, total, Sent(torch.arange(3.0)), scale=2)
    assert [rank for rank, _, _ in first] == [0, 1]
    for _, _, sent in first:
        torch.testing.assert_close(sent.value, torch.arange(3.0) * 6, rtol=0, atol=0)
    assert [pid for _, pid, _ in first] == pids()


def test_function_by_name_and_bad_functions() -> None:
    assert worlds.run(2, "os:getpid") == pids()
    with pytest.raises(ValueError, match="top level"):
        worlds.run(2, lambda: None)


def test_error_of_all_ranks_keeps_the_world() -> None:
    before = pids()
    with pytest.raises(KeyError, match="rank 0 fails") as caught:
        worlds.run(2, fail_on, [0, 1])
    assert isinstance(caught.value.__cause__, worlds.RankTraceback) and "fail_on" in str(caught.value.__cause__)
    assert pids() == before


def test_error_of_one_rank_replaces_the_world() -> None:
    before = pids()
    with pytest.raises(KeyError, match="rank 1 fails"):
        worlds.run(2, fail_on, [1])
    assert not set(pids()) & set(before)
    assert not any(alive(pid) for pid in before)


def test_exception_that_does_not_pickle_is_named() -> None:
    with pytest.raises(RuntimeError, match="Refused: world refused 0"):
        worlds.run(2, refuse)


def test_stalled_world_is_ended_with_stacks() -> None:
    before = pids()
    started = time.monotonic()
    with pytest.raises(worlds.WorldError, match=r"no answer from ranks \[1\] in 1 s(.|\n)*stall_on"):
        worlds.run(2, stall_on, 1, timeout=1.0)
    assert time.monotonic() - started < 10 * worlds.busy()  # and not the ten minutes that the rank stalls
    assert not any(alive(pid) for pid in before)


def test_dead_rank_is_reported_with_its_log() -> None:
    with pytest.raises(worlds.WorldError, match=r"rank 1 died \(exit status 7\)(.|\n)*last words"):
        worlds.run(2, die_on, 1)


def test_closing_a_world_ends_what_its_ranks_started() -> None:
    children = worlds.run(2, start_child)
    assert all(alive(pid) for pid in children)
    worlds.close()
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in children)


@pytest.mark.skipif(not leftovers.SHM.is_dir(), reason="this system has no /dev/shm")
def test_semaphores_of_a_closed_or_stalled_world_are_removed() -> None:
    names = set(worlds.run(2, hold_semaphore))
    assert names <= leftovers.shm_files()
    worlds.close()
    assert not names & leftovers.shm_files()
    names = set(worlds.run(2, hold_semaphore))
    with pytest.raises(worlds.WorldError):
        worlds.run(2, stall_on, 1, timeout=0.5)
    assert not names & leftovers.shm_files()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
