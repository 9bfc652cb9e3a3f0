"""The tasks that ``task`` can name. A new one needs its data and its step; `rlscale.loop.driver` serves them all.

The registry holds modules' names, so that a configuration is checked without importing any of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

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


#: module by name
TASKS = {"rl": "rlscale.loop.step"}


def load(name: str) -> Task:
    """The task of a name in `TASKS`; imports what its step needs."""
    return cast(Task, importlib.import_module(TASKS[name]).TASK)
