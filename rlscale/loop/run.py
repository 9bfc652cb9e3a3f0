"""A run as a value: its parts, and whose the device memory is at each phase of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlscale.batch.types import Trajectory
from rlscale.cluster.collective import gather
from rlscale.cluster.device import Device
from rlscale.config.schema import Config
from rlscale.data.dataset import Prompt
from rlscale.loop.checkpoint import CheckpointManager
from rlscale.loop.run_state import RunState
from rlscale.loop.stopping import Watch
from rlscale.observe.progress import Progress
from rlscale.observe.writers import RunWriter
from rlscale.reward.pool import RewardPool
from rlscale.rollout.rollout import Rollout
from rlscale.rollout.sampling import Sampling
from rlscale.train.engine import Engine


@dataclass
class Run:
    """Everything a step touches.

    Attributes:
        started: `time.monotonic` when the program began.
        resumed: it continues from a checkpoint.
        val: the task's held-out data, if it has any.
        models: the task's, by role.
        open_parts: closes what has processes, files or a display.
    """

    cfg: Config
    device: Device
    started: float
    resumed: bool
    total_steps: int
    state: RunState
    val: Any
    models: dict[str, Engine]
    writer: RunWriter
    progress: Progress
    checkpoints: CheckpointManager
    watch: Watch
    open_parts: contextlib.ExitStack

    @property
    def actor(self) -> Engine:
        return self.models["actor"]

    def phase(self, step: int, name: str) -> None:
        """Tell the user and the other ranks what this rank begins to do."""
        self.progress.phase(name)
        self.watch.phase(f"{name} of step {step}")

    @contextlib.contextmanager
    def using(self, *models: Engine) -> Iterator[None]:
        """These models have the device: they leave it after."""
        yield
        for model in models:
            model.release_device()

    def close(self) -> None:
        """End engine and scorer processes and flush the writers; safe after an error on any rank."""
        self.open_parts.close()  # each part is closed, also where closing another fails


@dataclass
class GeneratingRun(Run):
    """The run of a task that generates. ``pool``: on rollout leaders."""

    rollout: Rollout
    pool: RewardPool | None

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """vLLM has the device: the models leave it before, the engines sleep after."""
        for model in self.models.values():
            model.release_device()  # also what saving has brought back to the device
        yield
        self.rollout.sleep()

    def sample(self, prompts: list[Prompt], sampling: Sampling) -> list[Trajectory]:
        """All responses to the prompts, scored, on every rank, by prompt and sample regardless of which rank sampled
        them.

        Raises:
            Stopped: the run was asked to stop.
            RuntimeError: the leaders together did not return the expected number.
        """
        share, expected = self.rollout.generate(prompts, sampling, self.pool), len(prompts) * sampling.n
        self.watch.raise_if_stopped()
        everything = sorted((t for one in gather(share) for t in one), key=lambda t: (t.prompt_index, t.sample_index))
        if len(everything) != expected:
            raise RuntimeError(f"rollout returned {len(everything)} responses, expected {expected}")
        return everything

    def sync(self) -> dict[str, float]:
        """Give the actor's weights to the engines, which wake; its optimizer state leaves the device first."""
        self.actor.release_device(parameters=False)
        return self.rollout.sync(lambda: (self.actor.layout, self.actor.tensors()))


def trained(models: dict[str, Engine]) -> dict[str, Engine]:
    """Those of the models that are trained, by role."""
    return {role: engine for role, engine in models.items() if engine.optim is not None}
