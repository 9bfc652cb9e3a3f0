"""An optimizer step whose loss or gradient is not finite changes nothing, on any rank, and too many end the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlscale.testing.batches import random_batch
from tests import worlds
from tests.train.helpers import small_engine
from tests.train.reference import OPTIM as COMMON

OPTIM = COMMON | dict(max_skipped_steps=2)
CASES = {  # name: world, TP, PP, ZeRO stage, dtype
    "dp2-zero1": (2, 1, 1, 1, torch.float32),
    "dp2-zero1-bf16": (2, 1, 1, 1, torch.bfloat16),
    "dp2-zero2": (2, 1, 1, 2, torch.float32),
    "dp2-zero2-bf16": (2, 1, 1, 2, torch.bfloat16),
    "dp2-zero3": (2, 1, 1, 3, torch.float32),
    "dp2-zero3-bf16": (2, 1, 1, 3, torch.bfloat16),
    "tp2-zero1": (2, 2, 1, 1, torch.float32),
    "pp2-zero1-bf16": (2, 1, 2, 1, torch.bfloat16),
    "pp2-dp2-zero2": (4, 1, 2, 2, torch.float32),
}


def build(name: str) -> Any:
    _, tp, pp, zero, dtype = CASES[name]
    layout = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, zero_stage=zero)
    return small_engine(layout, dtype, optim=OPTIM, max_tokens=24)


def loss_fn(out: Any, micro: Any) -> Any:
    weights = micro.weights
    loss = torch.where(weights != 0, -out.logprobs * micro.advantages * weights, 0.0 * out.logprobs).sum()
    return loss, {"tokens": micro.mask.sum()}


def state(engine: Any) -> list[torch.Tensor]:
    """Copies of everything that a step changes: weights, fp32 masters, moments, the count of steps."""
    states = [tensor for _, tensors in engine.state().values() for tensor in tensors.values()]
    step = torch.tensor(engine.counters()["adam_step"])
    return [t.detach().clone() for t in (*engine.tensors().values(), *states, step)]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def skip_one(name: str, poison: float, in_loss: bool) -> dict[str, Any]:
    """Two good steps with a bad one between them, and the same without it."""
    good, bad = random_batch(), random_batch(seed=1)
    bad.advantages[bad.mask.nonzero()[-1]] = poison  # one token of one micro-batch of one rank

    def in_loss_only(out: Any, micro: Any) -> Any:  # a NaN through which no gradient flows
        loss, sums = loss_fn(out, micro)
        return torch.nan_to_num(loss, 0.0) + 0 * micro.advantages.sum(), sums

    plain, tried = build(name), build(name)
    first = [engine.update(good, loss_fn) for engine in (plain, tried)]
    before = state(tried)
    answer = tried.update(bad, in_loss_only if in_loss else loss_fn)
    after = state(tried)
    second = [engine.update(good, loss_fn) for engine in (plain, tried)]
    return {
        "answer": answer,
        "untouched": equal(before, after),
        "same": first[0] == first[1] and second[0] == second[1] and equal(state(plain), state(tried)),
        "moved": not equal(before, state(tried)),
        "counts": (plain.steps, tried.steps, tried.skipped_in_a_row),
    }


def check(name: str, poison: float, in_loss: bool = False) -> None:
    for result in worlds.run(CASES[name][0], skip_one, name, poison, in_loss):
        assert result["answer"] == {"skipped": 1.0, "lr": OPTIM["lr"]}
        assert result["untouched"] and result["same"] and result["moved"]
        assert result["counts"] == (2, 2, 0)


@pytest.mark.parametrize("name", CASES)
def test_a_bad_step_leaves_no_trace(name: str) -> None:
    check(name, float("nan"))


def test_infinite_gradient() -> None:
    check("pp2-zero1-bf16", float("inf"))


def test_a_loss_that_is_not_finite_counts_whatever_its_gradient() -> None:
    check("dp2-zero2", float("nan"), in_loss=True)


def unguarded(name: str) -> bool:
    """With DeepSpeed's own check of the norm taken out, the bad step reaches the weights: what the test must see."""
    from unittest import mock

    import deepspeed.runtime.zero.stage_1_and_2 as zero

    with mock.patch.object(zero, "is_invalid_grad_norm", lambda _: False):
        return skip_one(name, float("nan"), False)["untouched"]


def test_without_the_check_a_bad_step_would_be_seen() -> None:
    assert worlds.run(2, unguarded, "dp2-zero1") == [False, False]


def skip_on(name: str) -> list[str]:
    bad, good = random_batch(seed=1), random_batch()
    bad.advantages[0] = float("nan")
    engine, seen = build(name), []
    for batch in (bad, good, bad, bad, bad):
        try:
            seen.append("skipped" if "skipped" in engine.update(batch, loss_fn) else "done")
        except RuntimeError as error:
            seen.append(str(error))
            break
    return seen


def test_too_many_in_a_row_end_the_run_on_every_rank() -> None:
    name = "pp2-dp2-zero2"
    for seen in worlds.run(CASES[name][0], skip_on, name):
        assert seen[:-1] == ["skipped", "done", "skipped"]
        assert "actor: 2 optimizer step(s) in a row" in seen[-1] and "actor.optim.max_skipped_steps" in seen[-1]


def test_the_report_leaves_skipped_steps_out_of_its_means() -> None:
    from rlscale.loop.report import actor_metrics

    good = {"pg_loss": 2.0, "grad_norm": 1.0, "entropy": 6.0, "tokens": 3.0, "lr": 0.1}
    metrics = actor_metrics([good, {"skipped": 1.0, "lr": 0.1}])
    assert metrics["actor/skipped_steps"] == 1 and metrics["actor/pg_loss"] == 2 and metrics["actor/entropy"] == 2
    assert actor_metrics([{"skipped": 1.0, "lr": 0.1}]) == {"actor/skipped_steps": 1.0, "actor/lr": 0.1}
    assert actor_metrics([good])["actor/skipped_steps"] == 0
