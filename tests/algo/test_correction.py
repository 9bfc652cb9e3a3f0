"""Importance weights, rejection and the metrics of off-policy data, by loops; modes; placement of rewards survives."""

from __future__ import annotations

import math

import pytest
import torch

from rlscale.algo.correction import (
    REJECTIONS,
    CorrectionConfig,
    correct,
    importance_weights,
    off_policy_sequence_mask,
    offpolicy_metrics,
    rejection_mask,
)
from rlscale.testing.batches import Flat, random_flat


def rows(b: Flat, q: torch.Tensor) -> list[list[tuple[int, float]]]:
    return [
        [(t, q[t].item()) for t in range(int(b.cu[i]), int(b.cu[i + 1])) if b.mask[t] > 0] for i in range(b.sequences)
    ]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind,lower,upper", [("truncate", None, 1.3), ("icepop", 0.7, 1.3), ("icepop", None, 2.0)])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights(level: str, kind: str, lower: float | None, upper: float, normalize: bool) -> None:
    b = random_flat(8, sequences=15)
    q = b.logp - b.old
    got, metrics = importance_weights(
        q, b.mask, b.cu, level=level, kind=kind, lower=lower, upper=upper, batch_normalize=normalize
    )
    low = 1 / upper if lower is None else lower
    want, raw_units, row_weights = torch.zeros_like(got), [], []
    for row in (r for r in rows(b, q) if r):
        total = math.exp(sum(x for _, x in row))
        for t, x in row:
            raw = total if level == "sequence" else math.exp(x)
            want[t] = min(raw, upper) if kind == "truncate" else (raw if low <= raw <= upper else 0.0)
            raw_units += [] if level == "sequence" else [raw]
        raw_units += [total] if level == "sequence" else []
        row_weights.append(want[row[0][0]].item())
    valid = want[b.mask > 0]
    mean = valid.mean().item()
    assert metrics["mean"] == pytest.approx(mean, rel=1e-12)
    assert metrics["std"] == pytest.approx(valid.std(correction=0).item(), rel=1e-6, abs=1e-9)
    assert metrics["eff_sample_size"] == pytest.approx(mean**2 / valid.square().mean().item(), rel=1e-12)
    assert metrics["fraction_high"] == pytest.approx(sum(r > upper for r in raw_units) / len(raw_units))
    assert metrics["fraction_low"] == pytest.approx(sum(r < low for r in raw_units) / len(raw_units))
    if normalize:
        want /= mean if level == "token" else sum(row_weights) / len(row_weights)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("option", REJECTIONS)
def test_rejection(option: str) -> None:
    b = random_flat(8, sequences=15)
    q = b.logp - b.old
    level, kind = option.rsplit("_", 1)
    stat = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[kind]
    upper = {"k1": 1.6, "k2": 0.15, "k3": 0.15}[kind] * (2 if level == "seq_sum" else 1)
    got, metrics = rejection_mask(q, b.mask, b.cu, options=[option], upper=upper)
    want, hit = torch.zeros_like(b.mask), 0
    for row in rows(b, q):
        values = [stat(x) for _, x in row]
        pooled = {
            "token": None,
            "seq_sum": sum(values),
            "seq_mean": sum(values) / max(len(row), 1),
            "seq_max": max(values, default=0, key=abs),
        }[level]
        before = want.sum().item()
        for (t, _), v in zip(row, values, strict=True):
            s = v if pooled is None else pooled
            want[t] = float(abs(s) <= math.log(upper) if kind == "k1" else s <= upper)
        hit += want.sum().item() - before < len(row)
    assert torch.equal(got, want) and 0 < metrics["masked_fraction"] < 1
    assert metrics["masked_fraction"] == pytest.approx(1 - want.sum().item() / b.mask.sum().item())
    assert metrics["seq_masked_fraction"] == pytest.approx(hit / sum(bool(r) for r in rows(b, q)))


