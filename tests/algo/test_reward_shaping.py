"""Placement of scores, KL in the reward, length terms."""

from __future__ import annotations

import math

import pytest
import torch

from rlscale.algo.reward_shaping import (
    clip_and_scale,
    cosine_length_reward,
    kl_in_reward,
    length_reward,
    overlong_penalty,
    place_rewards,
)
from rlscale.testing.batches import random_flat


def test_placement_at_the_last_policy_token() -> None:
    mask, cu = torch.tensor([1.0, 1, 0, 0, 0, 1, 0, 1]), torch.tensor([0, 3, 5, 5, 8])
    placed = place_rewards(torch.tensor([2.0, 7.0, 9.0, -1.0]), mask, cu)
    assert placed.tolist() == [0, 2, 0, 0, 0, 0, 0, -1]
    with pytest.raises(ValueError, match=r"scores has shape \(1,\), but there are 4 sequences"):
        place_rewards(torch.tensor([1.0]), mask, cu)


def test_kl_in_reward() -> None:
    b = random_flat(5)
    for x in (b, b.poisoned()):
        got, mean = kl_in_reward(x.rewards, x.logp, x.ref, x.mask, x.cu, kind="k3", beta=0.1)
        d = b.logp - b.ref
        k = torch.where(b.mask > 0, (-d).exp() - 1 + d, 0.0)
        torch.testing.assert_close(got, torch.where(b.mask > 0, b.rewards - 0.1 * k, 0.0), rtol=1e-12, atol=1e-15)
        means = [
            k[i:j].sum().item() / b.mask[i:j].sum().item()
            for i, j in zip(b.cu[:-1], b.cu[1:], strict=True)
            if b.mask[i:j].sum() > 0
        ]
        assert mean == pytest.approx(sum(means) / len(means), rel=1e-12)


def test_overlong() -> None:
    penalty = overlong_penalty(
        torch.tensor([0, 15, 16, 18, 20, 24]), max_response_length=20, buffer=4, penalty_factor=2.0
    )
    assert penalty.tolist() == [0, 0, 0, -1.0, -2.0, -2.0]
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(torch.tensor([1]), max_response_length=20, buffer=0)


def test_length_aware_rewards() -> None:
    lengths, scores = torch.tensor([10, 20, 30, 5, 5]), torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    assert length_reward(lengths, scores, torch.tensor([0, 0, 0, 1, 1])).tolist() == pytest.approx(
        [0.5, 0.0, -0.5, 0.0, 0.0]
    )
    assert length_reward(lengths, torch.zeros(5), torch.tensor([0, 0, 0, 1, 1])).tolist() == pytest.approx(
        [0.0, 0.0, -0.5, 0.0, 0.0]
    )
    got = cosine_length_reward(
        torch.tensor([0, 50, 100, 0, 50]), torch.tensor([True, True, True, False, False]), max_response_length=100
    )
    assert got.tolist() == pytest.approx([2.0, 1.5, -10.0, -10.0, -5.0])
    with pytest.raises(ValueError, match="differ"):
        length_reward(lengths, scores, torch.zeros(2))


def test_clip_and_scale() -> None:
    assert clip_and_scale(torch.tensor([-3.0, 0.5, 9.0]), low=-1, high=1, scale=2, shift=1).tolist() == [-1, 2, 3]
    assert math.isclose(clip_and_scale(torch.tensor([9.0]), scale=0.5).item(), 4.5)
    with pytest.raises(ValueError, match="empty"):
        clip_and_scale(torch.zeros(1), low=1, high=0)
