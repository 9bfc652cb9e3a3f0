"""Responses move once: from the leaders that sampled them to every rank."""

from __future__ import annotations

from rlscale.batch.types import Trajectory
from rlscale.cluster.collective import gather


def exchange(mine: list[Trajectory], expected: int) -> list[Trajectory]:
    """All trajectories of the step on every rank, ordered by prompt and sample, whoever sampled them.

    Raises:
        RuntimeError: the leaders together did not bring the expected number.
    """
    everything = sorted((t for share in gather(mine) for t in share), key=lambda t: (t.prompt_index, t.sample_index))
    if len(everything) != expected:
        raise RuntimeError(f"rollout brought {len(everything)} responses, expected {expected}")
    return everything
