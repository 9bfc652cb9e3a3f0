"""What a task is. `rlscale.loop.build` builds what it needs and nothing else, `rlscale.loop.driver` serves them all."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from rlscale.config.schema import TASKS
from rlscale.loop.run_state import Batches, Stateful

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlscale.cluster.device import Device
    from rlscale.config.schema import Config
    from rlscale.loop.configure import Checked
    from rlscale.train.engine import Engine


@dataclass(frozen=True)
class TaskData:
    """Training data, held-out data (None: nothing is validated), and a line about both for the user.

    ``scorers``: of all samples, for a task that generates.
    """

    train: Batches
    val: Any
    summary: str
    scorers: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Task:
    """What is a task's own; its module calls it ``TASK``. Whether it generates stands in `TASKS`.

    Attributes:
        data: from configuration and tokenizer.
        models: by role, for a run of so many steps; the first is the one that is exported, and, in a task that
            generates, ``actor`` is the one that the engines get. Those with an optimizer are saved. Collective.
        step: ``step(run, number)`` takes one step of a `Run` (`GeneratingRun` if the task generates) and returns its
            metrics. It raises `rlscale.loop.stopping.Stopped` only while it has changed nothing.
        validate: ``validate(run, number)`` returns the metrics of the held-out data.
        state: what else is saved, by its key in the checkpoint.
    """

    data: Callable[[Config, PreTrainedTokenizerBase], TaskData]
    models: Callable[[Checked, Device, int], dict[str, Engine]]
    step: Callable[[Any, int], dict[str, float]]
    validate: Callable[[Any, int], dict[str, float]]
    state: Callable[[Config], dict[str, Stateful]] = lambda cfg: {}


def load_task(name: str) -> Task:
    """The task of a name in `TASKS`; imports what its step needs."""
    return cast(Task, importlib.import_module(TASKS[name].module).TASK)
