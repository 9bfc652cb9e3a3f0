"""From a micro-batch of responses to one packed row of model input.

A row is a sequence of *blocks*: a prompt, then every response to it that the micro-batch holds. With prefix sharing the
prompt stands once and each response attends to it and to itself, so the prompt of a group of ``n`` responses is
computed once instead of ``n`` times; without it each response brings its own copy. Rotary positions continue from the
prompt in both cases, and the result is the same up to rounding. The last token of a response predicts nothing and is
left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
class ModelRow:
    """Model input of one micro-batch: ``S`` tokens in a row that yield predictions for ``t`` response tokens."""

    tokens: Tensor  # [S] int64
    positions: Tensor  # [S] int64 rotary position of each token
    blocks: list[Block]
    predictors: Tensor  # [t] int64: the place in the row whose hidden state predicts each response token
    targets: Tensor  # [t] int64: the response tokens themselves
    rows: Tensor  # [b] int64: the batch rows of this micro-batch
    cache: dict[Any, Any] = field(default_factory=dict)  # masks and rotary tables, computed once for all layers

    @property
    def length(self) -> int:
        return self.tokens.numel()

    def part(self, rank: int, size: int) -> RowPart:
        """What rank ``rank`` of ``size`` Ulysses ranks embeds and predicts: the rank-th of ``size`` equal parts.

        ``size`` divides the length of the row.
        """
        if size == 1:
            return RowPart(self.tokens, self.predictors, self.targets, None)
        length = self.length // size
        start = rank * length
        places = ((self.predictors >= start) & (self.predictors < start + length)).nonzero().squeeze(1)
        return RowPart(
            self.tokens[start : start + length], self.predictors[places] - start, self.targets[places], places
        )

    def to(self, device: torch.device) -> ModelRow:
        if self.tokens.device == device:
            return self
        moved = {
            k: getattr(self, k).to(device, non_blocking=True) for k in ("tokens", "positions", "predictors", "targets")
        }
        return ModelRow(blocks=self.blocks, rows=self.rows, **moved)


@dataclass
class RowPart:
    """One Ulysses rank's part of a row: ``s`` tokens that yield predictions for ``t'`` of the response tokens."""

    tokens: Tensor  # [s] int64
    predictors: Tensor  # [t'] int64: places in this part
    targets: Tensor  # [t'] int64
    places: Tensor | None  # [t'] int64: which of the row's t predictions these are; None: all, in order


def build_row(batch: PackedBatch, rows: Tensor, *, share_prefix: bool, multiple: int = 1) -> ModelRow:
    """Pack the responses ``rows`` ([b] int64) of a batch into one row whose length is a multiple of ``multiple``.

    An empty ``rows`` gives a row of padding with no targets: it takes part in every collective and weighs nothing.
    """
    tokens: list[Tensor] = []
    positions: list[Tensor] = []
    blocks: list[Block] = []
    predictors: list[Tensor] = []
    targets: list[Tensor] = []
    at = 0
    by_prompt: list[tuple[int, list[int]]] = []
    place: dict[int, int] = {}
    for row, group in zip(rows.tolist(), batch.group[rows].tolist(), strict=True):
        if share_prefix and group in place:
            by_prompt[place[group]][1].append(row)
        else:
            place[group] = len(by_prompt)
            by_prompt.append((group, [row]))
    order: list[int] = []
    for group, members in by_prompt:
        prompt = batch.prompt_tokens[batch.prompt_cu_seqlens[group] : batch.prompt_cu_seqlens[group + 1]]
        block = Block(at, prompt.numel(), [])
        tokens.append(prompt)
        positions.append(torch.arange(prompt.numel()))
        last = at + prompt.numel() - 1
        at += prompt.numel()
        for row in members:
            response = batch.tokens[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
            n = max(response.numel() - 1, 0)
            tokens.append(response[:n])
            positions.append(torch.arange(prompt.numel(), prompt.numel() + n))
            if n:
                block.segments.append((at, n))
            if response.numel():
                predictors.append(torch.cat((torch.tensor([last]), torch.arange(at, at + n))))
                targets.append(response)
            at += n
            order.append(row)
        blocks.append(block)
    padding = -at % multiple if at else multiple
    if padding:
        tokens.append(torch.zeros(padding, dtype=torch.int64))
        positions.append(torch.arange(padding))
        blocks.append(Block(at, padding, []))
    empty = torch.zeros(0, dtype=torch.int64)
    return ModelRow(
        tokens=torch.cat(tokens),
        positions=torch.cat(positions),
        blocks=blocks,
        predictors=torch.cat(predictors) if predictors else empty,
        targets=torch.cat(targets) if targets else empty,
        rows=torch.tensor(order, dtype=torch.int64),
    )
