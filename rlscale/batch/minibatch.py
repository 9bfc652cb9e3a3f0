"""Mini-batches: the parts of a step's batch that one optimizer step each is made on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlscale.batch.types import PackedBatch


def num_mini_batches(prompts: int, size: int, epochs: int) -> int:
    """How many `mini_batches` a batch of so many prompts yields."""
    return epochs * -(-prompts // size)


def mini_batches(batch: PackedBatch, size: int, epochs: int, shuffle_seed: tuple[int, int] | None) -> Iterator[Tensor]:
    """[b] int64: the responses of each mini-batch, epoch after epoch; the responses to a prompt stay together.

    Args:
        size: prompts of a mini-batch; the last of an epoch has what is left.
        shuffle_seed: seed and step, from which the order of the prompts is drawn for every epoch but the first; None:
            always that of the batch.
    """
    samples, order = torch.arange(batch.num_samples), torch.arange(batch.num_prompts)
    for epoch in range(epochs):
        if epoch and shuffle_seed is not None:
            generator = torch.Generator().manual_seed(hash((*shuffle_seed, epoch)))
            order = torch.randperm(batch.num_prompts, generator=generator)
        for prompts in order.split(size):
            yield samples[torch.isin(batch.group, prompts)]
