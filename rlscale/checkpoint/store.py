"""The folder of a run's checkpoints: what is there, what of it is whole, what may go. Files only, one process.

    checkpoints/
      step_000020/            a checkpoint
        manifest.json         its marker, written last: size and checksum of every other file, and of itself
        run.json, layout.json, rank_00000.json, rank_00000.safetensors, ...
      step_000040.partial/    being written, or left by a run that was killed
      step_000030.damaged/    what a run that wanted to resume found damaged
      step_000050.abandoned/  of a run that was resumed from an earlier step by the user's choice
      step_000010.deleted/    being deleted

A checkpoint is written beside the others, flushed to the disk and made current by one rename, so that a process killed
at any moment leaves earlier checkpoints intact. Older ones are deleted only afterwards; which ones is decided from the
files on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlscale.checkpoint.checksum import Checksum

NAME = re.compile(r"step_(\d+)")  # of a checkpoint's folder
MANIFEST = "manifest.json"
FORMAT = 1  # of the files of a checkpoint; another number is refused
PARTIAL, DELETED, DAMAGED, ABANDONED = ".partial", ".deleted", ".damaged", ".abandoned"
CHUNK = 8 * 2**20  # bytes read or written at a time


class Damaged(ValueError):
    """A checkpoint that is not what was written; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of a file."""

    size: int
    checksum: int


@dataclass
class Manifest:
    """A complete checkpoint: its files, and what was noted when it was made current."""

    path: Path
    step: int
    files: dict[str, FileRecord]
    notes: dict[str, Any] = field(default_factory=dict)

    def json(self, name: str) -> Any:
        """The content of one of its JSON files."""
        return json.loads((self.path / name).read_bytes())

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Read files (default: all) and compare their checksums.

        Raises:
            Damaged: names the first file that differs.
        """
        for name in self.files if names is None else names:
            try:
                found = checksum_of(self.path / name)
            except OSError as error:
                raise Damaged(f"{self.path / name} cannot be read: {error.strerror or error}") from error
            if found != self.files[name].checksum:
                raise Damaged(f"{self.path / name}: its content has changed since it was written (checksum)")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the last ``keep_last`` (None: all), every one whose step is a multiple of ``keep_every``
    (0: none for that reason), and, where ``keep_best`` names a metric, the one with its highest value, or with the
    lowest where the name begins with ``-``."""

    keep_last: int | None = None
    keep_every: int = 0
    keep_best: str | None = None

    def superseded(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The steps that may go, of those for which metrics are given. Of equally good ones the latest is the best."""
        if self.keep_last is None:
            return []
        steps = sorted(metrics)
        kept = set(steps[-self.keep_last :])
        if self.keep_every:
            kept |= {step for step in steps if step % self.keep_every == 0}
        if self.keep_best is not None:
            name, sign = self.keep_best.removeprefix("-"), -1 if self.keep_best.startswith("-") else 1
            ranked = sorted((sign * values[name], step) for step, values in metrics.items() if name in values)
            kept |= {step for _, step in ranked[-1:]}
        return [step for step in steps if step not in kept]


