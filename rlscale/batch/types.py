"""The two shapes of experience: a `Trajectory` (one response, Python lists) and a `PackedBatch` (many, flat tensors);
and what a loss function is on them.

A batch holds the response tokens one after another, with the prompts beside them; a prompt that several responses share
is stored once. The batch is the *global* one and identical on every rank (a few integers per token), so that every
statistic of an algorithm (group mean, whitening, loss weight) comes from global counts, and only the model's work is
divided over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class Trajectory:
    """One sampled response. ``response_mask``: 1 for tokens sampled by the policy, 0 for observations (tool output)."""

    prompt_index: int  # position of the prompt in the step's global prompt list = its group
    sample_index: int  # which of the n responses to that prompt
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    rollout_logprobs: list[float]  # of the sampled tokens under the sampling policy (0.0 at observations)
    reward: float = 0.0
    reward_failed: bool = False
    finish_reason: str = ""  # stop | length | abort
    prompt_text: str = ""
    response_text: str = ""
    data_source: str = ""
    reward_error: str = ""
    extra: dict[str, float] = field(default_factory=dict)  # further numbers from the scorer, logged by name


@dataclass
class PackedBatch:
    """``B`` responses of ``T`` tokens in all, to ``G`` prompts of ``P`` tokens in all. Every tensor is on the CPU."""

    prompt_tokens: Tensor  # [P] int64
    prompt_cu_seqlens: Tensor  # [G+1] int64
    group: Tensor  # [B] int64: prompt of each response
    tokens: Tensor  # [T] int64
    cu_seqlens: Tensor  # [B+1] int64
    mask: Tensor  # [T] float32: 1 = token of the policy, 0 = observation
    rewards: Tensor  # [B] float32: score of the whole response
    rollout_logprobs: Tensor | None = None  # [T] float32
    old_logprobs: Tensor | None = None  # [T] float32
    ref_logprobs: Tensor | None = None  # [T] float32
    values: Tensor | None = None  # [T] float32
    token_rewards: Tensor | None = None  # [T] float32
    advantages: Tensor | None = None  # [T] float32
    returns: Tensor | None = None  # [T] float32
    weights: Tensor | None = None  # [T] float32: loss weight of each token, from global counts

    @property
    def num_samples(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_prompts(self) -> int:
        return self.prompt_cu_seqlens.numel() - 1

    @property
    def response_lengths(self) -> Tensor:  # [B] tokens of each response
        return self.cu_seqlens.diff()

    @property
    def prompt_lengths(self) -> Tensor:  # [G] tokens of each prompt
        return self.prompt_cu_seqlens.diff()

    def token_index(self, samples: Tensor) -> Tensor:
        """[t] int64: places of the tokens of some responses (``samples``: [b] int64), one response after another."""
        lengths = self.response_lengths[samples]
        ends = lengths.cumsum(0)
        starts = self.cu_seqlens[:-1][samples] - (ends - lengths)
        return torch.repeat_interleave(starts, lengths) + torch.arange(int(lengths.sum()))

    def select(self, samples: Tensor) -> PackedBatch:
        """The batch of some responses (``samples``: [b] int64), in that order. Prompts are kept whole and in place."""
        index = self.token_index(samples)
        per_token = {k: v[index] for k, v in vars(self).items() if v is not None and k not in _NOT_PER_TOKEN}
        cu_seqlens = _cumulative(self.response_lengths[samples])
        return replace(
            self, group=self.group[samples], rewards=self.rewards[samples], cu_seqlens=cu_seqlens, **per_token
        )

    def with_one_more_token(self) -> PackedBatch:
        """The same sequences with one token of any kind after each response, and no per-token quantities."""
        longer = PackedBatch(
            prompt_tokens=self.prompt_tokens,
            prompt_cu_seqlens=self.prompt_cu_seqlens,
            group=self.group,
            tokens=self.tokens.new_zeros(self.tokens.numel() + self.num_samples),
            cu_seqlens=_cumulative(self.response_lengths + 1),
            mask=torch.ones(self.tokens.numel() + self.num_samples),
            rewards=self.rewards,
        )
        owner = torch.repeat_interleave(torch.arange(self.num_samples), self.response_lengths)
        longer.tokens[torch.arange(self.tokens.numel()) + owner] = self.tokens
        return longer

    def to(self, device: torch.device) -> PackedBatch:
        """The batch with every tensor on a device, which a loss function gets; itself for a CPU."""
        if device.type == "cpu":
            return self
        return replace(self, **{name: v.to(device) for name, v in vars(self).items() if v is not None})


_NOT_PER_TOKEN = ("prompt_tokens", "prompt_cu_seqlens", "group", "cu_seqlens", "rewards")


@dataclass
class ModelOut:
    """What the model says about the response tokens of one micro-batch, fp32, in the order of its batch."""

    logprobs: Tensor | None = None  # [t]
    entropy: Tensor | None = None  # [t]
    values: Tensor | None = None  # [t]


#: the micro-batch's share of the loss (a sum weighted by its ``weights``, so that shares add up), and sums for the log
LossFn = Callable[[ModelOut, PackedBatch], tuple[Tensor, dict[str, Tensor]]]


def pack(trajectories: list[Trajectory]) -> PackedBatch:
    """One flat batch of the given trajectories, in their order.

    Raises:
        ValueError: two trajectories of one group have different prompts, or per-token lists of different lengths.
    """
    prompts: dict[int, list[int]] = {}
    for t in trajectories:
        if prompts.setdefault(t.prompt_index, t.prompt_ids) != t.prompt_ids:
            raise ValueError(f"trajectories of prompt {t.prompt_index} have different prompt tokens")
        if not len(t.response_ids) == len(t.response_mask) == len(t.rollout_logprobs):
            raise ValueError(f"prompt {t.prompt_index} sample {t.sample_index}: token, mask and log-prob counts differ")
    order = {p: g for g, p in enumerate(sorted(prompts))}

    def flat(lists: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor([x for one in lists for x in one], dtype=dtype)

    def cu(lists: list[Any]) -> Tensor:
        return _cumulative(torch.tensor([len(one) for one in lists], dtype=torch.int64))

    in_order = [prompts[p] for p in order]
    responses = [t.response_ids for t in trajectories]
    return PackedBatch(
        prompt_tokens=flat(in_order, torch.int64),
        prompt_cu_seqlens=cu(in_order),
        group=torch.tensor([order[t.prompt_index] for t in trajectories], dtype=torch.int64),
        tokens=flat(responses, torch.int64),
        cu_seqlens=cu(responses),
        mask=flat([t.response_mask for t in trajectories], torch.float32),
        rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        rollout_logprobs=flat([t.rollout_logprobs for t in trajectories], torch.float32),
    )


def _cumulative(lengths: Tensor) -> Tensor:
    """[n] int64 -> [n+1] int64: where each begins, and where the last ends."""
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
