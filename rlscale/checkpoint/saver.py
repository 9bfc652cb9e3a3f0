"""All ranks save one checkpoint together, in the step or beside the following ones.

Every rank writes its own files; then the ranks tell each other what they wrote, and the first of them sets the marker
and makes the folder current. An asynchronous save copies the tensors to host memory, which is all that the step waits
for, and does the rest on a thread; the threads of the ranks talk through a process group of their own. One save can be
on its way at a time, and its memory is used again for the next.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlscale.checkpoint.shards import LAYOUT, State, collect, file_of, snapshot, write_tensors
from rlscale.checkpoint.store import FileRecord, Retention, Store, write_json
from rlscale.cluster.collective import on_each, on_first

RUN = "run.json"


class SaveError(RuntimeError):
    """A checkpoint could not be written; what was there before is untouched. Raised on every rank."""


@dataclass
class CheckpointData:
    """What a checkpoint holds.

    Attributes:
        states: tensors, by state.
        run: values that are the same on every rank (plain JSON), in ``run.json``.
        own: values of this rank, in ``rank_*.json``.
        notes: for the marker; ``metrics`` among them decides which checkpoint is the best.
    """

    states: Mapping[str, State]
    run: Mapping[str, Any]
    own: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


def own_file(rank: int) -> str:
    """Name of the file with a rank's own values."""
    return f"rank_{rank:05d}.json"


class Saver:
    """Saves the checkpoints of one run. Construction, `save` and `wait` are collective over the world.

    Args:
        asynchronous: return from `save` when the tensors have been copied to host memory.
        timeout_s: for the ranks to wait for each other.
    """

    def __init__(self, store: Store, retention: Retention, *, asynchronous: bool = False, timeout_s: float = 1800.0):
        self.store, self.retention, self.asynchronous = store, retention, asynchronous
        self.rank, self.group = 0, None
        if dist.is_initialized():
            self.rank = dist.get_rank()
            # a group of its own, over CPU: the threads of a save must not come between the step's collectives
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.memory: Tensor | None = None
        self.thread: threading.Thread | None = None
        self.failure: str | None = None

    def save(self, step: int, content: CheckpointData) -> None:
        """Save; an asynchronous save waits for the one before it and starts its own.

        Raises:
            SaveError: this save, or the asynchronous one before it, failed on some rank.
        """
        self.wait()
        tensors, layout = collect(content.states, self.rank)
        if self.asynchronous:
            tensors, self.memory = snapshot(tensors, self.memory)
            args = (step, tensors, layout, content)
            self.thread = threading.Thread(target=self._write, args=args, name=f"save-{step}", daemon=True)
            self.thread.start()
        else:
            self._write(step, tensors, layout, content)
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is on its way.

        Raises:
            SaveError: the save on its way failed.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        failure, self.failure = self.failure, None
        if failure is not None:
            raise SaveError(failure)

    def _write(self, step: int, tensors: dict[str, Tensor], layout: Any, content: CheckpointData) -> None:
        """Every rank writes its files, the first one the rest; ``failure``, alike on all: what went wrong."""
        folder, failed = self.store.partial(step), f"checkpoint {self.store.path(step)} could not be written"
        together: Any = {"group": self.group, "raised": SaveError, "describe": self._describe}

        def write_files() -> dict[str, FileRecord]:
            name, values = file_of(self.rank), own_file(self.rank)
            return {
                name: write_tensors(folder / name, tensors),
                values: write_json(folder / values, dict(content.own)),
            }

        def publish() -> None:
            files = {name: record for of_rank in written for name, record in of_rank.items()}
            files[LAYOUT] = write_json(folder / LAYOUT, layout)
            files[RUN] = write_json(folder / RUN, dict(content.run))
            self.store.publish(step, files, content.notes)

        try:
            on_first(lambda: self.store.begin(step), **together)
            written = on_each(write_files, **together)
            on_first(publish, **together)
            failed = f"checkpoint {self.store.path(step)} is complete, but older checkpoints could not be deleted"
            on_first(lambda: self.store.prune(self.retention), **together)
        except SaveError as error:
            self.failure = f"{failed}: {error}"
            if self.rank == 0:
                self.store.discard(step)
        except Exception as error:  # the other ranks cannot be reached
            self.failure = f"the checkpoint of step {step} was not completed: {type(error).__name__}: {error}"

    def _describe(self, error: Exception) -> str:
        what = error.strerror or error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        return f"rank {self.rank}: {what}"
