"""Advantage estimators on flat tokens, by name.

Rules that hold for all of them: a token whose mask is 0 takes no part and has advantage 0; statistics are those of the
whole batch that is given (global counts); a sequence without tokens, or with a reward that is not finite, is outside
every statistic and has advantage 0; a group of one has no contrast, so its advantage is 0 in every group estimator;
equal rewards give exactly 0. Arithmetic is in float64, the result has the dtype of the rewards.

Rewards are per token; the outcome of a sequence is ``S_i = sum_t r_t`` over its policy tokens. An estimator maps a
`Batch`, where the shapes of the inputs stand, to advantages ``[T]`` and returns ``[T]``.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlscale.algo.dynamic_sampling import groups_with_contrast
from rlscale.algo.registry import ADVANTAGES
from rlscale.algo.segments import (
    any_valid,
    check_shapes,
    compress,
    cumulative,
    keep_valid,
    positive,
    reverse_scan,
    sequence_counts,
    sequence_sums,
    spread,
    whiten,
)

_GRPO = "Shao et al. 2024, arXiv:2402.03300; Liu et al. 2025, arXiv:2503.20783"
_ABOVE_0 = {"eps": {"above": 0}}
Inputs = dict[str, Tensor | None]
Estimate = tuple[Tensor, Tensor]  # advantages [T], returns [T]


@dataclass
class Advantages:
    """``metrics``: counts ``invalid_rewards``, ``singleton_groups`` (one usable sequence) and ``zero_std_groups``
    (several, all with the same outcome), ``groups``.
    """

    advantages: Tensor  # [T]
    returns: Tensor  # [T]
    metrics: dict[str, float]


@dataclass
class Batch:
    """What the estimators read."""

    rewards: Tensor  # [T], anything where ``valid`` is false
    valid: Tensor  # [T] bool: policy tokens of usable sequences
    cu: Tensor  # [B+1]
    group: Tensor  # [B] int64, 0..G-1
    usable: Tensor  # [B] bool: at least one policy token, finite reward
    outcome: Tensor  # [B] float64: S_i
    dtype: torch.dtype  # of the result
    values: Tensor | None = None  # [T]
    baselines: Tensor | None = None  # [B]
    components: Tensor | None = None  # [C, B]
    old_logprobs: Tensor | None = None  # [T]
    ref_logprobs: Tensor | None = None  # [T]
    sum_pi_squared: Tensor | None = None  # [T]
    is_weights: Tensor | None = None  # [T]

    @cached_property
    def lengths(self) -> Tensor:
        """``[B]`` float64 policy tokens."""
        return sequence_counts(self.valid, self.cu)

    @cached_property
    def r(self) -> Tensor:
        """``[T]`` float64 rewards, 0 where ``valid`` is false."""
        return torch.where(self.valid, self.rewards.double(), 0.0)

    @cached_property
    def groups(self) -> int:
        return int(self.group.max()) + 1 if self.group.numel() else 0

    def per_group(self, x: Tensor) -> Tensor:
        """Sum of ``x`` ``[B]`` over the usable sequences of each group: ``[G]``."""
        return x.new_zeros(self.groups).index_add_(0, self.group, torch.where(self.usable, x, 0.0))

    @cached_property
    def size(self) -> Tensor:
        """``[B]`` float64 usable sequences in the group of each sequence."""
        return self.per_group(torch.ones_like(self.outcome))[self.group]

    @cached_property
    def contrast(self) -> Tensor:
        """``[B]`` bool: usable, in a group of at least two usable ones."""
        return self.usable & (self.size > 1)

    def shifted(self, score: Tensor) -> Tensor:
        """``score`` less its group's minimum: equal scores become exactly 0 before any mean is taken. ``[B]``."""
        score = torch.where(self.usable, score, torch.inf)
        low = score.new_full((self.groups,), torch.inf).scatter_reduce_(0, self.group, score, "amin")
        return torch.where(self.usable, score - low[self.group], 0.0)

    def centred(self, score: Tensor) -> Tensor:
        """``score - mean`` of the group; 0 without contrast. ``[B]``."""
        x = self.shifted(score)
        x = x - self.per_group(x)[self.group] / self.size.clamp(min=1.0)
        return torch.where(self.contrast, x, 0.0)

    def group_std(self, score: Tensor) -> Tensor:
        """Unbiased standard deviation of the group of each sequence; 0 without contrast. ``[B]``."""
        x = self.centred(score)
        return (self.per_group(x.square())[self.group] / (self.size - 1.0).clamp(min=1.0)).sqrt()

    def to_tokens(self, x: Tensor) -> Tensor:
        """``[B]`` finite values -> ``[T]`` in the dtype of the result, 0 at tokens that take no part."""
        return keep_valid(spread(x.to(self.dtype), self.cu), self.valid)

    def discounted(self, gamma: float) -> Tensor:
        """``G_t = r_t + gamma G_next`` over policy tokens (others are no step and no discount). ``[T]``."""
        if bool(self.valid.all()):
            return reverse_scan(self.r, gamma, self.cu)
        at, cu = compress(self.valid, self.cu)
        return self.at_tokens(at, reverse_scan(self.r[at], gamma, cu))

    def at_tokens(self, at: Tensor, x: Tensor) -> Tensor:
        """``x`` ``[N]`` at the given tokens ``[N]``, 0 elsewhere. ``[T]`` float64."""
        return torch.zeros_like(self.r).index_put_((at,), x)


