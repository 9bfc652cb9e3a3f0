"""The layouts that parity is shown for: one case, all combinations, random ones, and the table of a README."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from rlscale.config.layouts import refusals
from rlscale.config.schema import ParallelConfig
from rlscale.model.arch import ModelSpec
from rlscale.testing.models import ARCHITECTURES, DENSE, EXPERTS, model_config

LONGEST = 48  # tokens of the longest document, as far as the budget allows
HEADS = {"actor": "ForCausalLM", "critic": "ForSequenceClassification"}
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
    budget: int = 48  # tokens per micro-batch; the Ulysses ranks share it
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


def hf_config(case: Case) -> Any:
    """The case's model: odd sizes, a head size other than hidden / heads, a vocabulary that TP pads."""
    config = model_config(
        case.arch, tied=case.tied, heads=8, kv_heads=case.kv, layers=4, hidden=96, ffn=144, vocab=250, head_dim=16,
        architectures=[ARCHITECTURES[case.arch] + HEADS[case.role]], max_position_embeddings=256, num_labels=1,
        **({"moe_intermediate_size": 48} if case.arch == "qwen3_moe" else {}),
    )  # fmt: skip
    config.sliding_window = None
    return config


def spec_of(case: Case) -> ModelSpec:
    """Shapes of the case's model."""
    return ModelSpec.from_config(hf_config(case))


@dataclass
class Difference:
    """The worst relative difference of one quantity over all ranks, and the tensor or step where it is."""

    what: str
    value: float
    where: str = ""


def one_process(case: Case) -> Case:
    """What decides the result of the plain process; all else is division of work."""
    kept = {name: getattr(case, name) for name in ("tied", "kv", "arch", "role", "groups", "order")}
    return Case(budget=min(case.budget, LONGEST), **kept)


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
    known, out = set(matrix()), list[Case]()
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
        out: dict[bool, str] = {}
        sizes: set[int] = set()
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

    rows: list[tuple[str, ...]] = [("layout", "ZeRO-1", "ZeRO-2", "ZeRO-3"), ("---",) * 4]
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
