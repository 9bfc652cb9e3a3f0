"""Policy losses on flat tokens, by name: weighted *sums* over tokens, so that micro-batch values simply add up.

With ``d = log pi - log pi_old``, ``r = exp(d)``, advantage ``A`` and loss weight ``w`` of a token (idea 2 of the
design: the aggregation mode is in the weights, `rlscale.batch.weights`), every loss is ``sum_t w_t L_t`` and differs
in ``L_t`` only. Tokens whose mask is 0 are selected away before any arithmetic, NaN and Inf included. ``d`` is
limited to +-20 where it is exponentiated.

Metrics are sums over policy tokens and carry their denominator, ``tokens``: add them up over micro-batches and ranks,
then `finish_metrics` divides. Four losses look beyond a token: gspo and geo_mean need whole sequences in a
micro-batch (they always are); kl_cov and clip_cov choose tokens by a statistic of the whole mini-batch, which
`prepare` turns into a few numbers that are handed to every micro-batch.
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


def policy_loss(
    name: str,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    cu_seqlens: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
    is_weights: Tensor | None = None,
    **args: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The named loss of one micro-batch of whole sequences.

    Args:
        logprobs: ``[t]`` of the policy in training (gradient); old_logprobs, advantages, mask, weights: ``[t]``;
        cu_seqlens: ``[b+1]``. clip_low, clip_high: ratio kept within ``[1 - clip_low, 1 + clip_high]``; clip_c: dual
        clip.
        is_weights: ``[t]`` importance weights of the sampling policy (`rlscale.algo.correction`), no gradient.
        args: further arguments of this loss, and what `prepare` returned for the mini-batch.

    Returns:
        The scalar loss, and sums over tokens: ``ppo_kl`` (k1, old || new), ``ppo_k3``, ``ratio``, ``ratio_sq`` and
        those of the loss (``pg_clipfrac``, ``pg_clipfrac_lower``...), with the denominator ``tokens``.

    Raises:
        ValueError: unknown loss or argument (with the lists), shapes that disagree.
    """
    check_shapes(
        cu_seqlens,
        per_token={
            "logprobs": logprobs,
            "old_logprobs": old_logprobs,
            "advantages": advantages,
            "mask": mask,
            "weights": weights,
            "is_weights": is_weights,
        },
    )
    kwargs = POLICY_LOSSES.arguments(name, {"clip_low": clip_low, "clip_high": clip_high, "clip_c": clip_c}, args)
    valid = mask > 0
    zero = logprobs.new_zeros(())

    def clean(x: Tensor) -> Tensor:
        return torch.where(valid, x.to(logprobs.dtype), zero)

    tokens = Tokens(clean(logprobs), clean(old_logprobs.detach()), clean(advantages.detach()), valid, cu_seqlens)
    is_w = None if is_weights is None else clean(is_weights.detach())
    by_sequence = "is_weights" in POLICY_LOSSES.accepts(name)  # the loss itself decides how they enter
    per_token, flags = POLICY_LOSSES.get(name)(tokens, **kwargs, **({"is_weights": is_w} if by_sequence else {}))
    if is_w is not None and not by_sequence:
        per_token = per_token * is_w
    loss = (per_token * clean(weights)).sum()
    with torch.no_grad():
        d, ratio = tokens.d, tokens.ratio
        flags = {**flags, "ppo_kl": -d, "ppo_k3": ratio - 1.0 - d, "ratio": ratio, "ratio_sq": ratio.square()}
        metrics = {k: torch.where(valid, v.to(logprobs.dtype), zero).sum() for k, v in flags.items()}
    return loss, {**metrics, "tokens": valid.sum()}


