"""The parts of a step that need no engine: rewards on tokens, mini-batches, what is skipped, what is reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlscale.batch.types import PackedBatch, Trajectory, pack
from rlscale.batch.weights import loss_weights
from rlscale.config.schema import ActorConfig, AlgorithmConfig, Config, KLControlConfig
from rlscale.loop import report
from rlscale.loop.objectives import actor_loss, contributing_rows
from rlscale.loop.rl import advantages, exchange, mini_batches, rewards_at_last_token
from rlscale.loop.state import kl_controller
from rlscale.testing.batches import random_batch


def trajectory(group: int, sample: int, mask: list[int], reward: float, **more: Any) -> Trajectory:
    n = len(mask)
    return Trajectory(group, sample, [5, 6], list(range(7, 7 + n)), mask, [-1.0] * n, reward=reward, **more)


def test_reward_stands_at_the_last_token_of_the_policy() -> None:
    batch = pack(
        [
            trajectory(0, 0, [1, 1, 0], 2.0),  # ends with an observation
            trajectory(0, 1, [0, 0], 3.0),  # no token of the policy: its last token, so that nothing is lost
            trajectory(1, 0, [1], 4.0),
            trajectory(1, 1, [], 5.0),  # nothing was sampled: nowhere to put it
        ]
    )
    assert rewards_at_last_token(batch).tolist() == [0, 2, 0, 0, 3, 4]


def test_a_prompt_has_one_text() -> None:
    other = trajectory(0, 1, [1], 0.0)
    other.prompt_ids = [5, 7]
    with pytest.raises(ValueError, match="prompt 0"):
        pack([trajectory(0, 0, [1], 0.0), other])


@pytest.mark.parametrize("size, epochs", [(1, 1), (2, 3), (4, 2)])
def test_every_row_is_in_one_mini_batch_of_each_epoch(size: int, epochs: int) -> None:
    batch = random_batch(groups=4, n=3)
    run: Any = SimpleNamespace(cfg=Config(actor=ActorConfig(ppo_mini_batch_size=size, ppo_epochs=epochs)))
    rows = list(mini_batches(run, batch, step=3))
    assert len(rows) == epochs * 4 // size
    for epoch in range(epochs):
        of_epoch = torch.cat(rows[epoch * 4 // size : (epoch + 1) * 4 // size])
        assert sorted(of_epoch.tolist()) == list(range(12))
    for part in rows:  # groups stay whole
        assert all((batch.group[part] == g).sum() in (0, 3) for g in range(4))
    again = list(mini_batches(run, batch, step=3))
    assert all(torch.equal(a, b) for a, b in zip(rows, again, strict=True))


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
    live = contributing_rows(cfg, batch)
    assert 0 < live.numel() < batch.num_samples
    everything = gradient(cfg, batch, torch.arange(batch.num_samples), logprobs)
    assert everything.abs().sum() > 0
    torch.testing.assert_close(gradient(cfg, batch, live, logprobs), everything, atol=0, rtol=0)


@pytest.mark.parametrize("key, value", [("use_kl_loss", True), ("entropy_coeff", 0.01), ("policy_loss", "kl_cov")])
def test_nothing_is_skipped_where_another_term_needs_it(key: str, value: Any) -> None:
    batch = random_batch(groups=2, n=2)
    batch.advantages = torch.zeros(batch.tokens.numel())
    assert contributing_rows(ActorConfig(**{key: value}), batch).numel() == batch.num_samples
    assert contributing_rows(ActorConfig(), batch).numel() == 0


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "interval"])
def test_kl_in_the_reward(kind: str) -> None:
    """The penalty is taken at the policy's tokens, with this step's coefficient; the controller moves afterwards."""
    ctrl = KLControlConfig(type=kind, kl_coef=0.5, horizon=100.0, target_kl=0.1, target_low=0.05, target_high=0.2)
    algorithm = AlgorithmConfig(adv_estimator="reinforce", use_kl_in_reward=True, kl_penalty="k1", kl_ctrl=ctrl)
    cfg = Config(algorithm=algorithm)
    batch = pack([trajectory(0, 0, [1, 0, 1], 1.0), trajectory(0, 1, [1], 0.0)])
    batch.old_logprobs = torch.tensor([-1.0, float("nan"), -1.0, -1.0])
    batch.ref_logprobs = torch.tensor([-2.0, 0.0, -1.0, -1.5])
    run: Any = SimpleNamespace(cfg=cfg, kl_controller=kl_controller(cfg))
    metrics = advantages(run, batch)
    assert batch.token_rewards.tolist() == pytest.approx([-0.5, 0.0, 1.0, -0.25])
    assert batch.advantages.tolist() == pytest.approx([0.5, 0.0, 1.0, -0.25])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)  # mean over rows of their token means
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    expected = {"fixed": 0.5, "adaptive": 0.5 * (1 + 0.2 * 2 / 100), "interval": 0.5 * (1 + 0.2 * 2 / 100)}
    assert run.kl_controller.coef == pytest.approx(expected[kind])


def test_log_probs_that_disagree_end_the_run() -> None:
    cfg = Config()
    batch = random_batch(groups=2, n=2)
    batch.rollout_logprobs = torch.zeros(batch.tokens.numel())
    trainer = torch.where(batch.mask != 0, 0.01, 100.0)  # what is masked is not compared
    metrics = report.compare_logprobs(cfg, batch, trainer, 1)
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(0.01)
    for wrong in (torch.full_like(trainer, 1.0), torch.full_like(trainer, float("nan"))):
        with pytest.raises(RuntimeError, match="rollout.logprob_check_bound"):
            report.compare_logprobs(cfg, batch, wrong, 1)


def test_a_scorer_that_fails_on_everything_ends_the_run() -> None:
    failed = [trajectory(0, i, [1], 0.0, reward_failed=True, reward_error="boom") for i in range(3)]
    with pytest.raises(RuntimeError, match="all 3 responses.*boom"):
        report.check_scores(failed, 7)
    report.check_scores([*failed, trajectory(0, 3, [1], 0.0)], 7)


def test_validation_by_source_with_ties_split() -> None:
    def answer(group: int, text: str, reward: float) -> Trajectory:
        return trajectory(group, 0, [1], reward, response_text=text, data_source=f"s{group % 2}")

    rows = [answer(0, "7", 1.0), answer(0, "7", 1.0), answer(0, "8", 0.0), answer(1, "1", 0.0), answer(1, "2", 1.0)]
    rows.append(answer(1, "2 ", 1.0))
    metrics = report.validation_metrics(rows, 3)
    assert metrics["val/s0/mean@3"] == pytest.approx(2 / 3) and metrics["val/s0/maj@3"] == 1.0
    assert metrics["val/s1/best@3"] == 1.0 and metrics["val/s1/maj@3"] == 1.0
    tied = report.validation_metrics([answer(0, "7", 1.0), answer(0, "8", 0.0)], 2)
    assert tied["val/s0/maj@2"] == 0.5


def solo_exchange(count: int) -> int:
    return len(exchange([trajectory(0, i, [1], 0.0) for i in range(count)], 2))


def test_exchange_refuses_a_wrong_number() -> None:
    from tests import worlds

    assert worlds.run(1, solo_exchange, 2) == [2]
    with pytest.raises(RuntimeError, match="3 responses, expected 2"):
        worlds.run(1, solo_exchange, 3)
