"""The configuration of a run: one dataclass per component, one documented field per key.

Every key of a YAML file is a field here, with its help text and unit in ``metadata["help"]``: the tables of the README
and of docs/configuration.md and ``yamls/reference.yaml`` are made from them. Names follow veRL where the thing is the
same. `rlscale.config.load` reads files and `rlscale.config.validate` reports every violation at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: in messages: what a value of a type is called, and what a bound says and means
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "min": ("at least", lambda v, b: v >= b),
    "max": ("at most", lambda v, b: v <= b),
    "above": ("above", lambda v, b: v > b),
    "below": ("below", lambda v, b: v < b),
}
_KL_NAMES = "k1, abs, k2, k3 (= low_var_kl), forward; a + takes the gradient of k2"


def opt(default: Any, help: str, **constraints: Any) -> Any:
    """A documented field. ``constraints``: ``choices`` (a collection), and the bounds of `BOUNDS`."""
    meta = {"help": help, **constraints}
    if isinstance(default, list | dict | type):
        return field(default_factory=default if isinstance(default, type) else default.copy, metadata=meta)
    return field(default=default, metadata=meta)


class Violation(NamedTuple):
    """One thing that is wrong: ``keys`` (dotted paths) that take part in it, the line that tells the user, and for a
    layout that cannot run a few words for a table.
    """

    keys: tuple[str, ...]
    message: str
    reason: str = ""


def outside(key: str, value: Any, bounds: Mapping[str, Any]) -> list[str]:
    """What to say about a number outside of its bounds; nothing about another value, or another word in ``bounds``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    return [
        f"{key} must be {words} {bounds[name]}, not {value}"
        for name, (words, holds) in BOUNDS.items()
        if name in bounds and not holds(value, bounds[name])
    ]


