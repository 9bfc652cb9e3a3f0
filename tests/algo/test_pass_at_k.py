"""pass@k, best@k and maj@k against enumeration of all subsets."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from rlscale.algo.pass_at_k import best_at_k, maj_at_k, pass_at_k


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_against_all_subsets(k: int) -> None:
    answers = ["a", "b", "a", "c", "b", "d", "a"]
    for right in "abcdz":
        subsets = list(combinations(answers, k))
        hits = sum(right in s for s in subsets) / len(subsets)
        assert pass_at_k(7, answers.count(right), k) == pytest.approx(hits)
        votes = 0.0
        for s in subsets:
            counts = Counter(s)
            best = [x for x, n in counts.items() if n == max(counts.values())]
            votes += (right in best) / len(best)
        assert maj_at_k(answers, right, k) == pytest.approx(votes / len(subsets))
    scores = [0.1, 0.9, 0.9, 0.0, -2.0, 0.5, 0.5]
    assert best_at_k(scores, k) == pytest.approx(
        sum(map(max, combinations(scores, k))) / len(list(combinations(scores, k)))
    )


def test_large_and_errors() -> None:
    assert (
        pass_at_k(256, 54, 192) == pytest.approx(1.0)
        and 0 < maj_at_k([i % 7 for i in range(64)] + [0] * 20, 0, 32) <= 1
    )
    for bad in ((4, 5, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError, match="pass@k"):
            pass_at_k(*bad)
    with pytest.raises(ValueError, match="best@k"):
        best_at_k([1.0], 2)
    with pytest.raises(ValueError, match="maj@k"):
        maj_at_k([1], 1, 2)
