"""Who has the device when: vLLM sleeps while the trainer works, and the trainer's models rest while vLLM samples."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlscale.batch.types import Trajectory
from rlscale.config.schema import ActorConfig, AlgorithmConfig, Config, DataConfig, RolloutConfig, TrainerConfig
from rlscale.loop import report
from rlscale.loop import step as module
from rlscale.loop.rl import state
from rlscale.loop.run import GeneratingRun
from rlscale.loop.run_state import RunState
from rlscale.loop.stopping import Stopped
from rlscale.observe.progress import Progress
from rlscale.observe.timers import PHASES, Timers


class Model:
    """An engine that notes its calls, and that it needs its device."""

    def __init__(self, name: str, log: list[str]):
        self.name, self.log, self.layout = name, log, None

    def _out(self, batch: Any) -> torch.Tensor:
        self.log.append(f"{self.name} works")
        return torch.zeros(batch.tokens.numel())

    def logprobs(self, batch: Any, **_: Any) -> tuple[torch.Tensor, None]:
        return self._out(batch), None

    def values(self, batch: Any) -> torch.Tensor:
        return self._out(batch)

    def update(self, batch: Any, *_: Any, **__: Any) -> dict[str, float]:
        self._out(batch)
        return {"lr": 0.1, "tokens": 1.0}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def release_device(self, *, parameters: bool = True) -> None:
        self.log.append(f"{self.name} rests" if parameters else f"{self.name} keeps weights")


class Rollout:
    def __init__(self, log: list[str], sleeps: bool):
        self.log, self.sleeps, self.asleep, self.restarts = log, sleeps, False, 0

    def generate(self, prompts: list[Any], *_: Any) -> list[Trajectory]:
        self.log.append("generate")
        return [Trajectory(g, i, [5], [6, 7], [1, 1], [0.0, 0.0], reward=float(i)) for g in range(2) for i in range(2)]

    def sleep(self) -> None:
        self.log.append("sleep")
        self.asleep = self.sleeps

    def sync(self, *_: Any) -> dict[str, float]:
        self.log.append("sync")
        self.asleep = False
        return {}


def steps(
    monkeypatch: pytest.MonkeyPatch,
    sleeps: bool,
    count: int = 1,
    warmup: int = 0,
    log: list[str] | None = None,
    stop: Callable[[], None] | None = None,
    epochs: int = 1,
    timed: list[str] | None = None,
) -> list[str]:
    log = [] if log is None else log
    cfg = Config(
        trainer=TrainerConfig(critic_warmup=warmup, rollout_dump_freq=0),
        data=DataConfig(train_batch_size=2),
        actor=ActorConfig(ppo_mini_batch_size=2, ppo_epochs=epochs, use_kl_loss=True),
        rollout=RolloutConfig(n=2, logprob_check_freq=-1),
        algorithm=AlgorithmConfig(adv_estimator="gae"),
    )

    def timing(run: Any, timers: Timers, batch: Any) -> dict[str, float]:
        if timed is not None:
            timed.extend(timers.take())
        return {}

    monkeypatch.setattr(report, "timing", timing)
    rollout: Any = Rollout(log, sleeps)
    data: Any = SimpleNamespace(peek=lambda: [0, 1], advance=lambda: log.append("advance"))
    models: Any = {role: Model(role, log) for role in ("actor", "reference", "critic")}
    none: Any = None
    run = GeneratingRun(
        cfg=cfg,
        device=SimpleNamespace(synchronize=lambda: None, rank=0),  # type: ignore[arg-type]
        started=0.0,
        resumed=False,
        total_steps=count,
        state=RunState(data, state(cfg)),
        val=None,
        models=models,
        rollout=rollout,
        pool=None,
        writer=none,
        progress=Progress(count, rank=1),
        checkpoints=none,
        watch=SimpleNamespace(raise_if_stopped=stop or (lambda: None), phase=lambda name: None),  # type: ignore[arg-type]
        open_parts=none,
    )
    for step in range(1, count + 1):
        module.train_step(run, step)
    return log


ALL_REST = ["actor rests", "reference rests", "critic rests"]


@pytest.mark.parametrize("sleeps", [True, False])
def test_turns_of_a_step(monkeypatch: pytest.MonkeyPatch, sleeps: bool) -> None:
    assert steps(monkeypatch, sleeps) == [
        *ALL_REST,
        "generate",
        "sleep",
        "reference works",
        "reference rests",
        "critic works",  # values
        "critic works",  # update
        "critic rests",
        "actor works",
        "actor keeps weights",  # its optimizer state goes before the engines wake, its weights are what they get
        "sync",
        *ALL_REST,
        "advance",  # nothing of the data is used up before
    ]


@pytest.mark.parametrize("times", [1, 2])
def test_a_discarded_step_has_used_no_data(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    log: list[str] = []
    calls = iter(range(times))

    def stop() -> None:
        if next(calls) == times - 1:
            raise Stopped("SIGTERM on rank 0")

    with pytest.raises(Stopped):
        steps(monkeypatch, sleeps=True, log=log, stop=stop)
    assert log[-1] == ("generate" if times == 1 else "critic works")
    assert not any(line.startswith("advance") for line in log)


def test_engines_that_slept_get_weights_though_the_actor_was_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, sleeps=True, count=2, warmup=1).count("sync") == 2
    assert steps(monkeypatch, sleeps=False, count=2, warmup=1).count("sync") == 1


def test_the_phases_that_are_drawn_are_those_that_a_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []
    steps(monkeypatch, sleeps=True, epochs=2, timed=timed)
    assert timed == [*(f"timing_s/{phase}" for phase in PHASES), "timing_s/step"]
