"""Loss weights of each mode by their definition, of nothing, errors."""

from __future__ import annotations

import pytest
import torch

from rlscale.batch.weights import MODES, loss_weights

CU = torch.tensor([0, 3, 3, 5, 9])
MASK = torch.tensor([1.0, 0, 1, 0, 0, 1, 1, 1, 1])  # 2, none, 0, 4 tokens that count: 6 tokens, 2 sequences


@pytest.mark.parametrize(
    "mode,first,last",
    [
        ("token-mean", 1 / 6, 1 / 6),
        ("token-sum", 1.0, 1.0),
        ("seq-mean-token-sum", 1 / 2, 1 / 2),
        ("seq-mean-token-mean", 1 / 4, 1 / 8),
        ("seq-mean-token-sum-norm", 1 / 20, 1 / 20),
    ],
)
def test_definition(mode: str, first: float, last: float) -> None:
    w = loss_weights(MASK.double(), CU, mode, scale_factor=10)
    want = torch.tensor([first, 0, first, 0, 0] + [last] * 4, dtype=torch.float64)
    torch.testing.assert_close(w, want, rtol=1e-15, atol=0)
    assert loss_weights(MASK, CU, mode, scale_factor=10).dtype == torch.float32


@pytest.mark.parametrize("mode", MODES)
def test_without_tokens_that_count(mode: str) -> None:
    assert bool((loss_weights(torch.zeros(9), CU, mode, scale_factor=10) == 0).all())
    assert loss_weights(torch.zeros(0), torch.tensor([0]), mode, scale_factor=10).numel() == 0


def test_errors() -> None:
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'; known: token-mean"):
        loss_weights(MASK, CU, "mean")
    with pytest.raises(ValueError, match="needs loss_scale_factor > 0, got None"):
        loss_weights(MASK, CU, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match=r"mask has shape \(8,\), but there are 9 tokens"):
        loss_weights(MASK[1:], CU, "token-sum")
