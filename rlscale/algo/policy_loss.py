"""Policy losses on flat tokens, by name. Each is a weighted *sum* over tokens, so that micro-batch values simply add up.

With ``d = log pi - log pi_old``, ``r = exp(d)``, advantage ``A`` and loss weight ``w`` of a token (idea 2 of the design: the
aggregation mode is in the weights, `rlscale.batch.weights`), every loss is ``sum_t w_t L_t`` and differs in ``L_t`` only.
Tokens whose mask is 0 are selected away before any arithmetic, NaN and Inf included. ``d`` is limited to +-20 where it is
exponentiated.

Metrics are sums over policy tokens and carry their denominator, ``tokens``: add them up over micro-batches and ranks, then
`finish_metrics` divides. Three losses look beyond a token: gspo and geo_mean need whole sequences in a micro-batch (they
always are); kl_cov and clip_cov choose tokens by a statistic of the whole mini-batch, which `prepare` turns into a few
numbers that are handed to every micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlscale.algo.registry import Registry
from rlscale.algo.segments import check_shapes, segment_sum, spread

POLICY_LOSSES = Registry("policy loss")
PREPARE = Registry("policy loss with a statistic of the mini-batch")
_D_LIMIT = 20.0


@dataclass
class Tokens:
    """Inputs of a policy loss, all ``[t]`` and 0 at tokens that do not count. Gradient flows into ``logp`` only."""

    logp: Tensor
    old: Tensor
    adv: Tensor
    valid: Tensor  # bool
    cu: Tensor  # [b+1]

    @property
    def d(self) -> Tensor:
        return self.logp - self.old

    @property
    def ratio(self) -> Tensor:
        return torch.exp(self.d.clamp(-_D_LIMIT, _D_LIMIT))

    def row_mean(self, x: Tensor) -> Tensor:
        """Mean over the policy tokens of its sequence, at each token. ``[t]`` -> ``[t]``."""
        n = segment_sum(self.valid.to(x.dtype), self.cu).clamp(min=1.0)
        return spread(segment_sum(torch.where(self.valid, x, x.new_zeros(())), self.cu) / n, self.cu)


LossAndFlags = tuple[Tensor, dict[str, Tensor]]  # L [t], per-token metrics [t]


def policy_loss(name: str, *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor,
                cu_seqlens: Tensor, clip_low: float = 0.2, clip_high: float = 0.2, clip_c: float | None = 3.0,
                is_weights: Tensor | None = None, **args: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The named loss of one micro-batch of whole sequences.

    Args:
        logprobs: ``[t]`` of the policy in training (gradient); old_logprobs, advantages, mask, weights: ``[t]``;
        cu_seqlens: ``[b+1]``. clip_low, clip_high: ratio kept within ``[1 - clip_low, 1 + clip_high]``; clip_c: dual clip.
        is_weights: ``[t]`` importance weights of the sampling policy (`rlscale.algo.correction`), no gradient.
        args: further arguments of this loss, and what `prepare` returned for the mini-batch.

    Returns:
        The scalar loss, and sums over tokens: ``ppo_kl`` (k1, old || new), ``ppo_k3``, ``ratio``, ``ratio_sq`` and those of the
        loss (``pg_clipfrac``, ``pg_clipfrac_lower``...), with the denominator ``tokens``.

    Raises:
        ValueError: unknown loss or argument (with the lists), shapes that disagree.
    """
    check_shapes(cu_seqlens, per_token={"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages,
                                        "mask": mask, "weights": weights, "is_weights": is_weights})
    kwargs = POLICY_LOSSES.arguments(name, {"clip_low": clip_low, "clip_high": clip_high, "clip_c": clip_c}, args)
    valid = mask > 0
    zero = logprobs.new_zeros(())

    def clean(x: Tensor) -> Tensor:
        return torch.where(valid, x.to(logprobs.dtype), zero)

    tokens = Tokens(clean(logprobs), clean(old_logprobs.detach()), clean(advantages.detach()), valid, cu_seqlens)
    is_w = None if is_weights is None else clean(is_weights.detach())
    by_sequence = "is_weights" in POLICY_LOSSES.accepts(name)  # the loss itself decides how the weights of a sequence enter
    per_token, flags = POLICY_LOSSES.get(name)(tokens, **kwargs, **({"is_weights": is_w} if by_sequence else {}))
    if is_w is not None and not by_sequence:
        per_token = per_token * is_w
    loss = (per_token * clean(weights)).sum()
    with torch.no_grad():
        d, ratio = tokens.d, tokens.ratio
        flags = {**flags, "ppo_kl": -d, "ppo_k3": ratio - 1.0 - d, "ratio": ratio, "ratio_sq": ratio.square()}
        metrics = {k: torch.where(valid, v.to(logprobs.dtype), zero).sum() for k, v in flags.items()}
    return loss, {**metrics, "tokens": valid.sum()}


