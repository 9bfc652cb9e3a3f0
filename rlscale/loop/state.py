"""What the steps of a run share: engines, data, rollout, writers. Built once, closed once, collectively."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlscale.algo.kl import FixedKL, make_controller
from rlscale.cluster.device import Device
from rlscale.config.schema import ActorConfig, Config, CriticConfig
from rlscale.config.validate import uses_critic, uses_reference
from rlscale.data.dataset import PromptData
from rlscale.data.tokenizers import eos_token_ids, load_tokenizer
from rlscale.loop.checkpoint import Checkpoints, Resume, find, restore, set_later_aside
from rlscale.loop.stopping import Watch
from rlscale.model.arch import ModelSpec
from rlscale.observe.progress import Progress
from rlscale.observe.writers import RunWriter
from rlscale.reward.pool import RewardPool, targets_of
from rlscale.rollout.rollout import Rollout
from rlscale.train.engine import Batching, Engine
from rlscale.train.schedule import warmup_steps

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Run:
    """Everything a step touches."""

    cfg: Config
    device: Device
    total_steps: int
    train: PromptData
    val: PromptData | None
    actor: Engine
    reference: Engine | None
    critic: Engine | None
    rollout: Rollout
    pool: RewardPool | None  # on rollout leaders
    writer: RunWriter
    progress: Progress
    kl_controller: FixedKL
    checkpoints: Checkpoints
    watch: Watch
    step: int = 0  # steps done
    unfinished: dict[str, float] | None = None  # metrics of the last of them while it is not yet validated and recorded
    started: float = field(default_factory=time.time)
    resumed: bool = False
    tokens_seen: int = 0

    def rest(self) -> None:
        """Leave the device to vLLM, as far as the engines' ``parallel.*_offload`` ask for it."""
        for engine in (self.actor, self.reference, self.critic):
            if engine is not None:
                engine.rest()

    @property
    def trained(self) -> dict[str, Engine]:
        """The models that are trained, by role."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    def phase(self, step: int, name: str) -> None:
        """Say what this rank begins to do."""
        self.progress.phase(name)
        self.watch.phase(f"{name} of step {step}")

    def close(self) -> None:
        """End engine and scorer processes and flush the writers; safe after an error on any rank."""
        with contextlib.ExitStack() as parts:  # each is closed, also where closing another fails
            for part in (self.watch, self.writer, self.progress, self.rollout, self.pool):
                if part is not None:
                    parts.callback(part.close)


def planned_steps(cfg: Config, prompts: int) -> int:
    """Steps of the run: total_training_steps, or as many batches as total_epochs hold."""
    per_epoch = prompts // cfg.data.train_batch_size
    return cfg.trainer.total_training_steps or cfg.trainer.total_epochs * per_epoch


def batching(part: ActorConfig | CriticConfig, actor: ActorConfig) -> Batching:
    return Batching(
        max_tokens=part.ppo_max_token_len_per_gpu if part.use_dynamic_bsz else None,
        max_sequences=None if part.use_dynamic_bsz else part.ppo_micro_batch_size_per_gpu,
        share_prefix=actor.share_prompt_prefix,
        recompute=part.recompute,
        head_chunk=actor.head_chunk_tokens,
    )


def optimizer_steps(cfg: Config, steps: int) -> dict[str, int]:
    """Optimizer steps of a run of so many steps, by role; the critic's sizes are the actor's where it has none."""

    def count(mini_batch: int, epochs: int) -> int:
        return steps * epochs * math.ceil(cfg.data.train_batch_size / mini_batch)

    actor, critic = cfg.actor, cfg.critic
    counts = {"actor": count(actor.ppo_mini_batch_size, actor.ppo_epochs)}
    if uses_critic(cfg):
        counts["critic"] = count(
            critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, critic.ppo_epochs or actor.ppo_epochs
        )
    return counts


def short_runs(cfg: Config, steps: int) -> list[str]:
    """What to say about learning rates that a run of so many steps never reaches."""
    optim = {"actor": cfg.actor.optim, "critic": cfg.critic.optim}
    return [
        f"{role}.optim: the warm-up of {warmup_steps(optim[role], count)} optimizer steps is longer than the run "
        f"({count}); the learning rate never reaches {optim[role].lr:g}"
        for role, count in optimizer_steps(cfg, steps).items()
        if warmup_steps(optim[role], count) > count
    ]


def build(cfg: Config, device: Device) -> Run:
    """Load data and models, start the engines, continue from a checkpoint if there is one to continue from.

    Collective; raises before anything trains if a part does not fit.
    """
    started = time.monotonic()
    resume = find(cfg, device)
    tokenizer = load_tokenizer(cfg.model)
    spec = ModelSpec.from_hf(cfg.model.path)
    seed = cfg.trainer.seed
    data = PromptData(cfg.data.train, cfg.data, tokenizer, cfg.data.train_batch_size, seed, cfg.data.shuffle)
    val = PromptData(cfg.data.val, cfg.data, tokenizer, None, seed, False, "data.val") if cfg.data.val else None
    if resume is not None:
        data.load_state_dict(resume.state["data"])
    steps = planned_steps(cfg, len(data))
    progress = Progress(steps, resume.step if resume else 0, rank=device.rank)
    prompts = data.all() + (val.all() if val else [])
    scorers = {p.scorer for p in prompts}
    targets_of(cfg.reward, scorers)  # on every rank, so that all refuse a bad scorer alike
    progress.message(_data_line(cfg, data, val))
    writer = _writer(cfg, device, resume, progress)
    pool = RewardPool(cfg.reward, scorers) if is_leader(cfg, device) else None
    rollout = Rollout(
        cfg, device, cfg.trainer.run_dir, tokenizer=tokenizer, eos_ids=eos_token_ids(cfg.model.path, tokenizer)
    )
    for warning in short_runs(cfg, steps):
        progress.message(f"WARNING: {warning}")
    try:
        progress.message(f"loading {cfg.model.path}")
        actor, reference, critic = _models(cfg, spec, device, steps)
        progress.message(f"starting {rollout.replicas} vLLM engine(s); their logs: {cfg.trainer.run_dir}/engines")
        rollout.start()
        watch = Watch(grace_s=cfg.trainer.stop_grace_s, max_time_s=cfg.trainer.max_time, since=started)
        rollout.interrupted = lambda: watch.requested
        rollout.weights = lambda: (actor.layout, actor.tensors())
        run = Run(
            cfg=cfg,
            device=device,
            total_steps=steps,
            train=data,
            val=val,
            actor=actor,
            reference=reference,
            critic=critic,
            rollout=rollout,
            pool=pool,
            writer=writer,
            progress=progress,
            kl_controller=kl_controller(cfg),
            checkpoints=Checkpoints(cfg, progress),
            watch=watch,
        )
        writer.make_room = run.checkpoints.wait
        if resume is not None:
            restore(run, resume)
    except BaseException:
        rollout.close()
        if pool is not None:
            pool.close()
        progress.close()
        raise
    progress.restart_clock()
    return run


def _writer(cfg: Config, device: Device, resume: Resume | None, progress: Progress) -> RunWriter:
    """The run folder: a new run sets the files of an earlier one aside, a resumed one drops what came after."""
    if resume is None:
        return RunWriter(cfg, Path(cfg.trainer.run_dir), device.rank)
    resuming = f"resuming after step {resume.step} from {resume.record.path}"
    for message in [*resume.messages, *set_later_aside(cfg, resume, device), resuming]:
        progress.message(message)
    if not resume.in_place:
        return RunWriter(cfg, Path(cfg.trainer.run_dir), device.rank)
    # a step that a stop left unvalidated is recorded by this run
    recorded = resume.step - (resume.state.get("unfinished") is not None)
    return RunWriter(cfg, Path(cfg.trainer.run_dir), device.rank, resume.step, recorded)


def _data_line(cfg: Config, data: PromptData, val: PromptData | None) -> str:
    line = f"data: {len(data)} prompts" + (f", {len(val)} held out" if val else "")
    filtered = data.filtered + (val.filtered if val else 0)
    if filtered:
        line += f"; {filtered} longer than data.max_prompt_length {cfg.data.max_prompt_length} were left out"
    shared = data.overlap(val) if val else 0
    if shared:
        line += f"; warning: {shared} of the held-out prompts are training prompts too"
    return line


def _models(cfg: Config, spec: ModelSpec, device: Device, steps: int) -> tuple[Engine, Engine | None, Engine | None]:
    """Actor, and the reference and the critic where the algorithm uses them."""
    common: dict[str, Any] = dict(device=device, dtype=DTYPES[cfg.model.dtype], seed=cfg.trainer.seed)
    policy = dict(temperature=cfg.rollout.temperature, **common)
    cut = batching(cfg.actor, cfg.actor)
    updates = optimizer_steps(cfg, steps)
    path, layout = cfg.model.path, cfg.actor.parallel
    actor = Engine("actor", spec, path, layout, cfg.actor.optim, cut, total_steps=updates["actor"], **policy)
    reference = Engine("reference", spec, path, layout, None, cut, **policy) if uses_reference(cfg) else None
    critic = _critic(cfg, spec, updates["critic"], common) if uses_critic(cfg) else None
    for engine in (actor, reference, critic):
        if engine is not None:
            engine.rest()
    return actor, reference, critic


def is_leader(cfg: Config, device: Device) -> bool:
    """Whether this rank hosts a vLLM engine."""
    return device.rank % cfg.rollout.tensor_model_parallel_size == 0


def _critic(cfg: Config, spec: ModelSpec, updates: int, common: dict[str, Any]) -> Engine:
    path = cfg.critic.path or cfg.model.path
    own = ModelSpec.from_hf(path) if cfg.critic.path else spec
    return Engine(
        "critic",
        own.as_critic(),
        path,
        cfg.critic.parallel,
        cfg.critic.optim,
        batching(cfg.critic, cfg.actor),
        total_steps=updates,
        **common,
    )


def kl_controller(cfg: Config) -> FixedKL:
    """The controller of the KL coefficient in the reward."""
    c = cfg.algorithm.kl_ctrl
    return make_controller(
        c.type,
        kl_coef=c.kl_coef,
        target_kl=c.target_kl,
        horizon=c.horizon,
        target_low=c.target_low,
        target_high=c.target_high,
    )
