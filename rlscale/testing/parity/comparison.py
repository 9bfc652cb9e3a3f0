"""The engine beside the plain process: the worst relative difference of everything that training computes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from rlscale.cluster.collective import gather
from rlscale.reshard.layout import Layout
from rlscale.reshard.transport import region
from rlscale.testing.parity.cases import Case, Difference, one_process, spec_of
from rlscale.testing.parity.reference import (
    OPTIM,
    STEPS,
    TEMPERATURE,
    Truth,
    draw_batch,
    objective,
    shared_folder,
    shared_truth,
)
from rlscale.train.engine import Batching, Engine

SMALL = 1 / 10  # of the largest gradient: the scale of those that are smaller


def compare(case: Case, device: Any, prepare: Callable[[Engine], None] | None = None) -> list[Difference]:
    """Train the case on this world and compare. Collective; the result is the same on every rank.

    ``prepare(engine)`` is called between construction and the first pass (tests take mends out there).
    """
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
    worst: dict[str, Difference] = {}
    for d in itertools.chain(*gather(mine)):
        # a difference that is not a number is the worst of all
        if d.what not in worst or not d.value <= worst[d.what].value:
            worst[d.what] = d
    return list(worst.values())


def _differences(engine: Engine, case: Case, truth: Truth) -> Iterator[Difference]:
    """What this rank sees."""
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
    what: str, layout: Layout, held: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], small: float = 0.0
) -> Iterator[Difference]:
    """This rank's slices of every tensor, relative to its largest element or ``small`` times that of all."""
    largest = {name: float(t.abs().max()) for name, t in truth.items()}
    least = small * max(largest.values())
    for piece in layout.of_rank(dist.get_rank()):
        expected = truth[piece.name][tuple(slice(a, b) for a, b in piece.index)]
        scale = max(largest[piece.name], least)
        yield Difference(what, relative(region(held[piece.key], piece), expected, scale), piece.name)


def moments(engine: Engine) -> dict[str, Any]:
    """AdamW's first moments, put together from the ranks among which ZeRO has divided them."""
    from deepspeed.utils import safe_get_full_optimizer_state

    return {key: safe_get_full_optimizer_state(p, "exp_avg") for key, p in engine.parameters().items()}


def masters(engine: Engine) -> dict[str, Any]:
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
