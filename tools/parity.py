"""Does the engine equal one process with transformers and torch.optim.AdamW? Trains a tiny random model both ways.

    deepspeed --num_gpus 4 tools/parity.py --tp 2 --sp --zero 2           # one layout; what is left of the world is DP
    deepspeed --num_gpus 2 tools/parity.py --pp 2 --arch llama --recompute
    python tools/parity.py --all                                          # every layout of the support matrix
    python tools/parity.py --random 10 --seed 1                           # supported layouts that the matrix lacks
    python tools/parity.py --readme README.md                             # write the README's table from the matrix
    python tools/parity.py --all --check-readme README.md                 # run it all and compare with that table

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
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout that was never installed

from rlscale.config.layouts import refusals  # noqa: E402
from rlscale.config.schema import OptimConfig, ParallelConfig  # noqa: E402

# bf16 against a single process in fp32: rounding of weights, activations and gradients, which gross errors exceed
BOUNDS = {"float32": 1e-5, "bfloat16": 1e-1}
STEPS = 2
TEMPERATURE = 0.7
SMALL = 1 / 10  # of the largest gradient: the scale of those that are smaller
LONGEST = 48  # tokens of the longest document, as far as the budget allows
OPTIM = OptimConfig(lr=1e-3, eps=1e-4, weight_decay=0.01, grad_clip=0.05, max_skipped_steps=1)
ENTROPY_COEFF = 0.01
VALUE_CLIP = 0.2
HEADS = {"actor": "ForCausalLM", "critic": "ForSequenceClassification"}
WITHIN = 240.0  # seconds for one layout, start of the processes included
DENSE = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
EXPERTS = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}
ARCHITECTURES = DENSE | EXPERTS
MARKS = ("<!-- table of layouts, made by python tools/parity.py --readme -->", "<!-- end of the layouts -->")


@dataclass(frozen=True)
class Case:
    """One layout, model and division of the batch."""

    tp: int = 1
    pp: int = 1
    ulysses: int = 1
    ep: int = 1  # 1: each expert split over TP; tp: whole experts
    dp: int = 1
    sp: bool = False  # Megatron's sequence parallelism
    zero: int = 1
    tied: bool = False
    kv: int = 4  # key-value heads, of 8 heads
    arch: str = "qwen3"
    role: str = "actor"
    recompute: bool = False
    share_prefix: bool = True
    budget: int = 48  # tokens a micro-batch; the Ulysses ranks share it
    groups: int = 6  # prompts
    order: int = 0  # seed of the order of the documents; 0: as drawn
    dtype: str = "float32"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.ulysses * self.dp

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            ulysses_sequence_parallel_size=self.ulysses,
            expert_model_parallel_size=self.ep,
            sequence_parallel=self.sp,
            zero_stage=self.zero,
        )

    def refused(self) -> str | None:
        """Why this layout cannot run, in one line with its key; None if it is supported."""
        found = refusals(self.role, self.parallel, self.world, spec_of(self))
        return found[0].message if found else None

    def options(self) -> str:
        """The options of this program that ask for this case."""
        out = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "dp" and value != f.default:
                name = "--" + f.name.replace("_", "-")
                out.append(f"{name} {value}" if not isinstance(value, bool) else name if value else f"--no-{name[2:]}")
        return " ".join(out)

    def __str__(self) -> str:
        return f"{self.world} processes {self.options()}"


# ---- the model and the batch


def hf_config(case: Case) -> Any:
    """Configuration of a tiny model: odd sizes, a head size other than hidden / heads, a vocabulary that TP pads."""
    import transformers

    name = ARCHITECTURES[case.arch]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if case.arch in EXPERTS else {}
    if case.arch == "qwen3_moe":
        experts |= {"moe_intermediate_size": 48, "norm_topk_prob": True}
    config = getattr(transformers, f"{name}Config")(
        architectures=[name + HEADS[case.role]],
        vocab_size=250,
        hidden_size=96,
        intermediate_size=144,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=case.kv,
        head_dim=16,
        tie_word_embeddings=case.tied,
        max_position_embeddings=256,
        num_labels=1,
        **experts,
    )
    config.sliding_window = None
    return config


def spec_of(case: Case) -> Any:
    """Shapes of the case's model."""
    from rlscale.model.arch import ModelSpec

    return ModelSpec.from_config(hf_config(case))


