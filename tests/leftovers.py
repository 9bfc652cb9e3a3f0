"""What a program leaves behind: processes that carry a mark in their environment, and files in shared memory.

The environment is inherited, so a marked program's processes are found however they were started and whoever their
parent is now. Files in /dev/shm carry no owner: those that were there before, or that an unmarked process has mapped,
are not counted.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

SHM = Path("/dev/shm")


def shm_files() -> set[str]:
    return set(os.listdir(SHM)) if SHM.is_dir() else set()


def processes(mark: str) -> dict[int, str]:
    """pid -> command line of all live processes with ``mark`` (NAME=value) in their environment, this one excepted."""
    return _scan(mark)[0]


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
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command:  # a zombie has none
                    own[int(folder.name)] = command
            else:
                foreign |= {int(inode) for inode in re.findall(r" (\d+) +/dev/shm/", (folder / "maps").read_text())}
    return own, foreign
