"""Contradictions between keys: what no single field can say about itself.

Each violation names the keys, their values and what would work. What rlscale doesn't support is refused here, with the
reason, so that it never becomes a hang or a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from rlscale.config import functions
from rlscale.config.algorithms import PROVIDED, Algorithm, Registries
from rlscale.config.layouts import ModelSizes, divisors, listed, refusals
from rlscale.config.paths import folder_problem, is_hub_name, read_chat_template
from rlscale.config.schema import TASKS, ActorConfig, Config, CriticConfig, SourceConfig, Violation

LOGGERS = ("jsonl", "tensorboard")


def find_violations(
    config: Config,
    world_size: int | None = None,
    *,
    spec: ModelSizes | None = None,
    critic_spec: ModelSizes | None = None,
    registries: Registries | None = None,
) -> list[Violation]:
    """Everything that is wrong with a configuration whose fields are right one by one; empty if it can run.

    Args:
        config: the configuration.
        world_size: trainer processes of the run; None skips what depends on it.
        spec: shapes of the model; None skips what depends on them. critic_spec: of ``critic.path``, where that is set.
        registries: what keys that name an algorithm may name (`rlscale.algo.needs.registries`); None skips what
            depends on it, such as whether there is a critic.
    """
    registries = registries or {}
    algorithms, unknown = _algorithms(config, registries)
    task = TASKS.get(config.task)
    if task is not None and not task.generates:  # it uses no algorithm and no engine
        return [
            *_trainer(config, False, registries),
            *_models(config, False),
            *_data(config),
            *refusals("actor", config.actor.parallel, world_size, spec),
            *_optimizers(config, False),
        ]
    critic = any("values" in a.needs for a in algorithms.values())
    found = [
        *_trainer(config, critic, registries),
        *_models(config, critic),
        *_data(config),
        *_batches("actor", config.actor, config),
        *refusals("actor", config.actor.parallel, world_size, spec),
        *_rollout(config, world_size, spec),
        *_algorithm(config, algorithms, registries),
        *_optimizers(config, critic),
        *_scorer(config),
        *unknown,
    ]
    if critic:
        found += _batches("critic", config.critic, config)
        critic_spec = spec if config.critic.path is None else critic_spec
        found += refusals("critic", config.critic.parallel, world_size, critic_spec, own_head=True)
    return found


def _trainer(c: Config, critic: bool, registries: Registries) -> Iterator[Violation]:
    t = c.trainer
    for i, name in enumerate(t.logger):
        if name not in LOGGERS:
            yield Violation((f"trainer.logger.{i}",), f"trainer.logger: {name!r} is not one of {', '.join(LOGGERS)}")
    if t.test_freq > 0 and not c.data.val:
        yield Violation(
            ("trainer.test_freq", "data.val"),
            f"trainer.test_freq is {t.test_freq}, but data.val names no held-out prompts; add a source to data.val or "
            "set trainer.test_freq to 0",
        )
    if t.critic_warmup and not critic:
        yield Violation(
            ("trainer.critic_warmup", "algorithm.adv_estimator"),
            f"trainer.critic_warmup is {t.critic_warmup}, but adv_estimator {c.algorithm.adv_estimator} trains no "
            f"critic; set it to 0{_or(registries, 'algorithm.adv_estimator', lambda a: 'values' in a.needs)}",
        )
    if t.total_training_steps is not None and 0 < t.total_training_steps <= t.critic_warmup:
        yield Violation(
            ("trainer.critic_warmup", "trainer.total_training_steps"),
            f"trainer.critic_warmup is {t.critic_warmup}, so the actor would never be trained in "
            f"trainer.total_training_steps {t.total_training_steps}",
        )
    start = t.resume_from_path
    if {"path": start is None, "disable": start is not None}.get(t.resume_mode):
        yield Violation(
            ("trainer.resume_mode", "trainer.resume_from_path"),
            f"trainer.resume_mode is {t.resume_mode} and trainer.resume_from_path {start}: mode path needs the folder "
            "of a checkpoint, auto may have one, and disable takes none",
        )
    elif t.resume_mode == "path" and start is not None and not Path(start).expanduser().is_dir():
        yield Violation(("trainer.resume_from_path",), f"trainer.resume_from_path: no such folder: {start}")
    run_dir = Path(t.run_dir).expanduser()
    if not t.run_dir:
        yield Violation(("trainer.run_dir",), "trainer.run_dir must name a folder")
    elif run_dir.exists() and not run_dir.is_dir():
        yield Violation(("trainer.run_dir",), f"trainer.run_dir: {t.run_dir} exists and is not a folder")


def _models(c: Config, critic: bool) -> Iterator[Violation]:
    if not c.model.path:
        yield Violation(("model.path",), "model.path must name a Hugging Face folder or hub model")
    elif wrong := folder_problem(c.model.path):
        hint = "" if Path(c.model.path).exists() else "; tools/prepare_model.py makes the quickstart's model"
        yield Violation(("model.path",), f"model.path: {wrong}{hint}")
    if critic and c.critic.path and (wrong := folder_problem(c.critic.path)):
        yield Violation(("critic.path",), f"critic.path: {wrong}")
    tokenizer = c.model.tokenizer_path
    if tokenizer and not Path(tokenizer).expanduser().exists() and not is_hub_name(tokenizer):
        message = f"model.tokenizer_path: no such folder: {tokenizer} (a hub name looks like org/name)"
        yield Violation(("model.tokenizer_path",), message)
    if c.model.chat_template is not None:
        try:
            read_chat_template(c.model.chat_template)
        except (ValueError, OSError) as error:
            yield Violation(("model.chat_template",), str(error))


def _data(c: Config) -> Iterator[Violation]:
    d = c.data
    if not d.train:
        yield Violation(("data.train",), "data.train names no source of prompts")
    for part in ("train", "val"):
        for i, source in enumerate(getattr(d, part)):
            yield from _source(f"data.{part}.{i}", source)
    if d.train and all(_procedural(s) for s in d.train):
        size = sum(s.size for s in d.train)
        if size < d.train_batch_size:
            yield Violation(
                ("data.train", "data.train_batch_size"),
                f"data.train_batch_size is {d.train_batch_size} prompts, but the sources of data.train hold {size}; "
                "make them larger (size) or the batch smaller",
            )
    for i, train in enumerate(d.train):
        for j, val in enumerate(d.val):
            if _procedural(train) and train == replace(val, size=train.size, files=train.files):
                kind = train.chosen()[0]
                yield Violation(
                    (f"data.train.{i}.seed", f"data.val.{j}.seed"),
                    f"data.train.{i} and data.val.{j} draw the same prompts: {kind} {getattr(train, kind)} with seed "
                    f"{train.seed}; give data.val.{j} another seed",
                )
            for name in sorted(set(train.files) & set(val.files)):
                yield Violation(
                    (f"data.train.{i}.files", f"data.val.{j}.files"),
                    f"data.train.{i} and data.val.{j} both read {name}: held-out prompts must not be trained on",
                )


def _procedural(s: SourceConfig) -> bool:
    return bool(s.task or s.reasoning_gym)


def _source(key: str, s: SourceConfig) -> Iterator[Violation]:
    given = s.chosen()
    if len(given) != 1:
        yield Violation(
            (key,),
            f"{key} must set exactly one of task, reasoning_gym and files; it sets {' and '.join(given) or 'none'}",
        )
    for i, name in enumerate(s.files):
        name = str(name)  # what is no text is refused where it is read
        if not name.endswith((".jsonl", ".json", ".parquet")):
            yield Violation((f"{key}.files.{i}",), f"{key}.files: {name} is neither .jsonl (.json) nor .parquet")
        elif not Path(name).expanduser().is_file():
            yield Violation((f"{key}.files.{i}",), f"{key}.files: no such file: {name}")
    if s.files and s.params:
        yield Violation((f"{key}.params",), f"{key}.params are for procedural sources; {key} reads files")


def _batches(role: str, a: ActorConfig | CriticConfig, c: Config) -> Iterator[Violation]:
    """Mini-batches divide the batch; a micro-batch has room for the longest sample."""
    batch, mini = c.data.train_batch_size, a.ppo_mini_batch_size
    key = f"{role}.ppo_mini_batch_size"
    if mini is not None and batch % mini:
        bigger = [mini * k for k in (batch // mini, batch // mini + 1) if k]
        yield Violation(
            (key, "data.train_batch_size"),
            f"{key} {mini} does not divide data.train_batch_size {batch} (both in prompts); {key} could be "
            f"{listed(divisors(batch), mini)}, or data.train_batch_size {listed(bigger, batch)}",
        )
    longest = c.data.max_prompt_length + c.data.max_response_length
    shared = a.parallel.ulysses_sequence_parallel_size
    if a.use_dynamic_bsz and a.ppo_max_token_len_per_gpu * shared < longest:
        key, sp_key = f"{role}.ppo_max_token_len_per_gpu", f"{role}.parallel.ulysses_sequence_parallel_size"
        ranks = f" on each of the {shared} ranks of {sp_key}" if shared > 1 else ""
        yield Violation(
            (key, sp_key, "data.max_prompt_length", "data.max_response_length"),
            f"{key} {a.ppo_max_token_len_per_gpu}{ranks} has no room for the longest sample, max_prompt_length "
            f"{c.data.max_prompt_length} + max_response_length {c.data.max_response_length} tokens; it must be at "
            f"least {-(-longest // shared)}",
        )


def _rollout(c: Config, world: int | None, spec: ModelSizes | None) -> Iterator[Violation]:
    r, key = c.rollout, "rollout.tensor_model_parallel_size"
    tp = r.tensor_model_parallel_size
    if world is not None and world % tp:
        yield Violation(
            (key,),
            f"{key} {tp} does not divide the {world} processes of this run; it could be {listed(divisors(world), tp)}",
        )
    if spec is not None and (spec.heads % tp or (spec.kv_heads % tp and tp % spec.kv_heads)):
        fits = [d for d in divisors(spec.heads) if spec.kv_heads % d == 0 or d % spec.kv_heads == 0]
        yield Violation(
            (key,),
            f"{key} {tp} splits neither the model's {spec.heads} attention heads nor its {spec.kv_heads} "
            f"key-value heads evenly; it could be {listed(fits, tp)}",
        )
    longest = c.data.max_prompt_length + c.data.max_response_length
    limit = r.engine_args.get("max_model_len")
    if isinstance(limit, int) and limit < longest:
        yield Violation(
            ("rollout.engine_args", "data.max_prompt_length", "data.max_response_length"),
            f"rollout.engine_args.max_model_len {limit} is less than max_prompt_length + max_response_length {longest}",
        )
    if spec is not None and 0 < spec.max_positions < longest:
        yield Violation(
            ("data.max_prompt_length", "data.max_response_length"),
            f"data.max_prompt_length + max_response_length is {longest} tokens, but the model "
            f"supports at most {spec.max_positions} positions",
        )
    if r.top_k == 0:
        message = "rollout.top_k is 0: no token could be sampled; -1 switches top-k sampling off"
        yield Violation(("rollout.top_k",), message)
    if r.val_n > 1 and r.val_temperature == 0:
        yield Violation(
            ("rollout.val_n", "rollout.val_temperature"),
            f"rollout.val_n is {r.val_n} with val_temperature 0: greedy responses to one prompt are all equal; set "
            "val_n to 1 or val_temperature above 0",
        )


def _algorithms(c: Config, registries: Registries) -> tuple[dict[str, Algorithm], list[Violation]]:
    """What the keys of the registries name, and what is wrong with the names and the arguments."""
    found: dict[str, Algorithm] = {}
    wrong: list[Violation] = []
    for key, registry in registries.items():
        try:
            found[key] = registry.choose(key, _value(c, key))
        except ValueError as error:
            wrong.append(Violation((key,), str(error)))
            continue
        if registry.args_key is not None:
            problems = found[key].problems(registry.args_key, _value(c, registry.args_key))
            wrong += [Violation((registry.args_key, key), problem) for problem in problems]
    return found, wrong


def _value(c: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), c)


def _or(registries: Registries, key: str, fits: Callable[[Algorithm], bool]) -> str:
    """`` or KEY to NAME or NAME`` of the fitting algorithms of a key that a step can provide for; empty: none."""
    known = registries[key].algorithms() if key in registries else []
    names = " or ".join(a.names[0] for a in known if a.needs <= PROVIDED and fits(a))
    return f" or {key.rpartition('.')[2]} to {names}" if names else ""


def _algorithm(c: Config, algorithms: Mapping[str, Algorithm], registries: Registries) -> Iterator[Violation]:
    a, actor = c.algorithm, c.actor
    for key, algorithm in algorithms.items():
        if c.rollout.n == 1 and "group" in algorithm.needs:
            name = f"{key.rpartition('.')[2]} {_value(c, key)}"
            yield Violation(
                ("rollout.n", key),
                f"rollout.n is 1, but {name} compares the responses to one prompt with each other; set rollout.n to at "
                f"least 2{_or(registries, key, lambda a: 'group' not in a.needs)}",
            )
    ctrl = a.kl_ctrl
    if ctrl.type == "interval" and not (ctrl.target_low and ctrl.target_high and ctrl.target_low < ctrl.target_high):
        yield Violation(
            ("algorithm.kl_ctrl.target_low", "algorithm.kl_ctrl.target_high"),
            "algorithm.kl_ctrl.type is interval: set target_low below target_high "
            f"(they are {ctrl.target_low} and {ctrl.target_high})",
        )
    if ctrl.type != "fixed" and not a.use_kl_in_reward:
        yield Violation(
            ("algorithm.kl_ctrl.type", "algorithm.use_kl_in_reward"),
            f"algorithm.kl_ctrl.type is {ctrl.type}, but it controls the KL in the reward and use_kl_in_reward is "
            "false; set use_kl_in_reward to true",
        )
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield Violation(
            ("actor.loss_scale_factor", "actor.loss_agg_mode"),
            "actor.loss_scale_factor is the C of loss_agg_mode seq-mean-token-sum-norm and has no effect with "
            f"{actor.loss_agg_mode}; set it to null",
        )


def _optimizers(c: Config, critic: bool) -> Iterator[Violation]:
    optims = {"actor": c.actor.optim} | ({"critic": c.critic.optim} if critic else {})
    for role, optim in optims.items():
        if len(optim.betas) != 2 or not all(0 <= b < 1 for b in optim.betas):
            message = f"{role}.optim.betas must be two numbers from 0 to below 1, not {optim.betas}"
            yield Violation((f"{role}.optim.betas",), message)
        if optim.lr_warmup_steps and optim.lr_warmup_steps_ratio:
            yield Violation(
                (f"{role}.optim.lr_warmup_steps", f"{role}.optim.lr_warmup_steps_ratio"),
                f"{role}.optim.lr_warmup_steps is {optim.lr_warmup_steps} and {role}.optim.lr_warmup_steps_ratio "
                f"{optim.lr_warmup_steps_ratio:g}: both say how long the warm-up is; set one of them to 0",
            )


def _scorer(c: Config) -> Iterator[Violation]:
    scorer = c.reward.scorer
    if scorer is None and c.reward.scorer_args:
        keys = ("reward.scorer_args", "reward.scorer")
        yield Violation(keys, "reward.scorer_args are given, but reward.scorer is null")
    if scorer and ":" in scorer and (wrong := functions.problem("reward.scorer", scorer)):  # built-in: known elsewhere
        yield Violation(("reward.scorer",), wrong)
