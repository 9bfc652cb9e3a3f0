"""Reinforcement learning: one step reads as the algorithm, and a run is the steps with validation around them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rlscale.algo.advantages import estimate_advantages
from rlscale.algo.needs import uses_old_logprobs
from rlscale.algo.reward_shaping import kl_in_reward, place_rewards
from rlscale.batch.types import PackedBatch, Trajectory, pack
from rlscale.batch.weights import loss_weights
from rlscale.cluster.device import Device
from rlscale.config.schema import Config
from rlscale.loop import report
from rlscale.loop.objectives import actor_loss, actor_trains, contributing_rows, critic_loss, current_logprobs
from rlscale.loop.state import Run, build
from rlscale.loop.stopping import Stopped
from rlscale.observe.timers import Timers
from rlscale.rollout.sampling import Sampling


def train(cfg: Config, device: Device) -> str | None:
    """Run the configured algorithm to its end, or until it is asked to stop: then the state reached is saved, and the
    reason is returned. Collective over the world; errors end the process with a message.
    """
    run = build(cfg, device)
    run.watch.start()
    try:
        return _until_stopped(run)
    except Exception as error:
        run.watch.failed(error)
        raise
    finally:
        run.close()


def _until_stopped(run: Run) -> str | None:
    began = run.step
    try:
        _steps(run)
    except Stopped as stop:
        saved = run.checkpoints.save_stopped(run)
        run.watch.settled()
        if stop.by_limit and run.step == began:  # to start it again and again would never get anywhere
            raise RuntimeError(
                f"{stop} before a step was finished, so the run would never go on; give it more"
            ) from stop
        what = f"nothing is saved ({'no step was finished' if run.step == 0 else 'trainer.save_freq -1'})"
        run.progress.message(
            f"stopped: {stop}; " + ("the same command with trainer.resume_mode=auto goes on" if saved else what)
        )
        return str(stop)
    return None


def _steps(run: Run) -> None:
    trainer = run.cfg.trainer
    if trainer.val_before_train and run.step == 0:
        validate(run, 0)
    if run.unfinished is not None:
        _finish(run, run.step, run.unfinished, saves=trainer.save_freq >= 0)  # at once: it is recorded now
    elif run.resumed and _exports(run, run.step) and not report.export_folder(run, run.step).exists():
        report.export_policy(run, run.step)  # the run ended between its checkpoint and this
    for step in range(run.step + 1, run.total_steps + 1):
        _finish(run, step, train_step(run, step), saves=_saves(run, step))
    run.checkpoints.wait()
    report.finish(run)


def _finish(run: Run, step: int, metrics: dict[str, float], saves: bool) -> None:
    """What comes after the updates of a step: validation, its record, checkpoint and export where they are due.

    Raises:
        Stopped: the run was asked to stop. In the validation: what has been measured so far is in ``run.unfinished``,
            so that whoever resumes validates and records the step as if nothing had happened.
    """
    trainer, last = run.cfg.trainer, step == run.total_steps
    run.step, run.unfinished = step, metrics
    if run.val and trainer.test_freq >= 0 and (last or _due(step, trainer.test_freq)):
        run.watch.agree()  # before engines that a launcher may have ended are used
        metrics = metrics | validate(run, step)
    run.unfinished = None
    run.writer.log(step, metrics)
    run.progress.step(step, metrics)
    if saves:
        run.watch.phase(f"save of step {step}")
        run.checkpoints.save(run, step, metrics)
    if _exports(run, step):
        run.watch.phase(f"export of step {step}")
        report.export_policy(run, step)
    if not last:
        run.watch.agree()


def _saves(run: Run, step: int) -> bool:
    freq = run.cfg.trainer.save_freq
    return freq >= 0 and (step == run.total_steps or _due(step, freq))


def _exports(run: Run, step: int) -> bool:
    when = run.cfg.trainer.export
    return (when != "never" and step == run.total_steps) or (when == "save" and _saves(run, step))


def _due(step: int, freq: int) -> bool:
    return freq > 0 and step % freq == 0


def train_step(run: Run, step: int) -> dict[str, float]:
    """One step: sample, score, estimate advantages, update, hand the new weights to the engines."""
    cfg, timers = run.cfg, Timers(run.device.synchronize, partial(run.phase, step))
    with timers("step"):
        position = run.train.state_dict()
        prompts = run.train.next_batch()
        with timers("gen"):
            run.rest()  # what saving has brought back to the device
            mine = run.rollout.generate(prompts, train_sampling(cfg, step), run.pool)
            _give_up_if_asked(run, position)
            trajectories = exchange(mine, len(prompts) * cfg.rollout.n)
            run.rollout.sleep()  # the devices are the trainer's until the sync
        batch = pack(trajectories)
        report.check_scores(trajectories, step)
        metrics = _log_probs(run, batch, step, timers)
        if run.critic is not None:
            with timers("values"):
                batch.values = run.critic.values(batch)
        _give_up_if_asked(run, position)
        with timers("adv"):
            metrics.update(advantages(run, batch))
        if run.critic is not None:
            with timers("update_critic"):
                metrics.update(update_critic(run, batch, step))
                run.critic.rest()
        trained = actor_trains(step, cfg.trainer.critic_warmup)
        if trained:
            with timers("update_actor"):
                metrics.update(update_actor(run, batch, step))
        if trained or run.rollout.asleep:  # engines that sleep have dropped their weights
            with timers("sync"):
                run.actor.rest(parameters=False)
                metrics.update(run.rollout.sync(run.actor.layout, run.actor.tensors()))
        run.rest()
    report.rollouts(run, step, trajectories, batch)
    if run.rollout.restarts:
        metrics |= {"rollout/engine_restarts": run.rollout.restarts, "rollout/resampled": run.rollout.resampled}
    return {**metrics, **report.batch_metrics(run, trajectories, batch), **report.timing(run, timers, batch)}


def _give_up_if_asked(run: Run, position: dict[str, Any]) -> None:
    """Leave the step if the run was asked to stop; nothing but the position in the data has changed so far."""
    try:
        run.watch.agree()
    except Stopped:
        run.train.load_state_dict(position)
        raise


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


def exchange(mine: list[Trajectory], expected: int) -> list[Trajectory]:
    """All trajectories of the step on every rank, ordered by prompt and sample, whoever sampled them.

    Raises:
        RuntimeError: the leaders together did not bring the expected number.
    """
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, mine)
    everything = sorted((t for share in shares for t in share), key=lambda t: (t.prompt_index, t.sample_index))
    if len(everything) != expected:
        raise RuntimeError(f"rollout brought {len(everything)} responses, expected {expected}")
    return everything


def _log_probs(run: Run, batch: PackedBatch, step: int, timers: Timers) -> dict[str, float]:
    """Old and reference log-probs where the algorithm uses them, and the comparison of trainer and engine."""
    cfg = run.cfg
    freq = cfg.rollout.logprob_check_freq
    check = freq >= 0 and (step == 1 or _due(step, freq))
    several = len(list(mini_batches(run, batch, step))) > 1
    needed = several or uses_old_logprobs(cfg)
    metrics: dict[str, float] = {}
    if needed or check:
        with timers("old_log_prob"):
            current, _ = run.actor.logprobs(batch)
        if check:
            metrics = report.compare_logprobs(cfg, batch, current, step)
        batch.old_logprobs = current if needed else None
    if run.reference is not None:
        with timers("ref"):
            batch.ref_logprobs, _ = run.reference.logprobs(batch)
            run.reference.rest()
    return metrics


def advantages(run: Run, batch: PackedBatch) -> dict[str, float]:
    """Token rewards (score at the last token of the policy, KL penalty if configured), advantages and returns."""
    algo = run.cfg.algorithm
    metrics: dict[str, float] = {}
    batch.token_rewards = place_rewards(batch.rewards, batch.mask, batch.cu_seqlens)
    if algo.use_kl_in_reward:
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        coef = run.kl_controller.coef
        batch.token_rewards, mean_kl = kl_in_reward(
            batch.token_rewards,
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.mask,
            batch.cu_seqlens,
            kind=algo.kl_penalty,
            beta=coef,
        )
        run.kl_controller.update(mean_kl, batch.num_samples)
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


def mini_batches(
    run: Run, batch: PackedBatch, step: int, size: int | None = None, epochs: int | None = None
) -> Iterator[Any]:
    """Rows of each mini-batch, epoch after epoch: whole groups, reshuffled from the second epoch on (seed and step)."""
    actor = run.cfg.actor
    groups = batch.prompt_cu_seqlens.numel() - 1
    size, order = size or actor.ppo_mini_batch_size, torch.arange(groups)
    rows = torch.arange(batch.num_samples)
    for epoch in range(epochs or actor.ppo_epochs):
        if epoch and actor.shuffle:
            order = torch.randperm(
                groups, generator=torch.Generator().manual_seed(hash((run.cfg.trainer.seed, step, epoch)))
            )
        for chunk in order.split(size):
            yield rows[torch.isin(batch.group, chunk)]


def update_actor(run: Run, batch: PackedBatch, step: int) -> dict[str, float]:
    """Optimizer steps of the policy over the mini-batches."""
    actor = run.cfg.actor
    records: list[dict[str, float]] = []
    for rows in mini_batches(run, batch, step):
        mini = batch.select(rows)
        mini.weights = loss_weights(
            mini.mask,
            mini.cu_seqlens,
            actor.loss_agg_mode,
            scale_factor=actor.loss_scale_factor or run.cfg.data.max_response_length,
        )
        live = mini.select(contributing_rows(actor, mini))
        loss = actor_loss(actor, mini, current_logprobs(actor, mini, bool(records), run.actor.logprobs))
        records.append(run.actor.update(live, loss, entropy=True, entropy_grad=actor.entropy_coeff != 0))
    return report.actor_metrics(records)


def update_critic(run: Run, batch: PackedBatch, step: int) -> dict[str, float]:
    """Optimizer steps of the value model over its mini-batches."""
    cfg = run.cfg.critic
    assert run.critic is not None
    records = []
    for rows in mini_batches(run, batch, step, cfg.ppo_mini_batch_size, cfg.ppo_epochs):
        mini = batch.select(rows)
        mini.weights = loss_weights(
            mini.mask, mini.cu_seqlens, cfg.loss_agg_mode, scale_factor=float(run.cfg.data.max_response_length)
        )
        records.append(run.critic.update(mini, critic_loss(cfg)))
    return report.critic_metrics(records, batch)


def validate(run: Run, step: int) -> dict[str, float]:
    """Sample and score the held-out prompts: mean, best and majority by data source."""
    if run.val is None:
        return {}
    cfg, started = run.cfg, time.time()
    r = cfg.rollout
    sampling = Sampling(
        n=r.val_n,
        temperature=r.val_temperature,
        top_p=r.val_top_p,
        top_k=-1,
        max_tokens=cfg.data.max_response_length,
        seed=cfg.trainer.seed,
    )
    prompts = run.val.all()
    run.phase(step, "validate")
    mine = run.rollout.generate(prompts, sampling, run.pool)
    run.watch.agree()
    trajectories = exchange(mine, len(prompts) * r.val_n)
    metrics = report.validation_metrics(trajectories, r.val_n)
    metrics["timing_s/testing"] = time.time() - started
    report.validation(run, step, trajectories, metrics)
    return metrics
