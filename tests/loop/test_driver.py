"""What a run says before it starts, and when it is stopped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlscale.config.schema import Config
from rlscale.loop import driver
from rlscale.loop.driver import Driver
from rlscale.loop.schedule import optimizer_steps, unreached_learning_rates
from rlscale.loop.stopping import Stopped

TASK: Any = None  # these tests take no step


@pytest.mark.parametrize(
    "reason, steps, saved, said",
    [
        ("SIGTERM on rank 1", 1, True, "resume with the same command and trainer.resume_mode=auto"),
        ("SIGTERM on rank 1", 0, False, "nothing is saved (no step was finished)"),
        ("SIGTERM on rank 1", 1, False, "nothing is saved (trainer.save_freq -1)"),
        ("trainer.max_time of 5 s has elapsed", 1, True, "resume with the same command and trainer.resume_mode=auto"),
        ("trainer.max_time of 5 s has elapsed", 0, True, None),  # a limit this short never lets a step finish
    ],
)
def test_how_a_stop_ends(
    reason: str, steps: int, saved: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    run: Any = SimpleNamespace(
        state=SimpleNamespace(step=0),
        models={},
        writer=SimpleNamespace(flush=lambda: None),
        checkpoints=SimpleNamespace(save_stopped=lambda *_: saved),
        watch=SimpleNamespace(state_saved=lambda: None),
        progress=SimpleNamespace(message=lines.append),
    )

    def stop(driver: Driver) -> None:
        driver.run.state.step += steps
        raise Stopped(reason)

    monkeypatch.setattr(Driver, "steps", stop)
    if said is None:
        with pytest.raises(RuntimeError, match="max_time of 5 s has elapsed before a step was finished"):
            Driver(run, TASK).run_until_stopped()
    else:
        assert Driver(run, TASK).run_until_stopped() == reason
        assert lines == [f"stopped: {reason}; {said}"]


@pytest.mark.parametrize(
    "error, first, ends",
    [
        (ValueError("data"), 0, ValueError("data")),  # all ranks find it: the exit code is that of a mistake
        (KeyError("x"), None, KeyError("x")),
        (KeyError("x"), 0, RuntimeError("rank 0 has failed; then this rank with KeyError: 'x'")),
    ],
)
def test_how_a_failure_ends(
    error: Exception, first: int | None, ends: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    error.add_note("what the ranks are doing")
    calls: list[str] = []
    watch = SimpleNamespace(start=lambda: calls.append("start"), failed=lambda _: first)
    run = SimpleNamespace(watch=watch, models={}, close=lambda: calls.append("close"))

    def fail(_: Driver) -> None:
        raise error

    monkeypatch.setattr(driver, "build", lambda *_: run)
    monkeypatch.setattr(Driver, "run_until_stopped", fail)
    checked: Any = SimpleNamespace(cfg=Config())
    with pytest.raises(type(ends)) as caught:
        driver.train(checked, TASK, 0.0, None, lambda: calls.append("watching"))
    assert str(caught.value) == str(ends) and caught.value.__notes__ == ["what the ranks are doing"]
    assert calls == ["start", "watching", "close"]


def test_the_record_is_on_the_disk_before_the_checkpoint_says_so() -> None:
    calls: list[str] = []
    cfg = Config()
    cfg.trainer.save_freq, cfg.trainer.export = 1, "never"
    run: Any = SimpleNamespace(
        cfg=cfg,
        total_steps=1,
        state=SimpleNamespace(step=0, unfinished=None),
        val=None,
        models={},
        phase=lambda step, name: calls.append(name),
        writer=SimpleNamespace(log=lambda *_: calls.append("log"), flush=lambda: calls.append("flush")),
        progress=SimpleNamespace(step=lambda *_: None),
        checkpoints=SimpleNamespace(save=lambda state, *_: calls.append(f"save {state.step}")),
    )
    Driver(run, TASK)._finish(1, {}, save=True)
    assert calls == ["log", "save", "flush", "save 1"]


def test_a_warm_up_that_outlasts_the_run_is_said() -> None:
    cfg = Config()
    cfg.data.train_batch_size, cfg.actor.ppo_mini_batch_size, cfg.actor.ppo_epochs = 8, 4, 2
    cfg.actor.optim.lr_warmup_steps, cfg.actor.optim.lr = 12, 1e-5
    cfg.critic.optim.lr_warmup_steps, cfg.critic.ppo_epochs = 4, 1

    def said(steps: int) -> list[str]:
        models: Any = {
            role: SimpleNamespace(optim=getattr(cfg, role).optim, total_steps=count)
            for role, count in optimizer_steps(cfg, steps).items()
        }
        return unreached_learning_rates(models)

    assert said(3) == []  # 12 optimizer steps
    [line] = said(2)
    assert line == (
        "actor.optim: the warm-up of 12 optimizer steps is longer than the run (8); "
        "the learning rate never reaches 1e-05"
    )
    cfg.algorithm.adv_estimator = "gae"
    assert [line.split(":")[0] for line in said(1)] == ["actor.optim", "critic.optim"]
