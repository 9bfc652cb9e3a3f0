"""Saves the state of a run with its models, and restores both.

What is saved: fp32 master weights and AdamW moments of every trained model as slices of canonical tensors, so that
another layout can read them; the optimizer's step counts; the `RunState`; the random states of every rank; the resolved
configuration. What is not: the weights in the working dtype (they follow from the masters) and the reference model (it
is the one the run started from).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rlscale.checkpoint.saver import CheckpointData, SaveError, Saver, own_file
from rlscale.checkpoint.shards import Shards, State
from rlscale.checkpoint.store import Retention, Store
from rlscale.cluster.device import Device
from rlscale.cluster.random_state import random_states, set_random_states
from rlscale.config import to_dict
from rlscale.config.schema import Config
from rlscale.loop.resume import ResumePoint, folder_of, on_first
from rlscale.loop.run_state import RunState
from rlscale.observe.progress import Progress
from rlscale.reshard.layout import Layout
from rlscale.train.engine import Engine


class CheckpointManager:
    """Saves the checkpoints of a run as ``trainer`` says. All methods are collective."""

    def __init__(self, cfg: Config, device: Device, progress: Progress):
        t = cfg.trainer
        self.cfg, self.device = cfg, device
        self.progress, self.tolerant = progress, t.continue_on_save_error
        self.best = (t.keep_best or "").removeprefix("-")  # until something has been said about it
        retention = Retention(t.keep_last, t.keep_every, t.keep_best)
        self.saver = Saver(
            Store(folder_of(cfg)), retention, asynchronous=t.async_save, timeout_s=t.collective_timeout_s
        )

    def save(self, state: RunState, engines: Mapping[str, Engine], metrics: Mapping[str, float]) -> None:
        """Save the state after a step, with the trained models by role and the step's metrics.

        Raises:
            SaveError: it failed (or the asynchronous save before it), unless ``trainer.continue_on_save_error``.
        """
        started, step = time.monotonic(), state.step
        numbers = {name: float(value) for name, value in metrics.items() if math.isfinite(float(value))}
        if self.best and self.best not in numbers:
            lacks = f"WARNING: trainer.keep_best: step {step} has no metric {self.best}"
            self.progress.message(f"{lacks}; a checkpoint without it is not considered for keep_best")
            self.best = ""
        values = run_values(state, engines, self.cfg, self.device.world)
        content = CheckpointData(model_states(engines), values, {"random": random_states()}, {"metrics": numbers})
        self.wait()  # a save before this one that failed is no reason to leave this one out
        if self._attempt(lambda: self.saver.save(step, content)):
            how = "copied; it is written in the background" if self.saver.asynchronous else "written"
            self.progress.message(f"checkpoint of step {step} {how} ({time.monotonic() - started:.1f} s)")
        self.progress.restart_clock()

    def save_stopped(self, state: RunState, engines: Mapping[str, Engine]) -> bool:
        """Save what a run that was asked to stop has reached, unless that is saved, or ``trainer.save_freq`` is -1.

        Returns:
            whether there is a checkpoint to go on from.
        """
        self.wait()
        saved = on_first(self.saver.store.steps)
        if self.cfg.trainer.save_freq >= 0 and state.step > max(saved, default=0):
            self.save(state, engines, {})
            self.wait()
            saved = on_first(self.saver.store.steps)
        return bool(saved)

    def wait(self) -> None:
        """Wait for an asynchronous save; errors as in `save`."""
        self._attempt(self.saver.wait)

    def _attempt(self, action: Callable[[], object]) -> bool:
        try:
            action()
        except SaveError as error:
            if not self.tolerant:
                raise
            self.progress.message(f"WARNING: {error}; the run continues (trainer.continue_on_save_error)")
            return False
        return True


def model_states(engines: Mapping[str, Engine]) -> dict[str, State]:
    """``<role>/<state>`` of the models that are trained. Collective."""
    return {f"{role}/{name}": held for role, engine in engines.items() for name, held in engine.state().items()}


def run_values(state: RunState, engines: Mapping[str, Engine], cfg: Config, world: int) -> dict[str, Any]:
    """What is the same on every rank."""
    config = to_dict(cfg)
    return {
        **state.state_dict(),
        "world": world,
        "engines": {role: engine.counters() for role, engine in engines.items()},
        "config": config,
        "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
    }


def restore(point: ResumePoint, state: RunState, engines: Mapping[str, Engine], rank: int) -> None:
    """Put the state of a checkpoint into a run that has just been built.

    The layout may be another one. Random states are those of the rank with the same number; a rank that the
    checkpoint's run did not have keeps its own, made from the seed.

    Raises:
        ValueError: the checkpoint lacks a model, or holds one of another shape.
    """
    shards = Shards(point.manifest)
    for role, engine in engines.items():
        load_engine(shards, role, engine, point.state["engines"].get(role))
        engine.release_device(parameters=False)
    state.load_state_dict(point.state)
    if own_file(rank) in point.manifest.files:
        set_random_states(point.manifest.json(own_file(rank))["random"])


def load_engine(shards: Shards, role: str, engine: Engine, counters: Mapping[str, int] | None) -> None:
    """Fill an engine's master weights and moments from the slices that this rank needs. Collective.

    Raises:
        ValueError: the checkpoint does not hold this model.
    """
    path = shards.manifest.path

    def read(name: str, layout: Layout, buffers: dict[str, Tensor]) -> None:
        if counters is None or f"{role}/{name}" not in shards.states:
            raise ValueError(f"{path} holds no {role} (algorithm.adv_estimator), so this run cannot continue from it")
        saved = shards.layout(f"{role}/{name}").shapes
        for tensor, shape in layout.shapes.items():
            if saved.get(tensor) != shape:
                raise ValueError(f"{path}: {role} has {tensor} {saved.get(tensor)}, this run needs {shape}")
        shards.read(f"{role}/{name}", layout.of_rank(engine.device.rank), buffers)

    engine.load_state(read, counters or {})
