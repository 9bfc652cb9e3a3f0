"""The files of a run folder: config.yaml, metrics.jsonl, TensorBoard events and rollouts/step_*.jsonl.

metrics.jsonl is the run's record: one object per step, written before the next step begins, so that a killed run keeps
everything it has shown. `read_metrics` also accepts a file that ends in the middle of a line.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from rlscale.cluster.files import write_whole
from rlscale.config import Config, save

METRICS = "metrics.jsonl"
LOCK = ".lock"  # held by the run that writes into the folder
#: what belongs to one run in a run folder; a new run moves it aside
FILES = ("config.yaml", METRICS, "summary.json", "tensorboard", "rollouts", "plots", "checkpoints", "export")


class RunWriter:
    """Writes what a run leaves behind. On ranks other than 0 every method does nothing.

    Args:
        config: saved resolved as config.yaml; ``trainer.logger`` chooses the metric writers.
        run_dir: made if needed. A new run (``resume_step`` None) moves the files of an earlier one to
            ``previous/<number>/``.
        rank: of this process.
        resume_step: last step of the state that the run continues from; what is of later steps is dropped.
        recorded: last step whose record stays (default: ``resume_step``).
        on_disk_full: called before the one more attempt to write that a full disk gets.

    Raises:
        ValueError: the folder cannot be made or written, or another run writes into it.
    """

    def __init__(
        self,
        config: Config,
        run_dir: str | os.PathLike[str],
        rank: int = 0,
        resume_step: int | None = None,
        recorded: int | None = None,
        on_disk_full: Callable[[], None] = lambda: None,
    ) -> None:
        self.run_dir, self.on_disk_full = Path(run_dir), on_disk_full
        self._file: Any = None
        self._tensorboard: Any = None
        self._lock: Any = None
        self._active = rank == 0
        if not self._active:
            return
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.run_dir / LOCK, "w")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"trainer.run_dir: another run writes into {self.run_dir}") from None
            except OSError:
                pass  # a file system without locks
            if resume_step is None:
                _set_aside(self.run_dir)
            else:
                recorded = resume_step if recorded is None else recorded
                _drop_after(self.run_dir, resume_step, recorded)
            save(config, self.run_dir / "config.yaml")
            if "jsonl" in config.trainer.logger:
                self._file = open(self.run_dir / METRICS, "ab", buffering=0)
        except OSError as error:
            raise ValueError(f"trainer.run_dir: {self.run_dir} cannot be written: {error.strerror or error}") from error
        if "tensorboard" in config.trainer.logger:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if recorded is None else recorded + 1
            self._tensorboard = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=purge, flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Record the metrics of a step (0: before training). Values that JSON doesn't know (nan, inf) become null.

        Raises:
            OSError: the file cannot be written (disk full); names it.
        """
        if not self._active:
            return
        values = {name: float(value) for name, value in metrics.items()}
        if self._file:
            record = {"step": step} | {n: v if math.isfinite(v) else None for n, v in values.items()}
            left = memoryview((json.dumps(record) + "\n").encode())

            def write() -> None:
                nonlocal left
                while left:  # a disk that is nearly full takes a part
                    left = left[self._file.write(left) :]

            self._attempt(self.run_dir / METRICS, write)
        if self._tensorboard:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]], kind: str = "step") -> None:
        """Write rollouts/<kind>_<step>.jsonl, one response per row; it appears whole or not at all."""
        if not self._active:
            return
        path = self.run_dir / "rollouts" / f"{kind}_{step:06d}.jsonl"
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

        def write() -> None:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, text)

        self._attempt(path, write)

    def _attempt(self, path: Path, write: Callable[[], Any]) -> None:
        """Write, once more where the disk was full. An OSError names the file: "No space left" does not say which."""
        try:
            try:
                write()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self.on_disk_full()
                write()
        except OSError as error:
            if error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error

    def flush(self) -> None:
        """Put the records so far on the disk, where they outlast a power failure."""
        if self._file:
            self._attempt(self.run_dir / METRICS, lambda: os.fsync(self._file.fileno()))
        if self._tensorboard:
            self._tensorboard.flush()

    def close(self) -> None:
        """Flush and close; further calls do nothing."""
        if self._file:
            self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._lock:
            self._lock.close()
        self._file = self._tensorboard = self._lock = None


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of metrics.jsonl by step, ascending; several records of one step are merged, null values left out.

    Raises:
        ValueError: there is no such file, or a line other than the last is not a JSON object.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for record in read_records(run_dir):
        by_step.setdefault(record["step"], {}).update({k: v for k, v in record.items() if v is not None})
    return [by_step[step] for step in sorted(by_step)]


def read_records(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The complete records of metrics.jsonl as they stand there; a last line without its end (the run was killed) is
    left out.

    Raises:
        ValueError: as `read_metrics`.
    """
    path = Path(run_dir) / METRICS
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a file of metrics records: {error}") from error
    records = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            records.append({**record, "step": int(record["step"])})
        except (ValueError, TypeError, KeyError) as error:
            what = "it has no step" if isinstance(error, KeyError) else error
            raise ValueError(f"{path}, line {number}: not a metrics record: {what}") from error
    return records


def _drop_after(run_dir: Path, step: int, recorded: int) -> None:
    """Keep the complete records up to step ``recorded``, by an atomic replacement, and the rollouts up to ``step``."""
    for rollouts in run_dir.glob("rollouts/*_*.jsonl"):
        number = rollouts.stem.rpartition("_")[2]
        if number.isdigit() and int(number) > step:
            rollouts.unlink()
    path = run_dir / METRICS
    if not path.is_file():
        return
    write_whole(path, "".join(json.dumps(r) + "\n" for r in read_records(run_dir) if r["step"] <= recorded))


def _set_aside(run_dir: Path) -> None:
    """Move the files of an earlier run in this folder to previous/<number>/."""
    present = [run_dir / name for name in FILES if (run_dir / name).exists()]
    if not present:
        return
    number = 1 + max((int(p.name) for p in run_dir.glob("previous/*") if p.name.isdigit()), default=0)
    target = run_dir / "previous" / str(number)
    target.mkdir(parents=True)
    for path in present:
        shutil.move(str(path), str(target / path.name))
