"""Held-out prompts: sampled, scored, and measured by data source."""

from __future__ import annotations

import time
from collections import defaultdict

from rlscale.algo.pass_at_k import best_at_k, majority_score
from rlscale.batch.types import Trajectory
from rlscale.loop import report
from rlscale.loop.run import GeneratingRun
from rlscale.rollout.sampling import Sampling


def validate(run: GeneratingRun, step: int) -> dict[str, float]:
    """Sample and score the held-out prompts: mean, best and majority by data source."""
    cfg, started = run.cfg, time.time()
    r = cfg.rollout
    sampling = Sampling(
        n=r.val_n,
        temperature=r.val_temperature,
        top_p=r.val_top_p,
        top_k=-1,
        max_tokens=cfg.data.max_response_length,
        seed=cfg.trainer.seed,
    )
    trajectories = run.sample(run.val.prompts, sampling)
    metrics = validation_metrics(trajectories, r.val_n)
    metrics["timing_s/testing"] = time.time() - started
    run.writer.rollouts(step, [report.record(t) for t in trajectories], kind="val")
    return metrics


def validation_metrics(trajectories: list[Trajectory], n: int) -> dict[str, float]:
    """val/<source>/mean@n, and with n > 1 best@n (expected best) and maj@n (score of the most frequent answer text)."""
    by_source: dict[str, dict[int, list[Trajectory]]] = defaultdict(lambda: defaultdict(list))
    for t in trajectories:
        by_source[t.data_source][t.prompt_index].append(t)
    out: dict[str, float] = {}
    for source, groups in sorted(by_source.items()):
        scores = [t.reward for group in groups.values() for t in group]
        out[f"val/{source}/mean@{n}"] = sum(scores) / len(scores)
        if n > 1:
            best = [best_at_k([t.reward for t in g], len(g)) for g in groups.values()]
            answers = [([t.response_text.strip() for t in g], [t.reward for t in g]) for g in groups.values()]
            out[f"val/{source}/best@{n}"] = sum(best) / len(groups)
            out[f"val/{source}/maj@{n}"] = sum(majority_score(*a) for a in answers) / len(groups)
    return out
