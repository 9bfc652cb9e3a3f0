"""Does the engine equal one process with transformers and torch.optim.AdamW? Trains a tiny random model both ways.

    deepspeed --num_gpus 4 tools/parity.py --tp 2 --sp --zero 2           # one layout; what is left of the world is DP
    deepspeed --num_gpus 2 tools/parity.py --pp 2 --arch llama --recompute
    python tools/parity.py --all                                          # every layout of the support matrix
    python tools/parity.py --random 10 --seed 1                           # supported layouts that the matrix lacks
    python tools/parity.py --readme docs/parallelism.md                   # write the page's table from the matrix
    python tools/parity.py --all --check-readme docs/parallelism.md       # run it all and compare with that table

Two optimizer steps on packed ragged documents: prompts shared by several responses, a prompt and a response of one
token, a document as long as the whole token budget, masked tokens whose advantages are NaN, a response that is masked
altogether; gradients are clipped. Compared on every rank: log-probs and entropy before (a critic: values), loss and
gradient norm of each step, every gradient as AdamW has seen it (its first moment after each step, so scaling, sums over
ranks and clipping are in it), every parameter after the second step, and the log-probs with them.

The difference of two tensors is ``max |a - b| / max |b|``, b being the single process's, each tensor (a slice of it on
this rank, relative to the whole) on its own; that of two numbers is ``|a - b| / |b|``. A gradient that is small beside
the others is a difference of large terms, whose rounding it carries: there ``max |b|`` is at least a tenth of that
of the largest gradient. Exit code: 0 if no difference is above the bound (1e-5 in fp32), 1 if one is, 2 if the layout
is refused. Adam's eps is 1e-4: with 1e-8 a gradient that is zero up to rounding moves a parameter by a whole learning
rate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

from rlscale.cluster.process import follow_launcher, free_port, leave
from rlscale.config.layouts import refusals
from rlscale.testing.models import ARCHITECTURES
from rlscale.testing.parity.cases import LONGEST, Case, Difference, draw, matrix, readme, spec_of

# bf16 against a single process in fp32: rounding of weights, activations and gradients, which gross errors exceed
BOUNDS = {"float32": 1e-5, "bfloat16": 1e-1}
WITHIN = 240.0  # seconds for one layout, start of the processes included
ROOT = Path(__file__).resolve().parents[3]


def report(case: Case, found: list[Difference]) -> bool:
    """Print the differences of one case; whether all are within the bound."""
    bound = BOUNDS[case.dtype]
    for d in found:
        print(f"  {d.what:<16} {d.value:.1e}  {d.where}")
    equal = all(d.value <= bound for d in found)
    print(f"{'equal' if equal else 'DIFFERENT'} within {bound:.0e}: {case}", flush=True)
    return equal


def run_here(cases: list[Case], results: str | None) -> int:
    """Run cases in the world that the launcher has started; their differences go to the screen or a file of lines."""
    from rlscale.cluster.device import detect, init_distributed, prepare_process

    follow_launcher()
    kind = detect("auto")
    prepare_process(kind)
    device = init_distributed(kind, timeout_s=WITHIN)
    from rlscale.testing.parity.comparison import compare  # Megatron, whose warnings the start has silenced

    equal = True
    for case in cases:
        start = time.monotonic()
        found = compare(case, device)
        seconds = time.monotonic() - start
        if device.rank == 0 and results:
            with open(results, "a", encoding="utf-8") as file:
                record = {"case": asdict(case), "differences": [asdict(d) for d in found], "seconds": seconds}
                file.write(json.dumps(record) + "\n")
        elif device.rank == 0:
            report(case, found)
        equal = equal and all(d.value <= BOUNDS[case.dtype] for d in found)
    return 0 if equal else 1


def launch(cases: list[Case], log: Path) -> Iterator[tuple[Case, list[Difference], float]]:
    """Run cases of one world size in as few started worlds as they allow; a case that ends its world is skipped."""
    world, left = cases[0].world, list(cases)
    with tempfile.TemporaryDirectory(prefix="rlscale-parity-") as folder:
        while left:
            listed, results = Path(folder, "cases.json"), Path(folder, "results.jsonl")
            listed.write_text(json.dumps([asdict(c) for c in left]))
            results.write_text("")
            command = ["deepspeed", "--num_gpus", str(world), "--master_port", str(free_port()), "--module"]
            command += ["rlscale.testing.parity.run", "--cases", str(listed), "--results", str(results)]
            with open(log, "ab") as out:
                process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT)
                try:
                    seen = yield from _follow(process, results, left)
                finally:
                    process.terminate()
                    process.wait()
            left = left[seen:]
            if left:
                yield left.pop(0), [], 0.0


def _follow(
    process: subprocess.Popen[bytes], results: Path, cases: list[Case]
) -> Generator[tuple[Case, list[Difference], float], None, int]:
    """Results as they come; returns how many. A world that says nothing for long has hung."""
    seen, heard = 0, time.monotonic()
    while True:
        ended = process.poll() is not None
        lines = results.read_text().split("\n")[:-1]
        for line in lines[seen:]:
            record = json.loads(line)
            yield cases[seen], [Difference(**d) for d in record["differences"]], record["seconds"]
            seen, heard = seen + 1, time.monotonic()
        # with all results there, the ranks still remove what they have made
        if ended or time.monotonic() - heard > (WITHIN if seen < len(cases) else 30.0):
            return seen
        time.sleep(0.2)


def run_all(cases: list[Case]) -> int:
    """Run cases of any world sizes, one line each; the number of those that failed."""
    start, failed = time.monotonic(), 0
    names = ("log-probs", "entropy", "loss", "gradient norm", "gradients", "parameters", "log-probs after")
    print(f"{'layout':<80}" + "".join(f"{name:>16}" for name in names))
    worlds: dict[int, list[Case]] = {}
    for case in cases:
        worlds.setdefault(case.world, []).append(case)
    with tempfile.TemporaryDirectory(prefix="rlscale-parity-") as folder:
        for world in sorted(worlds):
            log = Path(folder, f"world{world}.log")
            for case, found, seconds in launch(worlds[world], log):
                values = {d.what.replace("values", "log-probs"): d.value for d in found}
                equal = bool(found) and all(v <= BOUNDS[case.dtype] for v in values.values())
                cells = "".join(f"{values[n]:>16.1e}" if n in values else f"{'-':>16}" for n in names)
                line = f"{case!s:<80}{cells}  {seconds:4.1f} s"
                print(line + ("" if equal else "  DIFFERENT" if found else "  ENDED OR HUNG"), flush=True)
                failed += not equal
                if not found:
                    print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
    print(f"{len(cases) - failed} of {len(cases)} layouts equal one process; {time.monotonic() - start:.0f} s")
    return failed


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for name, what in (
        ("tp", "tensor-parallel size"),
        ("pp", "pipeline stages"),
        ("ulysses", "Ulysses sequence-parallel size"),
        ("ep", "expert-parallel size: 1, or the tensor-parallel size"),
        ("kv", "key-value heads, of 8 heads"),
        ("budget", "tokens per micro-batch, which Ulysses ranks share"),
        ("groups", "prompts of the batch, 1 to 6"),
        ("order", "seed of another order of the documents"),
    ):
        number = int if name == "order" else positive
        add(f"--{name}", type=number, default=getattr(Case, name), help=f"{what} (default: %(default)s)")
    add("--sp", action="store_true", help="Megatron's sequence parallelism")
    add("--zero", type=int, default=Case.zero, choices=(0, 1, 2, 3), help="ZeRO stage (default: %(default)s)")
    add("--tied", action="store_true", help="input and output embedding are one weight")
    add("--recompute", action="store_true", help="recompute activations in the backward pass")
    add("--no-share-prefix", dest="share_prefix", action="store_false", help="every response brings its own prompt")
    add("--arch", default=Case.arch, choices=sorted(ARCHITECTURES), help="architecture (default: %(default)s)")
    add("--role", default=Case.role, choices=("actor", "critic"), help="policy or value model (default: %(default)s)")
    add("--dtype", default=Case.dtype, choices=sorted(BOUNDS), help="working dtype (default: %(default)s)")
    add("--all", action="store_true", help="run the whole support matrix")
    add("--random", type=int, default=0, metavar="N", help="run N supported layouts that are not in the matrix")
    add("--seed", type=int, default=0, help="which ones")
    add("--world-max", type=int, default=8, help="leave out layouts of more processes (default: %(default)s)")
    add("--list", action="store_true", help="print the commands of the support matrix")
    add("--readme", metavar="FILE", help="write the table of this page from the matrix")
    add("--check-readme", metavar="FILE", help="fail if that table is another one")
    add("--cases", help=argparse.SUPPRESS)  # a file of cases to run in this world, and where their results go
    add("--results", help=argparse.SUPPRESS)
    add("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # set by the launcher
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """A size, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.cases:
        return run_here([Case(**c) for c in json.loads(Path(args.cases).read_text())], args.results)
    failed = 0
    if args.readme:
        path = Path(args.readme)
        path.write_text(readme(path.read_text(encoding="utf-8")), encoding="utf-8")
    if args.list:
        for case in matrix():
            print(f"deepspeed --num_gpus {case.world} tools/parity.py {case.options()}")
    wanted = (matrix() if args.all else []) + (draw(args.random, args.seed, args.world_max) if args.random else [])
    if wanted:
        failed += run_all([case for case in wanted if case.world <= args.world_max])
    if args.check_readme:
        text = Path(args.check_readme).read_text(encoding="utf-8")
        if readme(text) != text:
            print(f"{args.check_readme} has another table; run: python tools/parity.py --readme {args.check_readme}")
            failed += 1
    if wanted or args.readme or args.list or args.check_readme:
        return 1 if failed else 0
    return one(args)


def one(args: argparse.Namespace) -> int:
    """The layout that the options ask for, in the world that the launcher has started."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    case = Case(**{f.name: getattr(args, f.name) for f in fields(Case) if f.name != "dp"})
    if case.kv and 8 % case.kv:
        found = [f"--kv: {case.kv} key-value heads do not divide 8 heads"]
    elif case.budget < LONGEST // 2:
        found = [f"--budget: {case.budget} tokens have no room for the documents, it must be at least {LONGEST // 2}"]
    else:
        found = [refusal.message for refusal in refusals(case.role, case.parallel, world, spec_of(case))]
    if found:
        if rank == 0:
            print(f"refused: {found[0]}", file=sys.stderr, flush=True)
        else:
            time.sleep(5)  # the launcher ends all as soon as one has failed, and the first rank is to speak
        return 2
    return run_here([replace(case, dp=world // case.world)], None)


def program() -> None:
    """The command: ends the process."""
    leave(main(sys.argv[1:]))


if __name__ == "__main__":
    program()
