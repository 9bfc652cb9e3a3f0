"""What a step tells its user: metrics under veRL's names, rollout files, the end of the run."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlscale.algo.dynamic_sampling import groups_with_contrast
from rlscale.algo.value_loss import explained_variance
from rlscale.batch.types import PackedBatch, Trajectory
from rlscale.loop.objectives import need
from rlscale.loop.run import Run
from rlscale.observe import plots, summary
from rlscale.observe.timers import Timers

#: what is written of a `Trajectory`, the texts as ``prompt`` and ``response``
RECORDED = (
    "prompt_index", "sample_index", "data_source", "prompt_text", "response_text", "prompt_ids", "response_ids",
    "finish_reason", "reward", "reward_error",
)  # fmt: skip


def min_mean_max(prefix: str, values: Tensor) -> dict[str, float]:
    """mean, max and min under prefix/, e.g. response_length/mean."""
    values = values.float()
    if values.numel() == 0:
        return {}
    return {
        f"{prefix}/mean": float(values.mean()),
        f"{prefix}/max": float(values.max()),
        f"{prefix}/min": float(values.min()),
    }


def batch_metrics(trajectories: list[Trajectory], batch: PackedBatch) -> dict[str, float]:
    """Lengths, scores, advantages and group contrast of one rollout batch."""
    own = batch.mask != 0
    lengths = batch.response_lengths
    prompts = batch.prompt_lengths[batch.group]
    groups = int(batch.group.max()) + 1
    stds = torch.stack([batch.rewards[batch.group == g].std(correction=0) for g in range(groups)])
    no_contrast = torch.ones(groups).index_fill_(0, groups_with_contrast(batch.rewards, batch.group), 0.0)
    advantages, returns, token_rewards = need(batch, "advantages", "returns", "token_rewards")
    owner = torch.repeat_interleave(torch.arange(batch.num_samples), lengths)
    shaped = torch.zeros(batch.num_samples).index_add_(0, owner, token_rewards)
    out = {
        "batch/num_samples": float(batch.num_samples),
        "batch/num_tokens": float(prompts.sum() + lengths.sum()),
        "batch/num_response_tokens": float(lengths.sum()),
        "group/reward_std": float(stds.mean()),
        "group/zero_std_frac": float(no_contrast.mean()),
        "critic/score/std": float(batch.rewards.std(correction=0)),
        "critic/advantages/std": float(advantages[own].std(correction=0)),
        "response_length/clip_ratio": sum(t.finish_reason == "length" for t in trajectories) / len(trajectories),
        "reward/failures": float(sum(t.reward_failed for t in trajectories)),
        **min_mean_max("response_length", lengths),
        **min_mean_max("prompt_length", prompts),
        **min_mean_max("critic/score", batch.rewards),
        **min_mean_max("critic/rewards", shaped),
        **min_mean_max("critic/advantages", advantages[own]),
        **min_mean_max("critic/returns", returns[own]),
    }
    if batch.values is not None:
        out.update(min_mean_max("critic/values", batch.values[own]))
    extras: dict[str, list[float]] = defaultdict(list)
    for t in trajectories:
        for name, value in t.extra.items():
            extras[name].append(value)
    out.update({f"reward/{name}": sum(v) / len(v) for name, v in extras.items()})
    return out


def _update_metrics(
    role: str, records: list[dict[str, float]], per_token: tuple[str, ...], per_step: tuple[str, ...]
) -> dict[str, float]:
    """Of a model's optimizer steps: means over the tokens that were computed, means over steps, the last learning rate,
    and the steps that were left out because loss or gradient was not finite. What no step has is left out."""
    out = {}
    tokens = sum(r.get("tokens", 0.0) for r in records)
    for name in per_token:
        if tokens and any(name in r for r in records):
            out[name] = sum(r.get(name, 0.0) for r in records) / tokens
    for name in per_step:
        values = [r[name] for r in records if name in r]
        if values:
            out[name] = sum(values) / len(values)
    out |= {"lr": records[-1]["lr"], "skipped_steps": sum(r.get("skipped", 0.0) for r in records)}
    return {f"{role}/{name}": value for name, value in out.items()}


def actor_metrics(records: list[dict[str, float]]) -> dict[str, float]:
    """Losses are means over optimizer steps; per-token figures are means over the tokens that were computed."""
    per_token = ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "ref_kl")
    return _update_metrics("actor", records, per_token, ("pg_loss", "kl_loss", "grad_norm"))


def critic_metrics(records: list[dict[str, float]], batch: PackedBatch) -> dict[str, float]:
    """The value loss, and how much of the variance of the returns the old values explain."""
    values, returns = need(batch, "values", "returns")
    explained = explained_variance(values, returns, batch.mask)
    metrics = _update_metrics("critic", records, ("vf_clipfrac",), ("vf_loss", "grad_norm"))
    return metrics | {"critic/vf_explained_var": explained}


def timing(run: Run, timers: Timers, tokens: float) -> dict[str, float]:
    """timing_s/* of a step of so many tokens (prompt + response), and tokens per second of the whole job."""
    out = timers.take()
    run.state.tokens_seen += int(tokens)
    out["perf/throughput"] = tokens / out["timing_s/step"]
    out["perf/total_tokens"] = float(run.state.tokens_seen)
    return out


def rollouts(run: Run, step: int, trajectories: list[Trajectory], batch: PackedBatch) -> None:
    """rollouts/step_*.jsonl: one object per response."""
    freq = run.cfg.trainer.rollout_dump_freq
    if run.device.rank or freq == 0 or step % freq:
        return
    [advantages], rows = need(batch, "advantages"), []
    for i, t in enumerate(trajectories):
        span = slice(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1]))
        rows.append(record(t) | {"advantage": [round(a, 6) for a in advantages[span].tolist()]})
    run.writer.rollouts(step, rows)


def record(t: Trajectory) -> dict[str, Any]:
    """A response as a line of rollouts/*.jsonl."""
    return {name.removesuffix("_text"): getattr(t, name) for name in RECORDED}


def finish(run: Run) -> None:
    """Plots and the closing summary, on rank 0."""
    run.progress.close()
    run.writer.close()
    if run.device.rank:
        return
    if "jsonl" not in run.cfg.trainer.logger:
        print("no plots and no summary: both need metrics.jsonl, and trainer.logger does not include jsonl", flush=True)
        return
    folder = Path(run.cfg.trainer.run_dir)
    if run.cfg.trainer.plots:
        plots.draw(folder)
    # the parts of a resumed run before this one have left no record of their start-up
    known = None if run.resumed else time.monotonic() - run.started
    summary.print_summary(summary.summarize(folder, known))
