"""What a policy loss reads: one micro-batch of sequences.

A loss is a function of `Tokens` and keyword arguments that returns the loss of each token ``[t]``, without its weight,
and per-token metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.algo.segments import segment_sum, spread

LIMIT = 20.0  # of a log-ratio where it is exponentiated


@dataclass
class Tokens:
    """Inputs of a policy loss, all ``[t]`` and 0 at tokens that do not count. Gradient flows into ``logp`` only."""

    logp: Tensor
    old: Tensor
    adv: Tensor
    valid: Tensor  # bool
    cu: Tensor  # [b+1]
    ref: Tensor | None = None  # log-probs of the reference policy, for losses that need "ref_logprobs"

    @property
    def d(self) -> Tensor:
        return self.logp - self.old

    @property
    def ratio(self) -> Tensor:
        return torch.exp(self.d.clamp(-LIMIT, LIMIT))

    def clean(self, x: Tensor) -> Tensor:
        """``x`` in the dtype of the log-probs, 0 at tokens that do not count. ``[t]`` -> ``[t]``."""
        return torch.where(self.valid, x.to(self.logp.dtype), 0.0)

    def sequence_mean(self, x: Tensor) -> Tensor:
        """Mean over the policy tokens of its sequence, at each token. ``[t]`` -> ``[t]``."""
        n = segment_sum(self.valid.to(x.dtype), self.cu).clamp(min=1.0)
        return spread(segment_sum(torch.where(self.valid, x, 0.0), self.cu) / n, self.cu)


LossAndFlags = tuple[Tensor, dict[str, Tensor]]  # L [t], per-token metrics [t]


def clip(ratio: Tensor, low: float, high: float) -> Tensor:
    """The ratio kept within ``[1 - low, 1 + high]``. ``[t]`` -> ``[t]``."""
    return ratio.clamp(1.0 - low, 1.0 + high)


def surrogates(adv: Tensor, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``-A r`` and ``-A clip(r)``; PPO's loss is the larger one (Schulman et al. 2017). All ``[t]``."""
    return -adv * ratio, -adv * clip(ratio, low, high)
