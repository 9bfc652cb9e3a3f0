"""The parts of a step that need no engine: rewards on tokens, mini-batches, what is skipped, what is reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlscale.algo.policy_loss import policy_loss
from rlscale.algo.reward_shaping import place_rewards
from rlscale.batch.types import PackedBatch, Trajectory, pack
from rlscale.batch.weights import loss_weights
from rlscale.config.schema import ActorConfig, AlgorithmConfig, Config, KLControlConfig
from rlscale.loop.objectives import actor_loss, contributing_samples, current_logprobs
from rlscale.loop.rl import state
from rlscale.loop.run import GeneratingRun
from rlscale.loop.step import advantages, check_scores, compare_logprobs
from rlscale.loop.validation import validation_metrics
from rlscale.rollout.sampling import Sampling
from rlscale.testing.batches import random_batch


def trajectory(group: int, sample: int, mask: list[int], reward: float, **more: Any) -> Trajectory:
    n = len(mask)
    return Trajectory(group, sample, [5, 6], list(range(7, 7 + n)), mask, [-1.0] * n, reward=reward, **more)


def test_reward_stands_at_the_last_token_of_the_policy() -> None:
    batch = pack(
        [
            trajectory(0, 0, [1, 1, 0], 2.0),  # ends with an observation
            trajectory(0, 1, [0, 0], 3.0),  # no token of the policy: nothing to learn from its score
            trajectory(1, 0, [1], 4.0),
            trajectory(1, 1, [], 5.0),  # nothing was sampled: nowhere to put it
        ]
    )
    assert place_rewards(batch.rewards, batch.mask, batch.cu_seqlens).tolist() == [0, 2, 0, 0, 0, 4]


def test_a_prompt_has_one_text() -> None:
    other = trajectory(0, 1, [1], 0.0)
    other.prompt_ids = [5, 7]
    with pytest.raises(ValueError, match="prompt 0"):
        pack([trajectory(0, 0, [1], 0.0), other])


def gradient(cfg: ActorConfig, mini: PackedBatch, rows: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """d loss / d log-prob of every token when only ``rows`` are computed."""
    leaf = logprobs.clone().requires_grad_()
    mini.rollout_logprobs = torch.arange(logprobs.numel()).float()  # so that select tells which tokens it took
    part = mini.select(rows)
    out = SimpleNamespace(logprobs=leaf[part.rollout_logprobs.long()], entropy=None, values=None)
    loss, _ = actor_loss(cfg, mini)(out, part)
    loss.backward()
    return leaf.grad


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "sapo", "geo_mean", "reinforce", "dppo_tv", "dppo_kl"])
def test_skipped_responses_would_not_have_moved_the_policy(loss: str) -> None:
    cfg = ActorConfig(policy_loss=loss)
    batch = random_batch(groups=4, n=3, seed=2)
    batch.advantages = torch.where(torch.repeat_interleave(batch.group, batch.response_lengths) % 2 == 0, 0.0, 1.0)
    batch.weights = loss_weights(batch.mask, batch.cu_seqlens, "token-mean")
    logprobs = -torch.rand(batch.tokens.numel(), generator=torch.Generator().manual_seed(1))
    batch.old_logprobs = logprobs + 0.3 * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(2))
    live = contributing_samples(cfg, batch)
    assert 0 < live.numel() < batch.num_samples
    everything = gradient(cfg, batch, torch.arange(batch.num_samples), logprobs)
    assert everything.abs().sum() > 0
    torch.testing.assert_close(gradient(cfg, batch, live, logprobs), everything, atol=0, rtol=0)


@pytest.mark.parametrize("key, value", [("use_kl_loss", True), ("entropy_coeff", 0.01), ("policy_loss", "kl_cov")])
def test_nothing_is_skipped_where_another_term_needs_it(key: str, value: Any) -> None:
    batch = random_batch(groups=2, n=2)
    batch.advantages = torch.zeros(batch.tokens.numel())
    assert contributing_samples(ActorConfig(**{key: value}), batch).numel() == batch.num_samples
    assert contributing_samples(ActorConfig(), batch).numel() == 0


@pytest.mark.parametrize("loss, args", [("kl_cov", {"kl_cov_ratio": 0.2}), ("clip_cov", {"clip_cov_ratio": 0.2})])
def test_a_statistic_of_the_mini_batch_is_of_the_current_policy(loss: str, args: dict[str, float]) -> None:
    """From the second mini-batch of a rollout batch on, the policy has moved: which tokens are chosen follows it, and
    any micro-batches choose the same.
    """
    if loss == "clip_cov":
        args = args | {"cov_lb": 0.0, "cov_ub": 50.0}
    cfg = ActorConfig(policy_loss=loss, policy_loss_args=args)
    mini = random_batch(groups=4, n=3, seed=2)
    noise = torch.Generator().manual_seed(1)
    tokens = mini.tokens.numel()
    mini.advantages = torch.randn(tokens, generator=noise)
    mini.weights = loss_weights(mini.mask, mini.cu_seqlens, "token-mean")
    mini.old_logprobs = -torch.rand(tokens, generator=noise)
    now = mini.old_logprobs + 0.5 * torch.randn(tokens, generator=noise)
    assert current_logprobs(cfg, mini, False, lambda _: (now, None)) is None  # before the first update: the old ones
    assert current_logprobs(ActorConfig(), mini, True, lambda _: (now, None)) is None
    current = current_logprobs(cfg, mini, True, lambda _: (now, None))
    assert current is now

    def loss_and_share(given: torch.Tensor | None, parts: list[list[int]]) -> tuple[float, float]:
        total, chosen = 0.0, 0.0
        mini.rollout_logprobs = torch.arange(tokens).float()
        for rows in parts:
            micro = mini.select(torch.tensor(rows))
            out = SimpleNamespace(logprobs=now[micro.rollout_logprobs.long()], entropy=None, values=None)
            value, sums = actor_loss(cfg, mini, given)(out, micro)
            total, chosen = total + float(value), chosen + float(sums["pg_clipfrac"])
        return total, chosen

    whole = [list(range(12))]
    direct, sums = policy_loss(
        loss,
        logprobs=now,
        old_logprobs=mini.old_logprobs,
        advantages=mini.advantages,
        mask=mini.mask,
        weights=mini.weights,
        cu_seqlens=mini.cu_seqlens,
        **args,
    )
    expected = (float(direct), float(sums["pg_clipfrac"]))
    assert expected[1] == int(0.2 * int(mini.mask.sum()))
    for parts in (whole, [[i] for i in range(12)], [[3, 1], [0, 2, 11, 4], [5, 6, 7, 8, 9, 10]]):
        assert loss_and_share(current, parts) == pytest.approx(expected, rel=1e-5)
    assert loss_and_share(None, whole) != pytest.approx(expected, rel=1e-5)  # the old policy chooses other tokens


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "interval"])
def test_kl_in_the_reward(kind: str) -> None:
    """The penalty is taken at the policy's tokens, with this step's coefficient; the controller moves afterwards."""
    ctrl = KLControlConfig(type=kind, kl_coef=0.5, horizon=100.0, target_kl=0.1, target_low=0.05, target_high=0.2)
    algorithm = AlgorithmConfig(adv_estimator="reinforce", use_kl_in_reward=True, kl_penalty="k1", kl_ctrl=ctrl)
    cfg = Config(algorithm=algorithm)
    batch = pack([trajectory(0, 0, [1, 0, 1], 1.0), trajectory(0, 1, [1], 0.0)])
    batch.old_logprobs = torch.tensor([-1.0, float("nan"), -1.0, -1.0])
    batch.ref_logprobs = torch.tensor([-2.0, 0.0, -1.0, -1.5])
    run: Any = SimpleNamespace(cfg=cfg, state=SimpleNamespace(parts=state(cfg)))
    metrics = advantages(run, batch)
    assert batch.token_rewards.tolist() == pytest.approx([-0.5, 0.0, 1.0, -0.25])
    assert batch.advantages.tolist() == pytest.approx([0.5, 0.0, 1.0, -0.25])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)  # mean over rows of their token means
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    expected = {"fixed": 0.5, "adaptive": 0.5 * (1 + 0.2 * 2 / 100), "interval": 0.5 * (1 + 0.2 * 2 / 100)}
    assert run.state.parts["kl_controller"].coef == pytest.approx(expected[kind])


def test_log_probs_that_disagree_end_the_run() -> None:
    cfg = Config()
    batch = random_batch(groups=2, n=2)
    batch.rollout_logprobs = torch.zeros(batch.tokens.numel())
    trainer = torch.where(batch.mask != 0, 0.01, 100.0)  # what is masked is not compared
    metrics = compare_logprobs(cfg, batch, trainer, 1)
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(0.01)
    for wrong in (torch.full_like(trainer, 1.0), torch.full_like(trainer, float("nan"))):
        with pytest.raises(RuntimeError, match="rollout.logprob_check_bound"):
            compare_logprobs(cfg, batch, wrong, 1)


def test_a_scorer_that_fails_on_everything_ends_the_run() -> None:
    failed = [trajectory(0, i, [1], 0.0, reward_failed=True, reward_error="boom") for i in range(3)]
    with pytest.raises(RuntimeError, match="all 3 responses.*boom"):
        check_scores(failed, 7)
    check_scores([*failed, trajectory(0, 3, [1], 0.0)], 7)


def test_validation_by_source_with_ties_split() -> None:
    def answer(group: int, text: str, reward: float) -> Trajectory:
        return trajectory(group, 0, [1], reward, response_text=text, data_source=f"s{group % 2}")

    rows = [answer(0, "7", 1.0), answer(0, "7", 1.0), answer(0, "8", 0.0), answer(1, "1", 0.0), answer(1, "2", 1.0)]
    rows.append(answer(1, "2 ", 1.0))
    metrics = validation_metrics(rows, 3)
    assert metrics["val/s0/mean@3"] == pytest.approx(2 / 3) and metrics["val/s0/maj@3"] == 1.0
    assert metrics["val/s1/best@3"] == 1.0 and metrics["val/s1/maj@3"] == 1.0
    tied = validation_metrics([answer(0, "7", 1.0), answer(0, "8", 0.0)], 2)
    assert tied["val/s0/maj@2"] == 0.5


def solo_sample(count: int) -> int:
    share = [trajectory(0, i, [1], 0.0) for i in range(count)]
    run: Any = SimpleNamespace(
        rollout=SimpleNamespace(generate=lambda *_: share), pool=None,
        watch=SimpleNamespace(raise_if_stopped=lambda: None),
    )  # fmt: skip
    return len(GeneratingRun.sample(run, [None], Sampling(n=2)))  # type: ignore[list-item]


@pytest.mark.world
def test_a_wrong_number_of_responses_is_an_error() -> None:
    from tests import worlds

    assert worlds.run(1, solo_sample, 2) == [2]
    with pytest.raises(RuntimeError, match="3 responses, expected 2"):
        worlds.run(1, solo_sample, 3)
