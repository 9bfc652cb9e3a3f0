"""Before a run starts: read and check its configuration with the models' shapes, and say where everything will be
placed.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from rlscale.algo.needs import registries, uses_critic, uses_reference
from rlscale.cluster.device import detect, native_dtype
from rlscale.cluster.mesh import ParallelDims, RolloutDims
from rlscale.config import ConfigError, read
from rlscale.config.load import drop_consequences
from rlscale.config.schema import TASKS, Config, ParallelConfig
from rlscale.config.validate import find_violations
from rlscale.model.arch import ModelSpec
from rlscale.rollout.program import violations


class Checked(NamedTuple):
    """A configuration without contradictions, with what was read to check it.

    Attributes:
        spec: shapes of the policy.
        critic_spec: shapes of a critic that starts from ``critic.path``; None: it has the policy's.
        kind: of the devices, cpu or cuda.
    """

    cfg: Config
    spec: ModelSpec
    critic_spec: ModelSpec | None
    kind: str


def configure(path: str, overrides: list[str], world: int) -> Checked:
    """The checked configuration, the shapes of its models and the kind of its devices.

    Raises:
        ConfigError: everything that is wrong, reported together; what a model contradicts once it can be read.
    """
    cfg, misread = read(path, overrides)
    spec = critic_spec = None
    kind, critic, unreadable = "cpu", False, {}
    if not misread:
        try:
            kind = detect(cfg.trainer.device)
            if cfg.model.dtype == "auto":
                cfg.model.dtype = native_dtype(kind)
        except ValueError as error:
            unreadable["trainer.device"] = str(error)
        try:
            spec = ModelSpec.from_hf(cfg.model.path)
        except (ValueError, OSError) as error:
            unreadable["model.path"] = f"model.path: {error}"
        if cfg.critic.path is not None:
            with contextlib.suppress(ValueError):  # an estimator that there is not, which is found below
                critic = uses_critic(cfg)
            try:
                critic_spec = ModelSpec.from_hf(cfg.critic.path).as_critic() if critic else None
            except (ValueError, OSError) as error:
                unreadable["critic.path"] = f"critic.path: {error}"
    found = find_violations(cfg, world, spec=spec, critic_spec=critic_spec, registries=registries())
    lines = [v.message for v in [*misread, *drop_consequences(found, misread)]]
    named = {key for violation in found for key in violation.keys}
    lines += [message for key, message in unreadable.items() if key not in named]
    if spec is not None and "trainer.device" not in unreadable:
        lines += _limits(cfg, spec, kind)
    if lines or spec is None:
        raise ConfigError(lines)
    return Checked(cfg, spec, critic_spec, kind)


def _limits(cfg: Config, spec: ModelSpec, kind: str) -> list[str]:
    """What the model's attention, and the engines, do not support."""
    found = []
    window = spec.sliding_window
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    if window is not None and window < longest:
        found.append(
            f"model.path: the model attends to a window of {window} tokens, which is not supported where "
            f"data.max_prompt_length + data.max_response_length = {longest} exceeds it"
        )
    return found + (violations(cfg, spec, kind) if TASKS[cfg.task].generates else [])


def describe(checked: Checked, world: int) -> str:
    """Sizes and the placement of every rank, as text for --dry-run."""
    cfg, spec = checked.cfg, checked.spec
    size = f"{parameters(spec) / 1e6:.1f} M parameters"
    heads = f"{spec.heads} heads, {spec.kv_heads} key-value heads"
    model = [
        f"model      {cfg.model.path}: {spec.architecture}, {size}, {cfg.model.dtype}",
        f"           {spec.num_layers} layers, {heads}, vocabulary {spec.vocab}",
    ]
    if TASKS[cfg.task].generates:
        return "\n".join([*model, *_describe_rollout(cfg, world)])
    ranks = [f"  rank {rank:<4} actor {_place(cfg.actor.parallel, world, rank)}" for rank in range(world)]
    return "\n".join([*model, f"task       {cfg.task}", f"actor      {_dims(cfg.actor.parallel, world)}", *ranks])


def _describe_rollout(cfg: Config, world: int) -> list[str]:
    """Of a task that generates: the algorithm, the step, every model and every engine."""
    n, actor, prompts = cfg.rollout.n, cfg.actor, cfg.data.train_batch_size
    mini = actor.ppo_mini_batch_size
    lines = [
        f"algorithm  {cfg.algorithm.adv_estimator} advantages, {actor.policy_loss} policy loss, {actor.loss_agg_mode}",
        f"step       {prompts} prompts x {n} responses = {prompts * n} samples, at most "
        f"{cfg.data.max_prompt_length} + {cfg.data.max_response_length} tokens each",
        f"update     {actor.ppo_epochs} epoch(s) of {-(-prompts // mini)} mini-batch(es) of {mini * n} samples",
        f"actor      {_dims(cfg.actor.parallel, world)}",
    ]
    if uses_reference(cfg):
        lines.append(f"reference  {_dims(cfg.actor.parallel, world)}, frozen")
    if uses_critic(cfg):
        lines.append(f"critic     {_dims(cfg.critic.parallel, world)}")
    dims = RolloutDims(cfg.rollout.tensor_model_parallel_size, world)
    lines.append(f"rollout    {dims.replicas} vLLM engine(s) of {dims.tp} device(s)")
    for rank in range(world):
        place = f"actor {_place(cfg.actor.parallel, world, rank)}"
        if uses_critic(cfg):
            place += f" | critic {_place(cfg.critic.parallel, world, rank)}"
        lines.append(
            f"  rank {rank:<4} {place} | engine {dims.replica(rank)} worker {dims.worker(rank)}"
            + (" (leader)" if dims.is_leader(rank) else "")
        )
    return lines


def parameters(spec: ModelSpec) -> int:
    """Parameters of the whole model."""
    from rlscale.reshard.canonical import hf_shapes
    from rlscale.reshard.layout import volume, whole

    return sum(volume(whole(shape)) for shape in hf_shapes(spec).values())


def _place(parallel: ParallelConfig, world: int, rank: int) -> str:
    dims = ParallelDims.of(parallel, world)
    at = dims.coords(rank)
    return f"dp {at.dp} pp {at.pp} " + (f"sp {at.sp} " if dims.sp > 1 else "") + f"tp {at.tp}"


def _dims(parallel: ParallelConfig, world: int) -> str:
    dims = ParallelDims.of(parallel, world)
    parts = [f"data {dims.dp}", f"pipeline {dims.pp}", f"tensor {dims.tp}"]
    if dims.sp > 1:
        parts.insert(2, f"Ulysses {dims.sp}")
    sequence = " + sequence parallel" if parallel.sequence_parallel else ""
    experts = parallel.expert_model_parallel_size
    whole = f", whole experts over {experts} ranks" if experts > 1 else ""
    return f"{' x '.join(parts)}{sequence}{whole}, ZeRO-{parallel.zero_stage}"
