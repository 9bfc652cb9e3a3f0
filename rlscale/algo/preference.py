"""Pairwise losses (reward models, direct preference optimisation) and supervised cross-entropy, as weighted sums.

A pair, like a token, has a weight from global counts (`pair_weights`: 1 / pairs of the whole mini-batch), so that any
split adds up to the same loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.algo.registry import DPO_LOSSES
from rlscale.algo.segments import check_alike, check_shapes, segment_sum, weighted_sum


def pair_weights(pairs: int, *, num_pairs: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[pairs]``, each ``1 / num_pairs`` (of the whole mini-batch; default: these)."""
    return torch.full((pairs,), 1.0 / max(pairs if num_pairs is None else num_pairs, 1), dtype=dtype)


def bradley_terry(
    chosen: Tensor, rejected: Tensor, weights: Tensor, margin: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """``sum_i w_i softplus(-(r_c - r_r - margin))`` (Bradley and Terry 1952; margin: Touvron et al. 2023). All ``[P]``.

    Metric sums: ``accuracy`` (``r_c > r_r``), ``reward_margin``, denominator ``pairs``.
    """
    check_alike(chosen=chosen, rejected=rejected, weights=weights, margin=margin)
    gap = chosen - rejected
    loss = (weights * F.softplus(-(gap if margin is None else gap - margin))).sum()
    return loss, _gap_sums(gap.detach())


def _gap_sums(gap: Tensor) -> dict[str, Tensor]:
    return {"accuracy": (gap > 0).sum(), "reward_margin": gap.sum(), "pairs": torch.tensor(gap.numel())}


@DPO_LOSSES.register("sigmoid")
def sigmoid(h: Tensor, *, beta: float) -> Tensor:
    """Rafailov et al. 2023: ``softplus(-beta h)``."""
    return F.softplus(-beta * h)


@DPO_LOSSES.register("cdpo", "conservative")
def conservative(h: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Mitchell 2023: labels are wrong with probability ``e``: ``(1-e) softplus(-beta h) + e softplus(beta h)``."""
    return (1.0 - label_smoothing) * F.softplus(-beta * h) + label_smoothing * F.softplus(beta * h)


@DPO_LOSSES.register("robust")
def robust(h: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Chowdhury et al. 2024, unbiased under flipped labels: ``[(1-e) softplus(-beta h) - e softplus(beta h)] /
    (1-2e)``.
    """
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing of the robust loss must lie in [0, 0.5), got {label_smoothing}")
    e = label_smoothing
    return ((1.0 - e) * F.softplus(-beta * h) - e * F.softplus(beta * h)) / (1.0 - 2.0 * e)


@DPO_LOSSES.register("hinge")
def hinge(h: Tensor, *, beta: float) -> Tensor:
    """SLiC (Zhao et al. 2023): ``max(0, 1 - beta h)``."""
    return torch.relu(1.0 - beta * h)


@DPO_LOSSES.register("ipo")
def ipo(h: Tensor, *, beta: float) -> Tensor:
    """Azar et al. 2023: ``(h - 1/(2 beta))^2``."""
    return (h - 0.5 / beta).square()


def dpo(
    name: str,
    *,
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    weights: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The named loss of ``h = (pi_c - ref_c) - (pi_r - ref_r)``, of log-probs summed over the completion. All ``[P]``.

    With lengths each log-ratio is divided by its completion's tokens first. The metrics hold the implicit rewards
    ``beta (pi - ref)``, ``[P]``, as ``chosen_reward`` and ``rejected_reward``, and the sums ``accuracy``,
    ``reward_margin`` with their denominator ``pairs``.

    Raises:
        ValueError: unknown loss, ``beta <= 0``, one length without the other, shapes that disagree.
    """
    check_alike(
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        weights=weights,
        chosen_length=chosen_length,
        rejected_length=rejected_length,
    )
    if not beta > 0:
        raise ValueError(f"beta of DPO must be above 0, got {beta}")
    chosen, rejected = policy_chosen - ref_chosen.detach(), policy_rejected - ref_rejected.detach()
    if (chosen_length is None) != (rejected_length is None):
        raise ValueError("chosen_length and rejected_length go together")
    reward_c, reward_r = (beta * chosen).detach(), (beta * rejected).detach()
    if chosen_length is not None and rejected_length is not None:
        chosen, rejected = chosen / chosen_length.clamp(min=1), rejected / rejected_length.clamp(min=1)
    kwargs = DPO_LOSSES.arguments(name, {"beta": beta, "label_smoothing": label_smoothing}, {})
    loss = (weights * DPO_LOSSES.find(name).function(chosen - rejected, **kwargs)).sum()
    return loss, {"chosen_reward": reward_c, "rejected_reward": reward_r, **_gap_sums(reward_c - reward_r)}


def sequence_logprobs(logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum of the log-probs of each sequence's counted tokens. ``[T]`` -> ``[B]``; masked NaN does not reach it."""
    check_shapes(cu_seqlens, per_token={"logprobs": logprobs, "mask": mask})
    return segment_sum(torch.where(mask > 0, logprobs, 0.0), cu_seqlens)


def token_cross_entropy(logprobs: Tensor, mask: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """`weighted_sum` of ``nll``, ``-log p_t``. All ``[t]``, aligned with the *predicted* token."""
    return weighted_sum("nll", -logprobs, mask, weights)


def supervised_targets(tokens: Tensor, mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Which logits predict which token: (positions of the logits ``[N]``, positions of their targets ``[N]``).

    A token is trained if its mask is 1 and it is not the first of its sequence: a first token has no predecessor, and
    is never predicted from the sequence that happens to stand before it in the packed sequence.
    """
    check_shapes(cu_seqlens, per_token={"tokens": tokens, "mask": mask})
    first = torch.zeros(mask.numel() + 1, dtype=torch.bool, device=mask.device)
    first[cu_seqlens[:-1]] = True
    at = ((mask > 0) & ~first[:-1]).nonzero().squeeze(1)
    return at - 1, at
