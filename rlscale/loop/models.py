"""The policy of a configuration as an engine, for any task."""

from __future__ import annotations

from typing import Any

import torch

from rlscale.cluster.device import Device
from rlscale.config.schema import ActorConfig, Config, CriticConfig
from rlscale.loop.configure import Checked
from rlscale.train.engine import Batching, Engine


def policy(
    checked: Checked, device: Device, updates: int | None, *, role: str = "actor", temperature: float = 1.0
) -> Engine:
    """``model.path`` in the layout and with the optimizer of ``actor``. Collective.

    Args:
        updates: optimizer steps of the run; None: it is not trained.
        temperature: that its log-probs are taken at.
    """
    cfg = checked.cfg
    return Engine(
        role,
        checked.spec,
        cfg.model.path,
        cfg.actor.parallel,
        None if updates is None else cfg.actor.optim,
        batching(cfg.actor, cfg.actor),
        temperature=temperature,
        total_steps=updates or 1,
        **common(cfg, device),
    )


def common(cfg: Config, device: Device) -> dict[str, Any]:
    """What all engines of a run are built with."""
    return dict(device=device, dtype=getattr(torch, cfg.model.dtype), seed=cfg.trainer.seed)


def batching(part: ActorConfig | CriticConfig, actor: ActorConfig) -> Batching:
    """How an engine cuts its batches: by ``part``, and by ``actor`` for what only that says."""
    return Batching(
        max_tokens=part.ppo_max_token_len_per_gpu if part.use_dynamic_bsz else None,
        max_sequences=None if part.use_dynamic_bsz else part.ppo_micro_batch_size_per_gpu,
        share_prefix=actor.share_prompt_prefix,
        recompute=part.recompute,
        head_chunk=actor.head_chunk_tokens,
    )
