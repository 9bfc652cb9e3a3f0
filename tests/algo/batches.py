"""Random flat batches for the algorithm tests: holes, empty sequences, groups of different size."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

POISON = (float("nan"), float("inf"), -float("inf"))


@dataclass
class Flat:
    """``B`` sequences of ``T`` tokens; everything float64."""

    cu: Tensor
    group: Tensor
    mask: Tensor
    rewards: Tensor
    logp: Tensor
    old: Tensor
    ref: Tensor
    adv: Tensor
    values: Tensor
    returns: Tensor
    is_weights: Tensor

    @property
    def sequences(self) -> int:
        return self.group.numel()

    def tokens_of(self, rows: list[int]) -> Tensor:
        """Token positions of the given sequences, in the given order."""
        parts = [torch.arange(int(self.cu[r]), int(self.cu[r + 1])) for r in rows]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def take(self, rows: list[int]) -> Flat:
        """The batch of the given sequences, in the given order."""
        at = self.tokens_of(rows)
        lengths = self.cu.diff()[rows] if rows else torch.zeros(0, dtype=torch.int64)
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        token = {f.name: getattr(self, f.name)[at] for f in fields(self) if f.name not in ("cu", "group")}
        return Flat(cu=cu, group=self.group[rows], **token)

    def poisoned(self) -> Flat:
        """NaN, Inf and -Inf in turn at every masked position of every float tensor."""
        off = (self.mask == 0).nonzero().squeeze(1)
        bad = torch.tensor([POISON[i % 3] for i in range(off.numel())], dtype=torch.float64)
        changed = {}
        for f in fields(self):
            if f.name not in ("cu", "group", "mask"):
                x = getattr(self, f.name).clone()
                x[off] = bad
                changed[f.name] = x
        return replace(self, **changed)


def random_flat(seed: int, sequences: int = 9, longest: int = 11) -> Flat:
    """A random batch: some sequences empty or fully masked, observations in between, log-ratios up to about 1."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (sequences,), generator=g)
    lengths[0] = longest
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    t = int(cu[-1])

    def normal(scale: float = 1.0) -> Tensor:
        return torch.randn(t, generator=g, dtype=torch.float64) * scale

    mask = (torch.rand(t, generator=g) > 0.25).double()
    mask[int(cu[1]) : int(cu[2])] = 0.0  # sequence 1: observations only
    old = -torch.rand(t, generator=g, dtype=torch.float64) * 2 - 0.05
    return Flat(
        cu=cu,
        group=torch.randint(0, 4, (sequences,), generator=g) * 7 - 3,
        mask=mask,
        rewards=normal() * mask,
        logp=(old + normal(0.4)).clamp(max=-0.01),
        old=old,
        ref=old + normal(0.5),
        adv=normal(),
        values=normal(),
        returns=normal(),
        is_weights=torch.rand(t, generator=g, dtype=torch.float64) + 0.5,
    )
