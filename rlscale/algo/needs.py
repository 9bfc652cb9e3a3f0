"""What the algorithms of a configuration need, from what they said where they registered."""

from __future__ import annotations

from rlscale.config.algorithms import Registries
from rlscale.config.schema import Config


def registries() -> Registries:
    """The registry behind each key that names an algorithm, for `rlscale.config.validate.find_violations`."""
    from rlscale.algo.advantages import ADVANTAGES  # imports torch
    from rlscale.algo.kl import KL
    from rlscale.algo.policy_loss import POLICY_LOSSES

    return {
        "algorithm.adv_estimator": ADVANTAGES,
        "actor.policy_loss": POLICY_LOSSES,
        "algorithm.kl_penalty": KL,
        "actor.kl_loss_type": KL,
    }


def _any_needs(cfg: Config, need: str) -> bool:
    """Whether the advantage estimator or the policy loss needs it."""
    chosen = {"algorithm.adv_estimator": cfg.algorithm.adv_estimator, "actor.policy_loss": cfg.actor.policy_loss}
    found = registries()
    return any(need in found[key].find(name).needs for key, name in chosen.items())


def uses_critic(cfg: Config) -> bool:
    """True where the run trains a value model."""
    return _any_needs(cfg, "values")


def uses_reference(cfg: Config) -> bool:
    """True where the run needs the log-probs of the policy it started from."""
    return cfg.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward or _any_needs(cfg, "ref_logprobs")


def uses_old_logprobs(cfg: Config) -> bool:
    """True where the log-probs at the time of sampling are needed even if a batch has one optimizer step."""
    return cfg.algorithm.use_kl_in_reward or _any_needs(cfg, "old_logprobs")
