"""From one score per response to token rewards: placement, KL penalty, length terms, clipping and scaling."""

from __future__ import annotations

import torch
from torch import Tensor

from rlscale.algo.kl import kl
from rlscale.algo.segments import check_alike, check_shapes, compress, segment_sum


def place_rewards(scores: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Each response's score at its last policy token, 0 elsewhere. ``scores``: ``[B]``, ``mask``: ``[T]`` -> ``[T]`` in
    the dtype of the scores.

    A response without policy tokens gets none: an observation must not carry a reward that no estimator reads, which
    would only change the sum of rewards that is reported.

    Raises:
        ValueError: one score for several sequences, or any other disagreement of shapes.
    """
    check_shapes(cu_seqlens, per_token={"mask": mask}, per_sequence={"scores": scores})
    at, cu = compress(mask > 0, cu_seqlens)
    has = cu.diff() > 0
    out = torch.zeros(mask.numel(), dtype=scores.dtype, device=mask.device)
    out[at[cu[1:][has] - 1]] = scores[has]
    return out


def kl_in_reward(
    token_scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    kind: str,
    beta: float,
) -> tuple[Tensor, float]:
    """``r_t = score_t - beta k_t`` at policy tokens (Ziegler et al. 2019).

    All ``[T]``. Returns the token rewards ``[T]`` (0 at masked positions) and the mean over responses of their mean
    KL per token, which is what the controller of ``beta`` reads.

    Raises:
        ValueError: unknown estimator, shapes that disagree.
    """
    check_shapes(
        cu_seqlens,
        per_token={"token_scores": token_scores, "logprobs": logprobs, "ref_logprobs": ref_logprobs, "mask": mask},
    )
    valid = mask > 0
    with torch.no_grad():
        per_token = kl(kind, *(torch.where(valid, x.to(logprobs.dtype), 0.0) for x in (logprobs, ref_logprobs)))
        n = segment_sum(valid.to(per_token.dtype), cu_seqlens)
        means = (segment_sum(per_token, cu_seqlens) / n.clamp(min=1.0))[n > 0]
        mean_kl = float(means.mean()) if means.numel() else 0.0
        return torch.where(valid, token_scores - beta * per_token.to(token_scores.dtype), 0.0), mean_kl


def overlong_penalty(lengths: Tensor, *, max_response_length: int, buffer: int, penalty_factor: float = 1.0) -> Tensor:
    """Soft overlong punishment (DAPO, Yu et al. 2025, eq. 13), added to the score of a response.

    0 up to ``max - buffer`` tokens, then falling linearly to ``-penalty_factor`` from ``max`` on. ``[B]`` -> ``[B]``.

    Raises:
        ValueError: ``buffer`` not in ``[1, max_response_length]``.
    """
    if not 1 <= buffer <= max_response_length:
        raise ValueError(f"the overlong buffer must lie in [1, {max_response_length}], got {buffer}")
    excess = lengths.to(torch.promote_types(lengths.dtype, torch.float32)) - (max_response_length - buffer)
    return -(excess / buffer).clamp(0.0, 1.0) * penalty_factor


def clip_and_scale(
    scores: Tensor, *, low: float | None = None, high: float | None = None, scale: float = 1.0, shift: float = 0.0
) -> Tensor:
    """``clip(scores, low, high) * scale + shift``. ``[B]`` -> ``[B]``."""
    if low is not None and high is not None and low > high:
        raise ValueError(f"rewards are clipped to [{low}, {high}], which is empty")
    return (scores if low is None and high is None else scores.clamp(low, high)) * scale + shift


def length_reward(lengths: Tensor, scores: Tensor, group: Tensor, *, correct_above: float = 0.5) -> Tensor:
    """Length-aware reward (Kimi k1.5, section 2.3.3): in a group, shorter is better, but no bonus for a wrong answer.

    ``lambda = 0.5 - (len - min) / (max - min)`` over the group; a right response (score above ``correct_above``) gets
    ``lambda``, a wrong one ``min(0, lambda)``; 0 where all lengths of the group are equal. Add it, scaled, to the
    scores. All ``[B]``.
    """
    check_alike(lengths=lengths, scores=scores, group=group)
    index = torch.unique(group, return_inverse=True)[1]
    n = lengths.to(torch.promote_types(scores.dtype, torch.float32))
    groups = int(index.max()) + 1 if index.numel() else 0
    low = n.new_full((groups,), torch.inf).scatter_reduce_(0, index, n, "amin")[index]
    high = n.new_full((groups,), -torch.inf).scatter_reduce_(0, index, n, "amax")[index]
    value = torch.where(high > low, 0.5 - (n - low) / (high - low).clamp(min=1.0), 0.0)
    return torch.where(scores > correct_above, value, value.clamp(max=0.0))


def cosine_length_reward(
    lengths: Tensor,
    correct: Tensor,
    *,
    max_response_length: int,
    right: tuple[float, float] = (2.0, 1.0),
    wrong: tuple[float, float] = (-10.0, 0.0),
    exceed: float = -10.0,
) -> Tensor:
    """Cosine reward (Yeo et al. 2025): from ``(at length 0, at the maximum)`` along half a cosine; ``exceed`` from the
    maximum on. ``lengths``: ``[B]`` tokens; ``correct``: ``[B]`` bool -> ``[B]``.
    """
    wave = 0.5 * (1.0 + torch.cos(torch.pi * (lengths.float() / max_response_length)))
    if_right, if_wrong = (at_max + (at_0 - at_max) * wave for at_0, at_max in (right, wrong))
    value = torch.where(correct, if_right, if_wrong)
    return torch.where(lengths >= max_response_length, torch.full_like(value, exceed), value)
