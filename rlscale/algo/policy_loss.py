"""Policy losses on flat tokens, by name: weighted *sums* over tokens, so that micro-batch values simply add up.

With ``d = log pi - log pi_old``, ``r = exp(d)``, advantage ``A`` and loss weight ``w`` of a token (the aggregation mode
is in the weights, `rlscale.batch.weights`), every loss is ``sum_t w_t L_t`` and differs in ``L_t`` only: each function
here maps `Tokens` to ``L`` ``[t]`` and metrics ``[t]``. Tokens whose mask is 0 are selected away before any arithmetic,
NaN and Inf included.

Metrics are sums over policy tokens and carry their denominator, ``tokens``: add them up over micro-batches and ranks,
then divide. `rlscale.loop.report` says which of them a run logs. Four losses look beyond a token: gspo and geo_mean
read the whole sequences of a micro-batch, kl_cov and clip_cov (`rlscale.algo.covariance`) a statistic of the whole
mini-batch (`prepare`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlscale.algo.registry import POLICY_LOSSES
from rlscale.algo.segments import check_shapes
from rlscale.algo.tokens import LIMIT, LossAndFlags, Tokens, clip, surrogates
from rlscale.config.algorithms import Algorithm

_DPPO = "Qi et al. 2026, arXiv:2602.04879"
_DPPO_BOUNDS = {"div_low": {"min": 0}, "div_high": {"min": 0}, "ratio_cap": {"above": 0}}


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
    ref_logprobs: Tensor | None = None,
    statistic: Mapping[str, float] | None = None,
    **args: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The named loss of one micro-batch of whole sequences.

    Args:
        logprobs: ``[t]`` of the policy in training (gradient); cu_seqlens: ``[b+1]``; other tensors: ``[t]``.
        clip_low, clip_high: ratio kept within ``[1 - clip_low, 1 + clip_high]``; clip_c: dual clip.
        is_weights: importance weights of the sampling policy (`rlscale.algo.correction`), no gradient.
        statistic: what `prepare` returned for the mini-batch; without it, the tokens given are the whole mini-batch.
        args: further arguments of this loss.

    Returns:
        The scalar loss, and sums over tokens: ``ppo_kl`` (k1, old || new), ``ppo_k3``, ``ratio``, ``ratio_sq`` and
        those of the loss (``pg_clipfrac``, ``pg_clipfrac_lower``...), with the denominator ``tokens``.

    Raises:
        ValueError: unknown loss or argument (with the lists), shapes that disagree, or a loss from a path that returns
            something else.
    """
    check_shapes(cu_seqlens, per_token={"weights": weights, "is_weights": is_weights})
    x = _tokens(logprobs, old_logprobs, advantages, mask, cu_seqlens, ref_logprobs)
    clips = {"clip_low": clip_low, "clip_high": clip_high, "clip_c": clip_c}
    is_w = None if is_weights is None else x.clean(is_weights.detach())
    algorithm = POLICY_LOSSES.find(name)
    if algorithm.prepare is not None and not statistic:
        statistic = _statistic(algorithm, x, {**clips, **args})
    by_sequence = "is_weights" in algorithm.accepts()  # the loss itself decides how they enter
    kwargs = POLICY_LOSSES.arguments(name, {**clips, "is_weights": is_w, "statistic": statistic}, args)
    out = algorithm.function(x, **kwargs)
    _check_returned(name, out, logprobs)
    per_token, flags = out
    if is_w is not None and not by_sequence:
        per_token = per_token * is_w
    loss = (per_token * x.clean(weights)).sum()
    with torch.no_grad():
        d, ratio = x.d, x.ratio
        flags = {**flags, "ppo_kl": -d, "ppo_k3": ratio - 1.0 - d, "ratio": ratio, "ratio_sq": ratio.square()}
        metrics = {k: x.clean(v).sum() for k, v in flags.items()}
    return loss, {**metrics, "tokens": x.valid.sum()}


