"""A reward of your own, used by its path:

    deepspeed launchers/train.py --yaml FILE reward.scorer=examples/new_reward.py:right_and_short \
        'reward.scorer_args={words: 50}'

It runs in processes of its own: one that hangs times out after reward.timeout_s, and one that raises is counted.
"""

from typing import Any

from rlscale.reward.verifiers import numbers


def right_and_short(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, words: int = 100
) -> dict[str, float]:
    """1 for the right number at the end, half of it where the answer is longer than ``words`` words.

    ``score`` is what the policy learns from; the other numbers appear in the metrics as ``reward/right`` and so on.
    """
    found = numbers(solution_str)
    right = float(bool(found) and found[-1] == numbers(str(ground_truth))[-1])
    length = len(solution_str.split())
    return {"score": right if length <= words else 0.5 * right, "right": right, "words": float(length)}
