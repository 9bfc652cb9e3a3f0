"""The run as a value: random states, the configuration that may change and the one that may not, what is found."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlscale.checkpoint.store import Store, write_json
from rlscale.config import Config, to_dict
from rlscale.config.compare import check_config
from tests import worlds


def changed(**values: Any) -> dict[str, Any]:
    tree = to_dict(Config())
    for key, value in values.items():
        *parents, last = key.split("__")
        at = tree
        for name in parents:
            at = at[name]
        assert last in at
        at[last] = value
    return tree


def messages(**values: Any) -> list[str]:
    return check_config(to_dict(Config()), changed(**values), Path("step_000001"))


def test_layout_budget_and_length_may_change() -> None:
    assert messages() == [] == messages(trainer__run_dir="elsewhere", trainer__resume_mode="auto")
    [said] = messages(
        actor__parallel__tensor_model_parallel_size=2,
        actor__ppo_max_token_len_per_gpu=9999,
        rollout__tensor_model_parallel_size=2,
        trainer__total_training_steps=100,
    )
    assert said.startswith("resuming with another layout, budget or length: ")
    assert "actor.parallel.tensor_model_parallel_size 1 -> 2" in said
    assert "trainer.total_training_steps null -> 100" in said


def test_other_settings_are_said_aloud() -> None:
    quiet, loud = messages(actor__optim__lr=1e-5, rollout__n=4, critic__parallel__zero_stage=2)
    assert "critic.parallel.zero_stage 1 -> 2" in quiet
    assert loud.startswith("WARNING") and "actor.optim.lr 1e-06 -> 1e-05, rollout.n 8 -> 4" in loud


def test_another_run_is_refused_with_every_key() -> None:
    with pytest.raises(ValueError) as refused:
        messages(model__path="other", trainer__seed=7, actor__optim__lr=1e-5)
    text = str(refused.value)
    assert "step_000001 belongs to another run" in text and 'model.path: "" in the checkpoint, "other" now' in text
    assert "trainer.seed: 1 in the checkpoint, 7 now" in text and "optim" not in text


def test_keys_that_a_checkpoint_does_not_know_are_no_change() -> None:
    saved = to_dict(Config())
    del saved["trainer"]["keep_last"]
    assert check_config(saved, to_dict(Config()), Path("x")) == []


def draws() -> list[Any]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        forked = torch.rand(1).item()
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item(), forked]


def random_states_return() -> tuple[list[Any], list[Any], list[Any]]:
    import json

    from rlscale.cluster import megatron_cpu
    from rlscale.cluster.random_state import random_states, set_random_states

    megatron_cpu.enable()
    megatron_cpu.seed_model_parallel(3, 0, 0)
    random.gauss(0, 1), np.random.randn()  # each has a second number in store now
    saved = json.loads(json.dumps(random_states()))
    first, second = draws(), draws()
    set_random_states(saved)
    return first, second, draws()


def test_random_states_come_back_through_json() -> None:
    [(first, second, again)] = worlds.run(1, random_states_return)
    assert first == again and all(a != b for a, b in zip(first, second, strict=True))


def make(root: Path, step: int) -> Path:
    store = Store(root)
    files = {"run.json": write_json(store.begin(step) / "run.json", {"config": to_dict(Config()), "step": step})}
    store.publish(step, files, {})
    return store.path(step)


def what_is_found(run_dir: str, **trainer: Any) -> tuple[int, list[str]] | str | None:
    from rlscale.cluster.device import init_distributed
    from rlscale.loop.resume import archive_later, find

    cfg = Config()
    cfg.trainer.run_dir = run_dir
    for name, value in ({"resume_mode": "auto"} | trainer).items():
        setattr(cfg.trainer, name, value)
    device = init_distributed("cpu")
    try:
        point = find(cfg, device)
    except ValueError as error:
        return str(error)
    if point is None:
        return None
    archive_later(cfg, point)
    return point.step, point.messages


def found(run_dir: Path, **trainer: Any) -> Any:
    """What both ranks find alike."""
    first, second = worlds.run(2, what_is_found, str(run_dir), **trainer)
    assert first == second
    return first


def test_auto_takes_the_last_whole_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert found(tmp_path) is None
    for step in (1, 2, 3, 4):
        make(root, step)
    Store(root).begin(5)  # a run was killed while it saved
    assert found(tmp_path) == (4, [])
    assert found(tmp_path, resume_mode="disable") is None
    data = bytearray((root / "step_000004/run.json").read_bytes())
    data[9] ^= 4
    (root / "step_000004/run.json").write_bytes(data)
    (root / "step_000003/manifest.json").unlink()
    step, said = found(tmp_path)
    assert step == 2 and len(said) == 2 and all(line.startswith("WARNING: damaged checkpoint") for line in said)
    assert "step_000004/run.json: its content has changed" in said[0] and "step_000003" in said[1]
    assert sorted(p.name for p in root.iterdir()) == [
        "step_000001", "step_000002", "step_000003.damaged", "step_000004.damaged",
    ]  # fmt: skip
    assert found(tmp_path) == (2, [])


def test_where_all_are_damaged_a_run_does_not_start_anew_by_itself(tmp_path: Path) -> None:
    path = make(tmp_path / "checkpoints", 1)
    (path / "run.json").unlink()
    for _ in (1, 2):
        assert "no complete checkpoint is left" in found(tmp_path)
    assert found(tmp_path, resume_mode="disable") is None


def test_a_path_is_taken_or_refused(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        make(root, step)
    elsewhere = found(tmp_path / "other", resume_mode="path", resume_from_path=str(root / "step_000002"))
    assert elsewhere == (2, []) and Store(root).steps() == [1, 2, 3]
    step, said = found(tmp_path, resume_mode="path", resume_from_path=str(root / "step_000002"))
    assert step == 2 and said == ["later checkpoints were renamed to step_000003.abandoned"]
    assert Store(root).steps() == [1, 2]
    given = {"resume_mode": "auto", "resume_from_path": str(root / "step_000001")}
    assert found(tmp_path / "other", **given) == (1, [])  # while it has none of its own
    assert found(tmp_path, **given) == (2, [])
    (root / "step_000002/run.json").write_text("{}")
    refused = found(tmp_path, resume_mode="path", resume_from_path=str(root / "step_000002"))
    assert refused.startswith("trainer.resume_from_path: ") and "run.json: has 2 bytes" in refused
    assert Store(root).steps() == [1, 2]


@pytest.mark.parametrize("tolerant", [False, True])
def test_a_save_that_fails_ends_the_run_or_is_said(monkeypatch: pytest.MonkeyPatch, tolerant: bool) -> None:
    from rlscale.checkpoint.saver import SaveError
    from rlscale.loop import checkpoint as module

    class FullDisk:
        asynchronous = False

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def save(self, *_: Any) -> None:
            raise SaveError("checkpoint step_000003 could not be written: rank 1: No space left on device")

        wait = save

    for name in ("model_states", "run_values", "random_states"):
        monkeypatch.setattr(module, name, lambda *_: {})
    monkeypatch.setattr(module, "Saver", FullDisk)
    cfg, said = Config(), []
    cfg.trainer.continue_on_save_error, cfg.trainer.keep_best = tolerant, "-val/loss"
    progress = SimpleNamespace(message=said.append, restart_clock=lambda: None)
    checkpoints = module.CheckpointManager(cfg, SimpleNamespace(rank=0, world=1), progress)
    state: Any = SimpleNamespace(step=3)
    for action in (lambda: checkpoints.save(state, {}, {"a": float("nan")}), checkpoints.wait):
        if tolerant:
            action()
            assert said and said[-1].startswith(
                "WARNING: checkpoint step_000003 could not be written: rank 1: No space"
            )
        else:
            with pytest.raises(SaveError, match="No space left"):
                action()
    assert any("WARNING: checkpoint" in line for line in said) is tolerant
    assert [line for line in said if "keep_best" in line] == [
        "WARNING: trainer.keep_best: step 3 has no metric val/loss; "
        "a checkpoint without it is not considered for keep_best"
    ]
