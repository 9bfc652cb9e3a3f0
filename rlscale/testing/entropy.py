"""Log-prob and entropy from whole logits: the plain reference of `rlscale.model.head`, which never holds them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def _chunk(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
    p = logp.exp()
    safe = torch.where(p > 0, logp, logp.new_zeros(()))  # p log p -> 0 where a logit is -inf
    return logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(p * safe).sum(-1)


def logprob_entropy_from_logits(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-prob of the labels and entropy of ``softmax(logits / temperature)``, at least in float32.

    ``logits``: ``[T, V]``, ``labels``: ``[T]`` -> ``[T]``, ``[T]``. Temporary memory is that of ``chunk`` tokens, in
    backward too (each chunk is computed again). A logit of ``-inf`` counts 0.

    Raises:
        ValueError: shapes that disagree, ``temperature <= 0``.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} must be [T, V] and [T]")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    parts = [
        checkpoint(_chunk, z, y, temperature, use_reentrant=False)
        if torch.is_grad_enabled() and z.requires_grad
        else _chunk(z, y, temperature)
        for z, y in zip(logits.split(chunk), labels.split(chunk), strict=True)
    ]
    return torch.cat([p for p, _ in parts]), torch.cat([e for _, e in parts])
