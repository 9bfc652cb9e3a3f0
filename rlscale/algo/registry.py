"""The registries of algorithms, the keys that name one, and the keywords that other keys set.

A module adds its functions where it defines them; a user's function says what it needs with `declare`.
"""

from rlscale.config.algorithms import Registry
from rlscale.config.algorithms import declare as declare  # the name that users import

ADVANTAGES = Registry(
    "advantage estimator",
    key="algorithm.adv_estimator",
    args_key="algorithm.adv_args",
    common={"gamma": "algorithm.gamma", "lam": "algorithm.lam", "norm_by_std": "algorithm.norm_adv_by_std_in_grpo"},
)
POLICY_LOSSES = Registry(
    "policy loss",
    key="actor.policy_loss",
    args_key="actor.policy_loss_args",
    common={
        "clip_low": "actor.clip_ratio_low",
        "clip_high": "actor.clip_ratio_high",
        "clip_c": "actor.clip_ratio_c",
        "is_weights": "the run",
        "statistic": "the run",
    },
)
KL = Registry("KL estimator", suffix="+")
DPO_LOSSES = Registry("DPO loss")
