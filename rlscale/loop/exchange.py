"""Responses move once: from the leaders that sampled them to every rank."""

from __future__ import annotations

from rlscale.batch.types import Trajectory
from rlscale.cluster.collective import gather
from rlscale.data.dataset import Prompt
from rlscale.loop.run import GeneratingRun
from rlscale.rollout.sampling import Sampling


def sample(run: GeneratingRun, prompts: list[Prompt], sampling: Sampling) -> list[Trajectory]:
    """All responses to the prompts, scored, on every rank, by prompt and sample regardless of which rank sampled them.

    Raises:
        Stopped: the run was asked to stop.
        RuntimeError: the leaders together did not return the expected number.
    """
    share, expected = run.rollout.generate(prompts, sampling, run.pool), len(prompts) * sampling.n
    run.watch.raise_if_stopped()
    everything = sorted((t for one in gather(share) for t in one), key=lambda t: (t.prompt_index, t.sample_index))
    if len(everything) != expected:
        raise RuntimeError(f"rollout returned {len(everything)} responses, expected {expected}")
    return everything
