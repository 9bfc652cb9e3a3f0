"""The models of a configuration as engines, for any task."""

from __future__ import annotations

import torch

from rlscale.cluster.device import Device
from rlscale.loop.configure import Checked
from rlscale.train.engine import Batching, Engine


def build_model(role: str, checked: Checked, device: Device, updates: int | None, temperature: float = 1.0) -> Engine:
    """The critic as ``critic`` says, any other role as ``model`` and ``actor`` say. Collective.

    Args:
        updates: optimizer steps of the run; None: it is not trained.
        temperature: that log-probs are taken at.
    """
    cfg, critic = checked.cfg, role == "critic"
    part = cfg.critic if critic else cfg.actor
    return Engine(
        role,
        checked.critic_spec or checked.spec.as_critic() if critic else checked.spec,
        cfg.critic.path or cfg.model.path if critic else cfg.model.path,
        part.parallel,
        None if updates is None else part.optim,
        Batching(
            max_tokens=part.ppo_max_token_len_per_gpu if part.use_dynamic_bsz else None,
            max_sequences=None if part.use_dynamic_bsz else part.ppo_micro_batch_size_per_gpu,
            share_prefix=cfg.actor.share_prompt_prefix,
            recompute=part.recompute,
            head_chunk=cfg.actor.head_chunk_tokens,
        ),
        device,
        dtype=getattr(torch, cfg.model.dtype),
        temperature=temperature,
        total_steps=updates or 1,
        seed=cfg.trainer.seed,
    )
