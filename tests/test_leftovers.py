"""Leftovers: a detached process is found by its mark, a file by its absence before; other programs' are not counted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import leftovers

SLEEP = "import time; time.sleep(600)"
DETACH = f"""
import subprocess, sys
command = [sys.executable, "-c", "{SLEEP}"]
print(subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True).pid)
"""
SEMAPHORE = """
import multiprocessing
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
"""


def test_detached_process_is_found_by_its_mark() -> None:
    env = os.environ | {"A_MARK": "17"}
    out = subprocess.run([sys.executable, "-c", DETACH], env=env, stdout=subprocess.PIPE, timeout=60)
    pid = int(out.stdout)
    try:
        assert list(leftovers.processes("A_MARK=17")) == [pid]
        assert not leftovers.processes("A_MARK=1") and not leftovers.processes("MARK=17")
        assert leftovers.left("A_MARK=17", leftovers.shm_files()) == {f"process {pid}: {sys.executable} -c {SLEEP}"}
    finally:
        os.kill(pid, 9)


def test_process_without_environment_is_found_by_its_session() -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEP], env={}, start_new_session=True) as other:
        try:
            assert not leftovers.processes("A_MARK=19")
            leftovers.own_session(other.pid, "A_MARK=19", "B_MARK=20")
            assert list(leftovers.processes("A_MARK=19")) == list(leftovers.processes("B_MARK=20")) == [other.pid]
            assert not leftovers.processes("A_MARK=1")
        finally:
            other.kill()
            del leftovers.sessions[other.pid]
    assert not leftovers.processes("A_MARK=19")


@pytest.mark.skipif(not leftovers.SHM.is_dir(), reason="this system has no /dev/shm")
def test_shared_memory_counts_unless_another_program_has_it() -> None:
    before = leftovers.shm_files()
    file = Path(f"/dev/shm/rlscale-test-{os.getpid()}")
    with subprocess.Popen([sys.executable, "-c", SEMAPHORE + SLEEP], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            semaphore = f"sem.{other.stdout.readline().strip().removeprefix('/')}"
            assert semaphore in leftovers.shm_files()
            file.touch()
            lines = leftovers.left("A_MARK=18", before)
            assert f"file {file}" in lines and f"file /dev/shm/{semaphore}" not in lines
        finally:
            file.unlink()
            other.terminate()
    deadline = time.monotonic() + 10
    while semaphore in leftovers.shm_files() and time.monotonic() < deadline:
        time.sleep(0.1)


def test_only_what_stays_is_reported() -> None:
    says = iter([{"stays", "goes"}, {"stays"}, {"stays", "comes"}])
    last = {"stays", "comes"}
    assert leftovers.still_left(lambda: set(next(says, last)), 1.0) == ["stays"]
