"""Learning-rate schedules, as pure functions of the optimizer step."""

from __future__ import annotations

import math

from rlscale.config.schema import OptimConfig


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0) of ``total_steps``: linear warm-up, then the schedule."""
    if step < optim.lr_warmup_steps:
        return optim.lr * (step + 1) / (optim.lr_warmup_steps + 1)
    if optim.lr_scheduler == "constant":
        return optim.lr
    span = max(1, total_steps - optim.lr_warmup_steps)
    done = min(1.0, (step - optim.lr_warmup_steps) / span)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if optim.lr_scheduler == "cosine" else 1 - done
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * shape)