def prepare(
    name: str,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    **args: Any,
) -> dict[str, float]:
    """Numbers of the whole mini-batch that the named loss needs in each micro-batch; empty for most losses.

    Call it once a mini-batch with all its tokens, and hand the result to every `policy_loss` of it. ``logprobs``: of
    the policy as it is before this update, without gradient; before the first update of a rollout batch they are the
    old ones.
    """
    if name not in PREPARE.names():
        POLICY_LOSSES.get(name)
        return {}
    check_shapes(
        cu_seqlens,
        per_token={"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages, "mask": mask},
    )
    valid = mask > 0
    zero = logprobs.new_zeros(())
    logp, old, adv = (
        torch.where(valid, x.detach().to(logprobs.dtype), zero) for x in (logprobs, old_logprobs, advantages)
    )
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


@POLICY_LOSSES.register("sapo")
def sapo(x: Tokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> LossAndFlags:
    """Soft adaptive policy optimisation (Gao et al. 2025): a sigmoid gate in place of the clip.

    ``L = -A (4 / tau) sigmoid(tau (r - 1))``, ``tau`` by the sign of ``A``. Use it with seq-mean-token-mean weights.
    """
    tau = torch.where(x.adv > 0, x.adv.new_tensor(tau_pos), x.adv.new_tensor(tau_neg))
    return -x.adv * (4.0 / tau) * torch.sigmoid(tau * (x.ratio - 1.0)), {}


@POLICY_LOSSES.register("cispo")
def cispo(x: Tokens, *, clip_low: float, clip_high: float) -> LossAndFlags:
    """CISPO (MiniMax-M1 2025): the clipped ratio is a constant weight, so every token keeps its gradient.

    ``L = -sg(clip(r)) A log pi``.
    """
    ratio = x.ratio.detach()
    clipped = _clip(ratio, clip_low, clip_high)
    return -clipped * x.adv * x.logp, {"pg_clipfrac": clipped != ratio}


@POLICY_LOSSES.register("geo_mean")
def geo_mean(x: Tokens, *, clip_low: float, clip_high: float, is_weights: Tensor | None = None) -> LossAndFlags:
    """GMPO (Zhao et al. 2025): geometric mean of the token ratios, each clipped in log space on the side that helps.

    ``L_i = -mean_t(A) exp(mean_t d') exp(mean_t log w)``, the same at every token of the sequence; ``d' = min(d,
    clamp(d))`` for ``A > 0``, ``max`` for ``A < 0``, 0 for ``A = 0``. Use it with seq-mean-token-mean weights.
    """
    d = x.d
    limited = d.clamp(-clip_low, clip_high)
    side = torch.where(x.adv > 0, torch.minimum(d, limited), torch.maximum(d, limited))
    log_ratio = x.row_mean(torch.where(x.adv == 0, torch.zeros_like(d), side))
    loss = -x.row_mean(x.adv) * torch.exp(log_ratio.clamp(-_D_LIMIT, _D_LIMIT))
    if is_weights is not None:
        loss = loss * torch.exp(x.row_mean(is_weights.log()))
    outside = limited != d
    return loss, {"pg_clipfrac": outside & (x.adv > 0), "pg_clipfrac_lower": outside & (x.adv < 0)}


def _trust_region(x: Tokens, keep: Tensor, ratio_cap: float) -> LossAndFlags:
    """``L = -A sg(min(r, cap)) log pi`` at the tokens kept, 0 at the others."""
    ratio = x.ratio.detach()
    loss = torch.where(keep, -x.adv * ratio.clamp(max=ratio_cap) * x.logp, torch.zeros_like(x.logp))
    return loss, {"pg_clipfrac": ~keep, "pg_clipfrac_lower": keep & (ratio > ratio_cap)}


@POLICY_LOSSES.register("dppo_tv")
def dppo_tv(x: Tokens, *, div_low: float = 0.2, div_high: float = 0.2, ratio_cap: float = 20.0) -> LossAndFlags:
    """Divergence PPO (2026), total variation: a token counts while its probability has moved by at most ``div_*`` in
    the direction of its advantage.
    """
    moved = x.logp.detach().exp() - x.old.exp()
    return _trust_region(x, torch.where(x.adv > 0, moved <= div_high, moved >= -div_low), ratio_cap)


@POLICY_LOSSES.register("dppo_kl")
def dppo_kl(
    x: Tokens, *, div_low: float = 0.05, div_high: float = 0.05, ratio_cap: float = 20.0, eps: float = 1e-8
) -> LossAndFlags:
    """Divergence PPO (2026), binary KL between "this token" and "any other" under the old and the new policy.

    ``D = p_old (old - new) + (1 - p_old) log((1 - p_old + eps) / (1 - p + eps))``; movement back is always allowed.
    """
    logp = x.logp.detach()
    p, p_old = logp.exp(), x.old.exp()
    divergence = p_old * (x.old - logp) + (1.0 - p_old) * torch.log((1.0 - p_old + eps) / (1.0 - p + eps))
    up = (divergence <= div_high) | (p <= p_old)
    down = (divergence <= div_low) | (p >= p_old)
    return _trust_region(x, torch.where(x.adv > 0, up, down), ratio_cap)


@POLICY_LOSSES.register("dro")
def dro(x: Tokens, *, beta: float = 0.1) -> LossAndFlags:
    """Direct reward optimisation (Richemond et al. 2024): ``L = -(A log pi - beta/2 d^2)``, quadratic trust region."""
    return -(x.logp * x.adv - 0.5 * beta * x.d.square()), {}


def _covariance(x: Tokens, mean_adv: float, mean_logp: float) -> Tensor:
    """``(A - mean A)(log pi - mean log pi)``, without gradient (Cui et al. 2025)."""
    return (x.adv - mean_adv) * (x.logp.detach() - mean_logp)


def _means(x: Tokens) -> dict[str, float]:
    n = max(int(x.valid.sum()), 1)
    return {"mean_adv": float(x.adv.sum()) / n, "mean_logp": float(x.logp.detach().sum()) / n}


@PREPARE.register("kl_cov")
def _prepare_kl_cov(x: Tokens, *, kl_cov_ratio: float = 2e-4) -> dict[str, float]:
    """Means and the covariance from which on a token is chosen: the ``max(1, floor(N ratio))`` largest are.

    Of tokens that tie at the threshold, those with the lowest lottery numbers, up to ``tie``, are chosen.
    """
    means = _means(x)
    cov, numbers = _covariance(x, **means)[x.valid], _lottery(x, 0)[x.valid]
    if not cov.numel():
        return {**means, "threshold": math.inf, "tie": 0.0}
    chosen = max(1, int(cov.numel() * kl_cov_ratio))
    threshold = cov.topk(chosen).values[-1]
    tied = numbers[cov == threshold]
    left = chosen - int((cov > threshold).sum())
    return {**means, "threshold": float(threshold), "tie": float(tied.kthvalue(left).values)}


@POLICY_LOSSES.register("kl_cov")
def kl_cov(
    x: Tokens,
    *,
    kl_coef: float = 1.0,
    kl_cov_ratio: float = 2e-4,
    mean_adv: float | None = None,
    mean_logp: float | None = None,
    threshold: float | None = None,
    tie: float | None = None,
) -> LossAndFlags:
    """KL-Cov (Cui et al. 2025): no clipping; ``L = -A r``, and ``+ kl_coef |d|`` at the tokens of largest covariance.

    ``mean_adv``, ``mean_logp``, ``threshold``, ``tie``: from `prepare`; without them the tokens given are the whole
    mini-batch.
    """
    if mean_adv is None or mean_logp is None or threshold is None or tie is None:
        given = _prepare_kl_cov(x, kl_cov_ratio=kl_cov_ratio)
        mean_adv, mean_logp, threshold, tie = (given[k] for k in ("mean_adv", "mean_logp", "threshold", "tie"))
    cov = _covariance(x, mean_adv, mean_logp)
    chosen = ((cov > threshold) | ((cov == threshold) & (_lottery(x, 0) <= tie))) & x.valid
    distance = x.d.abs()
    loss = -x.adv * x.ratio
    return torch.where(chosen, loss + kl_coef * distance, loss), {
        "mean_abs_log_ratio": distance.detach(),
        "pg_clipfrac": chosen,
    }


def _lottery(x: Tokens, seed: int) -> Tensor:
    """A number in [0, 1) a token that depends on its old log-prob, its position and the seed: the same in any
    micro-batch.
    """
    position = torch.arange(x.old.numel(), device=x.old.device) - spread(x.cu[:-1], x.cu)
    h = (
        x.old.double().view(torch.int64)
        ^ ((position + 1) * -7046029254386353131)
        ^ (seed * 0x2545F4914F6CDD1D & 0x7FFFFFFFFFFFFFFF)
    )
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        h = (h ^ ((h >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((h >> 11) & ((1 << 53) - 1)).double() / (1 << 53)


def _eligible(
    x: Tokens, means: dict[str, float], clip_low: float, clip_high: float, cov_lb: float, cov_ub: float
) -> Tensor:
    cov, ratio = _covariance(x, **means), x.ratio.detach()
    clipped = -x.adv * _clip(ratio, clip_low, clip_high) > -x.adv * ratio
    return (cov > cov_lb) & (cov < cov_ub) & ~clipped & x.valid


@PREPARE.register("clip_cov")
def _prepare_clip_cov(
    x: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    clip_cov_ratio: float = 2e-4,
    cov_lb: float = 1.0,
    cov_ub: float = 5.0,
    seed: int = 0,
) -> dict[str, float]:
    """Means and the lottery number up to which an eligible token is drawn: at most ``max(1, floor(N ratio))`` are."""
    means = _means(x)
    numbers = _lottery(x, seed)[_eligible(x, means, clip_low, clip_high, cov_lb, cov_ub)]
    drawn = min(max(1, int(int(x.valid.sum()) * clip_cov_ratio)), numbers.numel())
    return {**means, "threshold": float(numbers.kthvalue(drawn).values) if drawn else -1.0}


@POLICY_LOSSES.register("clip_cov")
def clip_cov(
    x: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    clip_cov_ratio: float = 2e-4,
    cov_lb: float = 1.0,
    cov_ub: float = 5.0,
    seed: int = 0,
    mean_adv: float | None = None,
    mean_logp: float | None = None,
    threshold: float | None = None,
) -> LossAndFlags:
    """Clip-Cov (Cui et al. 2025): PPO in which a share of the tokens with large covariance, drawn at random, gets no
    gradient.

    The draw depends on the token and ``seed`` only, so it is the same in any split. ``mean_adv``, ``mean_logp``,
    ``threshold``: from `prepare`; without them the tokens given are the whole mini-batch.
    """
    if mean_adv is None or mean_logp is None or threshold is None:
        given = _prepare_clip_cov(
            x,
            clip_low=clip_low,
            clip_high=clip_high,
            clip_cov_ratio=clip_cov_ratio,
            cov_lb=cov_lb,
            cov_ub=cov_ub,
            seed=seed,
        )
        mean_adv, mean_logp, threshold = given["mean_adv"], given["mean_logp"], given["threshold"]
    means = {"mean_adv": mean_adv, "mean_logp": mean_logp}
    drawn = _eligible(x, means, clip_low, clip_high, cov_lb, cov_ub) & (_lottery(x, seed) <= threshold)
    loss, _ = ppo(x, clip_low=clip_low, clip_high=clip_high, clip_c=None)
    return torch.where(drawn, torch.zeros_like(loss), loss), {"pg_clipfrac": drawn}
