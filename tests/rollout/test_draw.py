"""Drawing by inverting the cumulative distribution: right frequencies, nothing impossible, reproducible."""

from __future__ import annotations

import pytest
import torch

from rlscale.rollout.vllm.draw import draw, uniform_numbers


@pytest.mark.parametrize("vocabulary", [5, 256, 384, 1000])
def test_frequencies_are_the_probabilities(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    p = (torch.randn(vocabulary, generator=generator) * 2).softmax(-1)
    n = 40_000
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n  # stratified: a frequency is off by 1/n at most
    counts = torch.bincount(draw(p.expand(n, -1), uniform), minlength=vocabulary)
    assert counts.numel() == vocabulary
    torch.testing.assert_close(counts / n, p, atol=1.5 / n, rtol=0)


def test_the_cumulative_distribution_is_inverted_exactly() -> None:
    p = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).expand(6, -1)
    uniform = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53], dtype=torch.float64)
    assert draw(p, uniform).tolist() == [0, 0, 2, 2, 3, 3]


def test_what_has_no_probability_is_never_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(512, 1024, generator=generator)
    p[torch.rand(p.shape, generator=generator) < 0.99] = 0.0
    p[:, 700:] = 0.0
    p[:, 3] += 1e-6
    for uniform in (0.0, 1e-300, 0.5, 1 - 2**-53):
        token = draw(p / p.sum(-1, keepdim=True), torch.full((512,), uniform, dtype=torch.float64))
        assert (p.gather(1, token[:, None]) > 0).all()


def test_rows_with_a_generator_do_not_depend_on_the_others() -> None:
    def numbers(rows: int, at: int) -> float:
        return float(uniform_numbers(rows, {at: torch.Generator().manual_seed(7)})[at])

    assert numbers(1, 0) == numbers(9, 4)
    out = uniform_numbers(1000, {})
    assert out.min() >= 0 and out.max() < 1 and out.unique().numel() == 1000
