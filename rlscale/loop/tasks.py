"""What a task is: its data, its step and its validation. `rlscale.loop.driver` serves every task alike."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rlscale.config.schema import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlscale.config.schema import Config
    from rlscale.data.dataset import PromptData
    from rlscale.loop.run import Run


@dataclass(frozen=True)
class Task:
    """What is a task's own; its module calls it ``TASK``.

    Attributes:
        data: training and held-out prompts from configuration and tokenizer.
        step: ``step(run, number)`` takes one step and returns its metrics. It raises `rlscale.loop.stopping.Stopped`
            only while it has changed nothing.
        validate: ``validate(run, number)`` returns the metrics of the held-out prompts.
    """

    data: Callable[[Config, PreTrainedTokenizerBase], tuple[PromptData, PromptData | None]]
    step: Callable[[Run, int], dict[str, float]]
    validate: Callable[[Run, int], dict[str, float]]


def load(name: str) -> Task:
    """The task of a name in `rlscale.config.schema.TASKS`; imports what its step needs."""
    return cast(Task, importlib.import_module(TASKS[name]).TASK)