def _check_returned(name: str, out: Any, logprobs: Tensor) -> None:
    """Of a loss of the user's, which may return anything."""

    def per_token(value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == logprobs.shape

    if not isinstance(out, tuple) or len(out) != 2 or not per_token(out[0]) or not isinstance(out[1], dict):
        raise ValueError(f"policy loss {name} must return a tensor [t], the loss of each token, and a dict of metrics")
    if wrong := [str(key) for key, value in out[1].items() if not per_token(value)]:
        raise ValueError(f"policy loss {name} must return metrics of each token, tensors [t], not {', '.join(wrong)}")
    if logprobs.requires_grad and not out[0].requires_grad:
        raise ValueError(f"policy loss {name} returns a loss without a gradient; it must depend on logprobs")


def _tokens(logprobs: Tensor, old: Tensor, adv: Tensor, mask: Tensor, cu: Tensor, ref: Tensor | None = None) -> Tokens:
    """What a loss reads, with 0 at tokens that do not count, once the shapes are checked."""
    named = {"logprobs": logprobs, "old_logprobs": old, "advantages": adv, "mask": mask, "ref_logprobs": ref}
    check_shapes(cu, per_token=named)
    x = Tokens(logprobs, old, adv, mask > 0, cu)
    x.logp, x.old, x.adv = x.clean(logprobs), x.clean(old.detach()), x.clean(adv.detach())
    x.ref = None if ref is None else x.clean(ref.detach())
    return x


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
    """Numbers of the whole mini-batch that the named loss needs in each micro-batch, as ``statistic``; empty for most.

    ``logprobs``: of the policy as it is before this update, without gradient: the old ones before the first update
    with a rollout batch, computed anew before any other. All ``[T]``.
    """
    algorithm = POLICY_LOSSES.find(name)
    if algorithm.prepare is None:
        return {}
    x = _tokens(logprobs.detach(), old_logprobs, advantages, mask, cu_seqlens)
    return _statistic(algorithm, x, {"clip_low": clip_low, "clip_high": clip_high, **args})


def _statistic(algorithm: Algorithm, x: Tokens, given: Mapping[str, Any]) -> dict[str, float]:
    """What ``prepare`` finds in a mini-batch. It gets the arguments of the loss that it declares, or their defaults."""
    assert algorithm.prepare is not None
    values = {name: argument.default for name, argument in algorithm.arguments.items()} | dict(given)
    declared = inspect.signature(algorithm.prepare).parameters
    return dict(algorithm.prepare(x, **{k: v for k, v in values.items() if k in declared}))


@POLICY_LOSSES.register(
    "ppo",
    "vanilla",
    zero_at_zero_advantage=True,
    paper="Schulman et al. 2017, arXiv:1707.06347; Yu et al. 2025, arXiv:2503.14476",
)
def ppo(x: Tokens, *, clip_low: float, clip_high: float, clip_c: float | None = 3.0) -> LossAndFlags:
    """PPO (Schulman et al. 2017), asymmetric clip (DAPO, Yu et al. 2025), dual clip (Ye et al. 2020).

    ``L = max(-A r, -A clip(r))``; for ``A < 0`` at most ``-A clip_c``.
    """
    ratio = x.ratio
    unclipped, clipped = surrogates(x.adv, ratio, clip_low, clip_high)
    loss = torch.maximum(unclipped, clipped)
    flags = {"pg_clipfrac": clipped > unclipped}
    if clip_c is not None:
        bound = -x.adv * clip_c
        flags["pg_clipfrac_lower"] = (loss > bound) & (x.adv < 0)
        loss = torch.where(x.adv < 0, torch.minimum(loss, bound), loss)
    return loss, flags


@POLICY_LOSSES.register(
    "reinforce",
    "gpg",
    zero_at_zero_advantage=True,
    paper="Williams 1992, Machine Learning 8; Chu et al. 2025, arXiv:2504.02546",
)
def reinforce(x: Tokens) -> LossAndFlags:
    """Policy gradient (Williams 1992; GPG, Chu et al. 2025): ``L = -A log pi``."""
    return -x.adv * x.logp, {}


@POLICY_LOSSES.register("gspo", zero_at_zero_advantage=True, paper="Zheng et al. 2025, arXiv:2507.18071")
def gspo(x: Tokens, *, clip_low: float, clip_high: float) -> LossAndFlags:
    """GSPO-token (Zheng et al. 2025): the ratio is the sequence's geometric mean, the gradient goes to each token.

    ``s_i = exp(mean_t d)``; ``R_t = sg(s_i) exp(log pi - sg(log pi))``; ``L = max(-A R, -A clip(R))``. Use it with
    seq-mean-token-mean weights.
    """
    s = torch.exp(x.sequence_mean(x.d.detach()).clamp(-LIMIT, LIMIT))
    ratio = s * torch.exp(x.logp - x.logp.detach())
    unclipped, clipped = surrogates(x.adv, ratio, clip_low, clip_high)
    return torch.maximum(unclipped, clipped), {"pg_clipfrac": clipped > unclipped, "seq_ratio": s}


@POLICY_LOSSES.register(
    "sapo",
    zero_at_zero_advantage=True,
    paper="Gao et al. 2025, arXiv:2511.20347",
    bounds={"tau_pos": {"above": 0}, "tau_neg": {"above": 0}},
)
def sapo(x: Tokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> LossAndFlags:
    """Soft adaptive policy optimisation (Gao et al. 2025): a sigmoid gate in place of the clip.

    ``L = -A (4 / tau) sigmoid(tau (r - 1))``, ``tau`` by the sign of ``A``. Use it with seq-mean-token-mean weights.
    """
    tau = torch.where(x.adv > 0, x.adv.new_tensor(tau_pos), x.adv.new_tensor(tau_neg))
    return -x.adv * (4.0 / tau) * torch.sigmoid(tau * (x.ratio - 1.0)), {}


@POLICY_LOSSES.register("cispo", zero_at_zero_advantage=True, paper="MiniMax 2025, arXiv:2506.13585")
def cispo(x: Tokens, *, clip_low: float, clip_high: float) -> LossAndFlags:
    """CISPO (MiniMax-M1 2025): the clipped ratio is a constant weight, so every token keeps its gradient.

    ``L = -sg(clip(r)) A log pi``.
    """
    ratio = x.ratio.detach()
    clipped = clip(ratio, clip_low, clip_high)
    return -clipped * x.adv * x.logp, {"pg_clipfrac": clipped != ratio}


@POLICY_LOSSES.register("geo_mean", zero_at_zero_advantage=True, paper="Zhao et al. 2025, arXiv:2507.20673")
def geo_mean(x: Tokens, *, clip_low: float, clip_high: float, is_weights: Tensor | None = None) -> LossAndFlags:
    """GMPO (Zhao et al. 2025): geometric mean of the token ratios, each clipped in log space on the side that helps.

    ``L_i = -mean_t(A) exp(mean_t d') exp(mean_t log w)``, the same at every token of the sequence; ``d' = min(d,
    clamp(d))`` for ``A > 0``, ``max`` for ``A < 0``, 0 for ``A = 0``. Use it with seq-mean-token-mean weights.
    """
    d = x.d
    limited = d.clamp(-clip_low, clip_high)
    side = torch.where(x.adv > 0, torch.minimum(d, limited), torch.maximum(d, limited))
    log_ratio = x.sequence_mean(torch.where(x.adv == 0, torch.zeros_like(d), side))
    loss = -x.sequence_mean(x.adv) * torch.exp(log_ratio.clamp(-LIMIT, LIMIT))
    if is_weights is not None:
        loss = loss * torch.exp(x.sequence_mean(is_weights.log()))
    outside = limited != d
    return loss, {"pg_clipfrac": outside & (x.adv > 0), "pg_clipfrac_lower": outside & (x.adv < 0)}


def _trust_region(x: Tokens, keep: Tensor, ratio_cap: float) -> LossAndFlags:
    """``L = -A sg(min(r, cap)) log pi`` at the tokens kept, 0 at the others."""
    ratio = x.ratio.detach()
    loss = torch.where(keep, -x.adv * ratio.clamp(max=ratio_cap) * x.logp, torch.zeros_like(x.logp))
    return loss, {"pg_clipfrac": ~keep, "pg_clipfrac_lower": keep & (ratio > ratio_cap)}


@POLICY_LOSSES.register("dppo_tv", zero_at_zero_advantage=True, paper=_DPPO, bounds=_DPPO_BOUNDS)
def dppo_tv(x: Tokens, *, div_low: float = 0.2, div_high: float = 0.2, ratio_cap: float = 20.0) -> LossAndFlags:
    """Divergence PPO (Qi et al. 2026), total variation: a token counts while its probability has moved by at most
    ``div_*`` in the direction of its advantage.
    """
    moved = x.logp.detach().exp() - x.old.exp()
    return _trust_region(x, torch.where(x.adv > 0, moved <= div_high, moved >= -div_low), ratio_cap)


@POLICY_LOSSES.register(
    "dppo_kl", zero_at_zero_advantage=True, paper=_DPPO, bounds=_DPPO_BOUNDS | {"eps": {"above": 0}}
)
def dppo_kl(
    x: Tokens, *, div_low: float = 0.05, div_high: float = 0.05, ratio_cap: float = 20.0, eps: float = 1e-8
) -> LossAndFlags:
    """Divergence PPO (Qi et al. 2026), binary KL between "this token" and "any other" under the old and the new policy.

    ``D = p_old (old - new) + (1 - p_old) log((1 - p_old + eps) / (1 - p + eps))``; movement back is always allowed.
    """
    logp = x.logp.detach()
    p, p_old = logp.exp(), x.old.exp()
    divergence = p_old * (x.old - logp) + (1.0 - p_old) * torch.log((1.0 - p_old + eps) / (1.0 - p + eps))
    up = (divergence <= div_high) | (p <= p_old)
    down = (divergence <= div_low) | (p >= p_old)
    return _trust_region(x, torch.where(x.adv > 0, up, down), ratio_cap)


@POLICY_LOSSES.register("dro", paper="Richemond et al. 2024, arXiv:2405.19107", bounds={"beta": {"min": 0}})
def dro(x: Tokens, *, beta: float = 0.1) -> LossAndFlags:
    """Direct reward optimisation (Richemond et al. 2024): ``L = -(A log pi - beta/2 d^2)``, quadratic trust region."""
    return -(x.logp * x.adv - 0.5 * beta * x.d.square()), {}


from rlscale.algo import covariance as covariance  # noqa: E402  registers its losses, after those above
