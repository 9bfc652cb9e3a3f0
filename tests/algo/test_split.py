"""Loss and gradient are the same for any micro-batches, ranks and order; masked positions cannot leak; nothing gives
0.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlscale.algo.entropy import entropy_sum
from rlscale.algo.kl import kl_loss
from rlscale.algo.policy_loss import POLICY_LOSSES, policy_loss, prepare
from rlscale.algo.preference import token_cross_entropy
from rlscale.algo.value_loss import value_loss
from rlscale.batch.weights import MODES, loss_weights
from rlscale.testing.batches import Flat, random_flat

ARGS = {
    "kl_cov": {"kl_cov_ratio": 0.3},
    "clip_cov": {"clip_cov_ratio": 0.2, "cov_lb": 0.02, "cov_ub": 5.0},
    "dppo_tv": {"div_low": 0.05, "div_high": 0.05, "ratio_cap": 1.2},
}
PREPARED = [n for n in POLICY_LOSSES.names() if POLICY_LOSSES.find(n).prepare is not None]
Loss = Callable[[Flat, Tensor, Tensor, dict], tuple[Tensor, dict[str, Tensor]]]


def _policy(name: str) -> Loss:
    def loss(b: Flat, x: Tensor, w: Tensor, shared: dict) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_loss(
            name,
            logprobs=x,
            old_logprobs=b.old,
            advantages=b.adv,
            mask=b.mask,
            weights=w,
            cu_seqlens=b.cu,
            is_weights=b.is_weights,
            **ARGS.get(name, {}),
            statistic=shared,
        )

    return loss


LOSSES: dict[str, Loss] = {n: _policy(n) for n in POLICY_LOSSES.names()} | {
    "value": lambda b, x, w, _: value_loss(x, b.values, b.returns, b.mask, w, 0.3),
    "kl": lambda b, x, w, _: kl_loss("k3", x, b.ref, b.mask, w),
    "entropy": lambda b, x, w, _: entropy_sum(-2.0 * x, b.mask, w),
    "cross_entropy": lambda b, x, w, _: token_cross_entropy(x, b.mask, w),
}


def shared_numbers(name: str, b: Flat) -> dict:
    if name not in PREPARED:
        return {}
    return prepare(
        name, logprobs=b.logp, old_logprobs=b.old, advantages=b.adv, mask=b.mask, cu_seqlens=b.cu, **ARGS[name]
    )


def run(loss: Loss, b: Flat, w: Tensor, shared: dict) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = b.logp.clone().requires_grad_()
    value, metrics = loss(b, x, w, shared)
    (grad,) = torch.autograd.grad(value, x)
    return value.detach(), grad, metrics


def divide(rows: list[int], rng: random.Random) -> list[list[int]]:
    """The rows in random order, in a random number of parts, some of them possibly empty."""
    rows = rng.sample(rows, len(rows))
    cuts = sorted(rng.randint(0, len(rows)) for _ in range(rng.randint(0, 4)))
    return [rows[i:j] for i, j in zip([0, *cuts], [*cuts, len(rows)], strict=True)]


@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_and_order(name: str, mode: str, seed: int) -> None:
    b, rng = random_flat(seed), random.Random(seed)
    shared = shared_numbers(name, b)
    weights = loss_weights(b.mask, b.cu, mode, scale_factor=20)
    whole, gradient, sums = run(LOSSES[name], b, weights, shared)
    for parts in (divide(list(range(b.sequences)), rng), [[i] for i in range(b.sequences)]):
        total, collected, added = torch.zeros((), dtype=torch.float64), torch.zeros_like(gradient), {}
        for rows in parts:
            at = b.tokens_of(rows)
            value, grad, metrics = run(LOSSES[name], b.take(rows), weights[at], shared)
            total, collected[at] = total + value, grad
            added = {k: added.get(k, 0) + v for k, v in metrics.items()}
        torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(collected, gradient, rtol=1e-12, atol=1e-14)
        assert set(added) == set(sums)
        for k in sums:
            torch.testing.assert_close(torch.as_tensor(added[k]).double(), sums[k].double(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", PREPARED)
def test_mini_batch_statistics_ignore_order(name: str, seed: int) -> None:
    b = random_flat(seed)
    order = random.Random(seed).sample(range(b.sequences), b.sequences)
    a, c = shared_numbers(name, b), shared_numbers(name, b.take(order))
    assert a.keys() == c.keys() and all(a[k] == pytest.approx(c[k], rel=1e-12) for k in a)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_masked_positions_change_nothing(name: str, mode: str, seed: int) -> None:
    b = random_flat(seed)
    bad = b.poisoned()
    assert not bool(bad.logp.isfinite().all())
    weights = loss_weights(b.mask, b.cu, mode, scale_factor=20)
    expected, got = (run(LOSSES[name], x, weights, shared_numbers(name, x)) for x in (b, bad))
    assert torch.equal(expected[0], got[0]) and torch.equal(expected[1], got[1])
    assert all(torch.equal(expected[2][k], got[2][k]) for k in expected[2])
    assert bool((got[1][b.mask == 0] == 0).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_all_masked_gives_zero(name: str, mode: str) -> None:
    b = random_flat(3)
    b.mask = torch.zeros_like(b.mask)
    weights = loss_weights(b.mask, b.cu, mode, scale_factor=20)
    value, grad, metrics = run(LOSSES[name], b.poisoned(), weights, shared_numbers(name, b))
    assert float(value) == 0.0 and bool((grad == 0).all()) and all(float(v) == 0 for v in metrics.values())


@pytest.mark.parametrize("name", LOSSES)
def test_no_sequence_at_all(name: str) -> None:
    b = random_flat(3).take([])
    value, grad, _ = run(LOSSES[name], b, loss_weights(b.mask, b.cu, "token-mean"), shared_numbers(name, b))
    assert float(value) == 0.0 and grad.numel() == 0
