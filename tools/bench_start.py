"""Time from the command to the first step of a run: of this tree, or of two trees that take turns.

    python tools/bench_start.py [--rounds 3] [--before FOLDER] [--model tiny|FOLDER] [key=value ...]

A run is started as a user starts it (`deepspeed --num_gpus 2 launchers/train.py`, two engines) and ended after its
first step, without validation, checkpoints and plots. Its parts are told by what it prints: the launcher starts the
ranks; they import, join and read the data until the run says that it loads the model; models and engines are ready when
the first step begins; the step (compilation of its kernels with it) ends with its line in metrics.jsonl. Compiled
kernels come from torch's cache, which one run before the first round fills.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

from rlscale.cluster.process import free_port
from rlscale.testing.models import tiny_model
from tools.common import ROOT, alternate, follow, table

MARKS = {"launcher": "spawned with command", "imports, process group, data": "loading "}
LOADING, STEP = "models and engines", "first step"
PARTS = (*MARKS, LOADING, STEP)
SETTINGS = {
    "trainer.total_training_steps": 1,
    "trainer.val_before_train": "false",
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.export": "never",
    "trainer.plots": "false",
}


def start(number: int, tree: Path, model: str, overrides: list[str], limit: float) -> dict[str, float]:
    """Seconds of each part of one start, and its CPU seconds."""
    folder = Path(tempfile.mkdtemp(prefix="bench-start-"))
    run_dir = folder / "run"
    settings = SETTINGS | {"trainer.run_dir": run_dir, "model.path": model}
    bin_folder = Path(sys.executable).parent
    command = [
        str(bin_folder / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port()), "launchers/train.py",
        "--yaml", "yamls/quickstart_cpu.yaml", *(f"{key}={value}" for key, value in settings.items()), *overrides,
    ]  # fmt: skip
    env = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(tree), "PATH": f"{bin_folder}:/usr/bin:/bin"}
    marks: list[float] = []

    def look(log: Path) -> None:
        text = log.read_text(errors="replace") if len(marks) < len(MARKS) else ""
        if len(marks) < len(MARKS) and list(MARKS.values())[len(marks)] in text:
            marks.append(time.monotonic())

    began = time.monotonic()
    lines, _ = follow(command, env, run_dir / "metrics.jsonl", folder / "log", limit, cwd=tree, look=look)
    [(ended, cpu, metrics)] = lines
    shutil.rmtree(folder)
    times = [began, *marks, ended - metrics["timing_s/step"], ended]
    parts = {name: after - before for name, before, after in zip(PARTS, times[:-1], times[1:], strict=True)}
    return parts | {"total": ended - began, "CPU seconds": cpu}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="starts of each tree (default 3)")
    parser.add_argument("--before", type=Path, help="checkout to compare with; its ratio is that of the medians")
    parser.add_argument("--model", default="tiny", help="tiny (two random layers), or a Hugging Face folder")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one start")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("overrides", nargs="*", help="key=value for the runs")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the program under way is ended, too
    model = tiny_model("qwen2", tied=False, layers=2) if args.model == "tiny" else str(Path(args.model).resolve())
    trees = {"before": args.before, "now": ROOT} if args.before else {"now": ROOT}
    runs = {
        name: partial(start, tree=tree.resolve(), model=model, overrides=args.overrides, limit=args.limit)
        for name, tree in trees.items()
    }
    for run in runs.values():
        run(0)
    rounds = list(alternate(runs, args.rounds))
    names = (*PARTS, "total", "CPU seconds")
    medians = {tree: {name: statistics.median(r[tree][name] for r in rounds) for name in names} for tree in runs}
    print(table(["seconds, median", *runs], [[n, *(f"{medians[t][n]:.1f}" for t in runs)] for n in names]))
    figures = {"medians": medians, "rounds": rounds}
    if args.before:
        ratios = [r["now"]["total"] / r["before"]["total"] for r in rounds]
        print(f"now / before: {statistics.median(ratios):.2f} of the time ({min(ratios):.2f} to {max(ratios):.2f})")
        figures["ratios"] = ratios
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
