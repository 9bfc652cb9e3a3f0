"""From a micro-batch of responses to one packed sequence of model input.

A packed sequence is made of *blocks*: a prompt, then every response to it that the micro-batch holds. With prefix
sharing the prompt stands once and each response attends to it and to itself, so the prompt of a group of ``n``
responses is computed once instead of ``n`` times; without it each response brings its own copy. Rotary positions
continue from the prompt in both cases, and the result is the same up to rounding. The last token of a response predicts
nothing and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlscale.batch.types import PackedBatch


@dataclass
class Block:
    """Tokens ``[start, start + prompt)`` are a prompt; ``segments`` are the responses after it as (start, length)."""

    start: int
    prompt: int
    segments: list[tuple[int, int]]

    @property
    def length(self) -> int:
        return self.prompt + sum(n for _, n in self.segments)


@dataclass
class PackedSequence:
    """Model input of one micro-batch: ``S`` tokens that yield predictions for ``t`` response tokens."""

    tokens: Tensor  # [S] int64
    positions: Tensor  # [S] int64 rotary position of each token
    blocks: list[Block]
    predictors: Tensor  # [t] int64: the place whose hidden state predicts each response token
    targets: Tensor  # [t] int64: the response tokens themselves
    samples: Tensor  # [b] int64: the responses of the batch that it holds, in its order
    cache: dict[Any, Any] = field(default_factory=dict)  # masks and rotary tables, computed once for all layers

    @property
    def length(self) -> int:
        return self.tokens.numel()

    def part(self, rank: int, size: int) -> SequencePart:
        """What rank ``rank`` of ``size`` Ulysses ranks, which divide the length, embeds and predicts: an equal part."""
        if size == 1:
            return SequencePart(self.tokens, self.predictors, self.targets, None)
        length = self.length // size
        start = rank * length
        places = ((self.predictors >= start) & (self.predictors < start + length)).nonzero().squeeze(1)
        return SequencePart(
            self.tokens[start : start + length], self.predictors[places] - start, self.targets[places], places
        )

    def to(self, device: torch.device) -> PackedSequence:
        """The same on a device, without the cache; itself if it is there."""
        if self.tokens.device == device:
            return self
        names = ("tokens", "positions", "predictors", "targets")
        return replace(self, cache={}, **{n: getattr(self, n).to(device, non_blocking=True) for n in names})


@dataclass
class SequencePart:
    """One Ulysses rank's part of a packed sequence: ``s`` tokens, which predict ``t'`` of the response tokens."""

    tokens: Tensor  # [s] int64
    predictors: Tensor  # [t'] int64: places in this part
    targets: Tensor  # [t'] int64
    places: Tensor | None  # [t'] int64: which of the t predictions these are; None: all, in order


def pack_sequence(batch: PackedBatch, samples: Tensor, *, share_prefix: bool, multiple: int = 1) -> PackedSequence:
    """Pack the responses ``samples`` ([b] int64) of a batch into one sequence; ``multiple`` divides its length.

    No ``samples`` give padding with no targets: it takes part in every collective and weighs nothing.
    """
    tokens: list[Tensor] = []
    positions: list[Tensor] = []
    blocks: list[Block] = []
    predictors = [torch.zeros(0, dtype=torch.int64)]
    targets = [torch.zeros(0, dtype=torch.int64)]
    at = 0
    by_prompt: dict[int, list[int]] = {}
    for sample, group in zip(samples.tolist(), batch.group[samples].tolist(), strict=True):
        by_prompt.setdefault(group if share_prefix else len(by_prompt), []).append(sample)
    for members in by_prompt.values():
        group = int(batch.group[members[0]])
        prompt = batch.prompt_tokens[batch.prompt_cu_seqlens[group] : batch.prompt_cu_seqlens[group + 1]]
        block = Block(at, prompt.numel(), [])
        tokens.append(prompt)
        positions.append(torch.arange(prompt.numel()))
        last = at + prompt.numel() - 1
        at += prompt.numel()
        for sample in members:
            response = batch.tokens[batch.cu_seqlens[sample] : batch.cu_seqlens[sample + 1]]
            n = max(response.numel() - 1, 0)
            tokens.append(response[:n])
            positions.append(torch.arange(prompt.numel(), prompt.numel() + n))
            if n:
                block.segments.append((at, n))
            if response.numel():
                predictors.append(torch.cat((torch.tensor([last]), torch.arange(at, at + n))))
                targets.append(response)
            at += n
        blocks.append(block)
    padding = -at % multiple if at else multiple
    if padding:
        tokens.append(torch.zeros(padding, dtype=torch.int64))
        positions.append(torch.arange(padding))
        blocks.append(Block(at, padding, []))
    return PackedSequence(
        tokens=torch.cat(tokens),
        positions=torch.cat(positions),
        blocks=blocks,
        predictors=torch.cat(predictors),
        targets=torch.cat(targets),
        samples=torch.tensor([s for members in by_prompt.values() for s in members], dtype=torch.int64),
    )
