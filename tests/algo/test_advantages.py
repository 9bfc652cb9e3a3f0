"""Estimators against plain Python loops over padded rows, in float64, and the rules that hold for all of them."""

from __future__ import annotations

import math
import random
import statistics
import warnings

import pytest
import torch

from rlscale.algo.advantages import ADVANTAGES, estimate_advantages
from rlscale.algo.segments import reverse_scan, whiten
from rlscale.testing.batches import Flat, random_flat

GROUP_ESTIMATORS = (
    "grpo",
    "rloo",
    "opo",
    "gpg",
    "grpo_passk",
    "reinforce_plus_plus_baseline",
    "gdpo",
    "optimal_token_baseline",
)


def rows_of(b: Flat) -> list[list[tuple[int, float]]]:
    """(token position, reward) of the policy tokens of each sequence."""
    return [
        [(t, float(b.rewards[t])) for t in range(int(b.cu[i]), int(b.cu[i + 1])) if b.mask[t] > 0]
        for i in range(b.sequences)
    ]


def call(name: str, b: Flat, **args):
    torch.manual_seed(5)
    if name == "gdpo":
        args.setdefault("components", torch.randn(2, 100, dtype=torch.float64)[:, : b.sequences])
    if name.endswith("optimal_token_baseline"):
        args |= {"old_logprobs": b.old, "sum_pi_squared": b.is_weights / 3}
    if name == "remax":
        args.setdefault("baselines", torch.arange(b.sequences, dtype=torch.float64))
    return estimate_advantages(
        name, token_rewards=b.rewards, mask=b.mask, cu_seqlens=b.cu, group=b.group, values=b.values, **args
    )


def whitened(values: dict[int, float]) -> dict[int, float]:
    if len(values) < 2:
        return dict.fromkeys(values, 0.0)
    mean, var = statistics.fmean(values.values()), statistics.variance(values.values())
    return {t: (v - mean) / math.sqrt(var + 1e-8) for t, v in values.items()}


