"""What a run says before it starts, and when it is stopped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlscale.config.schema import Config
from rlscale.loop import rl
from rlscale.loop.state import short_runs
from rlscale.loop.stopping import Stopped


@pytest.mark.parametrize(
    "reason, steps, saved, said",
    [
        ("SIGTERM on rank 1", 1, True, "the same command with trainer.resume_mode=auto goes on"),
        ("SIGTERM on rank 1", 0, False, "nothing is saved (no step was finished)"),
        ("SIGTERM on rank 1", 1, False, "nothing is saved (trainer.save_freq -1)"),
        ("trainer.max_time of 5 s is over", 1, True, "the same command with trainer.resume_mode=auto goes on"),
        ("trainer.max_time of 5 s is over", 0, True, None),  # started again and again, it would never get anywhere
    ],
)
def test_how_a_stop_ends(
    reason: str, steps: int, saved: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    run: Any = SimpleNamespace(
        step=0,
        checkpoints=SimpleNamespace(save_stopped=lambda _: saved),
        watch=SimpleNamespace(settled=lambda: None),
        progress=SimpleNamespace(message=lines.append),
    )

    def stop(run: Any) -> None:
        run.step += steps
        raise Stopped(reason)

    monkeypatch.setattr(rl, "_steps", stop)
    if said is None:
        with pytest.raises(RuntimeError, match="max_time of 5 s is over before a step was finished"):
            rl._until_stopped(run)
    else:
        assert rl._until_stopped(run) == reason
        assert lines == [f"stopped: {reason}; {said}"]


def test_a_warm_up_that_outlasts_the_run_is_said() -> None:
    cfg = Config()
    cfg.data.train_batch_size, cfg.actor.ppo_mini_batch_size, cfg.actor.ppo_epochs = 8, 4, 2
    cfg.actor.optim.lr_warmup_steps, cfg.actor.optim.lr = 12, 1e-5
    cfg.critic.optim.lr_warmup_steps, cfg.critic.ppo_epochs = 4, 1
    assert short_runs(cfg, 3) == []  # 12 optimizer steps
    [line] = short_runs(cfg, 2)
    assert line == (
        "actor.optim: the warm-up of 12 optimizer steps is longer than the run (8); "
        "the learning rate never reaches 1e-05"
    )
    cfg.algorithm.adv_estimator = "gae"
    assert [line.split(":")[0] for line in short_runs(cfg, 1)] == ["actor.optim", "critic.optim"]
