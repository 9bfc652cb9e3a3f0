"""Builds a run, its parts in the order of what needs what: nothing is given to a part later."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from rlscale.algo.kl import make_controller
from rlscale.algo.needs import uses_critic, uses_reference
from rlscale.cluster.device import Device
from rlscale.config.schema import ActorConfig, Config, CriticConfig
from rlscale.data.dataset import PromptData
from rlscale.data.tokenizers import eos_token_ids, load_tokenizer
from rlscale.loop.checkpoint import CheckpointManager, restore
from rlscale.loop.configure import Checked
from rlscale.loop.resume import ResumePoint, archive_later, find
from rlscale.loop.run import Run, trained
from rlscale.loop.run_state import RunState
from rlscale.loop.schedule import optimizer_steps, planned_steps, unreached_learning_rates
from rlscale.loop.stopping import Watch
from rlscale.loop.tasks import Task
from rlscale.observe.progress import Progress
from rlscale.observe.writers import RunWriter
from rlscale.reward.pool import RewardPool, targets_of
from rlscale.rollout.backend import Backend
from rlscale.rollout.rollout import Rollout
from rlscale.train.engine import Batching, Engine

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def build(checked: Checked, task: Task, device: Device, started: float, engine: Backend | None) -> Run:
    """Load data and models, start the engines, resume from a checkpoint if there is one to resume from.

    Collective; raises before anything trains if a part does not fit.
    """
    cfg = checked.cfg
    with contextlib.ExitStack() as parts:  # where a part fails, those before it are closed
        watch = Watch(grace_s=cfg.trainer.stop_grace_s, max_time_s=cfg.trainer.max_time, since=started)
        parts.callback(watch.close)
        point = find(cfg, device)
        tokenizer = load_tokenizer(cfg.model)
        data, val = task.data(cfg, tokenizer)
        if point is not None:
            data.load_state_dict(point.state["data"])  # other data is refused before the models are loaded
        steps = planned_steps(cfg, len(data))
        progress = Progress(steps, point.step if point else 0, rank=device.rank)
        parts.callback(progress.close)
        scorers = {p.scorer for p in data.prompts + (val.prompts if val else [])}
        targets_of(cfg.reward, scorers)  # on every rank, so that all refuse a bad scorer alike
        if point is not None:
            archive_later(cfg, point)
        checkpoints = CheckpointManager(cfg, device, progress)
        writer = _writer(cfg, device, point, checkpoints)
        parts.callback(writer.close)
        for line in announcement(cfg, device, data, val, point, steps):
            progress.message(line)
        models: dict[str, Engine] = {}
        rollout = Rollout(
            cfg, device, eos_token_ids(cfg.model.path, tokenizer), tokenizer,
            weights=lambda: (models["actor"].layout, models["actor"].tensors()), interrupted=lambda: watch.requested,
            backend=engine,
        )  # fmt: skip
        parts.callback(rollout.close)
        pool = RewardPool(cfg.reward, scorers) if rollout.is_leader else None
        if pool is not None:
            parts.callback(pool.close)
        rollout.begin_start()  # the engines start while the models load
        models |= _models(checked, device, steps)
        rollout.finish_start()
        state = RunState(data, make_controller(cfg.algorithm.kl_ctrl), rollout)
        if point is not None:
            restore(point, state, trained(models), device.rank)
            rollout.sync(models["actor"].layout, models["actor"].tensors())
        progress.restart_clock()
        return Run(
            cfg, device, started, point is not None, steps, state, val, models, rollout, pool, writer, progress,
            checkpoints, watch, parts.pop_all(),
        )  # fmt: skip


def batching(part: ActorConfig | CriticConfig, actor: ActorConfig) -> Batching:
    return Batching(
        max_tokens=part.ppo_max_token_len_per_gpu if part.use_dynamic_bsz else None,
        max_sequences=None if part.use_dynamic_bsz else part.ppo_micro_batch_size_per_gpu,
        share_prefix=actor.share_prompt_prefix,
        recompute=part.recompute,
        head_chunk=actor.head_chunk_tokens,
    )


def _writer(cfg: Config, device: Device, point: ResumePoint | None, checkpoints: CheckpointManager) -> RunWriter:
    """The run folder: a new run moves the files of an earlier one away, a resumed one drops what came after."""
    step = recorded = None
    if point is not None and point.in_place:  # a step that a stop left unvalidated is recorded by this run
        step, recorded = point.step, point.step - (point.state.get("unfinished") is not None)
    # a checkpoint may be on its way that will not be completed
    return RunWriter(cfg, cfg.trainer.run_dir, device.rank, step, recorded, on_disk_full=checkpoints.wait)


def announcement(
    cfg: Config, device: Device, data: PromptData, val: PromptData | None, point: ResumePoint | None, steps: int
) -> list[str]:
    """What a run says before its models are loaded and its engines started."""
    lines = [_data_line(cfg, data, val)]
    if point is not None:
        lines += [*point.messages, f"resuming after step {point.step} from {point.manifest.path}"]
    lines += [f"WARNING: {warning}" for warning in unreached_learning_rates(cfg, steps)]
    engines = device.world // cfg.rollout.tensor_model_parallel_size
    logs = f"{cfg.trainer.run_dir}/engines"
    return [*lines, f"loading {cfg.model.path}", f"starting {engines} vLLM engine(s); their logs: {logs}"]


def _data_line(cfg: Config, data: PromptData, val: PromptData | None) -> str:
    line = f"data: {len(data)} prompts" + (f", {len(val)} held out" if val else "")
    filtered = data.filtered + (val.filtered if val else 0)
    if filtered:
        line += f"; {filtered} longer than data.max_prompt_length {cfg.data.max_prompt_length} were left out"
    shared = data.overlap(val) if val else 0
    if shared:
        line += f"; warning: {shared} of the held-out prompts are training prompts too"
    return line


def _models(checked: Checked, device: Device, steps: int) -> dict[str, Engine]:
    """The actor, and the reference and the critic where the algorithm uses them; none of them has the device yet."""
    cfg, spec = checked.cfg, checked.spec
    common: dict[str, Any] = dict(device=device, dtype=DTYPES[cfg.model.dtype], seed=cfg.trainer.seed)
    policy = dict(temperature=cfg.rollout.temperature, **common)
    batches = batching(cfg.actor, cfg.actor)
    updates = optimizer_steps(cfg, steps)
    path, layout = cfg.model.path, cfg.actor.parallel
    actor = Engine("actor", spec, path, layout, cfg.actor.optim, batches, total_steps=updates["actor"], **policy)
    models = {"actor": actor}
    if uses_reference(cfg):
        models["reference"] = Engine("reference", spec, path, layout, None, batches, **policy)
    if uses_critic(cfg):
        models["critic"] = Engine(
            "critic",
            checked.critic_spec or spec.as_critic(),
            cfg.critic.path or path,
            cfg.critic.parallel,
            cfg.critic.optim,
            batching(cfg.critic, cfg.actor),
            total_steps=updates["critic"],
            **common,
        )
    for engine in models.values():
        engine.release_device()
    return models
