"""Unbiased accuracy of k tries: pass@k, best@k and maj@k over all k-subsets of n samples, without drawing any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import comb


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold a right one: ``1 - C(n-c,k)/C(n,k)`` (Chen et
    al. 2021).

    Raises:
        ValueError: not ``0 <= correct <= n`` or not ``1 <= k <= n``.
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= correct <= n and 1 <= k <= n, got n={n}, correct={correct}, k={k}")
    return float(1.0 - comb(n - correct, k) / comb(n, k)) if n - correct >= k else 1.0


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Expected best score of k samples drawn without replacement."""
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"best@k needs 1 <= k <= n, got n={n}, k={k}")
    return sum(s * comb(i, k - 1) for i, s in enumerate(sorted(scores)) if i >= k - 1) / comb(n, k)


def maj_at_k(answers: Sequence[Hashable], correct_answer: Hashable, k: int) -> float:
    """Probability that the majority answer of k samples drawn without replacement is right; ties are split evenly.

    Exact, by counting subsets: with ``v`` votes for the right answer, the others get at most ``v`` each, and ``j`` of
    them exactly ``v``.
    """
    n = len(answers)
    if not 1 <= k <= n:
        raise ValueError(f"maj@k needs 1 <= k <= n, got n={n}, k={k}")
    counts = Counter(answers)
    right = counts.pop(correct_answer, 0)
    others = tuple(sorted(counts.values()))
    total = 0.0
    for votes in range(1, min(right, k) + 1):
        ways = _ways(others, k - votes, votes)
        total += comb(right, votes) * sum(w / (ties + 1) for ties, w in enumerate(ways))
    return total / comb(n, k)


def majority_score(answers: Sequence[Hashable], scores: Sequence[float]) -> float:
    """Score of the most frequent answer of a group, that of its last response; the mean over answers that tie."""
    counts, score = Counter(answers), dict(zip(answers, scores, strict=True))
    winners = [a for a, count in counts.items() if count == max(counts.values())]
    return sum(score[a] for a in winners) / len(winners)


@lru_cache(maxsize=4096)
def _ways(counts: tuple[int, ...], draws: int, at_most: int) -> tuple[int, ...]:
    """Ways to draw from the answers, none more than ``at_most`` times, by the number of answers drawn so often."""
    table = {(0, 0): 1}  # (drawn so far, answers at the limit) -> ways
    for c in counts:
        following: dict[tuple[int, int], int] = {}
        for (drawn, ties), ways in table.items():
            for take in range(min(c, at_most, draws - drawn) + 1):
                key = (drawn + take, ties + (take == at_most))
                following[key] = following.get(key, 0) + ways * comb(c, take)
        table = following
    most = max((t for d, t in table if d == draws), default=-1)
    return tuple(table.get((draws, t), 0) for t in range(most + 1))