class Store:
    """The checkpoints below ``root``; the folder is made when the first one is written."""

    def __init__(self, root: str | os.PathLike[str]):
        self.root = Path(root)

    def path(self, step: int) -> Path:
        return self.root / f"step_{step:06d}"

    def partial(self, step: int) -> Path:
        """Where a checkpoint is while it is being written."""
        return self.root / (self.path(step).name + PARTIAL)

    def steps(self) -> list[int]:
        """Steps of all checkpoints, whole or not, ascending."""
        names = [path.name for path in self.root.iterdir()] if self.root.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))

    # ---- writing

    def begin(self, step: int) -> Path:
        """`partial`, empty, to be filled and then made current by `publish`, or given up by `discard`."""
        partial = self.partial(step)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        return partial

    def publish(self, step: int, files: Mapping[str, FileRecord], notes: Mapping[str, Any]) -> None:
        """Write the marker and make the folder current. All files must have been flushed.

        A checkpoint of the same step that is there already is replaced.
        """
        records = {name: asdict(files[name]) for name in sorted(files)}
        content = {"format": FORMAT, "step": step, "files": records, "notes": dict(notes)}
        partial = self.partial(step)
        write_json(partial / MANIFEST, content | {"digest": _digest(content)})
        flush_folder(partial)
        final = self.path(step)
        replaced = self.set_aside(step, DELETED) if final.exists() else None
        partial.rename(final)
        flush_folder(self.root)
        if replaced is not None:
            shutil.rmtree(replaced)

    def discard(self, step: int) -> None:
        """Remove an unfinished checkpoint."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    # ---- reading

    def complete(self) -> list[Manifest]:
        """All checkpoints whose marker and file sizes are right, ascending."""
        whole = []
        for step in self.steps():
            with contextlib.suppress(Damaged):
                whole.append(read_manifest(self.path(step)))
        return whole

    # ---- tidying

    def clean(self) -> None:
        """Tidy up after killed runs: a checkpoint that lacked only its name gets it, unfinished ones and half-done
        deletions are removed.
        """
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            match = re.fullmatch(rf"{NAME.pattern}({re.escape(PARTIAL)}|{re.escape(DELETED)})", path.name)
            if match is None:
                continue
            final = self.path(int(match[1]))
            if match[2] == PARTIAL and not final.exists():
                with contextlib.suppress(ValueError):
                    read_manifest(path)
                    path.rename(final)
                    continue
            shutil.rmtree(path)

    def set_aside(self, step: int, ending: str = DAMAGED) -> Path:
        """Rename a checkpoint, so that it neither counts nor is at any time half there under its own name."""
        path = self.path(step)
        target = path.with_name(path.name + ending)
        if target.exists():
            shutil.rmtree(target)
        path.rename(target)
        return target

    def prune(self, retention: Retention) -> None:
        """Delete those of the complete checkpoints that the retention does not keep."""
        metrics = {whole.step: whole.notes.get("metrics", {}) for whole in self.complete()}
        for step in retention.superseded(metrics):
            shutil.rmtree(self.set_aside(step, DELETED))


def read_manifest(path: Path) -> Manifest:
    """The checkpoint in a folder of any name.

    Raises:
        Damaged: no marker, a marker that is not what was written, a file that is missing or has another size.
    """
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        digest = content.pop("digest")
        known = content["format"]
    except FileNotFoundError:
        raise Damaged(f"{path}: has no {MANIFEST}, so it is not a complete checkpoint") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"{path / MANIFEST}: cannot be read as a manifest ({error})") from error
    if digest != _digest(content):
        raise Damaged(f"{path / MANIFEST}: its content has changed since it was written (checksum)")
    if known != FORMAT:
        raise ValueError(f"{path / MANIFEST}: format {known} is of another version of rlscale; this one reads {FORMAT}")
    named = NAME.fullmatch(path.name)
    if named and int(named[1]) != content["step"]:
        raise Damaged(f"{path}: its {MANIFEST} is that of step {content['step']}, so the folder is a copy of another")
    files = {name: FileRecord(**record) for name, record in content["files"].items()}
    for name, record in files.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            raise Damaged(f"{path / name}: the file is missing") from None
        if size != record.size:
            raise Damaged(f"{path / name}: has {size} bytes, {record.size} were written")
    return Manifest(path, int(content["step"]), files, content["notes"])


def checksum_of(path: Path) -> int:
    """The checksum of a file."""
    out = Checksum()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            out.update(chunk)
    return out.value()


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a file and flush it to the disk. Its checksum is taken on the way; small parts are written together."""
    size, checksum = 0, Checksum()
    with open(path, "wb", buffering=CHUNK // 8) as file:
        for part in parts:
            size += len(part)
            for start in range(0, len(part), CHUNK):
                chunk = part[start : start + CHUNK]
                checksum.update(chunk)
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, checksum.value())


def write_json(path: Path, value: Any) -> FileRecord:
    """`write_file` of a value as JSON."""
    return write_file(path, [json.dumps(value, separators=(",", ":")).encode()])


def flush_folder(path: Path) -> None:
    """Make renames and new names in a folder last over a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
