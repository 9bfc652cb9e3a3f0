"""Responses move once: from the leaders that sampled them to every rank."""

from __future__ import annotations

from rlscale.batch.types import Trajectory
from rlscale.cluster.collective import gather
from rlscale.data.dataset import Prompt
from rlscale.loop.run import Run
from rlscale.rollout.sampling import Sampling


def sample(run: Run, prompts: list[Prompt], sampling: Sampling) -> list[Trajectory]:
    """All responses to the prompts, scored, on every rank.

    Raises:
        Stopped: the run was asked to stop.
    """
    share = run.rollout.generate(prompts, sampling, run.pool)
    run.watch.raise_if_stopped()
    return exchange(share, len(prompts) * sampling.n)


def exchange(share: list[Trajectory], expected: int) -> list[Trajectory]:
    """All trajectories of the step on every rank, ordered by prompt and sample, whoever sampled them.

    Raises:
        RuntimeError: the leaders together did not bring the expected number.
    """
    everything = sorted((t for one in gather(share) for t in one), key=lambda t: (t.prompt_index, t.sample_index))
    if len(everything) != expected:
        raise RuntimeError(f"rollout brought {len(everything)} responses, expected {expected}")
    return everything
