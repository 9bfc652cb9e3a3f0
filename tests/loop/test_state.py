"""What a run says before it starts."""

from __future__ import annotations

from rlscale.config.schema import Config
from rlscale.loop.state import short_runs


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
