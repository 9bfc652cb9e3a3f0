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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
LAUNCHER_EXITED = "warning: the launcher has exited; this rank exits too"

#: How glibc keeps freed memory in a process on CPU: by environment variable, the number of the parameter of mallopt(3),
#: its value in the trainer and its value in vLLM's processes.
#:
#: Both allocate and free the same tensors every step. By default glibc maps each of them afresh, and the page faults
#: take a good part of the step. The few largest of the trainer (flat gradients, an embedding's gradient) are still
#: mapped and given back, because holes of their size would stay in the heap; an engine has no tensors of that size.
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


def shorten(names: Sequence[str]) -> str:
    """The first five of some names, for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def leave(status: int = 0) -> NoReturn:
    """End a rank's program without cleanup.

    A failed rank must not wait for others; tearing down torch and vLLM takes seconds, and on some days ends in an
    abort, when a thread of gloo's wants Python's lock in an interpreter that is being taken down.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def exit_with_launcher() -> NoReturn:
    """End this process at once, as after a SIGTERM."""
    say(LAUNCHER_EXITED)
    os._exit(128 + signal.SIGTERM)


def kill_self() -> None:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_parent(parent: int) -> None:
    """Ask the kernel (Linux) to kill this process when the thread that started it ends, whatever it is doing then."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


def follow(*pids: int, ended: Callable[[], object] = kill_self) -> None:
    """Call ``ended`` on a thread when one of these processes ends, which need not be parents (at once if it has ended).

    Where the kernel or a sandbox refuses pidfd, the thread looks once a second.
    """
    handles: list[int] = []
    polled: list[int] = []
    for pid in pids:
        try:
            handles.append(os.pidfd_open(pid))
        except ProcessLookupError:
            ended()
            return
        except OSError:
            polled.append(pid)

    def wait() -> None:
        while all(map(_runs, polled)) and not select.select(handles, [], [], 1.0 if polled else None)[0]:
            pass  # a handle is readable when its process has ended
        ended()

    if pids:
        threading.Thread(target=wait, name="follow", daemon=True).start()


def guard_start(message: str, within_s: float = 5.0) -> Callable[[], None]:
    """Until a run watches for both itself, end this process with a message ``within_s`` seconds after a signal, and at
    once when its launcher has exited.

    Python's own handlers run on the main thread, which may be waiting in C, for ranks that will never come.

    Returns:
        What ends the guard; call it when `signal.set_wakeup_fd` has been called for another pipe.
    """
    (reading, writing), screen, stopped = os.pipe(), os.dup(2), threading.Event()  # fd 2 may be a log's by then
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        while (number := os.read(reading, 1)[0]) not in (0, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            pass
        if number and not stopped.wait(within_s):
            with contextlib.suppress(OSError):
                os.write(screen, f"{message}\n".encode())
            os._exit(128 + number)
        for handle in (reading, writing, screen):
            os.close(handle)

    def stop() -> None:
        os.write(writing, b"\0")
        stopped.set()

    threading.Thread(target=wait, name="signals", daemon=True).start()
    follow_launcher(lambda: stopped.is_set() or exit_with_launcher())
    return stop


def follow_launcher(ended: Callable[[], object] = exit_with_launcher) -> None:
    """Call ``ended`` on a thread when DeepSpeed's runner is gone; nothing where this process has none.

    The runner starts a launcher, which starts the ranks. A SIGTERM (scheduler, ``timeout``) ends only the runner, and
    the launcher with all its ranks would train on unseen.
    """
    launcher = os.getppid()
    if "deepspeed.launcher.launch" not in _process(launcher, "cmdline"):
        return
    runner = _process(launcher, "stat").rpartition(")")[2].split()[1:2]  # its parent
    follow(launcher, *map(int, runner), ended=ended)


def _runs(pid: int) -> bool:
    return _process(pid, "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"])


def _process(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
