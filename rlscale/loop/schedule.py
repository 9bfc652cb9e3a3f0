"""How long a run is, in steps and in optimizer steps, and when something is due: arithmetic on the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlscale.algo.needs import uses_critic
from rlscale.batch.minibatch import num_mini_batches
from rlscale.config.schema import Config
from rlscale.train.schedule import warmup_steps

if TYPE_CHECKING:
    from rlscale.train.engine import Engine


def planned_steps(cfg: Config, prompts: int) -> int:
    """Steps of the run: total_training_steps, or as many batches as total_epochs hold."""
    per_epoch = prompts // cfg.data.train_batch_size
    return cfg.trainer.total_training_steps or cfg.trainer.total_epochs * per_epoch


def update_sizes(cfg: Config) -> dict[str, tuple[int, int]]:
    """Prompts of a mini-batch, and epochs, by trained role; the critic's are the actor's where it has none."""
    size, epochs = cfg.actor.ppo_mini_batch_size, cfg.actor.ppo_epochs
    sizes = {"actor": (size, epochs)}
    if uses_critic(cfg):
        sizes["critic"] = cfg.critic.ppo_mini_batch_size or size, cfg.critic.ppo_epochs or epochs
    return sizes


def optimizer_steps(cfg: Config, steps: int) -> dict[str, int]:
    """Optimizer steps of a run of so many steps, by trained role."""
    prompts = cfg.data.train_batch_size
    return {role: steps * num_mini_batches(prompts, *sizes) for role, sizes in update_sizes(cfg).items()}


def unreached_learning_rates(models: Mapping[str, Engine]) -> list[str]:
    """What to say about learning rates of the trained models, by role, that a run never reaches."""
    return [
        f"{role}.optim: the warm-up of {warmup} optimizer steps is longer than the run ({steps}); "
        f"the learning rate never reaches {optim.lr:g}"
        for role, optim, steps in ((role, engine.optim, engine.total_steps) for role, engine in models.items())
        if optim and (warmup := warmup_steps(optim, steps)) > steps
    ]


def due(step: int, freq: int) -> bool:
    """Whether something that happens every ``freq`` steps (0, -1: never) happens after this one."""
    return freq > 0 and step % freq == 0


def saves(cfg: Config, step: int, last: bool) -> bool:
    """Whether a checkpoint is due after this step."""
    freq = cfg.trainer.save_freq
    return freq >= 0 and (last or due(step, freq))


def exports(cfg: Config, step: int, last: bool) -> bool:
    """Whether an export is due after this step."""
    when = cfg.trainer.export
    return (when != "never" and last) or (when == "save" and saves(cfg, step, last))