def expected(name: str, b: Flat, gamma: float, lam: float) -> dict[int, float]:
    """Advantage of each policy token, by loops."""
    rows = rows_of(b)
    score = [sum(r for _, r in row) for row in rows]
    peers = [[j for j in range(b.sequences) if b.group[j] == b.group[i] and rows[j]] for i in range(b.sequences)]
    out: dict[int, float] = {}
    for i, row in enumerate(rows):
        if not row:
            continue
        s, n = [score[j] for j in peers[i]], len(peers[i])
        if n > 1:
            mean, std = statistics.fmean(s), statistics.stdev(s)
        if name == "gae":
            nxt, carry = 0.0, 0.0
            for t, r in reversed(row):
                carry = r + gamma * nxt - float(b.values[t]) + gamma * lam * carry
                nxt = float(b.values[t])
                out[t] = carry
            continue
        if name in ("reinforce", "reinforce_plus_plus", "remax"):
            carry = 0.0
            for t, r in reversed(row):
                carry = r + (1.0 if name == "remax" else gamma) * carry
                out[t] = carry - (i if name == "remax" else 0.0)
            continue
        if n == 1:
            a = 0.0
        elif name == "grpo":
            a = (score[i] - mean) / (std + 1e-6)
        elif name == "rloo":
            a = score[i] - (sum(s) - score[i]) / (n - 1)
        elif name == "reinforce_plus_plus_baseline":
            a = score[i] - mean
        elif name == "opo":
            a = score[i] - sum(len(rows[j]) * score[j] for j in peers[i]) / sum(len(rows[j]) for j in peers[i])
        elif name == "gpg":
            usable = [j for j in range(b.sequences) if rows[j]]
            a = (score[i] - mean) * len(usable) / sum(score[j] != 0 for j in usable)
        else:
            assert name == "grpo_passk"
            top = sorted(s)
            a = (score[i] - top[-2]) / (std + 1e-6) if score[i] == top[-1] else 0.0
        out |= {t: a for t, _ in row}
    if name in ("gae", "reinforce_plus_plus"):
        out = whitened(out)
    if name == "reinforce_plus_plus_baseline":
        alone = {t for i, row in enumerate(rows) for t, _ in row if len(peers[i]) == 1}
        out = whitened({t: v for t, v in out.items() if t not in alone}) | dict.fromkeys(alone, 0.0)
    return out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "name",
    [
        "gae",
        "grpo",
        "rloo",
        "reinforce",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "opo",
        "gpg",
        "grpo_passk",
    ],
)
def test_equals_loops(name: str, seed: int) -> None:
    b = random_flat(seed, sequences=12, longest=40)
    gamma, lam = random.Random(seed).choice([(1.0, 1.0), (0.97, 0.9), (0.5, 0.0)])
    got = call(name, b, gamma=gamma, lam=lam).advantages
    want = torch.zeros_like(got)
    for t, v in expected(name, b, gamma, lam).items():
        want[t] = v
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("decay", [1.0, 0.99, 0.3, 0.0])
def test_blocked_scan_over_thousands_of_tokens(decay: float) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([3000, 0, 1, 31, 32, 33, 5000, 64])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    x = torch.randn(int(cu[-1]), dtype=torch.float64)
    want = x.clone()
    for i in range(lengths.numel()):
        for t in range(int(cu[i + 1]) - 2, int(cu[i]) - 1, -1):
            want[t] += decay * want[t + 1]
    torch.testing.assert_close(reverse_scan(x, decay, cu), want, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_order_and_group_names_do_not_matter(name: str) -> None:
    b = random_flat(11, sequences=14)
    order = random.Random(0).sample(range(b.sequences), b.sequences)
    at, shuffled = b.tokens_of(order), b.take(order)
    shuffled.group = shuffled.group * -13 + 5
    extra = {
        "components": torch.randn(2, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
        "baselines": torch.arange(14, dtype=torch.float64),
    }
    moved = {"components": extra["components"][:, order], "baselines": extra["baselines"][order]}
    whole, other = call(name, b, gamma=0.9, lam=0.8, **extra), call(name, shuffled, gamma=0.9, lam=0.8, **moved)
    torch.testing.assert_close(other.advantages, whole.advantages[at], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(other.returns, whole.returns[at], rtol=1e-12, atol=1e-13)
    assert whole.metrics == other.metrics


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_masked_positions_and_empty_batches(name: str) -> None:
    b = random_flat(7)
    plain, bad = call(name, b, gamma=0.9), call(name, b.poisoned(), gamma=0.9)
    assert torch.equal(plain.advantages, bad.advantages) and torch.equal(plain.returns, bad.returns)
    assert bool((plain.advantages[b.mask == 0] == 0).all()) and bool((plain.returns[b.mask == 0] == 0).all())
    b.mask = torch.zeros_like(b.mask)
    assert bool((call(name, b.poisoned()).advantages == 0).all())
    assert call(name, b.take([])).advantages.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.7, 0.1, 1 / 3])
@pytest.mark.parametrize("name", [n for n in GROUP_ESTIMATORS if n != "optimal_token_baseline"])
def test_equal_rewards_give_exactly_zero(name: str, reward: float, dtype: torch.dtype) -> None:
    rewards = torch.full((7,), reward, dtype=dtype)
    a = estimate_advantages(
        name,
        token_rewards=rewards,
        mask=torch.ones(7),
        cu_seqlens=torch.arange(8),
        group=torch.zeros(7, dtype=torch.int64),
        components=rewards[None],
    )
    assert a.advantages.dtype == dtype and bool((a.advantages == 0).all())
    assert a.metrics["zero_std_groups"] == 1


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_group_of_one_gets_zero_and_is_counted(name: str) -> None:
    r = torch.tensor([5.0, 1.0, 0.0])
    a = estimate_advantages(
        name,
        token_rewards=r,
        mask=torch.ones(3),
        cu_seqlens=torch.arange(4),
        group=torch.tensor([9, 4, 4]),
        components=r[None],
        old_logprobs=-torch.ones(3),
        sum_pi_squared=torch.ones(3) / 2,
    )
    assert float(a.advantages[0]) == 0.0 and bool(a.advantages[1:].isfinite().all())
    assert a.metrics["singleton_groups"] == 1 and a.metrics["groups"] == 2


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_reward_that_is_not_finite_is_named_and_left_out(name: str) -> None:
    b = random_flat(1, sequences=10)
    b.group[:] = 0
    first = next(t for t in range(int(b.cu[0]), int(b.cu[1])) if b.mask[t] > 0)
    b.rewards[first] = float("nan")
    with pytest.warns(UserWarning, match=r"1 of 10 rewards are not finite: sequences \[0\]"):
        got = call(name, b)
    assert got.metrics["invalid_rewards"] == 1
    assert bool((got.advantages[: int(b.cu[1])] == 0).all())
    rest = b.take(list(range(1, 10)))
    extra = {} if name != "gdpo" else {"components": None}
    if name == "gdpo":
        torch.manual_seed(5)
        extra = {"components": torch.randn(2, 100, dtype=torch.float64)[:, 1:10]}
    if name == "remax":
        extra = {"baselines": torch.arange(1, 10, dtype=torch.float64)}
    torch.testing.assert_close(
        got.advantages[int(b.cu[1]) :], call(name, rest, **extra).advantages, rtol=1e-12, atol=1e-13
    )


def test_optimal_token_baseline_by_hand() -> None:
    """Two rows of 2 and 1 tokens; w = 1 - 2 p + q; beyond the shorter row the baseline is 0 with handle_zero_tail."""
    old, q = (
        torch.tensor([0.5, 0.25, 0.5], dtype=torch.float64).log(),
        torch.tensor([0.5, 0.7, 0.9], dtype=torch.float64),
    )
    args = {
        "token_rewards": torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64),
        "mask": torch.ones(3),
        "cu_seqlens": torch.tensor([0, 2, 3]),
        "group": torch.zeros(2),
        "old_logprobs": old,
        "sum_pi_squared": q,
        "epsilon": 0.0,
    }
    w = [0.5, 1.2, 0.9]
    b0 = (1.0 * w[0] + 3.0 * w[2]) / (w[0] + w[2])
    tail = estimate_advantages("optimal_token_baseline", **args, handle_zero_tail=False).advantages
    none = estimate_advantages("optimal_token_baseline", **args, handle_zero_tail=True).advantages
    torch.testing.assert_close(tail, torch.tensor([1 - b0, 0.0, 3 - b0], dtype=torch.float64), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(none, torch.tensor([1 - b0, 1.0, 3 - b0], dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_gdpo_by_hand() -> None:
    """Two components with standard deviation sqrt(1/2) and sqrt(8): each gives +-sqrt(1/2), then whitening over three
    tokens.
    """
    components = torch.tensor([[0.0, 1.0], [4.0, 0.0]], dtype=torch.float64)
    a = estimate_advantages(
        "gdpo",
        token_rewards=torch.zeros(3, dtype=torch.float64),
        mask=torch.ones(3),
        cu_seqlens=torch.tensor([0, 1, 3]),
        group=torch.zeros(2),
        components=components,
        weights=[3.0, 1.0],
    )
    h = math.sqrt(0.5)
    first = -3 * h + h
    want = whitened({0: first, 1: -first, 2: -first})
    torch.testing.assert_close(a.advantages, torch.tensor(list(want.values()), dtype=torch.float64), rtol=1e-5, atol=0)


def test_leave_one_out_deviation_of_equal_others() -> None:
    for rewards in ([1.0, 0.0, 0.0, 0.0], [0.0] + [0.95] * 7):
        r = torch.tensor(rewards, dtype=torch.float64)
        n = r.numel()
        a = estimate_advantages(
            "rloo",
            token_rewards=r,
            mask=torch.ones(n),
            cu_seqlens=torch.arange(n + 1),
            group=torch.zeros(n),
            norm_by_loo_std=True,
        ).advantages
        for i in range(n):
            others = rewards[:i] + rewards[i + 1 :]
            std = statistics.stdev(others) if len(set(others)) > 1 else 1.0
            assert float(a[i]) == pytest.approx((rewards[i] - statistics.fmean(others)) / std, rel=1e-9)


def test_whiten_of_few_tokens() -> None:
    x = torch.tensor([3.0, float("nan")])
    assert whiten(x, torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert whiten(x, torch.tensor([False, False])).tolist() == [0.0, 0.0]


def test_errors() -> None:
    ok = {
        "token_rewards": torch.zeros(4),
        "mask": torch.ones(4),
        "cu_seqlens": torch.tensor([0, 2, 4]),
        "group": torch.zeros(2),
    }
    with pytest.raises(ValueError, match="unknown advantage estimator 'grop'; known: gae, gdpo, gpg, grpo"):
        estimate_advantages("grop", **ok)
    with pytest.raises(ValueError, match="takes no argument epz; it takes: eps, norm_by_std"):
        estimate_advantages("grpo", **ok, epz=1.0)
    with pytest.raises(ValueError, match=r"mask has shape \(3,\), but there are 4 tokens"):
        estimate_advantages("grpo", **(ok | {"mask": torch.ones(3)}))
    with pytest.raises(ValueError, match=r"group has shape \(1,\), but there are 2 sequences"):
        estimate_advantages("grpo", **(ok | {"group": torch.zeros(1)}))
    with pytest.raises(ValueError, match="gae needs values"):
        estimate_advantages("gae", **ok)
    with pytest.raises(ValueError, match="remax needs baselines"):
        estimate_advantages("remax", **ok)
    with pytest.raises(ValueError, match="2 reward components, but 1 weights"):
        estimate_advantages("gdpo", **ok, components=torch.zeros(2, 2), weights=[1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimate_advantages("grpo", **ok)
