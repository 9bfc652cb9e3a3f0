"""What a program leaves behind: processes that belong to it, and files in shared memory.

A process belongs to a program if it carries the program's mark (NAME=value) in its environment, which is inherited
however it was started and whoever its parent is now, or if it is in a session (setsid) that the program leads: a
process that sets its own title, as vLLM's engines do, overwrites its environment. Files in /dev/shm carry no owner:
those that were there before, or that a process of another program has mapped, are not counted.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

SHM = Path("/dev/shm")
SESSION_MARK = "RLSCALE_TEST_SESSION"  # environment variable of a test session and of all that it starts
sessions: dict[int, str] = {}  # session -> mark of the program whose it is, from `own_session`


def shm_files() -> set[str]:
    return set(os.listdir(SHM)) if SHM.is_dir() else set()


def session_mark() -> str:
    """The mark of this test session."""
    return f"{SESSION_MARK}={os.environ.get(SESSION_MARK, '')}"


def own_session(session: int, *marks: str) -> None:
    """Count the processes of a session as those of the programs with these marks."""
    sessions[session] = " ".join(marks)


def processes(mark: str) -> dict[int, str]:
    """pid -> command line of all live processes of the program with ``mark`` (NAME=value), this one excepted."""
    return _scan(mark)[0]


def in_sessions(numbers: set[int]) -> dict[int, str]:
    """pid -> command line of all live processes in these sessions (setsid)."""
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) in numbers and state != "Z":
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return found


def left(mark: str, shm_before: set[str]) -> set[str]:
    """One line for each process and each new file in /dev/shm."""
    inodes = {}
    for name in shm_files() - shm_before:
        with contextlib.suppress(OSError):  # removed in this moment
            inodes[name] = (SHM / name).stat().st_ino
    own, foreign = _scan(mark)
    lines = {f"process {pid}: {command[:200]}" for pid, command in own.items()}
    return lines | {f"file /dev/shm/{name}" for name, inode in inodes.items() if inode not in foreign}


def still_left(find: Callable[[], set[str]], seconds: float) -> list[str]:
    """What ``find`` says every time for ``seconds``: what another program makes and removes meanwhile doesn't count."""
    deadline = time.monotonic() + seconds
    lines = find()
    while lines and time.monotonic() < deadline:
        time.sleep(0.3)
        lines &= find()
    return sorted(lines)


def _scan(mark: str) -> tuple[dict[int, str], set[int]]:
    """Command lines of marked processes; inodes in /dev/shm that others have mapped (names may differ there)."""
    own: dict[int, str] = {}
    foreign: set[int] = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            by_session = mark in sessions.get(int(session), "").split()
            if by_session or mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                if state != "Z":
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    own[int(folder.name)] = command.strip()
            else:
                foreign |= {int(inode) for inode in re.findall(r" (\d+) +/dev/shm/", (folder / "maps").read_text())}
    return own, foreign
