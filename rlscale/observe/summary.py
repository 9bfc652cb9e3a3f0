"""What a run came to, in a few lines: made from its metrics.jsonl, printed, and saved as summary.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlscale.cluster.files import write_whole
from rlscale.observe.progress import duration
from rlscale.observe.writers import read_metrics

ENDS = 5  # steps at most over which the first and the last rewards are averaged


def summarize(run_dir: str | os.PathLike[str], seconds: float | None = None) -> dict[str, Any]:
    """Summarise a run folder and write its summary.json.

    Args:
        run_dir: folder with metrics.jsonl.
        seconds: wall-clock time of the whole run, start-up included; null in the summary if not known.

    Returns:
        ``steps``, ``samples``, ``tokens`` (prompts and responses), ``seconds``, ``step_seconds`` (sum over the steps),
        ``tokens_per_second`` (in the steps), ``skipped_steps`` (optimizer steps of actor and critic left out because
        loss or gradient was not finite), ``reward_first``/``reward_last`` (means over up to 5 steps at either end,
        no step in both) and ``accuracy``: for each held-out source and measure ``{"before": ..., "after": ...}``,
        before being null if the run did not validate before training.

    Raises:
        ValueError: the folder has no readable metrics.jsonl.
    """
    records = read_metrics(run_dir)
    training = [r for r in records if r["step"] > 0]
    rewards = [r["critic/score/mean"] for r in training if "critic/score/mean" in r]
    ends = max(1, min(ENDS, len(rewards) // 2))
    tokens = sum(r.get("batch/num_tokens", 0) for r in training)
    step_seconds = sum(r.get("timing_s/step", 0.0) for r in training)
    summary = {
        "steps": len(training),
        "samples": int(sum(r.get("batch/num_samples", 0) for r in training)),
        "tokens": int(tokens),
        "seconds": seconds,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens / step_seconds if step_seconds else None,
        "skipped_steps": int(sum(r.get(f"{who}/skipped_steps", 0) for r in training for who in ("actor", "critic"))),
        "reward_first": _mean(rewards[:ends]),
        "reward_last": _mean(rewards[-ends:]),
        "accuracy": accuracy(records),
    }
    write_whole(Path(run_dir) / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def accuracy(records: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Before (step 0) and after (the last step that has it), by held-out source and measure."""
    out: dict[str, dict[str, float | None]] = {}
    for record in records:
        for name, value in record.items():
            if match := re.fullmatch(r"val/(.+/(?:mean|best|maj)@\d+)", name):
                entry = out.setdefault(match[1], {"before": None, "after": None})
                entry["before" if record["step"] == 0 else "after"] = value
    return out


def print_summary(summary: dict[str, Any], write: Callable[[str], Any] = print) -> None:
    """Print a summary, a line each."""

    def number(value: float | None, form: str = ".3f") -> str:
        return "-" if value is None else format(value, form)

    write("summary")
    for name, entry in summary["accuracy"].items():
        write(f"  held-out {name}: {number(entry['before'])} before, {number(entry['after'])} after")
    if summary["reward_first"] is not None:
        first, last = number(summary["reward_first"]), number(summary["reward_last"])
        write(f"  training reward: {first} in the first steps, {last} in the last")
    samples = f", {summary['samples']} samples" if summary["samples"] else ""
    rate = number(summary["tokens_per_second"], ".0f")
    tokens = f", {summary['tokens']} tokens ({rate} tokens/s)" if summary["tokens"] else ""
    write(f"  {summary['steps']} steps{samples}{tokens}")
    if summary["skipped_steps"]:
        write(f"  optimizer steps skipped (loss or gradient not finite): {summary['skipped_steps']}")
    total = "" if summary["seconds"] is None else f" of {duration(summary['seconds'])} in all"
    write(f"  time: {duration(summary['step_seconds'])} in steps{total}")
