"""Mini-batches: every response once an epoch, the responses to a prompt together, the same order every time."""

from __future__ import annotations

import pytest
import torch

from rlscale.batch.minibatch import mini_batches, num_mini_batches
from rlscale.testing.batches import random_batch


@pytest.mark.parametrize("size, epochs", [(1, 1), (2, 3), (4, 2)])
def test_every_row_is_in_one_mini_batch_of_each_epoch(size: int, epochs: int) -> None:
    batch = random_batch(groups=4, n=3)
    rows = list(mini_batches(batch, size, epochs, (0, 3)))
    assert len(rows) == epochs * 4 // size == num_mini_batches(4, size, epochs)
    for epoch in range(epochs):
        of_epoch = torch.cat(rows[epoch * 4 // size : (epoch + 1) * 4 // size])
        assert sorted(of_epoch.tolist()) == list(range(12))
    for part in rows:  # groups stay whole
        assert all((batch.group[part] == g).sum() in (0, 3) for g in range(4))
    again = list(mini_batches(batch, size, epochs, (0, 3)))
    assert all(torch.equal(a, b) for a, b in zip(rows, again, strict=True))


def test_without_a_seed_every_epoch_has_the_order_of_the_batch_and_what_is_left_is_a_mini_batch() -> None:
    parts = [part.tolist() for part in mini_batches(random_batch(groups=3, n=2), 2, 2, None)]
    assert parts == [[0, 1, 2, 3], [4, 5]] * 2 and num_mini_batches(3, 2, 2) == 4


def test_the_order_of_a_later_epoch_is_drawn_from_seed_step_and_epoch() -> None:
    batch = random_batch(groups=6, n=1)
    drawn = torch.randperm(6, generator=torch.Generator().manual_seed(hash((7, 3, 1))))
    expected = [sorted(part) for part in [[0, 1], [2, 3], [4, 5], *drawn.view(3, 2).tolist()]]
    assert [part.tolist() for part in mini_batches(batch, 2, 2, (7, 3))] == expected
