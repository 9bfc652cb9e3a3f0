"""All ranks save one checkpoint together, in the step or beside the following ones.

Every rank writes its own files; then the ranks tell each other what they wrote, and the first of them sets the marker
and makes the folder current. An asynchronous save copies the tensors to host memory, which is all that the step waits
for, and does the rest on a thread; the threads of the ranks talk through a process group of their own. One save can be
on its way at a time, and its memory is used again for the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlscale.checkpoint.shards import LAYOUT, Own, State, collect, file_of, snapshot, write_tensors
from rlscale.checkpoint.store import Entry, Retention, Store, write_json
from rlscale.cluster.collective import gather

RUN = "run.json"


class SaveError(RuntimeError):
    """A checkpoint could not be written; what was there before is untouched. Raised on every rank."""


@dataclass
class Content:
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

    def __init__(
        self, store: Store, retention: Retention, *, asynchronous: bool = False, timeout_s: float = 1800.0,
    ):  # fmt: skip
        self.store, self.retention, self.asynchronous = store, retention, asynchronous
        self.rank, self.group = 0, None
        if dist.is_initialized():
            self.rank = dist.get_rank()
            # a group of its own, over CPU: the threads of a save must not come between the step's collectives
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.memory: Tensor | None = None
        self.thread: threading.Thread | None = None
        self.failure: str | None = None

    def save(self, step: int, content: Content) -> None:
        """Save; an asynchronous save waits for the one before it and starts its own.

        Raises:
            SaveError: this save, or the asynchronous one before it, failed on some rank.
        """
        self.wait()
        own = collect(content.states, self.rank)
        if self.asynchronous:
            own.tensors, self.memory = snapshot(own.tensors, self.memory)
            self.thread = threading.Thread(
                target=self._write, args=(step, own, content), name=f"save-{step}", daemon=True
            )
            self.thread.start()
        else:
            self._write(step, own, content)
            self._raise()

    def wait(self) -> None:
        """Wait until nothing is on its way.

        Raises:
            SaveError: the save on its way failed.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
            self._raise()

    def _raise(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise SaveError(failure)

    def _write(self, step: int, own: Own, content: Content) -> None:
        """Write, publish and prune; what goes wrong is noted in ``failure``, the same on every rank."""
        try:
            self.failure = self._together(step, own, content)
        except Exception as error:  # the other ranks cannot be reached
            self.failure = f"the checkpoint of step {step} was not completed: {type(error).__name__}: {error}"

    def _together(self, step: int, own: Own, content: Content) -> str | None:
        """Every rank writes its files, the first one the rest; returns what went wrong."""
        folder = self.store.partial(step)
        _, problem = self._first(lambda: self.store.begin(step))
        if problem is None:
            written, problem = self._each(lambda: self._files(folder, own, content))
        if problem is None:
            _, problem = self._first(lambda: self._publish(step, written, own, content))
        if problem is None:
            _, problem = self._first(lambda: self.store.prune(self.retention))
            return problem and f"checkpoint {self.store.path(step)} is complete, but older ones stay: {problem}"
        if self.rank == 0:
            self.store.discard(step)
        return f"checkpoint {self.store.path(step)} could not be written: {problem}"

    def _publish(self, step: int, written: list[dict[str, Entry]], own: Own, content: Content) -> None:
        folder = self.store.partial(step)
        files = {name: entry for of_rank in written for name, entry in of_rank.items()}
        files[LAYOUT] = write_json(folder / LAYOUT, own.layout)
        files[RUN] = write_json(folder / RUN, dict(content.run))
        self.store.publish(step, files, content.notes)

    def _files(self, folder: Path, own: Own, content: Content) -> dict[str, Entry]:
        """This rank's files."""
        tensors, values = file_of(self.rank), own_file(self.rank)
        return {
            tensors: write_tensors(folder / tensors, own.tensors),
            values: write_json(folder / values, dict(content.own)),
        }

    def _first(self, action: Callable[[], Any]) -> tuple[Any, str | None]:
        """The first rank acts; every rank has its result and its error."""
        results, problem = self._each(action if self.rank == 0 else lambda: None)
        return results[0], problem

    def _each(self, action: Callable[[], Any]) -> tuple[list[Any], str | None]:
        """Every rank acts; every rank has all results and the error of the lowest rank that failed."""
        result: Any = None
        problem: str | None = None
        try:
            result = action()
        except OSError as error:
            problem = f"rank {self.rank}: {error.strerror or error}"
        except Exception as error:  # the others wait to be told
            problem = f"rank {self.rank}: {type(error).__name__}: {error}"
        everyone = gather((result, problem), self.group)
        problems = [p for _, p in everyone if p is not None]
        return [r for r, _ in everyone], problems[0] if problems else None
