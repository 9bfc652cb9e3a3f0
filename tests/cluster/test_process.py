"""The process: when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from rlscale.cluster import process


def ended(script: str, *signals: int) -> tuple[int, str]:
    """Status and errors of a process that runs a script, gets signals when that is ready, and comes to its end."""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout is not None and running.stdout.readline() == "ready\n"
            for number in signals:
                running.send_signal(number)
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    return running.returncode, errors


# the second lock of a mutex waits for ever in C, and a signal does not interrupt it, as in a store that waits for ranks
WAITS_IN_C = """
import ctypes, os, signal
from rlscale.cluster.process import guard_start
signal.signal(signal.SIGTERM, lambda *_: None)
guard_start("error: it waited", within_s=0.5)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # as while an engine starts
mutex = ctypes.create_string_buffer(128)
lock = ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
print("ready", flush=True)
lock(mutex)
"""


def test_a_signal_ends_a_process_that_waits_for_ranks_in_c() -> None:
    status, errors = ended(WAITS_IN_C, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM and "error: it waited" in errors


# the engine installs handlers of its own, and ends by itself
FORKED = """
import os, signal, time
from rlscale.cluster.process import guard_start
from rlscale.rollout.vllm.lifeline import Lifeline
guard_start("error: a signal came", within_s=0.5)
reading, writing = os.pipe()
with Lifeline(os.getpid()).forks():
    if not (engine := os.fork()):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        os.write(writing, b"1")
        time.sleep(60)
os.read(reading, 1)
os.kill(engine, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(engine, 0)[1]) == 7
print("ready", flush=True)
time.sleep(2.0)
"""


def test_a_signal_to_a_forked_engine_is_not_the_trainers() -> None:
    assert ended(FORKED) == (0, "")


WATCHED = """
import os, signal, time
from rlscale.cluster.process import guard_start
signal.signal(signal.SIGTERM, lambda *_: None)
stop = guard_start("error: a signal came", within_s=0.5)
os.kill(os.getpid(), signal.SIGTERM)
signal.set_wakeup_fd(-1)
stop()
os.kill(os.getpid(), signal.SIGTERM)
print("ready", flush=True)
time.sleep(2.0)
"""


def test_who_watches_for_signals_itself_is_not_ended() -> None:
    assert ended(WATCHED) == (0, "")


@pytest.mark.parametrize("refused", [None, PermissionError])
def test_the_end_of_another_process_is_noticed_without_pidfd(
    refused: type[OSError] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise refused  # type: ignore[misc]

    if refused is not None:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    gone = threading.Event()
    with subprocess.Popen(["sleep", "60"]) as other:
        process.follow(other.pid, ended=gone.set)
        assert not gone.wait(1.5)
        other.kill()  # and nobody has asked for its status yet
        assert gone.wait(10.0)
