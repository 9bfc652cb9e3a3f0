"""The scorer of reasoning-gym tasks: the task's own `score_answer`, with its partial credit and equivalent answers."""

from __future__ import annotations

import re
from typing import Any

from rlscale.data import reasoning_gym

gym = reasoning_gym.package()
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    """The task's score, 0 to 1, of the text between the last `<answer>` tags, or of the whole answer without them.

    `extra_info["reasoning_gym"]` is the task and `extra_info["entry"]` its item (see `rlscale.data.reasoning_gym`).

    Raises:
        ValueError: the prompt doesn't come from reasoning-gym.
    """
    if not extra_info or "reasoning_gym" not in extra_info or "entry" not in extra_info:
        raise ValueError(f"the scorer reasoning_gym needs prompts of a reasoning-gym source, not of {data_source!r}")
    tagged = _ANSWER.findall(solution_str)
    answer = (tagged[-1] if tagged else solution_str).strip()
    return float(gym.get_score_answer_fn(extra_info["reasoning_gym"])(answer=answer, entry=extra_info["entry"]))