def estimate_advantages(
    name: str,
    *,
    token_rewards: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    group: Tensor | None = None,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_by_std: bool = True,
    baselines: Tensor | None = None,
    components: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    is_weights: Tensor | None = None,
    **args: Any,
) -> Advantages:
    """Advantages and returns of a whole batch under the named estimator.

    Args:
        token_rewards, mask: ``[T]``; cu_seqlens: ``[B+1]``; group: ``[B]`` integers, equal for responses to one prompt.
        components: ``[C, B]``, baselines: ``[B]`` (reward of a greedy response), others ``[T]``: where they are needed.
        gamma: discount per policy token; lam: lambda of GAE; norm_by_std: divide by the group's std; args: its own.

    A reward that is not finite is left out, with a warning that names its sequence.

    Raises:
        ValueError: unknown estimator or argument, shapes that disagree, a needed input that is missing or not finite,
            or an estimator from a path that returns something else.
    """
    algorithm = ADVANTAGES.find(name)
    given = dict(values=values, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
    given |= dict(sum_pi_squared=sum_pi_squared, is_weights=is_weights)
    per_sequence = dict(baselines=baselines, components=components)
    check_shapes(
        cu_seqlens,
        per_token={"token_rewards": token_rewards, "mask": mask, **given},
        per_sequence={"group": group, "baselines": baselines},
    )
    size = cu_seqlens.numel() - 1
    if components is not None and (components.dim() != 2 or components.shape[1] != size):
        raise ValueError(f"components has shape {tuple(components.shape)}, [C, {size}] is needed: one per sequence")
    kwargs = ADVANTAGES.arguments(name, {"gamma": gamma, "lam": lam, "norm_by_std": norm_by_std}, args)
    valid = positive(mask)
    _check_needed(name, algorithm.needs, valid, given, per_sequence)
    valid, usable, outcome, invalid = _usable(token_rewards, valid, cu_seqlens, components)
    dtype = token_rewards.dtype if token_rewards.is_floating_point() else torch.float32
    group = torch.arange(size, device=mask.device) if group is None else torch.unique(group, return_inverse=True)[1]
    batch = Batch(token_rewards, valid, cu_seqlens, group, usable, outcome, dtype, **given, **per_sequence)
    out = algorithm.function(batch, **kwargs)
    if not isinstance(out, tuple) or [getattr(x, "shape", None) for x in out] != [valid.shape] * 2:
        raise ValueError(f"advantage estimator {name} must return two tensors, advantages and returns, of [T] each")
    return Advantages(out[0].to(dtype), out[1].to(dtype), _group_metrics(batch, invalid))


def _usable(rewards: Tensor, valid: Tensor, cu: Tensor, components: Tensor | None) -> tuple[Tensor, ...]:
    """Tokens ``[T]`` of sequences with a finite reward; which are usable, and outcomes, ``[B]``; numbers left out."""
    outcome = sequence_sums(rewards, valid, cu)
    finite = torch.isfinite(outcome)
    if components is not None:
        finite &= torch.isfinite(components).all(0)
    invalid = (~finite).nonzero().squeeze(1)
    if invalid.numel():
        message = f"{invalid.numel()} of {outcome.numel()} rewards are not finite: sequences {invalid.tolist()[:20]}"
        warnings.warn(message + "; they are left out", stacklevel=3)
        valid = valid & spread(finite, cu)
    return valid, finite & any_valid(valid, cu), outcome, invalid


def _check_needed(name: str, needs: Collection[str], valid: Tensor, per_token: Inputs, per_sequence: Inputs) -> None:
    """What the estimator reads is there and finite: one NaN would spread over the whole batch by whitening."""
    for need, x in {**per_token, **per_sequence}.items():
        if x is None and need in needs:
            raise ValueError(f"advantage estimator {name} needs {need}")
    for need, x in per_token.items():
        if x is not None and need in (*needs, "is_weights") and not bool(torch.isfinite(x[valid]).all()):
            bad = (valid & ~torch.isfinite(x)).nonzero().squeeze(1).tolist()
            raise ValueError(f"{need} is not finite at {len(bad)} policy tokens, the first at {bad[:20]}")
    baselines = per_sequence["baselines"]
    if baselines is not None and (bad := (~torch.isfinite(baselines)).nonzero().squeeze(1).tolist()):
        raise ValueError(f"baselines are not finite: sequences {bad[:20]}")


def _group_metrics(b: Batch, invalid: Tensor) -> dict[str, float]:
    """Counts of the groups that give no signal."""
    size = b.per_group(torch.ones_like(b.outcome))
    contrast = groups_with_contrast(torch.where(b.usable, b.outcome, torch.nan), b.group)
    return {
        "invalid_rewards": float(invalid.numel()),
        "groups": float((size > 0).sum()),
        "singleton_groups": float((size == 1).sum()),
        "zero_std_groups": float((size > 1).sum() - contrast.numel()),
    }


@ADVANTAGES.register("gae", needs={"values"}, paper="Schulman et al. 2016, arXiv:1506.02438")
def gae(b: Batch, *, gamma: float = 1.0, lam: float = 1.0, whiten_advantages: bool = True) -> Estimate:
    """Generalised advantage estimation (Schulman et al. 2016) over policy tokens; returns ``A + V``.

    ``delta_t = r_t + gamma V_next - V_t``, ``A_t = delta_t + gamma lam A_next``, "next" being the next policy token.
    """
    values = b.values
    assert values is not None
    at, cu = compress(b.valid, b.cu)
    v = values[at].double()
    following = torch.zeros_like(v)
    following[:-1] = v[1:]
    following[cu[1:][cu.diff() > 0] - 1] = 0.0
    advantage = reverse_scan(b.r[at] + gamma * following - v, gamma * lam, cu)
    out, returns = b.at_tokens(at, advantage), b.at_tokens(at, advantage + v)
    return (whiten(out, b.valid) if whiten_advantages else out), returns


@ADVANTAGES.register("grpo", needs={"group"}, paper=_GRPO, bounds=_ABOVE_0)
def grpo(b: Batch, *, norm_by_std: bool = True, eps: float = 1e-6) -> Estimate:
    """Group-relative outcome (Shao et al. 2024, DeepSeekMath): ``(S - mean) / (std + eps)``.

    ``norm_by_std`` false: ``S - mean`` (Dr. GRPO, Liu et al. 2025).
    """
    a = b.centred(b.outcome)
    if norm_by_std:
        a = a / (b.group_std(b.outcome) + eps)
    tokens = b.to_tokens(a)
    return tokens, tokens


@ADVANTAGES.register("rloo", needs={"group"}, paper="Ahmadian et al. 2024, arXiv:2402.14740")
def rloo(b: Batch, *, norm_by_loo_std: bool = False) -> Estimate:
    """Leave-one-out baseline (Ahmadian et al. 2024): ``S - mean of the others = n/(n-1) (S - mean)``.

    ``norm_by_loo_std``: divided by the standard deviation of the others, unless they are all equal.
    """
    x = b.centred(b.outcome)
    a = x * b.size / (b.size - 1.0).clamp(min=1.0)
    if norm_by_loo_std:
        std, scale = torch.zeros_like(x), torch.zeros_like(x)
        for g in range(b.groups):
            at = (b.usable & (b.group == g)).nonzero().squeeze(1)
            if (n := at.numel()) > 2:
                # from the others themselves: a difference of sums of squares would cancel
                others = x[at].expand(n, -1)[~torch.eye(n, dtype=torch.bool, device=x.device)]
                std[at], scale[at] = others.view(n, -1).std(1), x[at].abs().max()
        # others that differ by no more than rounding are equal: their deviation is noise
        a = torch.where(std > 1e-6 * scale, a / std.clamp(min=torch.finfo(std.dtype).tiny), a)
    tokens = b.to_tokens(a)
    return tokens, tokens


@ADVANTAGES.register("reinforce", paper="Williams 1992, Machine Learning 8")
def reinforce(b: Batch, *, gamma: float = 1.0) -> Estimate:
    """Discounted return (Williams 1992), no baseline."""
    returns = b.discounted(gamma)
    return returns, returns


@ADVANTAGES.register("reinforce_plus_plus", paper="Hu 2025, arXiv:2501.03262")
def reinforce_plus_plus(b: Batch, *, gamma: float = 1.0) -> Estimate:
    """REINFORCE++ (Hu 2025): discounted return, whitened over all tokens of the batch."""
    returns = b.discounted(gamma)
    return whiten(returns, b.valid), returns


@ADVANTAGES.register("reinforce_plus_plus_baseline", needs={"group"}, paper="Hu 2025, arXiv:2501.03262")
def reinforce_plus_plus_baseline(b: Batch) -> Estimate:
    """REINFORCE++ with the group mean as baseline (Hu 2025): ``S - mean``, whitened over the tokens with contrast."""
    tokens = whiten(spread(b.centred(b.outcome), b.cu), b.valid & spread(b.contrast, b.cu))
    return tokens, tokens


@ADVANTAGES.register("remax", needs={"baselines"}, paper="Li et al. 2023, arXiv:2310.10505")
def remax(b: Batch) -> Estimate:
    """ReMax (Li et al. 2023): reward to come, less the reward of the greedy response to the prompt (``baselines``)."""
    returns = b.discounted(1.0)
    assert b.baselines is not None
    return torch.where(b.valid, returns - spread(b.baselines.double(), b.cu), 0.0), returns


@ADVANTAGES.register("opo", needs={"group"}, paper="Hao et al. 2025, arXiv:2505.23585")
def opo(b: Batch) -> Estimate:
    """On-policy with the optimal baseline (Hao et al. 2025): the group mean weighted by length."""
    x = b.shifted(b.outcome)
    x = x - (b.per_group(b.lengths * x) / b.per_group(b.lengths).clamp(min=1.0))[b.group]
    tokens = b.to_tokens(torch.where(b.contrast, x, 0.0))
    return tokens, tokens


@ADVANTAGES.register("gpg", needs={"group"}, paper="Chu et al. 2025, arXiv:2504.02546")
def gpg(b: Batch) -> Estimate:
    """Group policy gradient (Chu et al. 2025): ``(B / #{S != 0}) (S - mean)``, over the usable sequences."""
    informative = (b.usable & (b.outcome != 0)).sum().clamp(min=1)
    tokens = b.to_tokens(b.centred(b.outcome) * (b.usable.sum() / informative))
    return tokens, tokens


@ADVANTAGES.register("grpo_passk", needs={"group"}, paper="Chen et al. 2025, arXiv:2508.10751", bounds=_ABOVE_0)
def grpo_passk(b: Batch, *, norm_by_std: bool = True, eps: float = 1e-6) -> Estimate:
    """Pass@k advantage (Chen et al. 2025): only the best of a group learns, by its lead over the second; 0 if tied."""
    score = torch.where(b.usable, b.outcome, -torch.inf)
    order = torch.argsort(score, stable=True)
    order = order[torch.argsort(b.group[order], stable=True)]  # by group, ascending within it
    last = torch.bincount(b.group, minlength=b.groups).cumsum(0) - 1
    best, second = order[last], order[(last - 1).clamp(min=0)]
    a = torch.zeros_like(score)
    a[best] = torch.where(b.contrast[best], score[best] - score[second], 0.0)
    if norm_by_std:
        a = a / (b.group_std(b.outcome) + eps)
    tokens = b.to_tokens(a)
    return tokens, tokens


@ADVANTAGES.register("gdpo", needs={"group", "components"}, paper="Liu et al. 2026, arXiv:2601.05242", bounds=_ABOVE_0)
def gdpo(b: Batch, *, weights: list[float] | None = None, eps: float = 1e-6) -> Estimate:
    """Group reward-decoupled normalisation (Liu et al. 2026): the grpo rule for each reward component apart, their
    weighted sum, whitened over the tokens with contrast. ``weights``: one number per component (default 1).
    """
    assert b.components is not None
    components = b.components.double()
    factors = [1.0] * components.shape[0] if weights is None else weights
    if len(factors) != components.shape[0]:
        raise ValueError(f"gdpo has {components.shape[0]} reward components, but {len(factors)} weights")
    a = torch.zeros_like(b.outcome)
    for score, factor in zip(components, factors, strict=True):
        a = a + factor * b.centred(score) / (b.group_std(score) + eps)
    tokens = whiten(spread(a, b.cu), b.valid & spread(b.contrast, b.cu))
    return tokens, tokens


@ADVANTAGES.register(
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    needs={"group", "old_logprobs", "sum_pi_squared"},
    paper="Li and Liu 2025, optimal token baseline",
    bounds={"epsilon": {"above": 0}},
)
def optimal_token_baseline(b: Batch, *, epsilon: float = 1e-8, handle_zero_tail: bool = True) -> Estimate:
    """A baseline for each group and position that minimises the variance of the gradient.

    The squared norm of a token's score function is estimated by ``w_t = 1 - 2 pi_t + sum_v pi(v)^2`` (times the
    square of the importance weight), ``W_t`` is its running sum, ``G_t`` the reward to come, and ``b_t = sum G W /
    (sum W + epsilon)`` over the group's sequences with a policy token at position ``t`` (counted in policy tokens).
    ``handle_zero_tail``: where only one of them is left, the baseline is 0.
    """
    old, squares = b.old_logprobs, b.sum_pi_squared
    assert old is not None and squares is not None
    at, cu = compress(b.valid, b.cu)
    w = 1.0 - 2.0 * old[at].double().exp() + squares[at].double()
    if b.is_weights is not None:
        w = w * b.is_weights[at].double().square()
    running, to_come = cumulative(w, cu), reverse_scan(b.r[at], 1.0, cu)
    lengths = cu.diff()
    sequence = torch.repeat_interleave(torch.arange(lengths.numel(), device=at.device), lengths)
    position = torch.arange(at.numel(), device=at.device) - cu[sequence]
    width = int(lengths.max()) if lengths.numel() else 0
    cell = b.group[sequence] * width + position
    top, bottom = (w.new_zeros(b.groups * width).index_add_(0, cell, x) for x in (to_come * running, running))
    baseline = (top / (bottom + epsilon))[cell]
    if handle_zero_tail:
        baseline = torch.where(torch.bincount(cell)[cell] > 1, baseline, 0.0)
    advantage = torch.where(b.contrast[sequence], to_come - baseline, 0.0)
    return b.at_tokens(at, advantage), b.at_tokens(at, to_come)
