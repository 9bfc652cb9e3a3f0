"""What the benchmarks share: rounds that alternate, times between barriers, memory of this process and of programs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
TICKS = os.sysconf("SC_CLK_TCK")
T = TypeVar("T")


def alternate(runs: Mapping[str, Callable[[int], T]], rounds: int) -> Iterator[dict[str, T]]:
    """What each run makes of each round's number. They take turns, so that all meet the same load, and every round
    begins with the next one."""
    names = list(runs)
    for number in range(rounds):
        first = number % len(names)
        yield {name: runs[name](number) for name in names[first:] + names[:first]}


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as what they hold: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [[cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
             for row in (head, *rows)]  # fmt: skip
    return "\n".join("  ".join(line) for line in lines)


# ---- on the ranks of a process group


@dataclass
class Timing:
    seconds: float
    cpu_seconds: float  # of this rank


def timed(work: Callable[[], object]) -> Timing:
    """Between two barriers: until all ranks have done it."""
    import torch.distributed as dist

    dist.barrier()
    started, cpu = time.perf_counter(), time.process_time()
    work()
    cpu = time.process_time() - cpu
    dist.barrier()
    return Timing(time.perf_counter() - started, cpu)


# ---- memory of this process


def memory(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS is resident now, VmHWM its peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def bytes_read() -> int:
    """Bytes that this process has read through system calls."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def reset_peak() -> None:
    """VmHWM starts again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


# ---- whole programs


class Monitor(threading.Thread):
    """CPU time and memory of a program and everything it has started, read from /proc while it runs."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pids = {pid}
        self.cpu: dict[int, float] = {}  # pid -> CPU seconds when last seen, kept after the process has ended
        self.peak = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(2.0):
            self.read_cpu()
            self.peak = max(self.peak, self.pss())

    def read_cpu(self) -> float:
        """CPU seconds of all processes so far."""
        parents: dict[int, int] = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                with open(f"/proc/{entry}/stat") as f:
                    fields = f.read().rsplit(")", 1)[1].split()
            except OSError:
                continue
            pid, parents[pid] = int(entry), int(fields[1])
            if pid in self.pids or parents[pid] in self.pids:
                self.pids.add(pid)
                self.cpu[pid] = (int(fields[11]) + int(fields[12])) / TICKS
        for pid, parent in parents.items():  # children listed before their parents
            if parent in self.pids:
                self.pids.add(pid)
        return sum(self.cpu.values())

    def pss(self) -> int:
        """Bytes of memory of all processes, shared pages counted once."""
        total = 0
        for pid in list(self.pids):
            try:
                with open(f"/proc/{pid}/smaps_rollup") as f:
                    total += next(int(line.split()[1]) for line in f if line.startswith("Pss:")) * 1024
            except (OSError, StopIteration):
                continue
        return total


def end(program: subprocess.Popen[bytes], pids: set[int]) -> None:
    """Stop a program and all its processes: launchers start their workers in sessions of their own."""
    program.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(10)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    program.wait()


def follow(
    command: list[str],
    env: dict[str, str],
    lines: Path,
    log: Path,
    limit: float,
    cwd: Path = ROOT,
    look: Callable[[Path], None] = lambda _: None,
) -> tuple[list[tuple[Any, ...]], float]:
    """Run a program. (time, CPU seconds so far, object) of each line that it adds to ``lines``; and the peak in GiB.

    ``look`` is called with ``log``, where its output goes, fifty times a second.
    """
    seen: list[tuple[Any, ...]] = []
    with open(log, "wb") as output:
        program = subprocess.Popen(
            command, env=os.environ | env, cwd=cwd, stdout=output, stderr=output, start_new_session=True
        )
    monitor = Monitor(program.pid)
    monitor.start()
    deadline = time.monotonic() + limit
    position = 0
    try:
        while True:
            running = program.poll() is None
            look(log)
            if lines.exists() and lines.stat().st_size > position:
                now = time.monotonic()
                with open(lines) as f:
                    f.seek(position)
                    text = f.read()
                whole = text[: text.rfind("\n") + 1]
                position += len(whole.encode())
                seen += [(now, monitor.read_cpu(), json.loads(line)) for line in whole.splitlines()]
            if not running:
                break
            if time.monotonic() > deadline:
                raise SystemExit(f"{command[0]} took more than {limit:.0f} s; its output is in {log}")
            time.sleep(0.02)
    finally:
        monitor.done.set()
        if program.poll() is None:
            end(program, monitor.pids)
    if program.returncode:
        sys.stderr.write(log.read_text(errors="replace")[-4000:])
        raise SystemExit(f"{' '.join(command)} ended with status {program.returncode}")
    return seen, monitor.peak / 2**30
