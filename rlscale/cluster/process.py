"""This process: when it ends, what it prints, how it allocates memory. Light: scorers and engines import it too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1

#: How glibc keeps freed memory in a process on CPU: by environment variable, the number of the parameter of mallopt(3),
#: its value in the trainer and its value in vLLM's processes.
#:
#: Both allocate and free the same tensors every step. By default glibc maps each of them afresh, and the page faults
#: take a good part of the step. The few largest of the trainer (flat gradients, an embedding's gradient) are still
#: mapped and given back, because holes of their size would stay in the heap for good; an engine has none such.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20, 2**31),
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1, 2**32),  # mallopt takes an int, the variable a long
    "MALLOC_TOP_PAD_": (-2, 64 << 20, 64 << 20),
    "MALLOC_ARENA_MAX": (-8, 1, 1),
}
#: the variables for vLLM's processes
MALLOC = {name: str(engine) for name, (_, _, engine) in _MALLOC.items()}


def tune_malloc(engine: bool = False) -> bool:
    """Keep freed memory in this process, as the trainer or an engine does (glibc only; True if it was done)."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    except (OSError, AttributeError):
        return False
    wanted = [(number, min(values[engine], 2**31 - 1)) for number, *values in _MALLOC.values()]
    return min(libc.mallopt(number, value) for number, value in wanted) == 1


def say(text: str) -> None:
    """Print a line on standard error; a reader that has ended (``| tee``) is no reason for the run to fail."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def leave() -> None:
    """End this process at once, as after a SIGTERM."""
    os._exit(143)


def die() -> None:
    """End this process, without ceremony."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_parent(parent: int) -> None:
    """Ask the kernel (Linux) to kill this process when the thread that started it ends, whatever it is doing then."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


def follow(*pids: int, ended: Callable[[], None] = die) -> None:
    """Call ``ended`` on a thread when one of these processes ends, which need not be parents (at once if it has ended).

    On a kernel without pidfd it is never called: only the orderly ways to end remain.
    """
    handles = []
    for pid in pids:
        try:
            handles.append(os.pidfd_open(pid))
        except ProcessLookupError:
            return ended()
        except OSError:
            pass

    def wait() -> None:
        with contextlib.suppress(InterruptedError):
            select.select(handles, [], [])  # one is readable when its process has ended
        ended()

    if handles:
        threading.Thread(target=wait, name="follow", daemon=True).start()


def end_after_signal(message: str, within_s: float = 5.0) -> None:
    """Let no signal of this process wait for long: ``within_s`` seconds after one, the process ends with a message.

    Python's own handlers run on the main thread, which may be waiting in C, for ranks that will never come. Whatever
    calls `signal.set_wakeup_fd` later takes this over.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        while (number := os.read(reading, 1)[0]) not in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            pass
        time.sleep(within_s)
        say(message)
        os._exit(128 + number)

    threading.Thread(target=wait, name="signals", daemon=True).start()


#: what to do when the launcher has ended
on_launcher_end: Callable[[], None] = leave


def follow_launcher() -> None:
    """End this process when DeepSpeed's runner is gone (or whatever `on_launcher_end` says by then).

    The runner starts a launcher, which starts the ranks. A SIGTERM (scheduler, ``timeout``) ends only the runner, and
    the launcher with all its ranks would train on unseen.
    """
    launcher = os.getppid()
    if "deepspeed.launcher.launch" not in _process(launcher, "cmdline"):
        return
    runner = _process(launcher, "stat").rpartition(")")[2].split()[1:2]  # its parent

    def ended() -> None:
        say("warning: the launcher has ended; so will this rank")
        on_launcher_end()

    follow(launcher, *map(int, runner), ended=ended)


def _process(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
