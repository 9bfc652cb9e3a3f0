"""Ulysses: attention over a divided row equals attention over the whole one, forward and backward."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.batch.types import PackedBatch
from rlscale.model import ulysses
from rlscale.model.packing import pack_sequence
from rlscale.testing.batches import random_batch
from tests import worlds

LENGTH, DIM = 24, 4


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention. q: [S, H, D]; k, v: [S, G, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def inputs(heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(heads * 100 + kv_heads)
    shapes = (heads, kv_heads, kv_heads, heads)
    q, k, v, up = (torch.randn(LENGTH, n, DIM, generator=g, dtype=torch.float64) for n in shapes)
    return q, k, v, up


def divided(heads: int, kv_heads: int, mutation: str = "") -> list[Tensor]:
    """Output and gradients of this rank's tokens."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)
    *leaves, up = (x[mine].clone() for x in inputs(heads, kv_heads))
    q, k, v = (x.requires_grad_() for x in leaves)

    out = ulysses.gather_heads(attend(*ulysses.scatter_heads(q, k, v, dist.group.WORLD)), dist.group.WORLD)
    with mock.patch.object(ulysses, "_exchange", _as_it_comes if mutation else ulysses._exchange):
        out.backward(up)
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def _as_it_comes(x: Tensor, group: object) -> Tensor:
    """The exchange without care for the strides of a gradient."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


def compare(size: int, heads: int, kv_heads: int, mutation: str = "") -> None:
    q, k, v, up = inputs(heads, kv_heads)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attend(q, k, v)
    out.backward(up)
    parts = worlds.run(size, divided, heads, kv_heads, mutation)
    for what, expected, *got in zip(
        ("output", "query", "key", "value"), (out.detach(), q.grad, k.grad, v.grad), *parts, strict=True
    ):
        torch.testing.assert_close(torch.cat(got), expected, atol=1e-12, rtol=1e-12, msg=lambda m, w=what: f"{w}: {m}")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1), (8, 2), (12, 3), (12, 2), (12, 6)])
def test_divided_attention_equals_whole(size: int, heads: int, kv_heads: int) -> None:
    compare(size, heads, kv_heads)


def test_strides_of_a_gradient_matter() -> None:
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        compare(2, 4, 2, mutation="strides")


@pytest.mark.parametrize(
    "heads, kv_heads, size, repeats",
    [(8, 8, 4, 1), (8, 4, 4, 1), (8, 2, 4, 2), (8, 1, 4, 4), (12, 3, 2, 4), (12, 4, 6, 3)],
)
def test_key_value_heads_are_repeated_no_more_than_needed(heads: int, kv_heads: int, size: int, repeats: int) -> None:
    assert ulysses.kv_repeats(heads, kv_heads, size) == repeats
    # the head that rank r gets for its query head q is the one that q attends to in the whole model
    each = kv_heads * repeats // size
    for head in range(heads):
        rank, local = divmod(head, heads // size)
        got = rank * each + local // (heads // size // each)
        assert got // repeats == head // (heads // kv_heads)


def test_parts_of_a_row_are_the_row(batch: PackedBatch) -> None:
    for size in (1, 2, 3, 4):
        row = pack_sequence(batch, torch.arange(batch.num_samples), share_prefix=True, multiple=size)
        parts = [row.part(rank, size) for rank in range(size)]
        assert torch.equal(torch.cat([p.tokens for p in parts]), row.tokens)
        assert len({p.tokens.numel() for p in parts}) == 1
        predictors, targets = torch.full_like(row.predictors, -1), torch.full_like(row.targets, -1)
        for rank, p in enumerate(parts):
            places = torch.arange(row.targets.numel()) if p.places is None else p.places
            predictors[places] = p.predictors + rank * row.length // size
            targets[places] = p.targets
        assert torch.equal(predictors, row.predictors) and torch.equal(targets, row.targets)


def collected(count: int) -> tuple[Tensor, Tensor]:
    """The outputs of all ranks together, and the gradient that this rank's own ones get."""
    size, rank = dist.get_world_size(), dist.get_rank()
    places = torch.arange(rank, count, size) if rank else torch.zeros(0, dtype=torch.int64)  # rank 0 predicts nothing
    part = (100.0 * rank + torch.arange(float(places.numel()))).expand(2, -1).clone().requires_grad_()
    out = ulysses.collect(part, places, count, dist.group.WORLD)
    (out * torch.arange(float(count))).sum().backward()
    assert part.grad is not None
    return out.detach(), part.grad


def test_outputs_are_collected_and_their_gradients_stay_home() -> None:
    [(out, none), (same, grad)] = worlds.run(2, collected, 5)
    assert torch.equal(out, same) and none.shape == (2, 0)
    assert out[0].tolist() == [0, 100, 0, 101, 0]
    assert grad[0].tolist() == [1, 3]


@pytest.fixture(scope="module")
def batch() -> PackedBatch:
    return random_batch(groups=3, n=3, seed=5)
