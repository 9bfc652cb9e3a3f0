"""The scorer of mathematical answers: equality as mathematics, not as text, by the `math-verify` package.

A module of its own because it needs an optional package, which only scorer processes that use it import. math-verify
limits its own time by an alarm and so runs on a main thread only, which a scorer process offers.
"""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify


def math(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    """1.0 where the final answer equals the ground truth, else 0.0. For worked solutions.

    The final answer is what is boxed, else the last formula or number; several different boxed answers count as the set
    of them, which equals no single truth, so that boxing every candidate isn't paid. A GSM8K solution as ground truth
    (`... #### 42`) stands for what follows its mark.

    Raises:
        ValueError: the ground truth can't be read as mathematics.
    """
    truth = str(ground_truth).rpartition("####")[2].strip()
    gold = parse(truth if "\\boxed" in truth else f"\\boxed{{{truth}}}")
    if not gold:
        raise ValueError(f"the ground truth {ground_truth!r} can't be read as mathematics")
    return float(verify(gold, parse(solution_str)))
