"""Whether two runs took the same steps: every training metric of metrics.jsonl, step by step.

    rlscale compare runs/a runs/b [--rtol 1e-5]

Times and rates are left out (timing_s/*, names that end in _s, and perf/* but perf/total_tokens). Exit status 0: equal;
1: different, with the first difference by step and name; 2: something cannot be read.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rlscale.observe.writers import METRICS, read_records

SAME, DIFFERENT = 0, 1


def is_training_metric(name: str) -> bool:
    """Whether equal runs must agree in it: not a time, nor what follows from one."""
    if name.startswith("perf/"):
        return name == "perf/total_tokens"
    return not (name.startswith("timing_s/") or name.endswith("_s"))


def differences(a: list[dict[str, Any]], b: list[dict[str, Any]], rtol: float = 0.0) -> Iterator[str]:
    """What differs between the records of two runs, by step and name of the metric."""
    steps = [Counter(record["step"] for record in records) for records in (a, b)]
    for step in sorted(steps[0] | steps[1]):
        times = [counted[step] for counted in steps]
        if times != [1, 1]:
            yield f"step {step}: recorded {times[0]} time(s) in A, {times[1]} in B"
            continue
        first, second = (next(r for r in records if r["step"] == step) for records in (a, b))
        for name in sorted(name for name in first.keys() | second.keys() if is_training_metric(name)):
            x, y = first.get(name, "absent"), second.get(name, "absent")
            if not _equal(x, y, rtol):
                yield f"step {step}: {name} is {x} in A, {y} in B"
    for label, records in (("A", a), ("B", b)):
        order = [record["step"] for record in records]
        if order != sorted(order):
            yield f"the steps of {label} are not in order: {order}"


def _equal(x: Any, y: Any, rtol: float) -> bool:
    if not (isinstance(x, int | float) and isinstance(y, int | float)):
        return bool(x == y)
    return x == y or (math.isnan(x) and math.isnan(y)) or math.isclose(x, y, rel_tol=rtol)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="run folder")
    parser.add_argument("b", metavar="B", help="run folder")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance (default 0)")


def run(args: argparse.Namespace) -> int:
    if not args.rtol >= 0:
        raise ValueError(f"--rtol {args.rtol:g} is not a relative difference")
    a, b = (read_records(folder) for folder in (args.a, args.b))
    if not a and not b:
        raise ValueError(f"neither run has a step in its {METRICS}")
    found = list(differences(a, b, args.rtol))
    names = {name for record in a for name in record if is_training_metric(name)} - {"step"}
    if found:
        print(found[0])
        if len(found) > 1:
            print(f"and {len(found) - 1} more difference(s)")
        return DIFFERENT
    print(f"equal: {len(a)} steps, {len(names)} training metrics")
    return SAME
