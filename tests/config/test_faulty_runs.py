"""What the program says to faulty configurations: one message with every violation, exit code 2, nothing started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launchers.train import main
from rlscale.testing.models import tiny_model

YAML = "yamls/quickstart_cpu.yaml"
GAE = "algorithm.adv_estimator=gae"
FAULTS: list[tuple[str, ...]] = [  # overrides; the key of each must be in the message
    # names and types
    ("actor.lr=1e-6",),
    ("actr.optim.lr=1e-6",),
    ("rollout.temprature=1",),
    ("actor.optim.lr=fast",),
    ("rollout.n=2.5",),
    ("trainer.val_before_train=perhaps",),
    ("actor.optim.betas=[0.9]",),
    ("data.train=addition",),
    ("actor.parallel=2",),
    ("trainer.logger=[jsonl,wandb9]",),
    # values out of range
    ("actor.optim.lr=0",),
    ("actor.optim.lr=-1e-6",),
    ("rollout.n=0",),
    ("rollout.temperature=0",),
    ("rollout.top_p=1.5",),
    ("actor.clip_ratio_low=2",),
    ("actor.clip_ratio_c=1",),
    ("algorithm.gamma=1.1",),
    ("data.max_response_length=0",),
    ("trainer.total_training_steps=0",),
    ("trainer.stop_grace_s=0",),
    ("trainer.keep_last=0",),
    ("model.dtype=float16",),
    ("algorithm.adv_estimator=grpoo",),
    ("actor.policy_loss=ppo2",),
    ("actor.loss_agg_mode=token",),
    ("rollout.sync_verify=sometimes",),
    # sizes that do not fit each other, the model or the processes
    ("actor.parallel.tensor_model_parallel_size=3",),
    ("actor.parallel.pipeline_model_parallel_size=4",),
    ("actor.parallel.ulysses_sequence_parallel_size=4",),
    ("rollout.tensor_model_parallel_size=3",),
    ("actor.ppo_mini_batch_size=5",),
    ("actor.ppo_max_token_len_per_gpu=16",),
    ("rollout.kv_cache_memory_gb=0.000001",),
    # options that contradict each other
    ("actor.parallel.sequence_parallel=true",),
    ("actor.parallel.expert_model_parallel_size=2",),
    ("trainer.resume_mode=path",),
    ("trainer.resume_from_path=/nowhere/step_000001",),
    ("actor.optim.lr_warmup_steps=5", "actor.optim.lr_warmup_steps_ratio=0.1"),
    ("algorithm.kl_ctrl.type=adaptive",),
    ("trainer.critic_warmup=3", GAE, "trainer.total_training_steps=2"),
    # files
    ("model.path=/nowhere",),
    ("data.train=[{files: [/nowhere/a.jsonl]}]",),
    ("data.train=[{task: addition, reasoning_gym: chain_sum}]",),
    # several at once: all of them are named
    ("actor.optim.lr=-1", "rollout.n=0", "rollout.temprature=1", "data.train_batch_size=none"),
    ("actor.parallel.zero_stage=3", "actor.parallel.pipeline_model_parallel_size=2"),
    (GAE, "critic.parallel.zero_stage=7", "actor.ppo_epochs=0", "algorithm.lam=2"),
]


@pytest.fixture(scope="module")
def model() -> str:
    return tiny_model("qwen2", tied=True, layers=2)


@pytest.mark.parametrize("overrides", FAULTS, ids=[" ".join(fault) for fault in FAULTS])
def test_a_faulty_configuration_is_one_message(
    overrides: tuple[str, ...], model: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    run_dir = tmp_path / "run"
    given = [f"model.path={model}", f"trainer.run_dir={run_dir}"]
    assert main(["--yaml", YAML, *given, *overrides]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("error: ") == 1, said.err
    for override in overrides:
        key = override.partition("=")[0]
        if override != GAE:
            assert key in said.err, said.err
    assert not run_dir.exists()


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 40 and len(set(FAULTS)) == len(FAULTS)