def prepare(name: str, *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor,
            clip_low: float = 0.2, clip_high: float = 0.2, **args: Any) -> dict[str, float]:
    """Numbers of the whole mini-batch that the named loss needs in each micro-batch; empty for most losses.

    Call it once a mini-batch with all its tokens, and hand the result to every `policy_loss` of it. ``logprobs``: of the
    policy as it is before this update, without gradient; before the first update of a rollout batch they are the old ones.
    """
    if name not in PREPARE.names():
        POLICY_LOSSES.get(name)
        return {}
    valid = mask > 0
    zero = logprobs.new_zeros(())
    logp, old, adv = (torch.where(valid, x.detach().to(logprobs.dtype), zero) for x in (logprobs, old_logprobs, advantages))
    kwargs = PREPARE.arguments(name, {"clip_low": clip_low, "clip_high": clip_high}, {})
    kwargs |= {k: v for k, v in args.items() if k in PREPARE.accepts(name)}
    return PREPARE.get(name)(Tokens(logp, old, adv, valid, cu_seqlens), **kwargs)


def finish_metrics(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Means of summed metrics: each divided by ``tokens``; ``ratio_std`` from the sums of ratio and its square."""
    tokens = max(float(sums.get("tokens", 0.0)), 1.0)
    out = {k: float(v) / tokens for k, v in sums.items() if k not in ("tokens", "ratio_sq")}
    if "ratio_sq" in sums:
        out["ratio_std"] = math.sqrt(max(float(sums["ratio_sq"]) / tokens - out["ratio"] ** 2, 0.0))
    return out


def _clip(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(1.0 - low, 1.0 + high)


@POLICY_LOSSES.register("ppo", "vanilla")
def ppo(x: Tokens, *, clip_low: float, clip_high: float, clip_c: float | None = 3.0) -> LossAndFlags:
    """PPO (Schulman et al. 2017), asymmetric clip (DAPO, Yu et al. 2025), dual clip (Ye et al. 2020).

    ``L = max(-A r, -A clip(r))``; for ``A < 0`` at most ``-A clip_c``.
    """
    ratio = x.ratio
    unclipped, clipped = -x.adv * ratio, -x.adv * _clip(ratio, clip_low, clip_high)
    loss = torch.maximum(unclipped, clipped)
    flags = {"pg_clipfrac": clipped > unclipped}
    if clip_c is not None:
        bound = -x.adv * clip_c
        flags["pg_clipfrac_lower"] = (loss > bound) & (x.adv < 0)
        loss = torch.where(x.adv < 0, torch.minimum(loss, bound), loss)
    return loss, flags


@POLICY_LOSSES.register("reinforce", "gpg")
def reinforce(x: Tokens) -> LossAndFlags:
    """Policy gradient (Williams 1992; GPG, Chu et al. 2025): ``L = -A log pi``."""
    return -x.adv * x.logp, {}


@POLICY_LOSSES.register("gspo")
def gspo(x: Tokens, *, clip_low: float, clip_high: float) -> LossAndFlags:
    """GSPO-token (Zheng et al. 2025): the ratio is the sequence's geometric mean, the gradient goes to each token.

    ``s_i = exp(mean_t d)``; ``R_t = sg(s_i) exp(log pi - sg(log pi))``; ``L = max(-A R, -A clip(R))``. Use it with
    seq-mean-token-mean weights.
    """
    s = torch.exp(x.row_mean(x.d.detach()).clamp(-_D_LIMIT, _D_LIMIT))
    ratio = s * torch.exp(x.logp - x.logp.detach())
    unclipped, clipped = -x.adv * ratio, -x.adv * _clip(ratio, clip_low, clip_high)
    return torch.maximum(unclipped, clipped), {"pg_clipfrac": clipped > unclipped, "seq_ratio": s}
