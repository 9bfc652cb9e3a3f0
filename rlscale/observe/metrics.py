"""From tensors and sums to the numbers of a step, under the names that every run uses.

The batch is the global one on every rank, so that nothing here communicates: what is computed is the same everywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, SupportsFloat

if TYPE_CHECKING:
    from torch import Tensor

    from rlscale.batch.types import PackedBatch, Trajectory


class Metrics:
    """Collects the numbers of a step: means keep sum and denominator, so that parts of unequal size add up right."""

    def __init__(self) -> None:
        self._sum: dict[str, float] = defaultdict(float)
        self._denominator: dict[str, float] = {}

    def mean(self, name: str, value: SupportsFloat, weight: float = 1.0) -> None:
        """Add ``value`` with ``weight`` to a mean; weight 0 adds nothing, whatever the value."""
        self._denominator[name] = self._denominator.get(name, 0.0) + weight
        if weight:
            self._sum[name] += float(value) * weight

    def ratio(self, name: str, total: SupportsFloat, denominator: SupportsFloat) -> None:
        """Add a sum over tokens or samples, and how many there were, to a mean."""
        self._denominator[name] = self._denominator.get(name, 0.0) + float(denominator)
        self._sum[name] += float(total)

    def means(self, values: Mapping[str, SupportsFloat], weight: float = 1.0) -> None:
        """`mean` for each of the values, e.g. the metrics of one optimizer step."""
        for name, value in values.items():
            self.mean(name, value, weight)

    def add(self, name: str, value: SupportsFloat) -> None:
        """Add to a total, e.g. a count."""
        self._sum[name] += float(value)

    def set(self, values: Mapping[str, SupportsFloat]) -> None:
        """Take the values as they are; a later one replaces an earlier one."""
        for name, value in values.items():
            self._sum[name] = float(value)
            self._denominator.pop(name, None)

    def result(self) -> dict[str, float]:
        """The numbers by name. A mean over nothing is left out."""
        out = {}
        for name in [*self._sum, *(n for n in self._denominator if n not in self._sum)]:
            denominator = self._denominator.get(name, 1.0)
            if denominator:
                out[name] = self._sum[name] / denominator
        return out


def distribution(prefix: str, values: Tensor) -> dict[str, float]:
    """``prefix/{mean,std,min,max}`` of the values (population standard deviation); nothing for an empty tensor."""
    if values.numel() == 0:
        return {}
    x = values.detach().double()
    return {
        f"{prefix}/mean": x.mean().item(),
        f"{prefix}/std": x.std(correction=0).item(),
        f"{prefix}/min": x.min().item(),
        f"{prefix}/max": x.max().item(),
    }


def batch_metrics(batch: PackedBatch, max_response_length: int | None = None) -> dict[str, float]:
    """The metrics of a batch as it goes into the update.

    ``critic/score/*`` are the scorer's rewards of whole responses; ``critic/rewards/*`` are the sums of the token
    rewards of each response, penalties included; ``critic/{advantages,returns,values}/*`` are over the policy's own
    tokens. ``group/reward_std`` is the mean over prompts of the standard deviation of the rewards of their responses,
    and ``group/zero_std_frac`` the share of prompts whose responses all got the same reward: they teach a group
    estimator nothing. ``response_length/clip_ratio`` is the share of responses that used up ``max_response_length``
    tokens.
    """
    lengths, own = batch.response_lengths, batch.mask > 0
    out = {"batch/num_samples": float(batch.num_samples), "batch/num_tokens": float(own.sum())}
    out |= distribution("critic/score", batch.rewards)
    if batch.token_rewards is not None:
        out |= distribution("critic/rewards", _sum_by_sample(batch.token_rewards * batch.mask, batch.cu_seqlens))
    for name in ("advantages", "returns", "values"):
        values = getattr(batch, name)
        if values is not None:
            out |= distribution(f"critic/{name}", values[own])
    if batch.values is not None and batch.returns is not None and own.any():
        out["critic/vf_explained_var"] = explained_variance(batch.values[own], batch.returns[own])
    out |= distribution("response_length", lengths)
    out |= distribution("prompt_length", batch.prompt_lengths[batch.group])
    if max_response_length is not None and lengths.numel():
        out["response_length/clip_ratio"] = (lengths >= max_response_length).double().mean().item()
    return out | _group_metrics(batch)


def _group_metrics(batch: PackedBatch) -> dict[str, float]:
    by_group: dict[int, list[float]] = defaultdict(list)
    for group, reward in zip(batch.group.tolist(), batch.rewards.tolist(), strict=True):
        by_group[group].append(reward)
    if not by_group:
        return {}
    stds = []
    for rewards in by_group.values():
        mean = sum(rewards) / len(rewards)
        stds.append((sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5)
    flat = sum(max(r) == min(r) for r in by_group.values())
    return {"group/reward_std": sum(stds) / len(stds), "group/zero_std_frac": flat / len(stds)}


def _sum_by_sample(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[B] sums of a flat [T] tensor over each sample; ``cu_seqlens``: [B+1]."""
    ends = x.new_zeros(x.numel() + 1).double()
    ends[1:] = x.double().cumsum(0)
    return ends[cu_seqlens[1:]] - ends[cu_seqlens[:-1]]


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one (or constant returns)."""
    variance = returns.double().var(correction=0).item()
    return 1.0 - (returns.double() - values.double()).var(correction=0).item() / variance if variance > 0 else 0.0


def logprob_difference(trainer: Tensor, engine: Tensor, mask: Tensor) -> dict[str, float]:
    """``rollout/logprob_diff_{mean,max}``: absolute difference of two [T] log-probs over the policy's own tokens."""
    difference = (trainer - engine).abs()[mask > 0]
    if difference.numel() == 0:
        return {}
    return {"rollout/logprob_diff_mean": difference.mean().item(), "rollout/logprob_diff_max": difference.max().item()}


def validation_metrics(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """``val/<source>/{mean@n,best@n}`` over held-out prompts with n responses each, and how long the responses were.

    ``mean@n`` is the mean over prompts of the mean reward; ``best@n`` the mean of the best reward (for a 0/1 reward:
    pass@n). n is the largest number of responses to a prompt of the source. A response whose scorer failed counts with
    its reward.
    """
    by_source: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    lengths: list[int] = []
    for t in trajectories:
        by_source[t.data_source or "data"][t.prompt_index].append(t.reward)
        lengths.append(len(t.response_ids))
    out = {}
    for source, prompts in sorted(by_source.items()):
        n = max(map(len, prompts.values()))
        out[f"val/{source}/mean@{n}"] = sum(sum(r) / len(r) for r in prompts.values()) / len(prompts)
        if n > 1:
            out[f"val/{source}/best@{n}"] = sum(map(max, prompts.values())) / len(prompts)
    if lengths:
        out["val/response_length/mean"] = sum(lengths) / len(lengths)
    return out
