"""Inputs at which a plain reading of a formula gives noise, infinity or a silent NaN."""

from __future__ import annotations

import pytest
import torch

from rlscale.algo.advantages import estimate_advantages
from rlscale.algo.dynamic_sampling import DynamicSampling
from rlscale.algo.entropy import entropy_sum
from rlscale.algo.kl import kl_loss
from rlscale.algo.policy_loss import policy_loss, prepare


def loo(rewards: list[float], dtype: torch.dtype = torch.float64) -> list[float]:
    n = len(rewards)
    out = estimate_advantages(
        "rloo",
        token_rewards=torch.tensor(rewards, dtype=dtype),
        mask=torch.ones(n),
        cu_seqlens=torch.arange(n + 1),
        group=torch.zeros(n, dtype=torch.int64),
        norm_by_loo_std=True,
    )
    return out.advantages.tolist()


def test_leave_one_out_deviation_of_others_that_hardly_differ() -> None:
    assert loo([0.0, 1.0, 2.0])[0] == pytest.approx(-1.5 / 0.5**0.5)
    far = loo([0.5, 0.5000001, 0.5, 1000.0])
    assert far[3] == pytest.approx(999.5, rel=1e-6)  # the others are equal but for rounding: the plain difference
    assert loo([0.7, 0.1 * 7, 0.7, 1.0])[3] == pytest.approx(0.3)
    assert loo([0.0, 1e-3, 0.0, 1.0])[3] == pytest.approx((1 - 1e-3 / 3) / (1e-3 / 3**0.5), rel=1e-9)


@pytest.mark.parametrize("name, key", [("gae", "values"), ("remax", "baselines")])
def test_inputs_that_are_not_finite_are_named(name: str, key: str) -> None:
    given = torch.tensor([0.0, float("nan"), 0.0])
    common = dict(token_rewards=torch.ones(3), cu_seqlens=torch.arange(4), group=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=f"{key}.*finite.*1"):
        estimate_advantages(name, mask=torch.ones(3), **common, **{key: given})
    if key == "values":  # where the mask is 0 it changes nothing
        out = estimate_advantages(name, mask=torch.tensor([1.0, 0.0, 1.0]), values=given, **common)
        assert bool(torch.isfinite(out.advantages).all())


def test_kl_cov_chooses_its_share_also_where_covariances_tie() -> None:
    n = 1000
    logp = -torch.rand(n, generator=torch.Generator().manual_seed(0))
    batch = dict(
        logprobs=logp, old_logprobs=logp, advantages=torch.zeros(n), mask=torch.ones(n), cu_seqlens=torch.tensor([0, n])
    )
    given = prepare("kl_cov", **batch, kl_cov_ratio=0.005)
    _, sums = policy_loss("kl_cov", **batch, weights=torch.ones(n), kl_cov_ratio=0.005, statistic=given)
    assert sums["pg_clipfrac"] == 5


def test_shapes_are_not_broadcast() -> None:
    six, one = torch.zeros(6), torch.zeros(1)
    for mask, weights in ((one, six), (six, one), (six[:, None], six)):
        with pytest.raises(ValueError, match="shape"):
            kl_loss("k3", six, six, mask, weights)
        with pytest.raises(ValueError, match="shape"):
            entropy_sum(six, mask, weights)
    with pytest.raises(ValueError, match="advantages"):
        prepare("kl_cov", logprobs=six, old_logprobs=six, advantages=one, mask=six, cu_seqlens=torch.tensor([0, 6]))


def test_dynamic_sampling_without_prompts_asks_again() -> None:
    assert DynamicSampling(4, 3).record(0, 0) == 4