def test_asymmetric_bounds_are_on_the_ratio_and_options_are_anded() -> None:
    ratio, cu, ones = torch.tensor([0.6, 1.0, 1.5, 3.0]), torch.tensor([0, 4]), torch.ones(4)
    assert rejection_mask(ratio.log(), ones, cu, options=["token_k1"], lower=0.25, upper=1.2)[0].tolist() == [
        1,
        1,
        0,
        0,
    ]
    both = rejection_mask(
        ratio.log(), ones, cu, options=["token_k1", "token_k2"], lower=[0.25, None], upper=[2.0, 0.1]
    )[0]
    assert both.tolist() == [0, 1, 1, 0]


def test_metrics_by_loops_and_masked_nan() -> None:
    b = random_flat(8, sequences=15)
    got = offpolicy_metrics(b.logp, b.old, b.mask, b.cu)
    assert got == offpolicy_metrics(b.poisoned().logp, b.poisoned().old, b.mask, b.cu)
    q = b.logp - b.old
    flat = [x for row in rows(b, q) for _, x in row]
    means = [sum(x for _, x in row) / len(row) for row in rows(b, q) if row]
    assert got["kl"] == pytest.approx(-sum(flat) / len(flat), rel=1e-12)
    assert got["k3_kl"] == pytest.approx(sum(math.exp(x) - 1 - x for x in flat) / len(flat), rel=1e-9)
    assert got["ppl_ratio"] == pytest.approx(sum(math.exp(-m) for m in means) / len(means), rel=1e-12)
    assert got["log_ppl_diff_max"] == pytest.approx(max(-m for m in means), rel=1e-12)
    assert got["chi2_token"] == pytest.approx(sum(math.exp(2 * x) for x in flat) / len(flat) - 1, rel=1e-12)
    assert offpolicy_metrics(b.logp, b.old, torch.zeros_like(b.mask), b.cu) == {}


def test_sequence_mask_drops_only_bad_sequences_left_behind() -> None:
    cu, ones = torch.tensor([0, 2, 4, 6]), torch.ones(6)
    behaviour, logp = torch.zeros(6) - 1, torch.tensor([-3.0, -3.0, -3.0, -3.0, -1.1, -1.1])
    adv = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    mask, metrics = off_policy_sequence_mask(logp, behaviour, adv, ones, cu, threshold=0.5)
    assert mask.tolist() == [0, 0, 1, 1, 1, 1] and metrics["seq_masked_fraction"] == pytest.approx(1 / 3)


def test_modes() -> None:
    b = random_flat(8)
    decoupled = correct(CorrectionConfig(), logprobs=b.logp, rollout_logprobs=b.old, mask=b.mask, cu_seqlens=b.cu)
    assert (
        torch.equal(decoupled.old_logprobs, b.logp)
        and decoupled.is_weights is not None
        and torch.equal(decoupled.mask, b.mask)
    )
    config = CorrectionConfig(mode="bypass", reject={"options": ("token_k1",), "upper": (1.3,)})
    bypass = correct(config, logprobs=b.logp, rollout_logprobs=b.old, mask=b.mask, cu_seqlens=b.cu)
    assert torch.equal(bypass.old_logprobs, b.old) and bypass.is_weights is None and bypass.mask.sum() < b.mask.sum()
    assert bypass.metrics["rollout_corr/rs_masked_fraction"] > 0 and "rollout_corr/is_mean" in decoupled.metrics


def test_errors() -> None:
    q, cu = torch.zeros(2), torch.tensor([0, 2])
    with pytest.raises(ValueError, match="unknown level"):
        importance_weights(q, q, cu, level="row")
    with pytest.raises(ValueError, match="unknown kind"):
        importance_weights(q, q, cu, kind="clip")
    with pytest.raises(ValueError, match="0 <= lower <= upper"):
        importance_weights(q, q, cu, lower=3.0)
    with pytest.raises(ValueError, match="unknown rejection option 'token_k4'; known: token_k1"):
        rejection_mask(q, q, cu, options=["token_k4"], upper=1.0)
    with pytest.raises(ValueError, match="1 rejection options, but 2 upper"):
        rejection_mask(q, q, cu, options=["token_k1"], upper=[1.0, 2.0])
    with pytest.raises(ValueError, match="unknown correction mode"):
        CorrectionConfig(mode="none")
