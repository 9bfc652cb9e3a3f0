"""KL estimators: values, gradients at any log-ratio, what they estimate; controllers."""

from __future__ import annotations

import math

import pytest
import torch

from rlscale.algo.kl import KL, AdaptiveKL, FixedKL, IntervalKL, kl, kl_loss, make_controller
from rlscale.config.schema import KLControlConfig

VALUE = {
    "k1": lambda d: d,
    "kl": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "mse": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "low_var_kl": lambda d: math.exp(-d) - 1 + d,
    "reverse": lambda d: math.exp(-d) - 1 + d,
    "forward": lambda d: -d * math.exp(-d) - math.exp(-d) + 1,
}
SLOPE = {
    "k1": lambda d: 1.0,
    "kl": lambda d: 1.0,
    "abs": lambda d: math.copysign(1.0, d),
    "k2": lambda d: d,
    "mse": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
    "low_var_kl": lambda d: 1 - math.exp(-d),
    "reverse": lambda d: 1 - math.exp(-d),
    "forward": lambda d: d * math.exp(-d),
}
RATIOS = (-8.0, -4.0, -1.5, -1.0, -0.3, -1e-4, 1e-4, 0.3, 1.0, 2.0, 9.0, 40.0)


def test_every_estimator_has_a_reference() -> None:
    assert set(KL.names()) == {n + s for n in VALUE for s in ("", "+")}


@pytest.mark.parametrize("name", KL.names())
def test_value_and_gradient(name: str) -> None:
    d = torch.tensor(RATIOS, dtype=torch.float64)
    logp = (d - 50.0).requires_grad_()
    value = kl(name, logp, torch.full_like(d, -50.0))
    (grad,) = torch.autograd.grad(value.sum(), logp)
    base = name.removesuffix("+")
    slope = SLOPE["k2"] if name.endswith("+") else SLOPE[base]
    for i, x in enumerate(RATIOS):
        assert value[i].item() == pytest.approx(VALUE[base](x), rel=1e-7 if abs(x) < 1e-3 else 1e-12, abs=1e-15)
        assert grad[i].item() == pytest.approx(slope(x), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KL.names())
def test_finite_at_any_log_ratio(name: str, dtype: torch.dtype) -> None:
    low = [-119.5, -0.5, -1e4, 0.0, -1e30, 0.0, -float("inf"), 0.0, -31.0, -30.0]
    logp = torch.tensor(low, dtype=dtype, requires_grad=True)
    ref = torch.tensor([-0.5, -119.5, 0.0, -1e4, 0.0, -1e30, 0.0, -float("inf"), 0.0, 0.0], dtype=dtype)
    value = kl(name, logp, ref)
    (grad,) = torch.autograd.grad(value.sum(), logp)
    assert bool(value.isfinite().all()) and bool(grad.isfinite().all())
    if name.removesuffix("+") in ("k2", "mse", "k3", "low_var_kl", "reverse"):
        assert float(grad[0]) < 0 < float(grad[1]) and float(grad[2]) < 0 < float(grad[3])


def test_they_estimate_the_divergences() -> None:
    """Exact expectation over a small distribution: k1, k3 the reverse KL, forward the forward KL; k2's gradient the
    reverse's.
    """
    torch.manual_seed(0)
    z = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(6, dtype=torch.float64), 0)
    logp = torch.log_softmax(z, 0)
    p = logp.exp()
    reverse, forward = (p * (logp - ref)).sum(), (ref.exp() * (ref - logp)).sum()
    for name, exact in (("k1", reverse), ("k3", reverse), ("reverse", reverse), ("forward", forward)):
        torch.testing.assert_close((p * kl(name, logp, ref)).sum(), exact, rtol=1e-12, atol=0)
    (want,) = torch.autograd.grad(reverse, z, retain_graph=True)
    for name in ("k2", "k3+", "k1+", "abs+"):
        (got,) = torch.autograd.grad((p.detach() * kl(name, logp, ref)).sum(), z, retain_graph=True)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_loss_and_errors() -> None:
    logp = torch.tensor([-1.0, float("nan")], requires_grad=True)
    loss, sums = kl_loss("k3", logp, torch.tensor([-1.2, -1.0]), torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.0]))
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (math.exp(-0.2) - 0.8), rel=1e-5) and logp.grad[1] == 0
    assert int(sums["tokens"]) == 1
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; known: abs, forward, k1"):
        kl("k4", logp, logp)
    with pytest.raises(ValueError, match="different shapes"):
        kl("k1", logp, torch.zeros(3))


def test_controllers() -> None:
    fixed = make_controller(KLControlConfig("fixed", kl_coef=0.3))
    assert fixed.update(99.0, 64) == 0.3
    adaptive = make_controller(KLControlConfig("adaptive", kl_coef=1.0, target_kl=2.0, horizon=100))
    assert adaptive.update(2.2, 10) == pytest.approx(1.0 + 0.1 * 0.1)
    assert adaptive.update(99.0, 10) == pytest.approx(1.01 * 1.02)
    other = AdaptiveKL(0.0, 2.0, 100)
    other.load_state_dict(adaptive.state_dict())
    assert other.update(0.0, 10) == adaptive.update(0.0, 10)
    assert isinstance(make_controller(KLControlConfig("fixed", kl_coef=0.0)), FixedKL)
    with pytest.raises(ValueError, match="unknown kl_ctrl.type 'pid'"):
        make_controller(KLControlConfig("pid", kl_coef=0.1))


def test_interval_controller_steers_into_the_interval() -> None:
    c = make_controller(KLControlConfig("interval", kl_coef=1.0, horizon=100, target_low=0.05, target_high=0.1))
    assert isinstance(c, IntervalKL) and c.update(0.07, 50) == 1.0
    assert c.update(0.2, 50) == pytest.approx(1.1) and c.update(0.01, 50) == pytest.approx(0.99)
    coef, kl_now = 1e-3, 0.5  # a policy whose KL falls as the coefficient rises
    c = IntervalKL(coef, 0.05, 0.1, horizon=100)
    for _ in range(500):
        kl_now = 0.01 / c.update(kl_now, 64)
    assert 0.05 <= kl_now <= 0.1
    with pytest.raises(ValueError, match="0 < low < high"):
        IntervalKL(1.0, 0.2, 0.1, 100)
    with pytest.raises(ValueError, match="target_low"):
        make_controller(KLControlConfig("interval", kl_coef=1.0))
