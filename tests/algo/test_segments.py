"""Segmented sums: few and many values that are not 0, empty sequences, masked NaN, gradients."""

from __future__ import annotations

import pytest
import torch

from rlscale.algo.segments import any_valid, cumulative, segment_sum, sequence_counts, sequence_sums, spread


@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sequence_sums(density: float, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 7, 0, 0, 500, 1, 33, 0])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    x = torch.randn(541, generator=g).to(dtype) * (torch.rand(541, generator=g) < density)
    valid = torch.rand(541, generator=g) > 0.3
    x[~valid] = float("nan")
    want = [torch.where(valid, x, 0)[i:j].double().sum() for i, j in zip(cu[:-1], cu[1:], strict=True)]
    torch.testing.assert_close(sequence_sums(x, valid, cu), torch.stack(want), rtol=1e-12, atol=1e-13)
    counts = [valid[i:j].sum() for i, j in zip(cu[:-1], cu[1:], strict=True)]
    assert sequence_counts(valid, cu).tolist() == counts and any_valid(valid, cu).tolist() == [c > 0 for c in counts]


def test_sums_and_running_sums_carry_gradients_and_order() -> None:
    cu = torch.tensor([0, 2, 2, 5])
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64, requires_grad=True)
    total = segment_sum(x, cu)
    assert total.tolist() == [3.0, 0.0, 12.0]
    (grad,) = torch.autograd.grad(spread(total, cu).square().sum(), x)
    assert grad.tolist() == [12.0, 12.0, 72.0, 72.0, 72.0]
    assert cumulative(x.detach(), cu).tolist() == [1.0, 3.0, 3.0, 7.0, 12.0]
