"""One step of reinforcement learning, which reads as the algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

import torch

from rlscale.algo.advantages import estimate_advantages
from rlscale.algo.kl import FixedKL
from rlscale.algo.needs import uses_old_logprobs
from rlscale.algo.reward_shaping import kl_in_reward, place_rewards
from rlscale.batch.minibatch import mini_batches
from rlscale.batch.types import PackedBatch, Trajectory, pack
from rlscale.batch.weights import loss_weights
from rlscale.config.schema import Config
from rlscale.loop import report
from rlscale.loop.objectives import actor_loss, contributing_samples, critic_loss, current_logprobs, need
from rlscale.loop.run import GeneratingRun, Run
from rlscale.loop.schedule import due, optimizer_steps, update_sizes
from rlscale.observe.timers import Timers
from rlscale.rollout.sampling import Sampling
from rlscale.train.engine import Engine


def train_step(run: GeneratingRun, step: int) -> dict[str, float]:
    """One step: sample, score, estimate advantages, update, hand the new weights to the engines.

    Raises:
        Stopped: the run was asked to stop while the step had only sampled; nothing has changed.
    """
    cfg, rollout, timers = run.cfg, run.rollout, Timers(run.device.synchronize, partial(run.phase, step))
    critic = run.models.get("critic")
    with timers("step"):
        prompts = run.state.data.peek()
        with timers("gen"), run.generating():
            trajectories = run.sample(prompts, train_sampling(cfg, step))
        with run.using(*run.models.values()):
            batch = pack(trajectories)
            check_scores(trajectories, step)
            metrics = _log_probs(run, batch, step, timers)
            if critic is not None:
                with timers("values"):
                    batch.values = critic.values(batch)
            run.watch.raise_if_stopped()  # from here on the step is finished
            with timers("adv"):
                metrics |= advantages(run, batch)
            if critic is not None:
                with timers("update_critic"), run.using(critic):
                    metrics |= update_critic(run, critic, batch, step)
            trained = step > cfg.trainer.critic_warmup
            if trained:
                with timers("update_actor"):
                    metrics |= update_actor(run, batch, step)
            if trained or rollout.asleep:  # engines that sleep have dropped their weights
                with timers("sync"):
                    metrics |= run.sync()
        run.state.data.advance()
    report.rollouts(run, step, trajectories, batch)
    if rollout.restarts:
        metrics |= {"rollout/engine_restarts": rollout.restarts, "rollout/resampled": rollout.resampled}
    metrics |= report.batch_metrics(trajectories, batch)
    return metrics | report.timing(run, timers, metrics["batch/num_tokens"])


def train_sampling(cfg: Config, step: int) -> Sampling:
    r = cfg.rollout
    return Sampling(
        n=r.n,
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        max_tokens=cfg.data.max_response_length,
        seed=cfg.trainer.seed * 1_000_003 + step,
    )


def check_scores(trajectories: list[Trajectory], step: int) -> None:
    """Stop when the scorer failed on every response of a step: there is nothing left to learn from.

    Raises:
        RuntimeError: all responses of the step have ``reward_failed``; the message carries the first error.
    """
    if trajectories and all(t.reward_failed for t in trajectories):
        raise RuntimeError(
            f"step {step}: the scorer (reward.scorer, or the data source's own) failed on all "
            f"{len(trajectories)} responses (time-outs, reward.timeout_s, included); "
            f"first error: {trajectories[0].reward_error}"
        )


def compare_logprobs(cfg: Config, batch: PackedBatch, trainer: torch.Tensor, step: int) -> dict[str, float]:
    """Absolute difference of trainer and engine log-probs over the sampled tokens.

    Raises:
        RuntimeError: its mean is above rollout.logprob_check_bound.
    """
    [engine] = need(batch, "rollout_logprobs")
    diff = (trainer - engine).abs()[batch.mask != 0]
    mean, worst = float(diff.mean()), float(diff.max())
    bound = cfg.rollout.logprob_check_bound
    if not mean <= bound:
        raise RuntimeError(
            f"step {step}: the log-probs of trainer and engine differ by {mean:.4g} on average, above "
            f"rollout.logprob_check_bound {bound:g} (worst token {worst:.4g}). Either the engine holds other weights "
            "than the trainer, or the two compute the model differently (dtype, attention, rotary scaling) or over "
            f"other tokens (rollout.top_p {cfg.rollout.top_p:g}, rollout.top_k {cfg.rollout.top_k}); a run would learn "
            "from the wrong ratio. If the difference is that of the dtype alone, raise the bound or use "
            "model.dtype: float32"
        )
    return {"rollout/logprob_diff_mean": mean, "rollout/logprob_diff_max": worst}


def _log_probs(run: Run, batch: PackedBatch, step: int, timers: Timers) -> dict[str, float]:
    """Old and reference log-probs where the algorithm uses them, and the comparison of trainer and engine."""
    cfg = run.cfg
    freq = cfg.rollout.logprob_check_freq
    check = freq >= 0 and (step == 1 or due(step, freq))
    several = optimizer_steps(cfg, 1)["actor"] > 1
    needed = several or uses_old_logprobs(cfg)
    metrics: dict[str, float] = {}
    if needed or check:
        with timers("old_log_prob"):
            current, _ = run.actor.logprobs(batch)
        if check:
            metrics = compare_logprobs(cfg, batch, current, step)
        batch.old_logprobs = current if needed else None
    if (reference := run.models.get("reference")) is not None:
        with timers("ref"), run.using(reference):
            batch.ref_logprobs, _ = reference.logprobs(batch)
    return metrics


def advantages(run: Run, batch: PackedBatch) -> dict[str, float]:
    """Token rewards (score at the last token of the policy, KL penalty if configured), advantages and returns."""
    algo = run.cfg.algorithm
    metrics: dict[str, float] = {}
    batch.token_rewards = place_rewards(batch.rewards, batch.mask, batch.cu_seqlens)
    if algo.use_kl_in_reward:
        old, reference = need(batch, "old_logprobs", "ref_logprobs")
        controller = cast(FixedKL, run.state.parts["kl_controller"])
        coef = controller.coef
        batch.token_rewards, mean_kl = kl_in_reward(
            batch.token_rewards,
            old,
            reference,
            batch.mask,
            batch.cu_seqlens,
            kind=algo.kl_penalty,
            beta=coef,
        )
        controller.update(mean_kl, batch.num_samples)
        metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coef}
    out = estimate_advantages(
        algo.adv_estimator,
        token_rewards=batch.token_rewards,
        mask=batch.mask,
        cu_seqlens=batch.cu_seqlens,
        group=batch.group,
        values=batch.values,
        old_logprobs=batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs,
        gamma=algo.gamma,
        lam=algo.lam,
        norm_by_std=algo.norm_adv_by_std_in_grpo,
        **algo.adv_args,
    )
    batch.advantages, batch.returns = out.advantages, out.returns
    return metrics | {f"group/{name}": value for name, value in out.metrics.items()}


def _mini_batches(run: Run, batch: PackedBatch, step: int, role: str, scale: float) -> Iterator[PackedBatch]:
    """The mini-batches of a trained model, with their loss weights; ``scale``: C of seq-mean-token-sum-norm."""
    size, epochs = update_sizes(run.cfg)[role]
    mode = run.cfg.critic.loss_agg_mode if role == "critic" else run.cfg.actor.loss_agg_mode
    seed = (run.cfg.trainer.seed, step) if run.cfg.actor.shuffle else None
    for samples in mini_batches(batch, size, epochs, seed):
        mini = batch.select(samples)
        mini.weights = loss_weights(mini.mask, mini.cu_seqlens, mode, scale_factor=scale)
        yield mini


def update_actor(run: Run, batch: PackedBatch, step: int) -> dict[str, float]:
    """Optimizer steps of the policy over the mini-batches."""
    actor = run.cfg.actor
    records: list[dict[str, float]] = []
    scale = actor.loss_scale_factor or run.cfg.data.max_response_length
    for mini in _mini_batches(run, batch, step, "actor", scale):
        live = mini.select(contributing_samples(actor, mini))
        loss = actor_loss(actor, mini, current_logprobs(actor, mini, bool(records), run.actor.logprobs))
        records.append(run.actor.update(live, loss, entropy=True, entropy_grad=actor.entropy_coeff != 0))
    return report.actor_metrics(records)


def update_critic(run: Run, critic: Engine, batch: PackedBatch, step: int) -> dict[str, float]:
    """Optimizer steps of the value model over its mini-batches."""
    minis = _mini_batches(run, batch, step, "critic", float(run.cfg.data.max_response_length))
    records = [critic.update(mini, critic_loss(run.cfg.critic)) for mini in minis]
    return report.critic_metrics(records, batch)
