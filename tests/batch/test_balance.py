"""Balanced partitions: every item once, close to the lower bound, sizes kept, small cases optimal."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from rlscale.batch.balance import balanced_partition


def heaviest(costs: list[int], parts: list[list[int]]) -> int:
    return max(sum(costs[i] for i in p) for p in parts)


def lengths(kind: str, n: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    draw = {
        "lognormal": lambda: np.minimum(rng.lognormal(6.0, 1.0, n), 8192),
        "uniform": lambda: rng.uniform(1, 10000, n),
        "bimodal": lambda: np.where(rng.random(n) < 0.5, rng.normal(300, 30, n), rng.normal(6000, 500, n)),
    }
    return [max(1, round(x)) for x in draw[kind]()]


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize("kind", ["lognormal", "uniform", "bimodal"])
@pytest.mark.parametrize("n,parts", [(8, 1), (64, 4), (256, 32), (2048, 16)])
def test_every_item_once_and_even(kind: str, n: int, parts: int, equal_size: bool) -> None:
    costs = lengths(kind, n, n + parts)
    got = balanced_partition(costs, parts, equal_size=equal_size)
    assert len(got) == parts and sorted(i for p in got for i in p) == list(range(n))
    assert not equal_size or {len(p) for p in got} == {n // parts}
    bound = max(-(-sum(costs) // parts), max(costs))
    slack = 1.04 if n // parts <= 8 else 1.002
    assert heaviest(costs, got) <= bound * (1.15 if equal_size and n // parts <= 16 else slack)
    assert got == balanced_partition(costs, parts, equal_size=equal_size), "the same input must give the same partition"


@pytest.mark.parametrize("seed", range(20))
def test_small_problems_are_close_to_optimal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = rng.integers(1, 50, 8).tolist()
    best = min(
        max(sum(c for c, p in zip(costs, choice, strict=True) if p == k) for k in range(3))
        for choice in product(range(3), repeat=8)
    )
    assert heaviest(costs, balanced_partition(costs, 3)) <= best * 1.06


def test_fewer_items_than_parts_and_zeros() -> None:
    got = balanced_partition([5, 3], 4)
    assert sorted(map(len, got)) == [0, 0, 1, 1]
    assert balanced_partition([], 2) == [[], []] and sorted(sum(balanced_partition([0, 0, 0], 2), [])) == [0, 1, 2]


def test_errors() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        balanced_partition([1], 0)
    with pytest.raises(ValueError, match="negative"):
        balanced_partition([-1], 1)
    with pytest.raises(ValueError, match="3 items cannot be divided into 2 parts"):
        balanced_partition([1, 2, 3], 2, equal_size=True)
