"""Who has the device when: vLLM sleeps while the trainer works, and the trainer's models rest while vLLM samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlscale.batch.types import Trajectory
from rlscale.config.schema import ActorConfig, AlgorithmConfig, Config, DataConfig, RolloutConfig, TrainerConfig
from rlscale.loop import report, rl
from rlscale.loop.state import Run, kl_controller
from rlscale.observe.progress import Progress


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


def steps(monkeypatch: pytest.MonkeyPatch, sleeps: bool, count: int = 1, warmup: int = 0) -> list[str]:
    log: list[str] = []
    cfg = Config(
        trainer=TrainerConfig(critic_warmup=warmup, rollout_dump_freq=0),
        data=DataConfig(train_batch_size=2),
        actor=ActorConfig(ppo_mini_batch_size=2, use_kl_loss=True),
        rollout=RolloutConfig(n=2, logprob_check_freq=-1),
        algorithm=AlgorithmConfig(adv_estimator="gae"),
    )
    monkeypatch.setattr(rl, "exchange", lambda mine, expected: mine)
    monkeypatch.setattr(report, "timing", lambda *_: {})
    run: Any = Run(
        cfg=cfg,
        device=SimpleNamespace(synchronize=lambda: None, rank=0),  # type: ignore[arg-type]
        total_steps=count,
        train=SimpleNamespace(next_batch=lambda: [0, 1], state_dict=dict),  # type: ignore[arg-type]
        val=None,
        actor=Model("actor", log),  # type: ignore[arg-type]
        reference=Model("reference", log),  # type: ignore[arg-type]
        critic=Model("critic", log),  # type: ignore[arg-type]
        rollout=Rollout(log, sleeps),  # type: ignore[arg-type]
        pool=None,
        writer=None,  # type: ignore[arg-type]
        progress=Progress(count, rank=1),
        watch=SimpleNamespace(agree=lambda: None, phase=lambda name: None),  # type: ignore[arg-type]
        kl_controller=kl_controller(cfg),
        checkpoints=None,  # type: ignore[arg-type]
    )
    for step in range(1, count + 1):
        rl.train_step(run, step)
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
    ]


def test_engines_that_slept_get_weights_though_the_actor_was_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, sleeps=True, count=2, warmup=1).count("sync") == 2
    assert steps(monkeypatch, sleeps=False, count=2, warmup=1).count("sync") == 1
