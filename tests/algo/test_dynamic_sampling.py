"""Which groups stay, how many prompts are asked for, when it stops."""

from __future__ import annotations

import pytest
import torch

from rlscale.algo.dynamic_sampling import DynamicSampling, groups_with_contrast


def test_groups_with_contrast() -> None:
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, float("nan"), 0.0, 0.3, 0.3 + 1e-6])
    group = torch.tensor([5, 5, 2, 2, 9, 9, 7, 7])
    assert groups_with_contrast(scores, group).tolist() == [2, 7]  # 5: equal, 9: one valid score only
    assert groups_with_contrast(scores[:0], group[:0]).tolist() == []
    with pytest.raises(ValueError, match="one length"):
        groups_with_contrast(scores, group[:2])


def test_refills_what_is_missing_and_stops() -> None:
    s = DynamicSampling(wanted=8, max_rounds=3)
    assert s.record(8, 2) == 8  # 6 missing at a share of 1/4 would be 24: at most `wanted`
    assert s.record(8, 5) == 3  # 1 missing at a share of 7/16
    assert s.record(3, 1) == 0 and s.kept == 8 and s.metrics()["dynamic_sampling/short"] == 0
    assert DynamicSampling(4, 1).record(4, 4) == 0
    short = DynamicSampling(4, 2)
    assert short.record(4, 0) == 4 and short.record(4, 1) == 0 and short.metrics()["dynamic_sampling/short"] == 3


def test_clear_stop_when_nothing_is_left() -> None:
    s = DynamicSampling(wanted=2, max_rounds=2)
    assert s.record(2, 0) == 2
    with pytest.raises(ValueError, match="no group with different rewards in 2 rounds of generation \\(4 prompts\\)"):
        s.record(2, 0)
    with pytest.raises(ValueError, match="wanted"):
        DynamicSampling(0, 1)
