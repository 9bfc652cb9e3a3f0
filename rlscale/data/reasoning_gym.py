"""Any reasoning-gym task by name as a source of prompts; it is scored by the task's own `score_answer`."""

from __future__ import annotations

import difflib
import hashlib
import warnings
from typing import Any

from rlscale.data.procedural import Prompt

INSTRUCTION = "\n\nPut the final answer between <answer> and </answer>."


def package() -> Any:
    """reasoning_gym, imported where a source asks for it and without its own SyntaxWarnings on the terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    return reasoning_gym


def make(name: str, size: int, seed: int, params: dict[str, Any]) -> list[Prompt]:
    """`size` items of the task. `params` are the task's own, besides `instruction`, which is put after each question.

    reasoning-gym seeds item i with seed + i, so that neighbouring seeds give overlapping data; hence our seed is hashed
    first. Tasks with few different items may still repeat some.

    Raises:
        ValueError: the package is missing, no such task, or parameters it refuses.
    """
    try:
        reasoning_gym = package()
    except ModuleNotFoundError as error:
        raise ValueError("reasoning_gym sources need the package: pip install reasoning-gym") from error
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = ", ".join(difflib.get_close_matches(name, DATASETS, 3))
        raise ValueError(f"reasoning_gym has no task {name!r}" + (f": did you mean {near}?" if near else ""))
    options = dict(params)
    instruction = options.pop("instruction", INSTRUCTION)
    hashed = int.from_bytes(hashlib.sha256(f"{name}/{seed}".encode()).digest()[:4]) >> 1
    try:
        data = reasoning_gym.create_dataset(name, size=size, seed=hashed, **options)
        items = [data[i] for i in range(size)]
    except Exception as error:  # assertions, TypeError, KeyError: whatever a task's config does
        raise ValueError(f"reasoning_gym task {name!r}, params {params}: {type(error).__name__}: {error}") from error
    return [
        Prompt(
            messages=[{"role": "user", "content": item["question"] + instruction}],
            data_source=f"reasoning_gym/{name}",
            ground_truth=item["answer"],
            extra_info={"reasoning_gym": name, "entry": item},
            scorer="reasoning_gym",
            where=f"reasoning_gym {name} {i}",
        )
        for i, item in enumerate(items)
    ]
