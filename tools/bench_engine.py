"""Speed and memory of the training engine, by layout, beside a plain transformers loop on the same cores.

    python tools/bench_engine.py [--layouts dp1,dp2-zero2,tp2,...] [--padded] [--rounds 5] [--activations dp1,ulysses4]

A layout is a list of dpN, tpN, ppN, ulyssesN, zeroN and sp (Megatron sequence parallelism), joined by dashes; its
processes are started here, each with its share of the cores. All programs of a run are loaded first, then take turns:
a round is one forward-only pass (log-probs of the responses) and one training step (forward, backward, clipping,
AdamW) of each over the same batch. Medians over the rounds are printed, after one round that is not counted.

* The batch: sequences with a prompt of their own (nothing is shared) and lognormal response lengths. Rates count
  its real tokens, prompts and responses, whatever a program computes besides.
* ``plain-sdpa`` and ``plain-eager``: a transformers model with the usual loop. Sequences are sorted by length and cut
  into right-padded micro-batches within the engine's token budget; the head sees the positions that predict a response
  token alone; clipping and fused AdamW as in the engine, in bf16 on fp32 masters. The better of the two is what the
  ratio at one process is taken to. Both sides get the same malloc settings and number of threads.
* ``--padded`` adds the engine at each layout on the same batch padded to its longest response, as a trainer without
  packing computes it: padding is masked, but goes through the layers, the attention and the head.
* Peak memory is the high-water mark of resident memory in the two passes, summed over processes; it holds weights,
  optimizer state and what malloc keeps. ``--activations`` measures otherwise: the peak of the tensors made in forward
  and backward (`rlscale.testing.tensor_memory`) of the rank that has most, with the whole batch as one packed sequence
  in every layout. Gradients of the weights are in it; weights, optimizer state and DeepSpeed's buckets are not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

from rlscale.cluster.process import free_port
from rlscale.testing.models import tiny_model
from tools.common import ROOT, alternate, memory, reset_peak, table

ANSWER = "@@bench "  # marks a worker's lines in what libraries print
PLAIN = ("plain-sdpa", "plain-eager")
KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ulysses": "ulysses_sequence_parallel_size",
    "zero": "zero_stage",
}


@dataclasses.dataclass
class Job:
    """What a worker process has to build and to run."""

    name: str
    model: str
    dtype: str
    layout: str = "dp1"
    padded: bool = False
    one_row: bool = False  # the whole batch in one micro-batch, and tensors counted instead of resident memory
    recompute: bool = False
    sequences: int = 32
    prompt: int = 16
    median: float = 64.0
    sigma: float = 1.0
    longest: int = 512
    max_tokens: int = 2048
    threads: int = 1
    seed: int = 1


def parse_layout(text: str) -> tuple[int, dict[str, Any]]:
    """Processes, and the fields of the layout; ``dp2-tp2-sp-zero2`` -> 4, {...}.

    Raises:
        ValueError: names the part that is not in the grammar.
    """
    world, fields = 1, {}
    for part in text.split("-"):
        match = re.fullmatch(r"(dp|tp|pp|ulysses|zero)([1-9]\d*)", part)
        if part == "sp":
            fields["sequence_parallel"] = True
        elif match is None:
            raise ValueError(f"layout {text!r}: {part!r} is not one of dpN, tpN, ppN, ulyssesN, zeroN, sp")
        else:
            if match[1] != "zero":
                world *= int(match[2])
            if match[1] in KEYS:
                fields[KEYS[match[1]]] = int(match[2])
    return world, fields


# ---- in the workers


def make_batch(job: Job, vocab: int) -> Any:
    """The batch of a job, the same for equal settings; padded to the longest response if the job says so."""
    from rlscale.testing.batches import lognormal_batch

    names = ("sequences", "prompt", "median", "sigma", "longest", "padded", "seed")
    return lognormal_batch(vocab, **{name: getattr(job, name) for name in names})


def real_tokens(job: Job, batch: Any) -> int:
    return int(batch.mask.sum()) + job.sequences * job.prompt


OPTIM: dict[str, Any] = dict(lr=1e-6, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.01, grad_clip=1.0)
Passes = dict[str, Callable[[], float]]


def build_engine(job: Job, device: Any) -> tuple[Passes, int, Any]:
    """The passes of the engine, the real tokens of its batch, and the engine."""
    import torch

    from rlscale.config.schema import OptimConfig, ParallelConfig
    from rlscale.model.arch import ModelSpec
    from rlscale.train.engine import Batching, Engine

    spec = ModelSpec.from_hf(job.model)
    batch = make_batch(job, spec.vocab)
    _, fields = parse_layout(job.layout)
    longest = int(batch.response_lengths.max()) + job.prompt
    if job.one_row:
        budget = -(-(batch.tokens.numel() + batch.prompt_tokens.numel()) // fields.get(KEYS["ulysses"], 1))
    else:
        budget = max(job.max_tokens, longest)
    cut = Batching(max_tokens=budget, recompute=job.recompute)
    engine = Engine(
        "actor",
        spec,
        job.model,
        ParallelConfig(**fields),
        OptimConfig(**OPTIM),
        cut,
        device,
        dtype=getattr(torch, job.dtype),
    )

    def loss_fn(out: Any, micro: Any) -> Any:
        return -(out.logprobs * micro.advantages * micro.weights).sum(), {}

    def forward() -> float:
        logprobs, _ = engine.logprobs(batch)
        return float(-(logprobs * batch.advantages * batch.weights).sum())

    return {"forward": forward, "train": lambda: engine.update(batch, loss_fn)["loss"]}, real_tokens(job, batch), engine


def padded_micro_batches(lengths: Any, budget: int) -> list[list[int]]:
    """Rows of each micro-batch: sorted by length, as many as fit into the budget when padded to their longest."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    out: list[list[int]] = []
    for row in order:
        if out and lengths[out[-1][0]] * (len(out[-1]) + 1) <= budget:
            out[-1].append(row)
        else:
            out.append([row])
    return out


