"""From a configuration to the loss functions of the engines: the only place where options, algorithms and batches meet.

A loss function sees one micro-batch and returns a sum weighted by `PackedBatch.weights`, which were made from the
counts of the whole mini-batch, and sums for the log (see `rlscale.loop.report`), so that any division adds up to the
same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlscale.algo.entropy import entropy_sum
from rlscale.algo.kl import kl_loss
from rlscale.algo.policy_loss import POLICY_LOSSES, policy_loss, prepare
from rlscale.algo.segments import any_valid
from rlscale.algo.value_loss import value_loss
from rlscale.batch.types import LossFn, ModelOut, PackedBatch
from rlscale.config.schema import ActorConfig, CriticConfig


def need(part: PackedBatch | ModelOut, *names: str) -> list[Tensor]:
    """Quantities that a step has computed by now.

    Raises:
        RuntimeError: it has not.
    """
    if missing := [name for name in names if getattr(part, name) is None]:
        raise RuntimeError(f"{', '.join(missing)}: not computed in this step")
    return [getattr(part, name) for name in names]


def actor_loss(cfg: ActorConfig, mini: PackedBatch, current: Tensor | None = None) -> LossFn:
    """Loss of the policy on micro-batches of ``mini``: policy loss - entropy_coeff * entropy + kl_loss_coef * KL.

    ``current``: ``[T]`` log-probs of ``mini`` under the policy as it is now (`current_logprobs`); None: the old ones.
    """
    args = {"clip_low": cfg.clip_ratio_low, "clip_high": cfg.clip_ratio_high, **cfg.policy_loss_args}
    statistic: dict[str, float] = {}
    needs = POLICY_LOSSES.find(cfg.policy_loss).needs
    [advantages] = need(mini, "advantages")
    if mini.old_logprobs is not None:
        statistic = prepare(
            cfg.policy_loss,
            logprobs=mini.old_logprobs if current is None else current,
            old_logprobs=mini.old_logprobs,
            advantages=advantages,
            mask=mini.mask,
            cu_seqlens=mini.cu_seqlens,
            **args,
        )

    def loss_fn(out: ModelOut, micro: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        [logprobs], (advantages, weights) = need(out, "logprobs"), need(micro, "advantages", "weights")
        # one optimizer step per batch: the old policy is the current one, and its ratio is 1 with the right gradient
        old = logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
        loss, sums = policy_loss(
            cfg.policy_loss,
            logprobs=logprobs,
            old_logprobs=old,
            advantages=advantages,
            mask=micro.mask,
            weights=weights,
            cu_seqlens=micro.cu_seqlens,
            clip_c=cfg.clip_ratio_c,
            ref_logprobs=micro.ref_logprobs if "ref_logprobs" in needs else None,
            statistic=statistic,
            **args,
        )
        sums = {"pg_loss": loss, **sums, "tokens": micro.mask.sum()}
        if out.entropy is not None:
            bonus, counts = entropy_sum(out.entropy, micro.mask, weights)
            sums["entropy"] = counts["entropy"]
            if cfg.entropy_coeff:
                loss = loss - cfg.entropy_coeff * bonus
        if micro.ref_logprobs is not None:
            reference = micro.ref_logprobs, micro.mask, weights
            sums["ref_kl"] = kl_loss("k3", logprobs.detach(), *reference)[1]["kl"]
            if cfg.use_kl_loss:
                sums["kl_loss"], _ = kl_loss(cfg.kl_loss_type, logprobs, *reference)
                loss = loss + cfg.kl_loss_coef * sums["kl_loss"]
        return loss, sums

    return loss_fn


def current_logprobs(
    cfg: ActorConfig, mini: PackedBatch, updated: bool, logprobs: Callable[[PackedBatch], tuple[Tensor, Tensor | None]]
) -> Tensor | None:
    """``[T]`` log-probs of a mini-batch under the policy as it is now, where the loss has a statistic of the mini-batch
    and the policy was ``updated`` since the batch was sampled; else None. Collective, as ``logprobs`` is.
    """
    if not updated or POLICY_LOSSES.find(cfg.policy_loss).prepare is None:
        return None
    return logprobs(mini)[0]


def critic_loss(cfg: CriticConfig) -> LossFn:
    """Clipped value loss (PPO) over the response tokens."""

    def loss_fn(out: ModelOut, micro: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        [values], (old, returns, weights) = need(out, "values"), need(micro, "values", "returns", "weights")
        loss, sums = value_loss(values, old, returns, micro.mask, weights, clip=cfg.cliprange_value)
        return loss, {"vf_loss": loss, **sums, "tokens": micro.mask.sum()}

    return loss_fn


def contributing_samples(cfg: ActorConfig, batch: PackedBatch) -> Tensor:
    """[b] int64: samples that can change the policy; one without advantage, KL or entropy term need not be computed."""
    skips = POLICY_LOSSES.find(cfg.policy_loss).zero_at_zero_advantage
    if not skips or cfg.use_kl_loss or cfg.entropy_coeff:
        return torch.arange(batch.num_samples)
    advantages, weights = need(batch, "advantages", "weights")
    return any_valid((advantages != 0) & (weights != 0), batch.cu_seqlens).nonzero().flatten()
