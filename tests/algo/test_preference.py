"""Pairwise and supervised losses by hand; the same for any split of the pairs; targets of packed sequences."""

from __future__ import annotations

import math

import pytest
import torch

from rlscale.algo.preference import (
    DPO_LOSSES,
    bradley_terry,
    dpo,
    pair_weights,
    sequence_logprobs,
    supervised_targets,
    token_cross_entropy,
)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


FORMULA = {
    "sigmoid": lambda h, b, e: softplus(-b * h),
    "hinge": lambda h, b, e: max(0.0, 1 - b * h),
    "ipo": lambda h, b, e: (h - 1 / (2 * b)) ** 2,
    "cdpo": lambda h, b, e: (1 - e) * softplus(-b * h) + e * softplus(b * h),
    "robust": lambda h, b, e: ((1 - e) * softplus(-b * h) - e * softplus(b * h)) / (1 - 2 * e),
}
FORMULA["conservative"] = FORMULA["cdpo"]


def pairs(n: int = 7) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        k: torch.randn(n, generator=g, dtype=torch.float64)
        for k in ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
    }


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("name", DPO_LOSSES.names())
def test_dpo_by_formula_and_split(name: str, lengths: bool) -> None:
    p, w = pairs(), pair_weights(7, dtype=torch.float64)
    p["policy_chosen"].requires_grad_()
    extra = (
        {k: torch.tensor([3, 1, 4, 1, 5, 9, 2]) + i for i, k in enumerate(("chosen_length", "rejected_length"))}
        if lengths
        else {}
    )
    loss, m = dpo(name, **p, weights=w, beta=0.3, label_smoothing=0.2, **extra)
    want = 0.0
    for i in range(7):
        c, r = (p[f"policy_{k}"][i].item() - p[f"ref_{k}"][i].item() for k in ("chosen", "rejected"))
        assert m["chosen_reward"][i].item() == pytest.approx(0.3 * c) and m["rejected_reward"][
            i
        ].item() == pytest.approx(0.3 * r)
        if lengths:
            c, r = c / extra["chosen_length"][i].item(), r / extra["rejected_length"][i].item()
        want += FORMULA[name](c - r, 0.3, 0.2) / 7
    assert loss.item() == pytest.approx(want, rel=1e-12)
    (grad,) = torch.autograd.grad(loss, p["policy_chosen"])
    parts = [[0, 3], [], [1, 2, 4, 5, 6]]
    total = sum(
        dpo(
            name,
            **{k: v[i] for k, v in p.items()},
            weights=w[i],
            beta=0.3,
            label_smoothing=0.2,
            **{k: v[i] for k, v in extra.items()},
        )[0]
        for i in parts
    )
    assert total.item() == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, p["policy_chosen"])[0], grad, rtol=1e-12, atol=0)


def test_bradley_terry() -> None:
    chosen, rejected = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.5, 2.0], dtype=torch.float64)
    loss, m = bradley_terry(
        chosen, rejected, pair_weights(2, dtype=torch.float64), torch.tensor([0.1, 0.2], dtype=torch.float64)
    )
    assert loss.item() == pytest.approx((softplus(-0.4) + softplus(2.2)) / 2, rel=1e-12)
    assert int(m["accuracy"]) == 1 and int(m["pairs"]) == 2


def test_supervised_targets_do_not_cross_sequences() -> None:
    source, target = supervised_targets(
        torch.arange(7), torch.tensor([1, 0, 1, 1.0, 1, 1, 1]), torch.tensor([0, 3, 3, 4, 7])
    )
    assert source.tolist() == [1, 4, 5] and target.tolist() == [2, 5, 6]


def test_cross_entropy_and_sequence_sums() -> None:
    logp, mask = torch.tensor([-1.0, float("nan"), -2.0], requires_grad=True), torch.tensor([1.0, 0.0, 1.0])
    loss, m = token_cross_entropy(logp, mask, mask / 2)
    loss.backward()
    assert loss.item() == 1.5 and logp.grad.tolist() == [-0.5, 0.0, -0.5] and int(m["tokens"]) == 2
    assert sequence_logprobs(logp, mask, torch.tensor([0, 2, 2, 3])).tolist() == [-1.0, 0.0, -2.0]


def test_errors() -> None:
    p = pairs()
    with pytest.raises(ValueError, match="unknown DPO loss 'kto'; known: cdpo"):
        dpo("kto", **p, weights=pair_weights(7))
    with pytest.raises(ValueError, match="beta"):
        dpo("ipo", **p, weights=pair_weights(7), beta=0.0)
    with pytest.raises(ValueError, match="go together"):
        dpo("ipo", **p, weights=pair_weights(7), chosen_length=torch.ones(7))
    with pytest.raises(ValueError, match="one length"):
        bradley_terry(torch.zeros(2), torch.zeros(1), torch.zeros(2))
    with pytest.raises(ValueError, match="label_smoothing"):
        dpo("robust", **p, weights=pair_weights(7), label_smoothing=0.5)
    with pytest.raises(ValueError, match="differ"):
        token_cross_entropy(torch.zeros(2), torch.zeros(1), torch.zeros(2))