def build_model(case: Case) -> Any:
    """The transformers model in fp32 with weights scaled to their fan-in, so that outputs are far from uniform."""
    import torch
    import transformers

    config = hf_config(case)
    config._attn_implementation = "eager"
    model = getattr(transformers, ARCHITECTURES[case.arch] + HEADS[case.role])(config).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("norm.weight"):
                p.copy_(1 + 0.2 * noise)
            elif p.dim() == 1:
                p.copy_(0.3 * noise)
            else:
                p.copy_(noise * (2 if "embed" in name or "head" in name else 1) / math.sqrt(p.shape[-1]))
    return model.train()


def draw_batch(case: Case, vocab: int = 250) -> Any:
    """Ragged documents with everything that has gone wrong somewhere; the longest fills the budget exactly."""
    import torch

    from rlscale.batch.types import Trajectory, pack

    g = torch.Generator().manual_seed(0)
    longest = min(case.budget, LONGEST)

    def size(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=g))

    prompts = [1, longest // 3, *(size(3, 9) for _ in range(4))]
    responses = [[1, 5, 2], [longest - longest // 3, 3], *([size(1, 12) for _ in range(3)] for _ in range(4))]
    out = []
    for group, (prompt_length, lengths) in enumerate(list(zip(prompts, responses, strict=True))[: case.groups]):
        prompt = torch.randint(vocab, (prompt_length,), generator=g).tolist()
        for sample, length in enumerate(lengths):
            tokens = torch.randint(vocab, (length,), generator=g).tolist()
            keep = torch.rand(length, generator=g) > (1.0 if (group, sample) == (3, 1) else 0.2 if length > 1 else 0.0)
            out.append(Trajectory(group, sample, prompt, tokens, keep.int().tolist(), [0.0] * length))
    batch = pack(out)
    total = batch.tokens.numel()
    batch.weights = torch.rand(total, generator=g) * batch.mask / batch.mask.sum()
    advantages = torch.randn(total, generator=g) + 0.5  # not centred: a loss near 0 would be a difference of large sums
    batch.advantages = advantages.masked_fill(batch.mask == 0, math.nan)
    batch.values, batch.returns = torch.randn(total, generator=g), torch.randn(total, generator=g)
    if case.order:
        g = torch.Generator().manual_seed(case.order)
        batch = batch.select(torch.randperm(batch.num_samples, generator=g))
    return batch


def objective(out: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """A policy gradient with an entropy bonus, or a clipped value loss: what `Engine.update` minimises."""
    import torch

    from rlscale.algo.value_loss import value_loss

    if out.values is not None:
        loss, _ = value_loss(out.values, batch.values, batch.returns, batch.mask, batch.weights, clip=VALUE_CLIP)
    else:
        live = batch.weights != 0
        advantages = torch.where(live, batch.advantages, 0.0)  # before the product: the gradient of 0 times NaN is NaN
        loss = -((out.logprobs * advantages + ENTROPY_COEFF * out.entropy) * batch.weights).sum()
    return loss, {"tokens": batch.mask.sum()}


# ---- the single process


@dataclass
class Truth:
    """What one process computes. Tensors by their names in a Hugging Face checkpoint."""

    start: dict[str, Any]  # weights
    before: Any  # [T] log-probs or values
    entropy: Any  # [T]; None: a critic
    after: Any  # [T]
    losses: list[float]
    norms: list[float]
    moments: list[dict[str, Any]]  # AdamW's first moments after each step
    weights: dict[str, Any]


def outputs(model: Any, batch: Any) -> Any:
    """Log-probs and entropies, or values, of all response tokens, one document at a time without any packing."""
    import torch

    from rlscale.batch.types import ModelOut

    columns: list[list[Any]] = [[], []]
    for row in range(batch.num_samples):
        group = int(batch.group[row])
        prompt = batch.prompt_tokens[batch.prompt_cu_seqlens[group] : batch.prompt_cu_seqlens[group + 1]]
        response = batch.tokens[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
        ids = torch.cat((prompt, response))[None]
        states = slice(prompt.numel() - 1, -1)  # those in which the response tokens were chosen
        if hasattr(model, "score"):
            columns[0].append(model.score(model.model(input_ids=ids).last_hidden_state[0, states])[:, 0])
            continue
        logp = (model(input_ids=ids).logits[0, states] / TEMPERATURE).log_softmax(-1)
        columns[0].append(logp.gather(1, response[:, None])[:, 0])
        columns[1].append(-(logp.exp() * logp).sum(-1))
    first = torch.cat(columns[0])
    return ModelOut(values=first) if not columns[1] else ModelOut(logprobs=first, entropy=torch.cat(columns[1]))


def train_alone(case: Case) -> Truth:
    """What a single process makes of the case's model."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, batch = build_model(case), draw_batch(case)
    start = checkpoint(model)
    optim = torch.optim.AdamW(
        model.parameters(), lr=OPTIM.lr, betas=tuple(OPTIM.betas), eps=OPTIM.eps, weight_decay=OPTIM.weight_decay
    )
    first = outputs(model, batch)
    truth = Truth(start, _main(first).detach(), None, None, [], [], [], {})
    truth.entropy = None if first.entropy is None else first.entropy.detach()
    for _ in range(STEPS):
        optim.zero_grad()
        loss, _ = objective(outputs(model, batch), batch)
        loss.backward()
        truth.losses.append(float(loss.detach()))
        truth.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.grad_clip)))
        optim.step()
        truth.moments.append(checkpoint(model, [optim.state[p]["exp_avg"] for p in model.parameters()]))
    truth.after = _main(outputs(model, batch)).detach()
    truth.weights = checkpoint(model)
    return truth


def _main(out: Any) -> Any:
    return out.logprobs if out.values is None else out.values


def checkpoint(model: Any, values: list[Any] | None = None) -> dict[str, Any]:
    """Parameters, or values in their places, by name and shape as in a checkpoint: in memory experts are stacked."""
    import copy

    import torch
    from safetensors.torch import load_file

    if values is not None:
        model = copy.deepcopy(model)
        with torch.no_grad():
            for p, value in zip(model.parameters(), values, strict=True):
                p.copy_(value)
    with tempfile.TemporaryDirectory(prefix="rlscale-parity-") as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


@lru_cache(maxsize=32)
def shared_truth(model_and_batch: Case) -> Truth:
    """The truth, made by rank 0 and known to all. Collective."""
    import torch.distributed as dist

    made = [train_alone(model_and_batch) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0)
    assert made[0] is not None
    return made[0]


@contextmanager
def shared_folder(weights: dict[str, Any]) -> Iterator[str]:
    """A folder of rank 0 with these weights, as long as any rank reads it. Collective."""
    import torch.distributed as dist
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="rlscale-parity-") if dist.get_rank() == 0 else nullcontext() as mine:
        if mine is not None:
            save_file(weights, f"{mine}/model.safetensors", metadata={"format": "pt"})
        name: list[Any] = [mine]
        dist.broadcast_object_list(name, src=0)
        yield name[0]
        dist.barrier()


def one_process(case: Case) -> Case:
    """What decides the truth of a case; all else is division of work."""
    kept = {name: getattr(case, name) for name in ("tied", "kv", "arch", "role", "groups", "order")}
    return Case(budget=min(case.budget, LONGEST), **kept)


# ---- the engine and the comparison


@dataclass
class Difference:
    """The worst relative difference of one quantity over all ranks, and the tensor or step where it is."""

    what: str
    value: float
    where: str = ""


def compare(case: Case, device: Any, prepare: Callable[[Any], None] | None = None) -> list[Difference]:
    """Train the case on this world and compare. Collective; the result is the same on every rank.

    ``prepare(engine)`` is called between construction and the first pass (tests take mends out there).
    """
    import torch
    import torch.distributed as dist

    from rlscale.train.engine import Batching, Engine

    truth = shared_truth(one_process(case))
    cut = Batching(
        -(-case.budget // case.ulysses), share_prefix=case.share_prefix, recompute=case.recompute, head_chunk=20
    )
    dtype = getattr(torch, case.dtype)
    with shared_folder(truth.start) as folder:
        engine = Engine(
            case.role, spec_of(case), folder, case.parallel, OPTIM, cut, device, dtype=dtype, temperature=TEMPERATURE
        )
    if prepare is not None:
        prepare(engine)
    mine = list(_differences(engine, case, truth))
    everyone: list[Any] = [None] * device.world
    dist.all_gather_object(everyone, mine)
    worst: dict[str, Difference] = {}
    for d in itertools.chain(*everyone):
        # a difference that is not a number is the worst of all
        if d.what not in worst or not d.value <= worst[d.what].value:
            worst[d.what] = d
    return list(worst.values())


def _differences(engine: Any, case: Case, truth: Truth) -> Iterator[Difference]:
    """What this rank sees."""
    import torch

    batch = draw_batch(case)
    actor = case.role == "actor"

    def passes() -> tuple[Any, Any]:
        return engine.logprobs(batch, entropy=True) if actor else (engine.values(batch), None)

    name = "log-probs" if actor else "values"
    before, entropy = passes()
    yield Difference(name, relative(before, truth.before))
    if actor:
        yield Difference("entropy", relative(entropy, truth.entropy))
    for step in range(STEPS):
        got = engine.update(batch, objective, entropy=actor, entropy_grad=actor)
        yield Difference("loss", _ratio(got["loss"], truth.losses[step]), f"step {step + 1}")
        yield Difference("gradient norm", _ratio(got["grad_norm"], truth.norms[step]), f"step {step + 1}")
        assert got["tokens"] == float(batch.mask.sum()), f"{got['tokens']} tokens were counted"
        yield from _tensors("gradients", engine.model_layout, moments(engine), truth.moments[step], SMALL)
    if engine.dtype == torch.float32:  # the weights that the model computes with, as ZeRO-3 holds them too
        yield from _tensors("parameters", engine.layout, engine.tensors(), truth.weights)
    else:
        yield from _tensors("parameters", engine.model_layout, masters(engine), truth.weights)
    yield Difference(f"{name} after", relative(passes()[0], truth.after))


def _tensors(
    what: str, layout: Any, held: dict[str, Any], truth: dict[str, Any], small: float = 0.0
) -> Iterator[Difference]:
    """This rank's slices of every tensor, relative to its largest element or ``small`` times that of all."""
    import torch.distributed as dist

    from rlscale.reshard.transport import region

    largest = {name: float(t.abs().max()) for name, t in truth.items()}
    least = small * max(largest.values())
    for piece in layout.of_rank(dist.get_rank()):
        expected = truth[piece.name][tuple(slice(a, b) for a, b in piece.index)]
        scale = max(largest[piece.name], least)
        yield Difference(what, relative(region(held[piece.key], piece), expected, scale), piece.name)


def moments(engine: Any) -> dict[str, Any]:
    """AdamW's first moments, put together from the ranks among which ZeRO has divided them."""
    from deepspeed.utils import safe_get_full_optimizer_state

    return {key: safe_get_full_optimizer_state(p, "exp_avg") for key, p in engine.parameters().items()}


def masters(engine: Any) -> dict[str, Any]:
    """The fp32 weights that the optimizer updates, put together likewise."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {key: safe_get_full_fp32_param(p) for key, p in engine.parameters().items()}


def relative(got: Any, expected: Any, scale: float | None = None) -> float:
    """``max |got - expected| / scale``, by default ``max |expected|``."""
    scale = float(expected.abs().max()) if scale is None else scale
    distance = float((got.float().cpu() - expected).abs().max())
    return distance / scale if scale else math.inf if distance else 0.0


def _ratio(got: float, expected: float) -> float:
    return abs(got - expected) / abs(expected)


# ---- the support matrix


def product() -> Iterator[Case]:
    """Every combination of the parallel dimensions at size 2 in at most 8 processes, supported or not.

    Architectures and recomputation go around, so that each meets many layouts; with a mixture of experts ZeRO stages
    do too.
    """
    dimensions = itertools.product(((1, False), (2, False), (2, True)), (1, 2), (1, 2), (1, 2, 3), (False, True))
    for number, ((tp, sp), pp, ulysses, zero, tied) in enumerate(dimensions):
        yield Case(
            tp=tp,
            sp=sp,
            pp=pp,
            ulysses=ulysses,
            zero=zero,
            tied=tied,
            dp=2 if tp * pp * ulysses <= 4 else 1,
            arch=list(DENSE)[number % 4],
            recompute=number % 3 == 0,
        )
    splits = itertools.product(((1, False, 1), (2, False, 1), (2, False, 2), (2, True, 2)), (1, 2), (1, 2))
    for number, ((tp, sp, ep), pp, ulysses) in enumerate(splits):
        yield Case(
            tp=tp,
            sp=sp,
            ep=ep,
            pp=pp,
            ulysses=ulysses,
            zero=1 + number % 3 if pp == 1 else 1 + number % 2,
            dp=2 if tp * pp * ulysses <= 4 else 1,
            arch=list(EXPERTS)[number // 3 % 2],
            recompute=number % 3 == 0,
        )


FURTHER = [  # sizes above 2, no data parallelism, key-value heads, divisions, critics
    Case(),
    Case(tied=True, share_prefix=False),
    Case(dp=4, budget=52, share_prefix=False, order=1),
    Case(dp=4, groups=1),
    Case(pp=2, dp=4, groups=1, tied=True),
    Case(ulysses=2, dp=4, groups=1, zero=2),
    Case(pp=2, dp=2, zero=2, budget=52, share_prefix=False),
    Case(ulysses=2, dp=2, budget=52, share_prefix=False, tied=True),
    Case(dp=8, zero=2, tied=True),
    Case(tp=2, kv=2),
    Case(tp=4, kv=2, sp=True, tied=True),
    Case(tp=4, kv=1, arch="qwen2", dp=2, zero=2),
    Case(arch="qwen3_moe"),
    Case(arch="mixtral", dp=2, zero=2, tied=True),
    Case(arch="qwen3_moe", tp=4, ep=4, sp=True, dp=2, zero=2),
    Case(arch="mixtral", tp=4, kv=2, pp=2),
    Case(arch="qwen3_moe", role="critic", tp=2, ep=2, dp=2),
    Case(tp=2, sp=True, tied=True),
    Case(tp=4, arch="llama", recompute=True),
    Case(tp=4, sp=True, arch="qwen2"),
    Case(tp=4, dp=2, zero=2, tied=True, arch="llama"),
    Case(pp=2, tied=True, arch="mistral"),
    Case(pp=4, arch="qwen2", recompute=True),
    Case(pp=4, tied=True, arch="llama"),
    Case(pp=4, dp=2, zero=2),
    Case(tp=2, pp=2, sp=True, tied=True, recompute=True),
    Case(tp=2, pp=4, sp=True, arch="llama"),
    Case(tp=4, pp=2, sp=True, arch="mistral"),
    Case(ulysses=2, kv=1),
    Case(ulysses=2, kv=2, tied=True, arch="llama"),
    Case(ulysses=4, kv=1, arch="qwen2"),
    Case(ulysses=4, kv=2, arch="mistral"),
    Case(ulysses=4, kv=2, dp=2, zero=2),
    Case(ulysses=4, kv=4, tied=True, recompute=True, share_prefix=False),
    Case(ulysses=8, kv=2),
    Case(ulysses=2, pp=2, arch="mistral"),
    Case(ulysses=2, pp=4, arch="llama"),
    Case(ulysses=4, tp=2, sp=True, kv=2),
    Case(role="critic", dp=2, zero=2),
    Case(role="critic", tp=2, sp=True, pp=2, tied=True),
    Case(role="critic", ulysses=2, tp=2, zero=2),
    Case(role="critic", pp=2, dp=2, zero=2, tied=True, arch="llama"),
    Case(dp=8, zero=3, groups=1),
    Case(tp=4, sp=True, dp=2, zero=3, arch="llama", tied=True),
    Case(ulysses=4, dp=2, kv=1, zero=3),
    Case(role="critic", dp=2, zero=3),
    Case(role="critic", tp=2, sp=True, ulysses=2, dp=2, zero=3, recompute=True),
]


@lru_cache(maxsize=1)
def matrix() -> list[Case]:
    """The layouts that are supported and shown, each once."""
    return [case for case in dict.fromkeys([*FURTHER, *product()]) if not case.refused()]


def draw(count: int, seed: int, world_max: int = 8) -> list[Case]:
    """Supported cases outside the matrix, at random."""
    rng = random.Random(seed)
    known, out = set(matrix()), []
    while len(out) < count:
        case = Case(
            tp=rng.choice((1, 1, 2, 4)),
            pp=rng.choice((1, 1, 2, 4)),
            ulysses=rng.choice((1, 1, 2, 4)),
            ep=rng.choice((1, 1, 2, 4)),
            dp=rng.choice((1, 2, 3, 4)),
            sp=rng.random() < 0.5,
            zero=rng.choice((1, 2, 3)),
            tied=rng.random() < 0.5,
            kv=rng.choice((1, 2, 4, 8)),
            arch=rng.choice(list(ARCHITECTURES)),
            role=rng.choice(("actor", "actor", "critic")),
            recompute=rng.random() < 0.3,
            share_prefix=rng.random() < 0.7,
            budget=rng.choice((32, 48, 64, 200)),
            groups=rng.choice((6, 6, 6, 1)),
            order=rng.choice((0, 1, 2)),
        )
        if case.world <= world_max and case not in known and not case.refused():
            known.add(case)
            out.append(case)
    return out


ROWS = {  # of the README's table: name, the layouts at size 2 that stand for it
    "data parallel": Case(dp=2),
    "TP": Case(tp=2),
    "TP + sequence parallel": Case(tp=2, sp=True),
    "PP (1F1B)": Case(pp=2),
    "TP x PP": Case(tp=2, pp=2),
    "TP x PP + sequence parallel": Case(tp=2, sp=True, pp=2),
    "Ulysses": Case(ulysses=2),
    "Ulysses x TP": Case(ulysses=2, tp=2),
    "Ulysses x TP + sequence parallel": Case(ulysses=2, tp=2, sp=True),
    "Ulysses x PP": Case(ulysses=2, pp=2),
    "Ulysses x TP x PP": Case(ulysses=2, tp=2, pp=2),
    "Ulysses x TP x PP + sequence parallel": Case(ulysses=2, tp=2, pp=2, sp=True),
    "mixture of experts, experts split over TP": Case(tp=2, arch="mixtral"),
    "mixture of experts, whole experts (EP = TP)": Case(tp=2, ep=2, arch="mixtral"),
}


def table() -> str:
    """The support matrix in Markdown: rows of dimensions, columns of ZeRO stages, footnotes with the reasons."""
    notes: list[str] = []

    def same_kind(a: Case, b: Case) -> bool:
        if a.arch in EXPERTS or b.arch in EXPERTS:  # whatever else is combined with them
            return a.arch in EXPERTS and b.arch in EXPERTS and (a.ep > 1) == (b.ep > 1)
        return a.sp == b.sp and all((getattr(a, d) > 1) == (getattr(b, d) > 1) for d in ("tp", "pp", "ulysses"))

    def cell(case: Case) -> str:
        out, sizes = {}, set()
        for tied in (False, True):
            now = replace(case, tied=tied)
            found = refusals("actor", now.parallel, now.world, spec_of(now))
            alike = [c for c in matrix() if same_kind(c, now) and c.role == "actor" and c.zero == now.zero]
            shown = {c.world for c in alike if c.tied == tied or case.arch in EXPERTS}
            assert bool(found) != bool(shown), f"{now} is neither refused nor in the list of layouts"
            sizes |= shown
            if found and found[0].reason not in notes:
                notes.append(found[0].reason)
            out[tied] = f"refused [{notes.index(found[0].reason) + 1}]" if found else "equal"
        equal = f"equal ({', '.join(map(str, sorted(sizes)))})"
        if out[False] == out[True]:
            return out[True].replace("equal", equal)
        return ", ".join(f"{'tied' if tied else 'untied'} {out[tied].replace('equal', equal)}" for tied in out)

    rows = [("layout", "ZeRO-1", "ZeRO-2", "ZeRO-3"), ("---",) * 4]
    rows += [(name, *(cell(replace(case, zero=zero)) for zero in (1, 2, 3))) for name, case in ROWS.items()]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if notes:
        lines += ["", "; ".join(f"[{n}] {note}" for n, note in enumerate(notes, 1)) + "."]
    return "\n".join(lines)


def readme(text: str) -> str:
    """A README's text with the table between its two marks made anew."""
    head, found, rest = text.partition(MARKS[0])
    _, ended, tail = rest.partition(MARKS[1])
    if not (found and ended):
        raise ValueError(f"the README lacks the marks {MARKS[0]} and {MARKS[1]}")
    return f"{head}{MARKS[0]}\n{table()}\n{MARKS[1]}{tail}"


# ---- as a program


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
    from rlscale.cluster.device import follow_launcher, init_distributed

    follow_launcher()
    device = init_distributed("auto", timeout_s=WITHIN)
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
    from rlscale.cluster.device import free_port

    world, left = cases[0].world, list(cases)
    with tempfile.TemporaryDirectory(prefix="rlscale-parity-") as folder:
        while left:
            listed, results = Path(folder, "cases.json"), Path(folder, "results.jsonl")
            listed.write_text(json.dumps([asdict(c) for c in left]))
            results.write_text("")
            command = ["deepspeed", "--num_gpus", str(world), "--master_port", str(free_port()), str(__file__)]
            command += ["--cases", str(listed), "--results", str(results)]
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
) -> Iterator[tuple[Case, list[Difference], float]]:
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
        ("budget", "tokens a micro-batch, which Ulysses ranks share"),
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
    add("--readme", metavar="FILE", help="write the table of a README from the matrix")
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


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)
