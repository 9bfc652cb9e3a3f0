"""Run the algorithm library on golden numeric cases: ``python tools/oracle.py FILE.json...``.

A file holds ``{"family": ..., "cases": [...]}``; a case ``{name, function, params, inputs, expected, dtype, rtol,
atol, tags}``. A value passes if ``|got - expected| <= atol + rtol |expected|``. One line is printed for each family
and function, with the worst error as a share of its tolerance, then one line for each mismatch; the exit status is 1
if there is any.

Counted apart: cases tagged ``singleton_group`` that expect the raw score for a group of one, where this library
answers 0 (the other rows are still checked where the estimator treats rows apart), and functions of other packages
(scorers, parsers).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.algo.golden_functions import TABLE, Answer, Case, number

OTHER_ROOMS = {"gsm8k_score", "boxed_answer", "tool_call"}
SEPARATE_ROWS = {"grpo", "rloo", "opo", "optimal_token_baseline", "tir_optimal_token_baseline"}


def worst_share(got: Any, expected: Any, rtol: float, atol: float) -> float:
    """Worst ``|got - expected|`` as a share of its tolerance; infinite where structure or finiteness differ."""
    if isinstance(got, Tensor):
        got = got.detach().tolist()
    if isinstance(expected, list):
        if not isinstance(got, list) or len(got) != len(expected):
            return math.inf
        return max((worst_share(g, e, rtol, atol) for g, e in zip(got, expected, strict=True)), default=0.0)
    if got is None:
        return math.inf
    g, e = float(got), number(expected)
    if g == e:
        return 0.0
    if not (math.isfinite(g) and math.isfinite(e)):
        return math.inf
    tolerance = atol + rtol * abs(e)
    return abs(g - e) / tolerance if tolerance > 0 else math.inf


def drop_singletons(case: dict[str, Any], answer: Answer) -> dict[str, Any] | None:
    """What can still be compared of a case with a group of one: its other rows, or ``None`` where rows depend on each
    other.

    Raises:
        AssertionError: a group of one did not get 0.
    """
    group = case["inputs"]["group"]
    alone = [group.count(g) == 1 for g in group]
    assert all(v == 0 for row, single in zip(answer.values["advantages"], alone, strict=True) if single for v in row), (
        f"{case['name']}: a group of one has an advantage that is not 0"
    )
    if case["function"] not in SEPARATE_ROWS:
        return None
    answer.values["advantages"] = [
        r for r, single in zip(answer.values["advantages"], alone, strict=True) if not single
    ]
    return case["expected"] | {
        "advantages": [r for r, single in zip(case["expected"]["advantages"], alone, strict=True) if not single]
    }


@dataclass
class Tally:
    """Figures of one function of one family."""

    passed: int = 0
    failed: int = 0
    apart: int = 0
    other: int = 0
    worst: float = 0.0

    def __str__(self) -> str:
        apart = f", {self.apart} groups of one answered by 0" if self.apart else ""
        other = f", {self.other} of other packages" if self.other else ""
        return f"{self.passed:4d} passed, {self.failed} failed{apart}{other}"


def run_case(case: dict[str, Any], tally: Tally) -> list[str]:
    """Run one case in each of its dtypes; the mismatches as text."""
    name = case["function"]
    if name in OTHER_ROOMS:
        tally.other += 1
        return []
    if name not in TABLE:
        tally.failed += 1
        return [f"{case['name']}: unknown function {name!r}"]
    problems: list[str] = []
    apart = False
    for dtype in (
        case["inputs"].get("test_dtypes") or case["params"].get("test_dtypes") or [case.get("dtype", "float64")]
    ):
        params = {k: v for k, v in case["params"].items() if k != "test_dtypes"}
        inputs = {k: v for k, v in case["inputs"].items() if k != "test_dtypes"}
        try:
            answer = TABLE[name](
                Case(
                    {**case, "params": params, "inputs": inputs},
                    getattr(torch, dtype if dtype.startswith("float") else "float64"),
                ),
                name,
            )
            expected: dict[str, Any] | None = case["expected"]
            wrong = compare(case, answer, expected, Tally())
            if wrong and "singleton_group" in case.get("tags", []) and name != "rloo":
                apart, expected = True, drop_singletons(case, answer)
        except Exception as e:  # a crash is a mismatch of this case, the others still run
            problems.append(f"{case['name']} [{dtype}]: {type(e).__name__}: {e}")
            continue
        if expected is not None:
            problems += [f"{case['name']} [{dtype}]: {w}" for w in compare(case, answer, expected, tally)]
    if problems:
        tally.failed += 1
    elif apart:
        tally.apart += 1
    else:
        tally.passed += 1
    return problems


def compare(case: dict[str, Any], answer: Answer, expected: dict[str, Any], tally: Tally) -> list[str]:
    """Mismatches of one answer; the tally takes the worst share of the tolerance."""
    problems = [f"check failed: {label}" for label, ok in answer.checks.items() if not ok]
    for key, value in expected.items():
        if key in answer.ignore:
            continue
        if key not in answer.values:
            problems.append(f"{key}: not answered")
            continue
        share = worst_share(answer.values[key], value, case["rtol"], case["atol"])
        tally.worst = max(tally.worst, share)
        if not share <= 1.0:
            problems.append(
                f"{key}: error is {share:.3g} times the tolerance (rtol {case['rtol']}, atol {case['atol']})"
            )
    return problems


def main(argv: list[str] | None = None) -> int:
    """Entry point; 1 on any mismatch."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    problems: list[str] = []
    total = Tally()
    for path in args.files:
        try:
            content = json.loads(path.read_text())
            cases = content["cases"] if isinstance(content, dict) else content
        except (OSError, KeyError, json.JSONDecodeError) as e:
            parser.error(f"{path}: not a case file: {e}")
        family = content.get("family", path.stem) if isinstance(content, dict) else path.stem
        tally = Tally()
        for case in cases:
            problems += [f"{family}: {p}" for p in run_case(case, tally)]
        print(f"{family:20s} {tally}; worst error {tally.worst:.2e} of the tolerance")
        for f in ("passed", "failed", "apart", "other"):
            setattr(total, f, getattr(total, f) + getattr(tally, f))
    for p in problems:
        print("MISMATCH", p)
    print(f"{'total':20s} {total}")
    return 1 if problems else 0
