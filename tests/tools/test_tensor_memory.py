"""The counter of tensor memory against sums done by hand."""

from __future__ import annotations

import torch

from rlscale.testing.tensor_memory import TensorMemory

KIB = 1024


def test_what_is_made_counts_until_it_is_gone() -> None:
    before = torch.zeros(256)
    with TensorMemory(before) as memory:
        a = torch.ones(256)
        view = a[:10].view(2, 5)  # no memory of its own
        b = a + before
        assert memory.live == memory.peak == 2 * KIB
        del b
        assert memory.live == KIB
        del a
        assert memory.live == KIB  # the view keeps it
        del view
        assert memory.live == 0 and memory.peak == 2 * KIB
        before.add_(1)
        assert memory.live == 0


def test_what_autograd_keeps_counts() -> None:
    weight, x = torch.ones(256, requires_grad=True), torch.ones(256)
    with TensorMemory(weight, x) as memory:
        y = (x * weight).exp().exp()  # keeps the results of both exp; the product is gone
        assert memory.live == 2 * KIB
        y.sum().backward()
        y = None
    assert memory.live == KIB  # the gradient of the weight
    assert 3 * KIB <= memory.peak <= 5 * KIB
    weight.grad = None
    assert memory.live == 0


def test_a_storage_that_grows_is_counted_by_its_size() -> None:
    with TensorMemory() as memory:
        x = torch.empty(0)
        x.resize_(256)
        assert memory.live == KIB
        x = None
    assert memory.live == 0
