"""A run as a value: its parts, and whose the device memory is at each phase of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlscale.cluster.device import Device
from rlscale.config.schema import Config
from rlscale.loop.checkpoint import CheckpointManager
from rlscale.loop.run_state import RunState
from rlscale.loop.stopping import Watch
from rlscale.observe.progress import Progress
from rlscale.observe.writers import RunWriter
from rlscale.reward.pool import RewardPool
from rlscale.rollout.rollout import Rollout
from rlscale.train.engine import Engine


@dataclass
class Run:
    """Everything a step touches.

    Attributes:
        started: `time.monotonic` when the program began.
        resumed: it continues from a checkpoint.
        val: the task's held-out data, if it has any.
        models: the task's, by role.
        engines: of a task that generates.
        pool: of such a task, on rollout leaders.
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
    engines: Rollout | None
    pool: RewardPool | None
    writer: RunWriter
    progress: Progress
    checkpoints: CheckpointManager
    watch: Watch
    open_parts: contextlib.ExitStack

    @property
    def rollout(self) -> Rollout:
        assert self.engines is not None, "the task does not generate"
        return self.engines

    @property
    def actor(self) -> Engine:
        return self.models["actor"]

    @property
    def reference(self) -> Engine | None:
        return self.models.get("reference")

    @property
    def critic(self) -> Engine | None:
        return self.models.get("critic")

    def phase(self, step: int, name: str) -> None:
        """Tell the user and the other ranks what this rank begins to do."""
        self.progress.phase(name)
        self.watch.phase(f"{name} of step {step}")

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """vLLM has the device: the models leave it before, the engines sleep after."""
        self._release_device()  # also what saving has brought back to the device
        yield
        self.rollout.sleep()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """The trainer has the device: the models leave it after."""
        yield
        self._release_device()

    def sync(self) -> dict[str, float]:
        """Give the actor's weights to the engines, which wake; its optimizer state leaves the device first."""
        self.actor.release_device(parameters=False)
        return self.rollout.sync(self.actor.layout, self.actor.tensors())

    def _release_device(self) -> None:
        for engine in self.models.values():
            engine.release_device()

    def close(self) -> None:
        """End engine and scorer processes and flush the writers; safe after an error on any rank."""
        self.open_parts.close()  # each part is closed, also where closing another fails


def trained(models: dict[str, Engine]) -> dict[str, Engine]:
    """Those of the models that are trained, by role."""
    return {role: engine for role, engine in models.items() if engine.optim is not None}
