"""What an engine leaves in the operating system: its processes, the files they share, and the log they write."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil


def last_error(log: str) -> str | None:
    """The last exception in a log that is not merely somebody's giving up because of another process's."""
    prefix = r"^(?:\([^)]*\)\s*)*(?:(?:ERROR|CRITICAL)\b[^\]]*\]\s*)?"  # (process) LEVEL date [file:line]
    pattern = re.compile(prefix + r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit): .+)$")
    errors = [match.group(1).strip() for line in log.splitlines() if (match := pattern.match(line.strip()))]
    own = [e for e in errors if not re.search(r"initialization failed|EngineDeadError|Engine core|WorkerProc", e)]
    return (own or errors or [None])[-1]


@contextlib.contextmanager
def redirected(log: Path) -> Iterator[None]:
    """Standard output and error, of this process and of what it starts, go to the end of a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(saved, start=1):
            os.dup2(copy, number)
            os.close(copy)
        os.close(target)


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def shared_files(pid: int) -> set[Path]:
    """Semaphores and message queues of Python's multiprocessing that a process has mapped.

    Files are told by their inode: a semaphore's mapping carries the name under which it was made, not its final one.
    """
    try:
        mapped = set(re.findall(r" (\d+) +/dev/shm/", Path(f"/proc/{pid}/maps").read_text()))
    except OSError:
        return set()
    out = set()
    for path in [*Path("/dev/shm").glob("sem.mp-*"), *Path("/dev/shm").glob("psm_*")]:
        with contextlib.suppress(FileNotFoundError):
            if str(path.stat().st_ino) in mapped:
                out.add(path)
    return out


def end(processes: list[Any], members: list[psutil.Process]) -> None:
    """Wait for processes that are ending; kill what is still there."""
    for process in processes:
        process.join(timeout=1.0)
    _, alive = psutil.wait_procs(members, timeout=2.0)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=2.0)
    for process in processes:
        process.join(timeout=1.0)