def show(value: Any) -> str:
    """A value as messages show it, with its type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{str(value).lower()} (bool)"
    if isinstance(value, dict):
        return "a mapping"
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({type(value).__name__})"


@dataclass
class TrainerConfig:
    run_dir: str = opt(
        "runs/default", "the run's folder: config, metrics, events, rollouts, plots, checkpoints, export"
    )
    seed: int = opt(1, "seed of initialisation, shuffling and sampling", min=0)
    deterministic: bool = opt(
        False,
        "bit-for-bit reproducible runs for a given configuration and layout: operations without a deterministic kernel "
        "raise an error, and every engine receives a fixed share of the prompts in one batch",
    )
    device: str = opt("auto", "device type; auto: cuda if available, else cpu", choices=("auto", "cpu", "cuda"))
    total_training_steps: int | None = opt(None, "training steps (rollout batches); null: from total_epochs", min=1)
    total_epochs: int = opt(1, "passes over the training data, used where total_training_steps is null", min=1)
    save_freq: int = opt(
        0, "steps between checkpoints (weights, optimizer, run state) in checkpoints/; 0: at the end, -1: none", min=-1
    )
    async_save: bool = opt(False, "write checkpoints during the next steps, from a copy in host memory")
    continue_on_save_error: bool = opt(False, "continue with a warning when a checkpoint cannot be written (disk full)")
    keep_last: int | None = opt(2, "number of most recent checkpoints to keep; null: all", min=1)
    keep_every: int = opt(0, "also keep the checkpoints of steps that are multiples of this; 0: none", min=0)
    keep_best: str | None = opt(
        None,
        "also keep the checkpoint with the highest value of this metric (-metric: the lowest); checkpoints of steps "
        "without the metric are not considered",
    )
    export: str = opt(
        "end",
        "when to export the policy to export/step_*: never, at the end, or at the end and with every checkpoint (save)",
        choices=("never", "end", "save"),
    )
    test_freq: int = opt(0, "steps between validations; 0: only before and after training, -1: never", min=-1)
    val_before_train: bool = opt(True, "validate before the first step")
    resume_mode: str = opt(
        "disable",
        "disable: start a new run and move an earlier run's files to previous/; auto: resume from the last complete "
        "checkpoint in run_dir, if any; path: resume from resume_from_path",
        choices=("disable", "auto", "path"),
    )
    resume_from_path: str | None = opt(
        None, "checkpoint folder (.../checkpoints/step_*) used by path, and by auto when run_dir has no checkpoint"
    )
    logger: list[str] = opt(["jsonl", "tensorboard"], "metric writers: any of jsonl, tensorboard")
    rollout_dump_freq: int = opt(1, "steps between rollouts/step_*.jsonl files; 0: none", min=0)
    plots: bool = opt(True, "draw plots/*.png at the end of the run")
    critic_warmup: int = opt(0, "steps in which only the critic is updated", min=0)
    collective_timeout_s: float = opt(1800.0, "seconds after which a stalled collective aborts the run", above=0)
    max_time: float | None = opt(
        None,
        "seconds after which the run stops at the next safe point, saves its state and exits with code 75",
        above=0,
    )
    stop_grace_s: float = opt(25.0, "seconds to save the state and exit after SIGTERM, SIGINT or SIGUSR1", above=0)


@dataclass
class SourceConfig:
    """One source of prompts; exactly one of ``task``, ``reasoning_gym`` and ``files`` is set (`chosen`)."""

    task: str | None = opt(None, "built-in procedural task by name, e.g. addition")
    reasoning_gym: str | None = opt(None, "name of a reasoning-gym task, e.g. chain_sum")
    files: list[str] = opt([], "JSONL or Parquet files, one prompt per row")
    size: int = opt(1024, "prompts drawn from a procedural source (files are read whole)", min=1)
    seed: int = opt(0, "seed of a procedural source; train and validation must differ", min=0)
    params: dict[str, Any] = opt({}, "keyword arguments of the procedural task")

    def chosen(self) -> list[str]:
        """Which of the three are set."""
        return [kind for kind in ("task", "reasoning_gym", "files") if getattr(self, kind)]


@dataclass
class DataConfig:
    train: list[SourceConfig] = opt([], "sources of training prompts")
    val: list[SourceConfig] = opt([], "sources of held-out prompts")
    train_batch_size: int = opt(8, "prompts per step, global", min=1)
    max_prompt_length: int = opt(512, "tokens per prompt, chat template included", min=1)
    max_response_length: int = opt(512, "tokens per response", min=1)
    overlong_prompts: str = opt(
        "filter", "prompts longer than max_prompt_length: drop and count them, or fail", choices=("filter", "error")
    )
    shuffle: bool = opt(True, "shuffle each epoch with trainer.seed")
    system_prompt: str | None = opt(None, "system message prepended to conversations that have none")
    prompt_key: str = opt("prompt", "column with the chat messages or the prompt text")
    data_source_key: str = opt("data_source", "column with the name under which rewards and accuracy are reported")
    ground_truth_key: str = opt(
        "reward_model.ground_truth", "column with the reference answer (a dot selects a field of a struct)"
    )
    extra_info_key: str = opt("extra_info", "column with anything else the scorer needs")


@dataclass
class ModelConfig:
    path: str = opt("", "local Hugging Face folder, or a hub name that is passed to transformers unchanged")
    tokenizer_path: str | None = opt(None, "tokenizer folder or hub name; null: model.path")
    dtype: str = opt(
        "bfloat16",
        "working dtype of the weights; the optimizer keeps fp32 masters. auto: bfloat16, but float32 on a CPU without "
        "AVX-512, where bfloat16 is emulated",
        choices=("auto", "bfloat16", "float32"),
    )
    chat_template: str | None = opt(None, "Jinja chat template, or a path to one; null: the tokenizer's own")


@dataclass
class ParallelConfig:
    tensor_model_parallel_size: int = opt(1, "ranks over which each matrix is split (TP)", min=1)
    pipeline_model_parallel_size: int = opt(1, "ranks over which the layers are split (PP)", min=1)
    ulysses_sequence_parallel_size: int = opt(1, "ranks over which each packed sequence is split (Ulysses SP)", min=1)
    expert_model_parallel_size: int = opt(
        1,
        "mixture of experts: 1 shards every expert over the TP ranks; tensor_model_parallel_size distributes whole "
        "experts over them",
        min=1,
    )
    sequence_parallel: bool = opt(False, "Megatron sequence parallelism in the norms; needs TP > 1")
    zero_stage: int = opt(1, "DeepSpeed ZeRO stage over the data-parallel ranks", choices=(1, 2, 3))
    param_offload: bool = opt(
        False,
        "move the weights to host memory while another model or vLLM uses the device (actor: also the reference's)",
    )
    optimizer_offload: bool = opt(
        False, "fp32 masters and AdamW moments stay on the host between updates (gradients are freed after each update)"
    )


@dataclass
class OptimConfig:
    lr: float = opt(1e-6, "peak learning rate", above=0)
    betas: list[float] = opt([0.9, 0.999], "AdamW betas")
    eps: float = opt(1e-8, "AdamW epsilon", above=0)
    weight_decay: float = opt(0.0, "AdamW decoupled weight decay", min=0)
    grad_clip: float = opt(1.0, "global gradient norm above which gradients are scaled down; 0: no clipping", min=0)
    lr_scheduler: str = opt("constant", "learning rate after the warm-up", choices=("constant", "cosine", "linear"))
    lr_warmup_steps: int = opt(0, "optimizer steps of linear warm-up", min=0)
    lr_warmup_steps_ratio: float = opt(0.0, "warm-up as a fraction of all steps; set one of the two", min=0, below=1)
    min_lr_ratio: float = opt(0.0, "final learning rate as a share of lr (cosine, linear)", min=0, max=1)
    max_skipped_steps: int = opt(
        3, "consecutive steps skipped for a non-finite loss or gradient norm after which the run stops", min=1
    )


@dataclass
class TrainedConfig:
    """What actor and critic have in common."""

    parallel: ParallelConfig = opt(ParallelConfig, "layout of the model")
    optim: OptimConfig = opt(OptimConfig, "its optimizer")
    use_dynamic_bsz: bool = opt(True, "cut micro-batches by tokens instead of by sequences")
    ppo_max_token_len_per_gpu: int = opt(
        4096,
        "token budget of a micro-batch per rank (use_dynamic_bsz); N Ulysses ranks share N times as many",
        min=1,
    )
    ppo_micro_batch_size_per_gpu: int = opt(8, "sequences per micro-batch and rank (without use_dynamic_bsz)", min=1)
    recompute: bool = opt(False, "recompute activations layer by layer in the backward pass")
    loss_agg_mode: str = opt(
        "token-mean",
        "how token losses are aggregated",
        choices=("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    )


@dataclass
class ActorConfig(TrainedConfig):
    ppo_mini_batch_size: int = opt(8, "prompts per optimizer step, global", min=1)
    ppo_epochs: int = opt(1, "passes over each rollout batch", min=1)
    share_prompt_prefix: bool = opt(True, "compute the prompt of a group once for all its responses in a micro-batch")
    shuffle: bool = opt(True, "reshuffle prompts between epochs with trainer.seed")
    policy_loss: str = opt("ppo", "policy loss by its name, or as module:function or path/file.py:function")
    policy_loss_args: dict[str, Any] = opt({}, "further keyword arguments of the policy loss")
    clip_ratio_low: float = opt(0.2, "lower clip bound of the probability ratio is 1 - this", min=0, max=1)
    clip_ratio_high: float = opt(0.2, "upper clip bound of the probability ratio is 1 + this", min=0)
    clip_ratio_c: float | None = opt(3.0, "dual clip: loss at most -c A for an advantage A < 0; null: off", above=1)
    loss_scale_factor: float | None = opt(None, "C of seq-mean-token-sum-norm; null: max_response_length", above=0)
    entropy_coeff: float = opt(0.0, "weight of the entropy bonus in the loss")
    use_kl_loss: bool = opt(False, "add the KL to the reference policy to the loss")
    kl_loss_coef: float = opt(0.001, "coefficient of the KL loss", min=0)
    kl_loss_type: str = opt("low_var_kl", f"estimator of the KL loss: {_KL_NAMES}")
    head_chunk_tokens: int = opt(1024, "tokens whose logits are materialised at a time", min=1)


@dataclass
class CriticConfig(TrainedConfig):
    path: str | None = opt(None, "Hugging Face folder of the initial weights; null: model.path with a new value head")
    ppo_mini_batch_size: int | None = opt(None, "prompts per optimizer step, global; null: the actor's", min=1)
    ppo_epochs: int | None = opt(None, "passes over each rollout batch; null: the actor's", min=1)
    cliprange_value: float = opt(0.5, "clip range of the value loss around the old values", above=0)


@dataclass
class RolloutConfig:
    tensor_model_parallel_size: int = opt(1, "ranks (devices) of one vLLM engine", min=1)
    n: int = opt(8, "responses per prompt", min=1)
    temperature: float = opt(1.0, "sampling temperature in training", above=0)
    top_p: float = opt(1.0, "nucleus-sampling threshold in training", above=0, max=1)
    top_k: int = opt(-1, "top-k sampling in training; -1: off", min=-1)
    val_n: int = opt(1, "responses per held-out prompt", min=1)
    val_temperature: float = opt(0.0, "temperature of validation; 0: greedy", min=0)
    val_top_p: float = opt(1.0, "nucleus-sampling threshold in validation", above=0, max=1)
    dtype: str | None = opt(None, "dtype of the engine; null: model.dtype", choices=("bfloat16", "float32", None))
    max_num_seqs: int = opt(64, "responses decoded at the same time, per engine", min=1)
    max_num_batched_tokens: int | None = opt(None, "tokens per scheduler step and engine; null: vLLM's default", min=1)
    kv_cache_memory_gb: float = opt(1.0, "GiB of key-value cache per device on CPU", above=0)
    gpu_memory_utilization: float = opt(0.5, "share of the device memory that vLLM may use on GPU", above=0, max=1)
    enforce_eager: bool = opt(True, "disable compilation and CUDA graphs in vLLM")
    enable_prefix_caching: bool = opt(True, "share the key-value cache of equal prefixes")
    prefetch_groups: int = opt(2, "prompts an idle engine claims at a time", min=1)
    sync_bucket_mb: int = opt(
        64,
        "memory for weight updates: two buckets and a staging buffer together take twice this many MiB per rank",
        min=1,
    )
    sync_verify: str = opt(
        "first",
        "compare per-tensor checksums of trainer and engine: never (off), after the first weight update, or after "
        "every one",
        choices=("off", "first", "always"),
    )
    logprob_check_freq: int = opt(
        0, "steps between comparisons of trainer and engine log-probs; 0: first step only, -1: never", min=-1
    )
    logprob_check_bound: float = opt(0.1, "mean absolute difference of log-probs above which the run stops", above=0)
    start_timeout_s: float = opt(300.0, "seconds for an engine to start", above=0)
    request_timeout_s: float = opt(1800.0, "seconds for one step's generation", above=0)
    engine_restarts: int = opt(2, "times per run that dead or stalled engines are replaced", min=0)
    engine_args: dict[str, Any] = opt({}, "further arguments of vLLM's engine, passed on unchanged")


@dataclass
class RewardConfig:
    scorer: str | None = opt(None, "built-in name, module:function or path/file.py:function; null: the source's own")
    scorer_args: dict[str, Any] = opt({}, "further keyword arguments of the scorer")
    num_workers: int = opt(1, "scorer processes per rollout leader", min=1)
    timeout_s: float = opt(10.0, "seconds for scoring one response; then it counts as a failure", above=0)


@dataclass
class KLControlConfig:
    type: str = opt("fixed", "controller of the reward's KL coefficient", choices=("fixed", "adaptive", "interval"))
    kl_coef: float = opt(0.001, "(initial) coefficient", min=0)
    horizon: float = opt(10000.0, "samples over which the adaptive and the interval controller correct", above=0)
    target_kl: float = opt(0.1, "KL that the adaptive controller aims at, nats per token", above=0)
    target_low: float | None = opt(
        None, "interval: lower end of the KL range in which the coefficient stays unchanged, nats per token", above=0
    )
    target_high: float | None = opt(None, "interval: upper end of that range, nats per token", above=0)


@dataclass
class AlgorithmConfig:
    adv_estimator: str = opt("grpo", "advantage estimator by its name, or as module:function or path/file.py:function")
    adv_args: dict[str, Any] = opt({}, "further keyword arguments of the estimator")
    gamma: float = opt(1.0, "discount per token", min=0, max=1)
    lam: float = opt(1.0, "lambda of GAE", min=0, max=1)
    norm_adv_by_std_in_grpo: bool = opt(True, "GRPO: divide by the standard deviation of the group")
    use_kl_in_reward: bool = opt(False, "subtract the KL to the reference policy from the reward")
    kl_penalty: str = opt("k1", f"estimator of the KL in the reward: {_KL_NAMES}")
    kl_ctrl: KLControlConfig = opt(KLControlConfig, "coefficient of the KL in the reward")


class TaskEntry(NamedTuple):
    """Where a task is: its ``module`` has a `rlscale.loop.tasks.Task` as ``TASK``, and is imported when the task runs.

    ``generates``: it samples from engines (``rollout``) and scores (``reward``); the engines start before the import.
    """

    module: str
    generates: bool


#: what can be run
TASKS = {"rl": TaskEntry("rlscale.loop.rl", generates=True)}


@dataclass
class Config:
    task: str = opt("rl", "what to run", choices=TASKS)
    trainer: TrainerConfig = opt(TrainerConfig, "the run")
    data: DataConfig = opt(DataConfig, "prompts")
    model: ModelConfig = opt(ModelConfig, "the policy's start")
    actor: ActorConfig = opt(ActorConfig, "the policy under training")
    critic: CriticConfig = opt(CriticConfig, "the value model, for advantage estimators that need one")
    rollout: RolloutConfig = opt(RolloutConfig, "generation")
    reward: RewardConfig = opt(RewardConfig, "scoring")
    algorithm: AlgorithmConfig = opt(AlgorithmConfig, "advantages and KL")
