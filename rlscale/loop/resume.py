"""The checkpoint that a run resumes from: found, compared with its checksums and with the configuration of today."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlscale.checkpoint.saver import RUN
from rlscale.checkpoint.store import ABANDONED, Damaged, Manifest, Store, read_manifest
from rlscale.cluster import collective
from rlscale.cluster.device import Device
from rlscale.config import to_dict
from rlscale.config.compare import check_config
from rlscale.config.schema import Config


def folder_of(cfg: Config) -> Path:
    """Where the checkpoints of a run are."""
    return Path(cfg.trainer.run_dir) / "checkpoints"


@dataclass
class ResumePoint:
    """The checkpoint that a run resumes from, whole and checked.

    Attributes:
        in_place: it is in the run's own folder, whose records are continued; otherwise the run only starts from it.
        messages: for the user.
    """

    manifest: Manifest
    in_place: bool
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state: dict[str, Any] = self.manifest.json(RUN)

    @property
    def step(self) -> int:
        return self.manifest.step


def find(cfg: Config, device: Device) -> ResumePoint | None:
    """The checkpoint to resume from as ``trainer.resume_mode`` says, every checksum compared; None: start anew.

    That is the last one of the run's own folder (auto), or the one of ``resume_from_path`` (path, and auto while the
    folder has none).

    With ``auto`` a damaged checkpoint is archived with a message, and the one before it is taken. Collective.

    Raises:
        ValueError: the checkpoint of ``resume_from_path`` is not whole, or of several in ``auto`` none is; the
            configuration is that of another run. On every rank.
    """
    if cfg.trainer.resume_mode == "disable":
        return None
    store, given = Store(folder_of(cfg)), cfg.trainer.resume_from_path
    found, messages = _latest_whole(store, device) if cfg.trainer.resume_mode == "auto" else (None, [])
    if found is not None:
        resume = ResumePoint(read_manifest(found), True, messages)
    elif given is not None:
        path = Path(given).expanduser()
        problem = _problem(path, device)
        if problem is not None:
            raise ValueError(f"trainer.resume_from_path: {problem}")
        resume = ResumePoint(read_manifest(path), path.resolve().parent == store.root.resolve(), messages)
    else:
        return None
    resume.messages += check_config(resume.state["config"], to_dict(cfg), resume.manifest.path)
    return resume


def _latest_whole(store: Store, device: Device) -> tuple[Path | None, list[str]]:
    """The last checkpoint without fault; those after it that have one are renamed."""
    on_first(store.clean)
    messages: list[str] = []
    while steps := on_first(store.steps):
        problem = _problem(store.path(steps[-1]), device)
        if problem is None:
            return store.path(steps[-1]), messages
        aside = on_first(partial(store.set_aside, steps[-1]))
        messages.append(f"WARNING: damaged checkpoint: {problem}; renamed to {aside}; resuming from the previous one")
    damaged = on_first(lambda: sorted(map(str, store.root.glob("*.damaged"))))
    if damaged:
        raise ValueError(
            "\n".join([*messages, f"trainer.resume_mode auto: no complete checkpoint is left in {store.root}, only "
                       f"{', '.join(damaged)}; set trainer.resume_mode=disable to start a new run"])
        )  # fmt: skip
    return None, messages


def archive_later(cfg: Config, point: ResumePoint) -> None:
    """Rename the later checkpoints of the folder when the user resumes from an earlier one; adds to ``messages``.

    Collective.
    """
    if not point.in_place:
        return
    store = Store(folder_of(cfg))
    later = on_first(lambda: [store.set_aside(step, ABANDONED).name for step in store.steps() if step > point.step])
    if later:
        point.messages.append(f"later checkpoints were renamed to {', '.join(later)}")


def _problem(path: Path, device: Device) -> str | None:
    """What is wrong with a checkpoint; every rank reads a share of its files, and all get the same answer."""
    problem: str | None = None
    try:
        manifest = read_manifest(path)
        manifest.verify(sorted(manifest.files)[device.rank :: device.world])
    except Damaged as error:
        problem = str(error)
    return next((p for p in collective.gather(problem) if p is not None), None)


def on_first(action: Callable[[], Any]) -> Any:
    """What the first rank's action returns, on every rank; an OSError there is a ValueError everywhere."""

    def failed(text: str) -> ValueError:
        return ValueError(f"trainer.run_dir: checkpoints cannot be read or moved: {text}")

    return collective.on_first(action, catch=OSError, raised=failed)
