"""Scorers for end-to-end runs on models with random weights, whose answers are noise."""

from __future__ import annotations

import time
from typing import Any


def spread(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    """A number that depends on the text alone and differs within a group, so that every step has advantages."""
    return sum(solution_str.encode()) % 17 / 16


def flawed(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> Any:
    """As `spread`, but raises, returns NaN or None for some texts."""
    kind = len(solution_str.encode()) % 4
    if kind == 0:
        raise RuntimeError("this scorer does not like the text")
    return [spread(data_source, solution_str, ground_truth), float("nan"), None][kind - 1]


def broken(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    """Raises always."""
    raise RuntimeError("this scorer is broken")


def stuck(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    """Takes for ever on some texts."""
    if len(solution_str.encode()) % 4 == 0:
        time.sleep(3600)
    return spread(data_source, solution_str, ground_truth)
