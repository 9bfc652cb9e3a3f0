"""Time of a GRPO step of this project beside TRL's GRPOTrainer, on the same machine, model, task and batch.

    python tools/bench_step.py [--rounds 3] [--steps 6] [--drop 2] [--only ours|trl] [key=value ...]

Both systems run alternately as whole programs: ours as a user starts it (`deepspeed launchers/train.py`), TRL as its
best setting on a CPU (`tools/trl_peer.py`). A step is 8 prompts x 8 responses of at most 32 tokens. It is timed from
outside, between the lines that each program writes after a step, and CPU time and memory are those of all processes
of the program, so that nothing that a step costs can be left out. Each program's first steps are dropped
(compilation, allocation). Validation, plots and checkpoints are off, and so is the reference model, as in TRL's
default. Further ``key=value`` go to our program.

Tokens are those of the responses, and of prompts and responses, counting each response's prompt (both systems alike).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

from rlscale.cluster.process import MALLOC, free_port
from tools.common import alternate, follow


@dataclasses.dataclass
class Step:
    """One step of one program. Times in seconds; ``phases`` as the program reports them."""

    seconds: float
    cpu_seconds: float
    completion_tokens: float
    prompt_tokens: float
    reward: float
    phases: dict[str, float]


@dataclasses.dataclass
class Result:
    steps: list[Step]
    peak_gib: float  # sum over all processes of the proportional set size


def run_ours(args: argparse.Namespace, folder: Path) -> Result:
    run_dir = folder / "run"
    settings = dict(zip(("trainer.run_dir", "trainer.total_training_steps"), (run_dir, args.steps), strict=True)) | {
        "trainer.val_before_train": "false",
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.export": "never",
        "trainer.plots": "false",
        "trainer.seed": args.seed,
        "actor.use_kl_loss": "false",
        "model.path": args.model,
    }
    command = [
        str(Path(sys.executable).parent / "deepspeed"),
        "--num_gpus",
        "2",
        "--master_port",
        str(free_port()),
        "launchers/train.py",
        "--yaml",
        args.yaml,
        *(f"{k}={v}" for k, v in settings.items()),
        *args.overrides,
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    lines, peak = follow(
        command, {"DS_ACCELERATOR": "cpu", "PATH": path}, run_dir / "metrics.jsonl", folder / "log", args.limit
    )
    lines = [line for line in lines if "timing_s/step" in line[2]]

    def step(before: tuple[Any, ...], after: tuple[Any, ...]) -> Step:
        m = after[2]
        return Step(
            after[0] - before[0],
            after[1] - before[1],
            m["response_length/mean"] * m["batch/num_samples"],
            m["prompt_length/mean"] * m["batch/num_samples"],
            m["critic/score/mean"],
            {k.removeprefix("timing_s/"): v for k, v in m.items() if k.startswith("timing_s/")},
        )

    return Result([step(*pair) for pair in zip(lines, lines[1:], strict=False)], peak)


def run_trl(args: argparse.Namespace, folder: Path) -> Result:
    out = folder / "steps.jsonl"
    command = [
        str(Path(sys.executable).parent / "torchrun"),
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        "tools/trl_peer.py",
        "--model",
        args.model,
        "--steps",
        str(args.steps),
        "--seed",
        str(args.seed),
        "--out",
        str(out),
    ]
    lines, peak = follow(command, MALLOC | {"OMP_NUM_THREADS": "1"}, out, folder / "log", args.limit)

    def step(before: tuple[Any, ...], after: tuple[Any, ...]) -> Step:
        m = after[2]
        return Step(
            after[0] - before[0],
            after[1] - before[1],
            m["completion_tokens"],
            m["prompt_tokens"],
            m["reward"],
            m["phases"],
        )

    return Result([step(*pair) for pair in zip(lines, lines[1:], strict=False)], peak)


def report(name: str, results: list[Result], drop: int) -> dict[str, Any]:
    """Figures of one system over the kept steps of all rounds (a rate is a ratio of totals, not a mean of rates)."""
    # the first line of a program ends its first step, which has no beginning to be timed from: one step is always
    # dropped
    steps = [s for r in results for s in r.steps[max(0, drop - 1) :]]
    if not steps:
        raise SystemExit(f"{name}: no step left after dropping {drop}; ask for more --steps")
    seconds = sum(s.seconds for s in steps)
    completion, prompt = sum(s.completion_tokens for s in steps), sum(s.prompt_tokens for s in steps)
    phases = {
        k: statistics.mean(s.phases.get(k, 0.0) for s in steps)
        for k in dict.fromkeys(k for s in steps for k in s.phases)
    }
    return {
        "system": name,
        "rounds": len(results),
        "steps": len(steps),
        "tokens_per_s": round(completion / seconds, 1),
        "tokens_with_prompts_per_s": round((completion + prompt) / seconds, 1),
        "seconds_per_step": round(seconds / len(steps), 3),
        "seconds_per_step_by_round": [
            round(statistics.mean(s.seconds for s in r.steps[max(0, drop - 1) :]), 3) for r in results
        ],
        "cpu_seconds_per_step": round(sum(s.cpu_seconds for s in steps) / len(steps), 2),
        "completion_tokens_per_step": round(completion / len(steps), 1),
        "prompt_tokens_per_step": round(prompt / len(steps), 1),
        "reward": round(statistics.mean(s.reward for s in steps), 3),
        "peak_memory_gib": round(max(r.peak_gib for r in results), 2),
        "seconds_by_phase": {k: round(v, 3) for k, v in phases.items()},
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program (default 3)")
    parser.add_argument("--steps", type=int, default=6, help="steps of a run (default 6)")
    parser.add_argument(
        "--drop", type=int, default=2, help="first steps of a run that are not counted (default 2, at least 1)"
    )
    parser.add_argument("--only", choices=("ours", "trl"), help="run one system alone")
    parser.add_argument("--yaml", default="yamls/quickstart_cpu.yaml", help="our configuration")
    parser.add_argument(
        "--model", default="models/SmolLM2-135M-Instruct", help="Hugging Face folder (tools/prepare_model.py)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one run of a program")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("overrides", nargs="*", help="key=value for our program")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the program under way is ended, too
    systems = {"ours": run_ours, "trl": run_trl}
    wanted = [args.only] if args.only else list(systems)

    def run(number: int, name: str) -> Result:
        folder = Path(tempfile.mkdtemp(prefix=f"bench-{name}-"))
        result = systems[name](args, folder)
        shutil.rmtree(folder)
        kept = result.steps[max(0, args.drop - 1) :]
        print(f"round {number + 1} {name}: " + " ".join(f"{s.seconds:.2f}" for s in kept) + " s per step", flush=True)
        return result

    rounds = list(alternate({name: partial(run, name=name) for name in wanted}, args.rounds))
    figures = {name: report(name, [row[name] for row in rounds], args.drop) for name in wanted}
    for figure in figures.values():
        print(json.dumps(figure, indent=1))
    if len(figures) == 2:
        ratio = figures["ours"]["tokens_per_s"] / figures["trl"]["tokens_per_s"]
        print(f"ours / trl: {ratio:.2f} times the response tokens per second")
        figures["ratio"] = {"tokens_per_s": round(ratio, 3)}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
