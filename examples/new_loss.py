"""A policy loss of your own, used by its path:

    deepspeed launchers/train.py --yaml FILE actor.policy_loss=examples/new_loss.py:squared_ratio \
        actor.policy_loss_args.strength=0.5
"""

from rlscale.algo.registry import declare
from rlscale.algo.tokens import LossAndFlags, Tokens


# zero_at_zero_advantage is not declared: the penalty below has a gradient at every token, so none may be skipped
@declare(paper="a quadratic trust region in the ratio", bounds={"strength": {"min": 0}})
def squared_ratio(x: Tokens, *, strength: float = 1.0) -> LossAndFlags:
    """``L = -A r + strength / 2 (r - 1)^2``: the further the ratio has moved, the stronger it is pulled back.

    Returns the loss of each token ``[t]`` (its weight, by actor.loss_agg_mode, is applied by the caller) and per-token
    metrics ``[t]``. ``x.ratio``, ``x.adv``, ``x.logp``, ``x.old`` are ``[t]``; common arguments such as ``clip_low``
    reach a function that declares them as keywords.
    """
    moved = x.ratio - 1.0
    loss = -x.adv * x.ratio + 0.5 * strength * moved.square()
    return loss, {"pg_clipfrac": moved.detach().abs() > 0.2}
