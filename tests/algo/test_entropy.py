"""Log-prob and entropy from logits in chunks; schedules of the coefficient."""

from __future__ import annotations

import pytest
import torch

from rlscale.algo.entropy import EntropySchedule
from rlscale.testing.entropy import logprob_entropy_from_logits


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients(chunk: int, temperature: float) -> None:
    torch.manual_seed(0)
    z = torch.randn(7, 11, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 11, (7,))
    logp, entropy = logprob_entropy_from_logits(z, y, temperature=temperature, chunk=chunk)
    dist = torch.distributions.Categorical(logits=z / temperature)
    torch.testing.assert_close(logp, dist.log_prob(y), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, dist.entropy(), rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad((logp * 2 + entropy).sum(), z)[0]
    want = torch.autograd.grad((dist.log_prob(y) * 2 + dist.entropy()).sum(), z)[0]
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_excluded_vocabulary_entry() -> None:
    z = torch.tensor([[0.0, 1.0, -float("inf")]], requires_grad=True)
    logp, entropy = logprob_entropy_from_logits(z, torch.tensor([1]))
    assert entropy.item() == pytest.approx(0.5822031, rel=1e-6) and logp.item() == pytest.approx(-0.3132617, rel=1e-6)
    (logp + entropy).sum().backward()
    assert bool(z.grad.isfinite().all()) and z.grad[0, 2] == 0
    with pytest.raises(ValueError, match="temperature"):
        logprob_entropy_from_logits(z, torch.tensor([1]), temperature=0.0)
    with pytest.raises(ValueError, match="must be"):
        logprob_entropy_from_logits(z, torch.tensor([1, 2]))


def test_schedules() -> None:
    assert [EntropySchedule(coeff=0.1)(s) for s in (0, 9)] == [0.1, 0.1]
    linear = EntropySchedule("linear", coeff=0.1, final=0.02, warmup_steps=4, decay_steps=8)
    assert [round(linear(s), 6) for s in (0, 1, 3, 4, 8, 12, 99)] == [0.02, 0.04, 0.08, 0.1, 0.06, 0.02, 0.02]
    cosine = EntropySchedule("cosine", coeff=1.0, decay_steps=10)
    assert cosine(0) == 1.0 and cosine(5) == pytest.approx(0.5) and cosine(10) == pytest.approx(0.0) and cosine(2) > 0.8
    piecewise = EntropySchedule("piecewise", points=[(2, 0.1), (4, 0.3), (8, 0.0)])
    assert [piecewise(s) for s in (0, 2, 3, 4, 6, 8, 9)] == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.15, 0.0, 0.0])
    assert piecewise.used and linear.used and not EntropySchedule().used


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "step"},
        {"kind": "linear"},
        {"kind": "piecewise"},
        {"kind": "piecewise", "points": [(3, 1.0), (2, 1.0)]},
    ],
)
def test_schedule_errors(bad: dict) -> None:
    with pytest.raises(ValueError, match="entropy schedule"):
        EntropySchedule(**bad)
