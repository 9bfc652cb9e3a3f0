"""Cutting a batch into micro-batches that never exceed a token budget, as few as a good packer finds, evenly over
ranks.

A unit of work is a prompt with some of its responses. With a shared prefix the prompt is computed once for all of
them, so a unit costs its prompt plus its responses, and the responses of one prompt are kept together where the
budget allows; without it each response is a unit that costs its prompt plus itself. Units are divided over ranks by
cost, then packed on each rank, largest first into the fullest micro-batch that still has room. Ranks with fewer
micro-batches get empty ones, so that every rank takes part in every collective call.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from rlscale.batch.balance import balanced_partition
from rlscale.batch.types import PackedBatch

Unit = list[int]  # samples
Cost = Callable[[Unit], int]  # tokens of a unit
_ACCEPTABLE_IMBALANCE = 1.05  # max / mean over ranks above which groups are cut


def pack_by_budget(
    costs: Sequence[int], budget: int, *, counts: Sequence[int] | None = None, max_count: int | None = None
) -> list[list[int]]:
    """Item numbers of each bin: no bin above ``budget``, few bins (best-fit decreasing).

    Args:
        costs: ``[n]`` tokens of each item. counts: ``[n]`` sequences of each item (default 1), of which a bin takes
        at most ``max_count`` (default: any number).

    Raises:
        ValueError: an item alone is above the budget; names it.
    """
    bins: list[list[int]] = []
    held: list[int] = []  # sequences of each bin
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending; bins that can take nothing more are left out
    for i in np.argsort(-np.asarray(costs, dtype=np.int64), kind="stable").tolist():
        cost, count = int(costs[i]), 1 if counts is None else int(counts[i])
        if cost > budget:
            raise ValueError(f"sample {i} has {cost} tokens, more than the budget of {budget} tokens per micro-batch")
        at = bisect.bisect_left(room, (cost, -1))
        while max_count is not None and at < len(room) and held[room[at][1]] + count > max_count:
            at += 1
        if at == len(room):
            free, k = budget, len(bins)
            bins.append([])
            held.append(0)
        else:
            free, k = room.pop(at)
        bins[k].append(i)
        held[k] += count
        if free > cost and (max_count is None or held[k] < max_count):
            bisect.insort(room, (free - cost, k))
    return bins


def plan_micro_batches(
    batch: PackedBatch, num_ranks: int, *, max_tokens: int | None, max_sequences: int | None, share_prefix: bool
) -> list[list[Tensor]]:
    """``[rank][micro-batch]`` -> samples ``[b]`` int64 of the batch, ascending.

    Every sample stands exactly once; every rank has the same number of micro-batches, some of them possibly empty.

    Args:
        batch: the global mini-batch; num_ranks: data-parallel ranks.
        max_tokens: prompt and response tokens per micro-batch; ``None``: no limit. max_sequences: samples per
            micro-batch.
        share_prefix: the prompt of several samples counts (and is computed) once per micro-batch.

    Raises:
        ValueError: neither limit given or below 1, or one sample alone exceeds ``max_tokens`` (named).
    """
    if num_ranks < 1 or (max_tokens is None and max_sequences is None):
        raise ValueError(
            f"micro-batches need num_ranks >= 1 and a limit, got {num_ranks}, {max_tokens}, {max_sequences}"
        )
    for name, limit in (("max_tokens", max_tokens), ("max_sequences", max_sequences)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, got {limit}")
    response = batch.response_lengths.tolist()
    prompt = batch.prompt_lengths[batch.group].tolist()
    for sample, (p, r) in enumerate(zip(prompt, response, strict=True)):
        if max_tokens is not None and p + r > max_tokens:
            raise ValueError(
                f"sample {sample} has {p + r} tokens (prompt {p}, response {r}), more than the budget of {max_tokens} "
                "tokens per micro-batch"
            )

    def cost(unit: Unit) -> int:
        return prompt[unit[0]] + sum(response[sample] for sample in unit)

    groups = batch.group.tolist() if share_prefix else range(batch.num_samples)
    plans: list[list[list[int]]] = []
    for units in _divide(_units(groups, prompt, response, max_tokens, max_sequences), cost, num_ranks):
        costs = [cost(unit) for unit in units]
        budget = max_tokens or max(sum(costs), 1)
        bins = pack_by_budget(costs, budget, counts=[len(unit) for unit in units], max_count=max_sequences)
        plans.append([sorted(sample for k in members for sample in units[k]) for members in bins])
    count = max(len(plan) for plan in plans)
    return [
        [torch.tensor(samples, dtype=torch.int64) for samples in plan + [[]] * (count - len(plan))] for plan in plans
    ]


def _units(
    groups: Iterable[int], prompt: list[int], response: list[int], max_tokens: int | None, max_sequences: int | None
) -> list[Unit]:
    """The samples of each group; a group above a limit is packed into several units."""
    by_group: dict[int, list[int]] = {}
    for sample, g in enumerate(groups):
        by_group.setdefault(g, []).append(sample)
    units: list[Unit] = []
    for samples in by_group.values():
        pieces = [samples]
        if max_tokens is not None:
            free = max_tokens - prompt[samples[0]]
            pieces = [[samples[k] for k in piece] for piece in pack_by_budget([response[s] for s in samples], free)]
        size = max_sequences or len(samples)
        units += [piece[k : k + size] for piece in pieces for k in range(0, len(piece), size)]
    return units


def _divide(units: list[Unit], cost: Cost, num_ranks: int) -> list[list[Unit]]:
    """The units of each rank, the large ones cut where the ranks would be uneven otherwise."""
    total = sum(map(cost, units))
    lowest, divided = math.inf, list[list[Unit]]()
    for pieces_a_rank in (0, 1, 2, 4, 8):  # 0: nothing is cut; else no unit above 1 / pieces_a_rank of a rank's share
        trial = units if pieces_a_rank == 0 else _cut(units, cost, total / (num_ranks * pieces_a_rank))
        costs = [cost(unit) for unit in trial]
        parts = balanced_partition(costs, num_ranks)
        heaviest = max(sum(costs[u] for u in part) for part in parts)
        if heaviest < lowest:
            lowest, divided = heaviest, [[trial[u] for u in part] for part in parts]
        if heaviest * num_ranks <= _ACCEPTABLE_IMBALANCE * total:
            break
    return divided


def _cut(units: list[Unit], cost: Cost, limit: float) -> list[Unit]:
    """Units above ``limit`` in even pieces (each of them computes the prompt again)."""
    out: list[Unit] = []
    for unit in units:
        total = cost(unit)
        pieces = min(len(unit), math.ceil(total / limit)) if total > limit else 1
        parts = balanced_partition([cost([sample]) for sample in unit], pieces)
        out += [[unit[k] for k in part] for part in parts if part]
    return out
