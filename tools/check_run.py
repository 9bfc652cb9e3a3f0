"""Whether a run learned: exit status 0 if the training reward rose far enough and the held-out accuracy did not fall.

python tools/check_run.py runs/quickstart [--min-reward 0.75]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

from rlscale.observe.summary import accuracy
from rlscale.observe.writers import read_metrics

REWARD = "critic/score/mean"


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def check(records: list[dict[str, Any]], first: int, last: int, min_reward: float, tolerance: float) -> list[str]:
    """What a run of these metrics records failed at; empty if it learned. Prints what it compared."""
    rewards = [r[REWARD] for r in records if r["step"] > 0 and REWARD in r]
    if len(rewards) < first + last:
        return [
            f"the run has {len(rewards)} steps with a reward; at least {first + last} are needed to compare its ends"
        ]
    begin, end = mean(rewards[:first]), mean(rewards[-last:])
    print(f"training reward: {begin:.3f} in the first {first} steps, {end:.3f} in the last {last}")
    failures = []
    if end <= begin:
        failures.append(f"the training reward has not risen: {begin:.3f} -> {end:.3f}")
    if end < min_reward:
        failures.append(f"the training reward ended at {end:.3f}, below {min_reward}")
    held_out = accuracy(records)
    if not held_out:
        failures.append("the run has no held-out accuracy")
    for name, entry in held_out.items():
        before, after = entry["before"], entry["after"]
        if before is None or after is None:
            failures.append(f"held-out {name} was not measured {'before' if before is None else 'after'} training")
            continue
        print(f"held-out {name}: {before:.3f} before, {after:.3f} after")
        if after < before - tolerance:
            failures.append(f"held-out {name} fell: {before:.3f} -> {after:.3f}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir")
    parser.add_argument("--first", type=int, default=3, help="steps at the beginning whose mean reward is compared")
    parser.add_argument("--last", type=int, default=5, help="steps at the end whose mean reward is compared")
    parser.add_argument("--min-reward", type=float, default=0.75, help="least mean reward of the last steps")
    parser.add_argument("--tolerance", type=float, default=0.0, help="largest accepted drop of a held-out accuracy")
    args = parser.parse_args()
    try:
        failures = check(read_metrics(args.run_dir), args.first, args.last, args.min_reward, args.tolerance)
    except ValueError as error:
        failures = [str(error)]
    for failure in failures:
        print(f"check_run: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