class PlainLoop:
    """The passes of the usual loop with transformers and torch.optim.AdamW, in bf16 on fp32 masters."""

    def __init__(self, job: Job) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, dtype = torch, getattr(torch, job.dtype)
        attention = job.name.removeprefix("plain-")
        self.model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype, attn_implementation=attention)
        self.batch = make_batch(job, self.model.config.vocab_size)
        cu = self.batch.cu_seqlens
        self.rows = [slice(int(a), int(b)) for a, b in zip(cu[:-1], cu[1:], strict=True)]
        self.prompts = self.batch.prompt_tokens.view(job.sequences, job.prompt)
        self.lengths = [job.prompt + s.stop - s.start for s in self.rows]
        self.micros = padded_micro_batches(self.lengths, max(job.max_tokens, max(self.lengths)))
        self.weights = list(self.model.parameters())
        self.own_masters = dtype != torch.float32
        self.masters = [p.detach().float().clone() for p in self.weights] if self.own_masters else self.weights
        adam = dict(lr=OPTIM["lr"], betas=tuple(OPTIM["betas"]), eps=OPTIM["eps"], weight_decay=OPTIM["weight_decay"])
        self.optimizer = torch.optim.AdamW(self.masters, **adam, fused=True)

    def share(self, micro: list[int]) -> Any:
        """The loss of one micro-batch; the last token of a response is no input, it predicts nothing."""
        torch, batch, first = self.torch, self.batch, self.prompts.shape[1] - 1
        width = max(self.lengths[i] for i in micro) - 1
        ids = torch.zeros(len(micro), width, dtype=torch.int64)
        mask, scored = torch.zeros_like(ids), torch.zeros(len(micro), width, dtype=torch.bool)
        for k, i in enumerate(micro):
            n = self.lengths[i] - 1
            ids[k, :n] = torch.cat((self.prompts[i], batch.tokens[self.rows[i]][:-1]))
            mask[k, :n] = 1
            scored[k, first:n] = True
        hidden = self.model.model(input_ids=ids, attention_mask=mask).last_hidden_state[scored]
        logits = self.model.lm_head(hidden).float()
        targets = torch.cat([batch.tokens[self.rows[i]] for i in micro])
        factor = torch.cat([(batch.advantages * batch.weights)[self.rows[i]] for i in micro])
        return (torch.nn.functional.cross_entropy(logits, targets, reduction="none") * factor).sum()

    def forward(self) -> float:
        self.model.eval()
        with self.torch.no_grad():
            return sum(float(self.share(micro)) for micro in self.micros)

    def train(self) -> float:
        self.model.train()
        total = 0.0
        for micro in self.micros:
            loss = self.share(micro)
            loss.backward()
            total += float(loss.detach())
            if self.own_masters:  # gradients are summed in fp32, as the engine does
                for master, p in zip(self.masters, self.weights, strict=True):
                    assert p.grad is not None
                    master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
                    p.grad = None
        self.torch.nn.utils.clip_grad_norm_(self.masters, float(OPTIM["grad_clip"]))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.own_masters:
            with self.torch.no_grad():
                self.torch._foreach_copy_(self.weights, self.masters)
        return total


