"""Before a run starts: read and check its configuration with the model's shapes, and say where everything will be
placed.
"""

from __future__ import annotations

from rlscale.cluster.device import detect
from rlscale.cluster.mesh import ParallelDims
from rlscale.config import ConfigError, load
from rlscale.config.schema import Config, ParallelConfig
from rlscale.config.validate import find_violations, uses_critic, uses_reference
from rlscale.model.arch import ModelSpec
from rlscale.rollout.vllm.limits import violations

# estimators whose further inputs (a greedy response, reward components, sums over the vocabulary) no step
# provides yet
NEED_MORE = ("remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline")


def configure(path: str, overrides: list[str], world: int) -> tuple[Config, ModelSpec]:
    """The checked configuration and the shapes of its model.

    Raises:
        ConfigError: everything that is wrong, reported together; the model's own contradictions once it can be read.
    """
    from rlscale.algo.advantages import ADVANTAGES
    from rlscale.algo.kl import names as kl_names
    from rlscale.algo.policy_loss import POLICY_LOSSES

    registries = {
        "algorithm.adv_estimator": [name for name in ADVANTAGES.names() if name not in NEED_MORE],
        "algorithm.kl_penalty": kl_names(),
        "actor.kl_loss_type": kl_names(),
        "actor.policy_loss": POLICY_LOSSES.names(),
    }
    cfg = load(path, overrides, world_size=world, registries=registries)
    try:
        spec = ModelSpec.from_hf(cfg.model.path)
    except (ValueError, OSError) as error:
        found = [f"model.path: {error}"]
    else:
        critic, found = _critic_spec(cfg)
        found += [v.message for v in find_violations(cfg, world, spec=spec, critic_spec=critic)]
        window = spec.sliding_window
        longest = cfg.data.max_prompt_length + cfg.data.max_response_length
        if window is not None and window < longest:
            found.append(
                f"model.path: the model attends to a window of {window} tokens, which is not supported where "
                f"data.max_prompt_length + data.max_response_length = {longest} exceeds it"
            )
        found += violations(cfg, spec, detect(cfg.trainer.device))
    if found:
        raise ConfigError(found)
    return cfg, spec


def _critic_spec(cfg: Config) -> tuple[ModelSpec | None, list[str]]:
    """Shapes of a critic that starts from a folder of its own, and what is wrong with that folder."""
    if not uses_critic(cfg) or cfg.critic.path is None:
        return None, []
    try:
        return ModelSpec.from_hf(cfg.critic.path).as_critic(), []
    except (ValueError, OSError) as error:
        return None, [f"critic.path: {error}"]


def describe(cfg: Config, spec: ModelSpec, world: int) -> str:
    """Sizes and the placement of every rank, as text for --dry-run."""
    n = cfg.rollout.n
    actor, prompts = cfg.actor, cfg.data.train_batch_size
    mini = actor.ppo_mini_batch_size
    size = f"{parameters(spec) / 1e6:.1f} M parameters"
    heads = f"{spec.heads} heads, {spec.kv_heads} key-value heads"
    lines = [
        f"model      {cfg.model.path}: {spec.architecture}, {size}, {cfg.model.dtype}",
        f"           {spec.num_layers} layers, {heads}, vocabulary {spec.vocab}",
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
    tp = cfg.rollout.tensor_model_parallel_size
    lines.append(f"rollout    {world // tp} vLLM engine(s) of {tp} device(s)")
    for rank in range(world):
        place = f"actor {_place(cfg.actor.parallel, world, rank)}"
        if uses_critic(cfg):
            place += f" | critic {_place(cfg.critic.parallel, world, rank)}"
        lines.append(
            f"  rank {rank:<4} {place} | engine {rank // tp} worker {rank % tp}"
            + (" (leader)" if rank % tp == 0 else "")
        )
    return "\n".join(lines)


def parameters(spec: ModelSpec) -> int:
    """Parameters of the whole model."""
    from rlscale.reshard.layout import volume, whole
    from rlscale.reshard.megatron import hf_shapes

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
