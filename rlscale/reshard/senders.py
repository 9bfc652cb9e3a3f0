"""Who sends what: the nearest holder of a slice where that is fair, else the one with least to do.

Copies are grouped by the set of ranks that could send them. The copies of a group, ordered by receiver, are divided
among these ranks in consecutive parts, whose sizes even out what all ranks send. Groups with few possible senders come
first. So a receiver has few senders, and the loads differ by little more than a copy.
"""

from __future__ import annotations

import numpy as np

from rlscale.reshard.cover import Copies
from rlscale.reshard.layout import Ints

NEAR = 1.2  # a rank serves its node before others up to this multiple of a fair share of what its slices' holders send


def choose(copies: Copies, senders: int, ranks_per_node: int | None) -> Ints:
    """The sender of every copy.

    Args:
        senders: number of ranks that hold anything.
        ranks_per_node: ranks ``[n * ranks_per_node, (n + 1) * ranks_per_node)`` share a node; None: all do.
    """
    receiver, nbytes, held = copies.receiver, copies.nbytes, copies.held
    sender = receiver.copy()
    away = np.flatnonzero(held >= 0)
    if not len(away):
        return sender
    numbers: dict[tuple[int, ...], int] = {}
    which = np.array([numbers.setdefault(ranks, len(numbers)) for ranks in copies.holders])
    groups = {number: away[rows] for number, rows in _grouped(which[held[away]])}
    sets = list(numbers)
    fewest_first = sorted(groups, key=lambda number: (len(sets[number]), number))
    dealer = _Dealer(nbytes, max(max(ranks) for ranks in sets) + 1, sender)
    mean = int(nbytes[away].sum()) // senders
    for number in fewest_first:
        if len(sets[number]) == 1:
            dealer.deal(groups[number], sets[number])
    remaining = {number: [groups[number]] for number in fewest_first if len(sets[number]) > 1}
    if ranks_per_node is not None:
        near = []
        for number in remaining:
            fair = max(mean, int(nbytes[groups[number]].sum()) // len(sets[number]))
            remaining[number] = []
            for node, rows in _grouped(receiver[groups[number]] // ranks_per_node):
                local = tuple(rank for rank in sets[number] if rank // ranks_per_node == node)
                rows = groups[number][rows]
                if local and len(local) < len(sets[number]):
                    near.append((len(local), number, node, rows, local, int(NEAR * fair)))
                else:
                    remaining[number].append(rows)
        for _, number, _, rows, local, limit in sorted(near, key=lambda entry: entry[:3]):
            remaining[number].append(dealer.deal(rows, local, limit))
    for number, parts in remaining.items():
        dealer.deal(np.sort(np.concatenate(parts)), sets[number])
    return sender


def _grouped(keys: Ints) -> list[tuple[int, Ints]]:
    """The distinct keys in order, each with the positions where it stands."""
    order = np.argsort(keys, kind="stable")
    distinct, starts = np.unique(keys[order], return_index=True)
    return list(zip(distinct.tolist(), np.split(order, starts[1:]), strict=True))


class _Dealer:
    """Deals copies to senders, and keeps count of the bytes that each sends. All arithmetic is in whole numbers."""

    def __init__(self, nbytes: Ints, ranks: int, sender: Ints):
        self.nbytes, self.sender = nbytes, sender
        self.load = np.zeros(ranks, np.int64)

    def deal(self, rows: Ints, ranks: tuple[int, ...], limit: int | None = None) -> Ints:
        """Give ``rows`` to ``ranks``, none of which is to send more than ``limit``; returns the rows left over."""
        sizes, candidates = self.nbytes[rows], np.array(ranks)
        quota = _fill(self.load[candidates], int(sizes.sum()))
        if limit is not None:
            quota = np.minimum(quota, np.maximum(0, limit - self.load[candidates]))
        ends = np.cumsum(sizes)
        chosen = np.searchsorted(2 * np.cumsum(quota), 2 * ends - sizes, side="right")
        given = chosen < len(ranks)
        assert limit is not None or given.all()
        self.sender[rows[given]] = candidates[chosen[given]]
        np.add.at(self.load, candidates[chosen[given]], sizes[given])
        return rows[~given]


def _fill(load: Ints, total: int) -> Ints:
    """How much each of several loads grows when ``total`` is poured on the lowest of them."""
    low = np.sort(load)
    below = np.cumsum(low)
    needs = low * np.arange(1, len(low) + 1) - below  # to raise all lower ones to this one
    count = int(np.searchsorted(needs, total, side="right"))
    level, rest = divmod(total + int(below[count - 1]), count)
    grown = np.maximum(0, level - load)
    grown[np.flatnonzero(load <= level)[:rest]] += 1
    return grown