def build_plain(job: Job) -> tuple[Passes, int, Any]:
    """The passes of the plain loop, and the real tokens of its batch."""
    loop = PlainLoop(job)
    return {"forward": loop.forward, "train": loop.train}, real_tokens(job, loop.batch), None


def work(job: Job) -> None:
    """A worker: build, then run the passes each time that a line comes in, and answer with seconds and bytes."""
    from rlscale.cluster.device import init_distributed, prepare_process
    from rlscale.cluster.process import leave, tune_malloc

    if job.name in PLAIN:
        tune_malloc()
        import torch

        torch.set_num_threads(job.threads)
        passes, tokens, engine = build_plain(job)
    else:
        prepare_process("cpu")
        device = init_distributed("cpu")
        passes, tokens, engine = build_engine(job, device)
    print(ANSWER + json.dumps({"tokens": tokens}), flush=True)
    for _ in sys.stdin:
        answer = count_tensors(passes, engine) if job.one_row else measure(passes)
        print(ANSWER + json.dumps(answer), flush=True)
    leave()


def measure(passes: Passes) -> dict[str, Any]:
    out: dict[str, Any] = {}
    reset_peak()
    for name, run in passes.items():
        started = time.perf_counter()
        out[f"{name}_loss"] = run()
        out[f"{name}_s"] = time.perf_counter() - started
    out["peak_bytes"] = memory("VmHWM")
    return out


def count_tensors(passes: Passes, engine: Any) -> dict[str, Any]:
    """Peak bytes of the tensors that a training step makes until its backward passes have ended."""
    from unittest import mock

    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from torch.utils._python_dispatch import _disable_current_modes

    from rlscale.testing.tensor_memory import TensorMemory

    counter = TensorMemory(*engine.stage.parameters())
    drive, make_buckets = engine._run, DeepSpeedZeroOptimizer.setup_buckets

    def uncounted(optimizer: Any) -> None:  # of a fixed size, in which gradients travel: not activations
        with _disable_current_modes():
            make_buckets(optimizer)

    def counted(*args: Any, **kwargs: Any) -> Any:
        with counter:
            return drive(*args, **kwargs)

    patched = mock.patch.object(DeepSpeedZeroOptimizer, "setup_buckets", uncounted)
    with mock.patch.object(engine, "_run", counted), patched:
        passes["train"]()
    return {"activation_bytes": counter.peak}


# ---- in the program that starts them


