"""Which parallel layouts the engine supports, and why it refuses the others: the one place that decides.

What is not refused here equals one process with transformers and AdamW: `rlscale.testing.parity` holds the list of
layouts it was shown for and runs it; `tools/parity.py` writes the table of docs/parallelism.md from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from rlscale.config.schema import ParallelConfig, Violation


class ModelSizes(Protocol):
    """What is asked about a model (`rlscale.model.arch.ModelSpec` answers)."""

    @property
    def tied(self) -> bool: ...

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    def violations(self, key: str, tp: int, pp: int, sp: int = 1, ep: int = 1) -> list[str]: ...


def refusals(
    role: str,
    layout: ParallelConfig,
    world: int | None = None,
    spec: ModelSizes | None = None,
    *,
    own_head: bool = False,
) -> list[Violation]:
    """Everything that speaks against a layout; empty if it is supported.

    Args:
        role: actor or critic, for the keys in the messages.
        layout: sizes of the parallel dimensions.
        world: processes of the run; None skips what depends on it.
        spec: shapes of the model; None skips what depends on them.
        own_head: the model's output weight is its own whatever ``spec`` says (a critic's value head).
    """
    key = f"{role}.parallel"
    tied = spec is not None and spec.tied and not own_head
    found = [*_world(key, layout, world), *_zero(key, layout, tied)]
    if spec is not None:
        names = [
            f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "ulysses_sequence", "expert_model")
        ]
        messages = spec.violations(key, *(getattr(layout, name) for name in names))
        keys = tuple(f"{key}.{name}" for name in names)
        found += [Violation(keys, message, "does not fit the model") for message in messages]
    return found


def _world(key: str, layout: ParallelConfig, world: int | None) -> Iterator[Violation]:
    """Sizes that do not fit together or into the world."""
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    sp = layout.ulysses_sequence_parallel_size
    tp_key, pp_key = f"{key}.tensor_model_parallel_size", f"{key}.pipeline_model_parallel_size"
    sp_key = f"{key}.ulysses_sequence_parallel_size"
    if world is not None and world % (tp * pp * sp):
        what, sizes, product = "TP x PP", f"{tp} x {pp}", tp * pp
        if sp > 1:
            what, sizes, product = f"{what} x Ulysses", f"{sizes} x {sp}", product * sp
        set_by = [name for name, size in ((tp_key, tp), (pp_key, pp), (sp_key, sp)) if size > 1]
        yield Violation(
            (tp_key, pp_key, sp_key),
            f"{' and '.join(set_by)}: {what} = {sizes} = {product} does not divide the {world} processes of this run; "
            f"{what} could be {listed(divisors(world), product)}, or start a multiple of {product} processes",
            "does not divide the world",
        )
    ep, ep_key = layout.expert_model_parallel_size, f"{key}.expert_model_parallel_size"
    if ep not in (1, tp):
        yield Violation(
            (ep_key, tp_key),
            f"{ep_key} is {ep}: it must be 1 (each expert is split over the tensor-parallel ranks) or {tp_key} {tp} "
            "(each rank holds whole experts); with another size experts would need data-parallel groups of their own, "
            "which ZeRO does not have here",
            "experts would need data-parallel groups of their own",
        )
    if layout.sequence_parallel and tp == 1:
        yield Violation(
            (f"{key}.sequence_parallel", tp_key),
            f"{key}.sequence_parallel requires {tp_key} > 1, not 1; increase it or set sequence_parallel to false",
            "needs TP > 1",
        )


def _zero(key: str, layout: ParallelConfig, tied: bool) -> Iterator[Violation]:
    """What a ZeRO stage cannot do."""
    pp, stage = layout.pipeline_model_parallel_size, layout.zero_stage
    pp_key, zero_key = f"{key}.pipeline_model_parallel_size", f"{key}.zero_stage"
    if stage == 0:
        yield Violation(
            (zero_key,),
            f"{zero_key} is 0: the engine reads accumulated gradients where ZeRO keeps them; use 1, which computes the "
            "same and needs less memory",
            "ZeRO-1 computes the same in less memory",
        )
    if stage == 3 and pp > 1:
        yield Violation(
            (zero_key, pp_key),
            f"{zero_key} is 3 with {pp_key} {pp}: ZeRO-3 compares over the whole world, inside the forward pass, which "
            "weights it gathers, and pipeline stages gather different ones, at different times; use zero_stage 1 or 2",
            "ZeRO-3 compares over all ranks which weights it gathers, and stages gather different ones",
        )
    if stage == 2 and pp > 1 and tied:
        yield Violation(
            (zero_key, pp_key),
            f"{zero_key} is 2 with {pp_key} {pp}, and the model's input and output embeddings are tied: the gradient "
            "of the shared weight lives on two stages and ZeRO-2 has partitioned it before they can be added; use "
            "zero_stage 1",
            "gradient of the tied weight is partitioned too early",
        )


MOST = 1 << 16  # numbers that are tried as divisors


def divisors(n: int) -> list[int]:
    """Ascending; of a number beyond any batch, not all."""
    small = [d for d in range(1, min(math.isqrt(n), MOST) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def listed(numbers: list[int], near: int, count: int = 8) -> str:
    """At most ``count`` of the numbers, those nearest to ``near``, ascending."""
    return ", ".join(map(str, sorted(sorted(numbers, key=lambda x: (abs(x - near), x))[:count])))
