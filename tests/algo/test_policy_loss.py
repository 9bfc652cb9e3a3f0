"""Each policy loss and its gradient against formulas written out in scalar Python, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rlscale.algo.policy_loss import policy_loss, prepare
from rlscale.batch.weights import loss_weights
from rlscale.testing.batches import Flat, random_flat
from tests.algo.golden_functions import finish_metrics

LOW, HIGH, C = 0.15, 0.25, 1.6
Token = tuple[float, float, float]  # log pi, log pi_old, A
Scalar = Callable[[float, float, float], tuple[float, float]]  # -> L, dL/dlog pi


def ppo(p: float, old: float, a: float) -> tuple[float, float]:
    r = math.exp(p - old)
    inside = 1 - LOW <= r <= 1 + HIGH
    clipped = min(max(r, 1 - LOW), 1 + HIGH)
    value, grad = (-a * clipped, -a * r if inside else 0.0) if -a * clipped > -a * r else (-a * r, -a * r)
    return (-a * C, 0.0) if a < 0 and value > -a * C else (value, grad)


def cispo(p: float, old: float, a: float) -> tuple[float, float]:
    w = min(max(math.exp(p - old), 1 - LOW), 1 + HIGH)
    return -w * a * p, -w * a


def sapo(p: float, old: float, a: float) -> tuple[float, float]:
    r, tau = math.exp(p - old), (1.0 if a > 0 else 1.05)
    s = 1 / (1 + math.exp(-tau * (r - 1)))
    return -a * 4 / tau * s, -a * 4 * s * (1 - s) * r


def dro(p: float, old: float, a: float) -> tuple[float, float]:
    return -(p * a - 0.25 * (p - old) ** 2), -(a - 0.5 * (p - old))


def reinforce(p: float, old: float, a: float) -> tuple[float, float]:
    return -a * p, -a


def dppo_tv(p: float, old: float, a: float) -> tuple[float, float]:
    moved = math.exp(p) - math.exp(old)
    keep = moved <= 0.06 if a > 0 else moved >= -0.04
    w = min(math.exp(p - old), 1.3) if keep else 0.0
    return -a * w * p, -a * w


def dppo_kl(p: float, old: float, a: float) -> tuple[float, float]:
    new, was = math.exp(p), math.exp(old)
    d = was * (old - p) + (1 - was) * math.log((1 - was + 1e-8) / (1 - new + 1e-8))
    keep = (d <= 0.02 or new <= was) if a > 0 else (d <= 0.01 or new >= was)
    w = min(math.exp(p - old), 1.3) if keep else 0.0
    return -a * w * p, -a * w


BY_TOKEN: dict[str, tuple[Scalar, dict]] = {
    "ppo": (ppo, {"clip_c": C}),
    "cispo": (cispo, {}),
    "sapo": (sapo, {}),
    "dro": (dro, {"beta": 0.5}),
    "reinforce": (reinforce, {}),
    "gpg": (reinforce, {}),
    "dppo_tv": (dppo_tv, {"div_high": 0.06, "div_low": 0.04, "ratio_cap": 1.3}),
    "dppo_kl": (dppo_kl, {"div_high": 0.02, "div_low": 0.01, "ratio_cap": 1.3}),
}


def run(name: str, b: Flat, mode: str = "seq-mean-token-mean", is_weights: bool = False, **args):
    w = loss_weights(b.mask, b.cu, mode)
    x = b.logp.clone().requires_grad_()
    loss, sums = policy_loss(
        name,
        logprobs=x,
        old_logprobs=b.old,
        advantages=b.adv,
        mask=b.mask,
        weights=w,
        cu_seqlens=b.cu,
        clip_low=LOW,
        clip_high=HIGH,
        is_weights=b.is_weights if is_weights else None,
        **args,
    )
    return loss, torch.autograd.grad(loss, x)[0], sums, w


def policy_rows(b: Flat) -> list[list[int]]:
    return [[t for t in range(int(b.cu[i]), int(b.cu[i + 1])) if b.mask[t] > 0] for i in range(b.sequences)]


@pytest.mark.parametrize("is_weights", [False, True])
@pytest.mark.parametrize("name", BY_TOKEN)
def test_token_losses(name: str, is_weights: bool) -> None:
    b = random_flat(4, sequences=20)
    formula, args = BY_TOKEN[name]
    loss, grad, _, w = run(name, b, is_weights=is_weights, **args)
    value, slopes = 0.0, torch.zeros_like(grad)
    for t in (t for row in policy_rows(b) for t in row):
        factor = float(w[t]) * (float(b.is_weights[t]) if is_weights else 1.0)
        v, slope = formula(float(b.logp[t]), float(b.old[t]), float(b.adv[t]))
        value, slopes[t] = value + factor * v, factor * slope
    assert loss.item() == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(grad, slopes, rtol=1e-12, atol=1e-15)


def test_gspo_and_geo_mean() -> None:
    b = random_flat(4, sequences=20)
    for name, is_weights in (("gspo", False), ("geo_mean", False), ("geo_mean", True)):
        loss, grad, _, w = run(name, b, is_weights=is_weights)
        value, slopes = 0.0, torch.zeros_like(grad)
        for row in (r for r in policy_rows(b) if r):
            d = [float(b.logp[t] - b.old[t]) for t in row]
            a = [float(b.adv[t]) for t in row]
            if name == "gspo":
                s = math.exp(sum(d) / len(d))
                clipped = min(max(s, 1 - LOW), 1 + HIGH)
                for t, at in zip(row, a, strict=True):
                    use_clip = -at * clipped > -at * s
                    value += float(w[t]) * (-at * (clipped if use_clip else s))
                    slopes[t] = 0.0 if use_clip else -at * s * float(w[t])
                continue
            limited = [min(x, HIGH) if at > 0 else max(x, -LOW) for x, at in zip(d, a, strict=True)]
            scale = math.exp(sum(math.log(float(b.is_weights[t])) for t in row) / len(row)) if is_weights else 1.0
            total = -sum(a) / len(a) * math.exp(sum(limited) / len(row)) * scale
            row_weight = sum(float(w[t]) for t in row)
            value += row_weight * total
            for t, x, y in zip(row, d, limited, strict=True):
                slopes[t] = row_weight * total / len(row) if x == y else 0.0
        assert loss.item() == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(grad, slopes, rtol=1e-11, atol=1e-15)


def test_kl_cov_chooses_the_largest_covariances() -> None:
    b = random_flat(4, sequences=20)
    tokens = [t for row in policy_rows(b) for t in row]
    mean_a = sum(float(b.adv[t]) for t in tokens) / len(tokens)
    mean_p = sum(float(b.logp[t]) for t in tokens) / len(tokens)
    cov = {t: (float(b.adv[t]) - mean_a) * (float(b.logp[t]) - mean_p) for t in tokens}
    chosen = set(sorted(tokens, key=lambda t: -cov[t])[: max(1, int(0.2 * len(tokens)))])
    loss, grad, sums, w = run("kl_cov", b, kl_coef=0.7, kl_cov_ratio=0.2)
    value, slopes = 0.0, torch.zeros_like(grad)
    for t in tokens:
        d = float(b.logp[t] - b.old[t])
        extra = t in chosen
        value += float(w[t]) * (-float(b.adv[t]) * math.exp(d) + extra * 0.7 * abs(d))
        slopes[t] = float(w[t]) * (-float(b.adv[t]) * math.exp(d) + extra * math.copysign(0.7, d))
    assert loss.item() == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(grad, slopes, rtol=1e-12, atol=1e-15)
    assert int(sums["pg_clipfrac"]) == len(chosen)


@pytest.mark.parametrize("ratio,limit", [(1.0, 10**9), (0.05, None), (1e-9, 1)])
def test_clip_cov_draws_at_most_its_share(ratio: float, limit: int | None) -> None:
    b = random_flat(4, sequences=30)
    args = {"cov_lb": 0.05, "cov_ub": 3.0, "clip_cov_ratio": ratio}
    loss, grad, sums, w = run("clip_cov", b, **args)
    plain, plain_grad, _, _ = run("ppo", b, clip_c=None)
    tokens = [t for row in policy_rows(b) for t in row]
    mean_a = sum(float(b.adv[t]) for t in tokens) / len(tokens)
    mean_p = sum(float(b.logp[t]) for t in tokens) / len(tokens)
    eligible = set()
    for t in tokens:
        cov = (float(b.adv[t]) - mean_a) * (float(b.logp[t]) - mean_p)
        r = math.exp(float(b.logp[t] - b.old[t]))
        if 0.05 < cov < 3.0 and not -float(b.adv[t]) * min(max(r, 1 - LOW), 1 + HIGH) > -float(b.adv[t]) * r:
            eligible.add(t)
    drawn = {t for t in tokens if float(grad[t]) == 0.0 and float(plain_grad[t]) != 0.0}
    assert drawn <= eligible and len(eligible) > 10
    assert (
        len(drawn)
        == min(len(eligible), limit if limit is not None else int(ratio * len(tokens)))
        == int(sums["pg_clipfrac"])
    )
    kept = [t for t in tokens if t not in drawn]
    torch.testing.assert_close(grad[kept], plain_grad[kept], rtol=0, atol=0)
    other = (
        {t for t in tokens if float(run("clip_cov", b, **args, seed=9)[1][t]) == 0.0 and float(plain_grad[t]) != 0.0}
        if limit is None
        else None
    )
    assert other is None or (other != drawn and len(other) == len(drawn))


def test_metrics_are_sums_with_a_denominator() -> None:
    b = random_flat(4)
    _, _, sums, _ = run("ppo", b, clip_c=C)
    means = finish_metrics(sums)
    tokens = [t for row in policy_rows(b) for t in row]
    d = (b.logp - b.old)[tokens]
    assert int(sums["tokens"]) == len(tokens)
    assert means["ppo_kl"] == pytest.approx(float((-d).mean()), rel=1e-12)
    assert means["ppo_k3"] == pytest.approx(float((d.exp() - 1 - d).mean()), rel=1e-9)
    assert means["ratio"] == pytest.approx(float(d.exp().mean()), rel=1e-12)
    assert means["ratio_std"] == pytest.approx(float(d.exp().std(correction=0)), rel=1e-9)
    assert 0 < means["pg_clipfrac"] < 1 and "ratio_sq" not in means


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    b = random_flat(4)
    b.logp = b.old.clone()
    want = run("reinforce", b)[1]
    for name in ("ppo", "gspo", "cispo", "sapo", "dppo_tv", "dppo_kl", "dro"):
        torch.testing.assert_close(run(name, b)[1], want, rtol=1e-12, atol=1e-15)


def test_errors() -> None:
    b = random_flat(4)
    with pytest.raises(ValueError, match="unknown policy loss 'poo'; known: cispo, clip_cov"):
        run("poo", b)
    with pytest.raises(ValueError, match="unknown policy loss"):
        prepare("poo", logprobs=b.logp, old_logprobs=b.old, advantages=b.adv, mask=b.mask, cu_seqlens=b.cu)
    with pytest.raises(ValueError, match="takes no argument betta; it takes: beta"):
        run("dro", b, betta=1.0)
    with pytest.raises(ValueError, match="advantages has shape"):
        policy_loss(
            "ppo",
            logprobs=b.logp,
            old_logprobs=b.old,
            advantages=b.adv[:-1],
            mask=b.mask,
            weights=b.mask,
            cu_seqlens=b.cu,
        )
