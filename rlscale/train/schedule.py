"""Learning-rate schedules, as pure functions of the optimizer step."""

from __future__ import annotations

import math

from rlscale.config.schema import OptimConfig


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """Optimizer steps of the warm-up: ``lr_warmup_steps``, or ``lr_warmup_steps_ratio`` of ``total_steps``, rounded
    down.
    """
    return optim.lr_warmup_steps or int(optim.lr_warmup_steps_ratio * total_steps)


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0) of ``total_steps``.

    Linear warm-up that never is 0, ``lr (step + 1) / (warmup + 1)``; then constant, or from ``lr`` down to
    ``min_lr_ratio lr``, which is reached at ``total_steps`` and kept: linearly, or along half a cosine (Loshchilov &
    Hutter 2017, SGDR without restarts).
    """
    warmup = warmup_steps(optim, total_steps)
    if step < warmup:
        return optim.lr * (step + 1) / (warmup + 1)
    if optim.lr_scheduler == "constant":
        return optim.lr
    span = max(1, total_steps - warmup)
    done = min(1.0, (step - warmup) / span)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if optim.lr_scheduler == "cosine" else 1 - done
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * shape)
