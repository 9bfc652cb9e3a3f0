"""An advantage estimator of your own, used by its path:

    deepspeed launchers/train.py --yaml FILE algorithm.adv_estimator=examples/new_estimator.py:median_baseline \
        algorithm.adv_args.scale=2.0
"""

import torch
from torch import Tensor

from rlscale.algo.advantages import Batch
from rlscale.algo.registry import declare


# needs: a run with one response per prompt is refused; bounds: a scale of 0 is refused before anything is loaded
@declare(needs={"group"}, paper="the median of a group as its baseline", bounds={"scale": {"above": 0}})
def median_baseline(b: Batch, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """``scale * (S - median of the group)``: one very good response does not make the others look bad.

    Returns advantages and returns, both ``[T]``. ``b.outcome`` ``[B]`` holds the reward of each response, ``b.group``
    ``[B]`` the number of its prompt, ``b.contrast`` ``[B]`` whether there is another response to compare it with.
    """
    baseline = torch.zeros_like(b.outcome)
    for g in range(b.groups):
        members = (b.group == g) & b.usable
        if members.any():
            baseline[members] = b.outcome[members].median()
    advantage = torch.where(b.contrast, scale * (b.outcome - baseline), 0.0)
    tokens = b.to_tokens(advantage)  # every policy token of a response gets the advantage of the response
    return tokens, tokens
