"""The clipped value loss by hand, explained variance, critic warm-up."""

from __future__ import annotations

import pytest
import torch

from rlscale.algo.value_loss import explained_variance, value_loss
from rlscale.batch.weights import loss_weights
from rlscale.testing.batches import random_flat


@pytest.mark.parametrize("clip", [None, 0.1, 0.5])
def test_value_and_gradient(clip: float | None) -> None:
    b = random_flat(2, sequences=15)
    w = loss_weights(b.mask, b.cu, "token-mean")
    v = (b.values + b.adv).requires_grad_()
    loss, sums = value_loss(v, b.values, b.returns, b.mask, w, clip)
    (grad,) = torch.autograd.grad(loss, v)
    total, count = 0.0, 0
    for t in range(b.mask.numel()):
        new, old, target = v[t].item(), b.values[t].item(), b.returns[t].item()
        limited = new if clip is None else min(max(new, old - clip), old + clip)
        worse = (limited - target) ** 2 > (new - target) ** 2
        slope = (0.0 if limited != new else new - target) if worse else new - target
        total += 0.5 * w[t].item() * max((new - target) ** 2, (limited - target) ** 2)
        count += worse and bool(b.mask[t])
        assert grad[t].item() == pytest.approx(w[t].item() * slope, rel=1e-12, abs=1e-15)
    assert loss.item() == pytest.approx(total, rel=1e-12)
    assert int(sums["vf_clipfrac"]) == count and int(sums["tokens"]) == int(b.mask.sum())


def test_explained_variance() -> None:
    r, mask = torch.tensor([1.0, 2.0, 3.0, float("nan")]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert explained_variance(r.clone(), r, mask) == 1.0
    assert explained_variance(torch.zeros(4), r, mask) == pytest.approx(0.0)
    assert explained_variance(torch.tensor([3.0, 2.0, 1.0, 0.0]), r, mask) == pytest.approx(-3.0)
    assert explained_variance(r, torch.ones(4), mask) == 0.0 and explained_variance(r, r, torch.zeros(4)) == 0.0


def test_errors() -> None:
    x = torch.zeros(3)
    with pytest.raises(ValueError, match=r"returns has shape \(2,\)"):
        value_loss(x, x, torch.zeros(2), x, x, 0.2)
