"""Learning-rate schedules against their closed forms."""

from __future__ import annotations

import math

import pytest

from rlscale.config import find_violations
from rlscale.config.schema import ActorConfig, Config, OptimConfig
from rlscale.train.schedule import learning_rate, warmup_steps

TOTAL = 50


def rates(total: int = TOTAL, **optim: float | str) -> list[float]:
    return [learning_rate(OptimConfig(lr=2.0, **optim), step, total) for step in range(total + 5)]


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_closed_forms(warmup: int, floor: float) -> None:
    ramp = [2.0 * (s + 1) / (warmup + 1) for s in range(warmup)]
    done = [min(1.0, (s - warmup) / (TOTAL - warmup)) for s in range(warmup, TOTAL + 5)]
    common = {"lr_warmup_steps": warmup, "min_lr_ratio": floor}
    assert rates(lr_scheduler="constant", **common) == pytest.approx(ramp + [2.0] * len(done))
    assert rates(lr_scheduler="linear", **common) == pytest.approx(ramp + [2 - 2 * (1 - floor) * d for d in done])
    half_cosine = [2 * floor + (1 - floor) * (1 + math.cos(math.pi * d)) for d in done]
    assert rates(lr_scheduler="cosine", **common) == pytest.approx(ramp + half_cosine)


def test_ends_and_middle() -> None:
    cosine = rates(lr_scheduler="cosine", min_lr_ratio=0.1)
    assert cosine[0] == 2.0 and cosine[TOTAL // 2] == pytest.approx(1.1) and cosine[TOTAL] == pytest.approx(0.2)
    assert cosine[TOTAL + 4] == cosine[TOTAL]  # steps beyond the plan keep the last rate
    linear = rates(lr_scheduler="linear")
    assert linear[TOTAL // 2] == pytest.approx(1.0) and linear[TOTAL] == 0.0
    for curve in (cosine, linear, rates(lr_scheduler="cosine", lr_warmup_steps=10)[10:]):
        assert all(a >= b for a, b in zip(curve, curve[1:], strict=False))


@pytest.mark.parametrize("ratio, steps", [(0.0, 0), (0.1, 5), (0.119, 5), (0.5, 25)])
def test_warm_up_as_a_share_of_the_run(ratio: float, steps: int) -> None:
    assert warmup_steps(OptimConfig(lr_warmup_steps_ratio=ratio), TOTAL) == steps
    for kind in ("constant", "linear", "cosine"):
        by_ratio = rates(lr_scheduler=kind, lr_warmup_steps_ratio=ratio)
        assert by_ratio == rates(lr_scheduler=kind, lr_warmup_steps=steps)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_learns(kind: str) -> None:
    assert learning_rate(OptimConfig(lr=2.0, lr_scheduler=kind), 0, 1) == 2.0


def test_two_lengths_of_the_warm_up_are_a_contradiction() -> None:
    both = OptimConfig(lr_warmup_steps=3, lr_warmup_steps_ratio=0.1)
    messages = [v.message for v in find_violations(Config(actor=ActorConfig(optim=both)))]
    assert any("actor.optim.lr_warmup_steps is 3 and actor.optim.lr_warmup_steps_ratio 0.1" in m for m in messages)
    for one in (OptimConfig(lr_warmup_steps=3), OptimConfig(lr_warmup_steps_ratio=0.1)):
        assert not any("warmup" in v.message for v in find_violations(Config(actor=ActorConfig(optim=one))))