class Program:
    """The processes of one job; they wait until `turn` is called."""

    def __init__(self, job: Job) -> None:
        world = 1 if job.name in PLAIN else parse_layout(job.layout)[0]
        self.job, port = job, free_port()
        self.processes = [self._start(job, rank, world, port) for rank in range(world)]

    def _start(self, job: Job, rank: int, world: int, port: int) -> subprocess.Popen[str]:
        threads = str(job.threads)
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        env |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": 1, "DS_ACCELERATOR": "cpu"}
        return subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(dataclasses.asdict(job))],
            env=os.environ | {k: str(v) for k, v in env.items()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answers(self) -> list[dict[str, Any]]:
        """The next answer of every process.

        Raises:
            SystemExit: one has ended; its error is on the screen.
        """
        return [self._answer(process.stdout) for process in self.processes]  # type: ignore[arg-type]

    def _answer(self, lines: TextIO) -> dict[str, Any]:
        for line in lines:
            if line.startswith(ANSWER):
                return dict(json.loads(line.removeprefix(ANSWER)))
        raise SystemExit(f"{self.job.name}: a process has ended without an answer")

    def turn(self, _: int = 0) -> list[dict[str, Any]]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return self.answers()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def compare(jobs: list[Job], rounds: int) -> dict[str, dict[str, Any]]:
    """Medians over the rounds by name: tokens a second of both passes, peak GiB, and the loss as a check."""
    programs: list[Program] = []
    try:
        for job in jobs:
            programs.append(Program(job))
        tokens = {p.job.name: p.answers()[0]["tokens"] for p in programs}
        rows = list(alternate({p.job.name: p.turn for p in programs}, rounds + 1))[1:]
    finally:
        for program in programs:
            program.close()
    return {name: summarize([row[name] for row in rows], count) for name, count in tokens.items()}


def summarize(answers: list[list[dict[str, Any]]], tokens: int) -> dict[str, Any]:
    def seconds(key: str) -> float:
        return statistics.median(max(rank[key] for rank in ranks) for ranks in answers)

    return {
        "processes": len(answers[0]),
        "tokens": tokens,
        "forward_tokens_per_s": round(tokens / seconds("forward_s"), 1),
        "train_tokens_per_s": round(tokens / seconds("train_s"), 1),
        "peak_gib": round(max(sum(rank["peak_bytes"] for rank in ranks) for ranks in answers) / 2**30, 3),
        "loss": answers[0][0]["forward_loss"],
    }


def activations(jobs: list[Job]) -> dict[str, int]:
    """Peak bytes of tensors in forward and backward, by layout, of the rank that has most."""
    out = {}
    for job in jobs:
        program = Program(job)
        try:
            program.answers()
            program.turn()  # what is made once (caches) is not counted
            out[job.layout] = max(rank["activation_bytes"] for rank in program.turn())
        finally:
            program.close()
    return out


def report(figures: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Print the table; the ratios that it allows."""
    columns = ("processes", "forward_tokens_per_s", "train_tokens_per_s", "peak_gib", "loss")
    print(table(["", *columns], [[name, *(f"{row[c]:.6g}" for c in columns)] for name, row in figures.items()]))
    ratios: dict[str, float] = {}
    plain = [figures[name] for name in PLAIN if name in figures]
    for kind in ("forward", "train"):
        key = f"{kind}_tokens_per_s"
        if plain and "dp1" in figures:
            ratios[f"{kind}: dp1 / better plain loop"] = figures["dp1"][key] / max(p[key] for p in plain)
        for name in figures:
            if f"{name} padded" in figures:
                ratios[f"{kind}: {name} packed / padded"] = figures[name][key] / figures[f"{name} padded"][key]
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layouts", default="dp1", help="comma-separated layouts of the engine (default dp1)")
    parser.add_argument("--padded", action="store_true", help="also the engine on padded batches")
    parser.add_argument("--no-plain", action="store_true", help="leave the transformers loop out")
    parser.add_argument("--activations", default="", help="layouts whose tensor memory is measured instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="cores that processes share")
    parser.add_argument(
        "--model",
        default=str(ROOT / "models" / "SmolLM2-135M-Instruct"),
        help="Hugging Face folder, or 'random' for a small Llama of 8 heads that is made on the spot",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    for name in ("sequences", "prompt", "longest", "max_tokens", "seed", "median", "sigma"):
        default = getattr(Job, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--recompute", action="store_true")
    args = parser.parse_args()
    if args.worker:
        return work(Job(**json.loads(args.worker)))
    if args.model == "random":  # 12 M parameters whose heads any layout can split
        shape = dict(layers=12, heads=8, kv_heads=4, head_dim=32, ffn=768, vocab=4096)
        args.model = tiny_model("llama", **shape, max_position_embeddings=32768)
    run(args, parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    names = ("model", "dtype", "sequences", "prompt", "longest", "max_tokens", "seed", "median", "sigma", "recompute")
    common = {name: getattr(args, name) for name in names}
    try:
        worlds = {
            layout: parse_layout(layout)[0] for layout in f"{args.layouts},{args.activations}".split(",") if layout
        }
    except ValueError as error:
        parser.error(str(error))

    def job(layout: str, name: str, **more: Any) -> Job:
        return Job(name, layout=layout, threads=max(1, args.cores // worlds[layout]), **common, **more)

    if args.activations:
        figures: Any = activations([job(x, x, one_row=True) for x in args.activations.split(",")])
        first = next(iter(figures.values()))
        for layout, size in figures.items():
            print(f"{layout:24}{size / 2**20:10.1f} MiB a rank, {size / first:.3f} of the first")
    else:
        layouts = args.layouts.split(",")
        jobs = [job(x, x) for x in layouts] + [job(x, f"{x} padded", padded=True) for x in layouts if args.padded]
        if not args.no_plain:
            jobs += [Job(name, threads=args.cores, **common) for name in PLAIN]
        figures = compare(jobs, args.rounds)
        figures["ratios"] = report(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
