"""What the algorithms of a configuration need, from what they said where they registered."""

from __future__ import annotations

from rlscale.config.algorithms import Algorithm, Registries
from rlscale.config.schema import Config


def registries() -> Registries:
    """The registry behind each key that names an algorithm, for `rlscale.config.validate.find_violations`."""
    from rlscale.algo.advantages import ADVANTAGES
    from rlscale.algo.kl import KL
    from rlscale.algo.policy_loss import POLICY_LOSSES

    return {
        "algorithm.adv_estimator": ADVANTAGES,
        "actor.policy_loss": POLICY_LOSSES,
        "algorithm.kl_penalty": KL,
        "actor.kl_loss_type": KL,
    }


def algorithms(cfg: Config) -> list[Algorithm]:
    """The advantage estimator and the policy loss."""
    found = registries()
    return [
        found["algorithm.adv_estimator"].find(cfg.algorithm.adv_estimator),
        found["actor.policy_loss"].find(cfg.actor.policy_loss),
    ]


def uses_critic(cfg: Config) -> bool:
    """True where the run trains a value model."""
    return any("values" in a.needs for a in algorithms(cfg))


def uses_reference(cfg: Config) -> bool:
    """True where the run needs the log-probs of the policy it started from."""
    kl = cfg.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward
    return kl or any("ref_logprobs" in a.needs for a in algorithms(cfg))


def uses_old_logprobs(cfg: Config) -> bool:
    """True where the log-probs at the time of sampling are needed even if a batch has one optimizer step."""
    return cfg.algorithm.use_kl_in_reward or any("old_logprobs" in a.needs for a in algorithms(cfg))
