"""Gradients of bf16 micro-batches are summed in fp32: small ones are not lost beside large sums."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from rlscale.testing.batches import random_batch
from tests import worlds
from tests.train.helpers import small_engine
from tests.train.reference import policy_gradient

ROUNDING = 2.0**-9  # of one number in bf16, relative


def build(stage: int) -> Any:
    """An engine that makes a micro-batch of every response, with steps too small to change a bf16 weight."""
    cut = dict(max_tokens=None, max_sequences=1, share_prefix=False)
    return small_engine(dict(zero_stage=stage), torch.bfloat16, optim=dict(lr=1e-12, grad_clip=0.0), **cut)


def gradient(engine: Any, batch: Any) -> torch.Tensor:
    """[n] fp32: what AdamW is given for the master weights."""
    adamw = engine.optimizer.adamw
    with mock.patch.object(adamw, "step", wraps=adamw.step) as step:
        seen: list[torch.Tensor] = []
        flats = engine.optimizer.masters()
        step.side_effect = lambda *_, **__: seen.extend(flat.grad.float().clone() for flat in flats)
        engine.update(batch, policy_gradient)
    return torch.cat(seen)


def error(stage: int, in_bf16: bool = False) -> tuple[int, float]:
    """Micro-batches, and how far their accumulated gradient is from the fp32 sum of one gradient each, relatively."""
    from rlscale.train import zero

    configure = zero.deepspeed_config

    def wrong(*args: Any) -> dict[str, Any]:
        return configure(*args) | {"data_types": {"grad_accum_dtype": "bf16"}}

    batch = random_batch(groups=8, n=4, seed=5)  # 32 micro-batches: a power of two scales without rounding
    with mock.patch.object(zero, "deepspeed_config", wrong if in_bf16 else configure):
        engine = build(stage)
    together = gradient(engine, batch)
    alone = [gradient(engine, batch.select(torch.tensor([row]))) for row in range(batch.num_samples)]
    expected = torch.stack(alone).double().sum(0)
    return len(alone), float((together - expected).norm() / expected.norm())


@pytest.mark.parametrize("stage", [1, 2])
def test_many_bf16_micro_batches_are_summed_in_fp32(stage: int) -> None:
    count, off = worlds.run(1, error, stage)[0]
    assert count == 32 and off < 1e-6


@pytest.mark.parametrize("stage", [1, 2])
def test_a_sum_in_bf16_would_be_seen(stage: int) -> None:
    assert worlds.run(1, error, stage, in_bf16=True)[0][1] > ROUNDING / 4
