"""Dividing sequences evenly: over ranks by cost, with a largest-first pass and pairwise exchanges.

`balanced_partition` first gives each item, largest first, to the lightest part (LPT, Graham 1969), then lowers the
heaviest part by the single move or exchange with a lighter part that gains most, until none helps. Small problems are
also solved by largest differencing (Karmarkar and Karp 1982) and the better result is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Items = NDArray[np.int64]

_SMALL = 512  # items up to which largest differencing is tried as well
_ROUNDS = 20_000  # exchanges at most: a bound, not a target


def balanced_partition(costs: Sequence[int] | Items, parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Item numbers of each part, with the largest part sum made small.

    Args:
        costs: ``[n]`` non-negative integers.
        parts: number of parts; a part may stay empty where there are fewer items.
        equal_size: every part gets ``n / parts`` items.

    Raises:
        ValueError: ``parts < 1``, a negative cost, or ``equal_size`` with ``n`` not divisible by ``parts``.
    """
    c = np.asarray(costs, dtype=np.int64)
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    if c.size and int(c.min()) < 0:
        raise ValueError("costs must not be negative")
    if equal_size and c.size % parts:
        raise ValueError(f"{c.size} items cannot be divided into {parts} parts of equal size")
    starts = [_largest_first(c, parts, c.size // parts if equal_size else None)]
    if 0 < c.size <= _SMALL:
        starts.append(_largest_differencing(c, parts, equal_size))
    best = min((_exchange(c, s, equal_size) for s in starts), key=lambda p: max(int(c[m].sum()) for m in p))
    return [sorted(m) for m in best]


def _largest_first(c: Items, parts: int, size: int | None) -> list[list[int]]:
    """Largest item to the lightest part that has room."""
    heap = [(0, k) for k in range(parts)]
    members: list[list[int]] = [[] for _ in range(parts)]
    cost = c.tolist()
    for i in np.argsort(-c, kind="stable").tolist():
        total, k = heap[0]
        members[k].append(i)
        if size is not None and len(members[k]) == size:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (total + cost[i], k))
    return members


def _largest_differencing(c: Items, parts: int, equal_size: bool) -> list[list[int]]:
    """Karmarkar-Karp for several parts: merge the two partial solutions with the widest spread, large against small."""
    order = np.argsort(c, kind="stable").tolist()
    cost = c.tolist()
    size = parts if equal_size else 1  # blocks of one item per part keep sizes equal
    blocks = [order[k : k + size] for k in range(0, len(order), size)]
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, block in enumerate(blocks):
        slots = sorted(((cost[i], [i]) for i in block), key=lambda s: s[0])
        slots = [(0, list[int]()) for _ in range(parts - len(slots))] + slots
        heapq.heappush(heap, (slots[0][0] - slots[-1][0], number, slots))
    number = len(blocks)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        slots = sorted(((x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True)), key=lambda s: s[0])
        heapq.heappush(heap, (slots[0][0] - slots[-1][0], number, slots))
        number += 1
    return [members for _, members in heap[0][2]]


def _exchange(c: Items, start: list[list[int]], equal_size: bool) -> list[list[int]]:
    """Lower the heaviest part, one move or exchange at a time, until no lighter part can take a useful one."""
    members = [np.array(sorted(m, key=c.__getitem__), dtype=np.int64) for m in start]
    sums = np.array([int(c[m].sum()) for m in members], dtype=np.int64)
    target = -(-int(c.sum()) // len(members))
    for _ in range(_ROUNDS):
        top = int(sums.argmax())
        if sums[top] <= target:
            break
        found = None
        for low in np.argsort(sums, kind="stable").tolist():
            gap = int(sums[top] - sums[low])
            found = _best_swap(c, members[top], members[low], gap, equal_size) if gap > 1 else None
            if found is not None or gap <= 1:
                break
        if found is None:
            break
        give, take = found
        gone = int(members[top][give])
        members[top] = np.delete(members[top], give)
        moved = int(c[gone])
        if take is not None:
            come = int(members[low][take])
            members[low] = np.delete(members[low], take)
            members[top] = _insert(c, members[top], come)
            moved -= int(c[come])
        members[low] = _insert(c, members[low], gone)
        sums[top] -= moved
        sums[low] += moved
    return [m.tolist() for m in members]


def _insert(c: Items, m: Items, item: int) -> Items:
    """``m`` sorted by cost with ``item`` in its place."""
    return np.insert(m, int(np.searchsorted(c[m], c[item])), item)


def _best_swap(c: Items, top: Items, low: Items, gap: int, equal_size: bool) -> tuple[int, int | None] | None:
    """Positions in ``top`` and in ``low`` (``None``: a plain move) whose exchange moves closest to half the gap: more
    than 0 and less than the gap, so that both parts end below the heavier one."""
    a = c[top]
    b = c[low] if equal_size else np.concatenate((np.zeros(1, dtype=np.int64), c[low]))  # 0 stands for a plain move
    if not a.size or not b.size:
        return None
    at = np.searchsorted(b, a - gap // 2)
    best: tuple[int, int, int] | None = None
    for candidate in (np.clip(at - 1, 0, b.size - 1), np.clip(at, 0, b.size - 1)):
        moved = a - b[candidate]
        badness = np.where((moved > 0) & (moved < gap), np.abs(2 * moved - gap), gap)
        k = int(badness.argmin())
        if badness[k] < gap and (best is None or badness[k] < best[0]):
            best = (int(badness[k]), k, int(candidate[k]))
    if best is None:
        return None
    _, give, take = best
    return give, take if equal_size else take - 1 if take > 0 else None
