"""The example in one file, and what a newcomer does with README and docs alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlscale.testing.models import tiny_model
from tests.docs.pages import BLOCKS
from tests.e2e.program import ROOT, Ended, launch, small

REWARD = "return float(bool(numbers) and int(numbers[-1]) == int(answer))"


def test_grpo_in_one_file(tmp_path: Path) -> None:
    """Two steps of examples/minimal_grpo.py, with a reward in place of its own that a model of noise can earn."""
    text = (ROOT / "examples/minimal_grpo.py").read_text(encoding="utf-8")
    assert REWARD in text and len(text.splitlines()) <= 150
    (tmp_path / "grpo.py").write_text(text.replace(REWARD, "return len(text) % 3 / 2"))
    ended = launch(
        tmp_path / "run", small(tiny_model("qwen2", tied=False)),
        script=str(tmp_path / "grpo.py"), environment={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.status == 0 and not ended.left, ended.output
    steps = [line.split("|") for line in ended.output.splitlines() if line.startswith("step ")]
    assert [step[0].strip() for step in steps] == ["step   1/2", "step   2/2"]
    assert all(float(step[2].removeprefix(" grad norm ")) > 0 for step in steps), steps


def command(*words: str) -> str:
    """``rlscale words``"""
    done = subprocess.run([sys.executable, "-m", "rlscale.cli", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_newcomer_in_one_sitting(tmp_path: Path) -> None:
    """The prompts and the scorer of docs/data_and_rewards.md, estimator and loss of examples/, then another layout."""
    row, scorer = (
        next(b.text for b in BLOCKS if b.page == "docs/data_and_rewards.md" and b.language == language)
        for language in ("json", "python")
    )
    (tmp_path / "my.jsonl").write_text(f"{row}\n" * 8)
    (tmp_path / "my_reward.py").write_text(scorer)
    folder = tmp_path / "run"

    def start(**overrides: object) -> Ended:
        ended = launch(folder, small(
            tiny_model("qwen2", tied=False), trainer__save_freq=2, trainer__export="end", trainer__resume_mode="auto",
            data__train=[{"files": [str(tmp_path / "my.jsonl")]}], data__val=[], trainer__plots=True,
            reward__scorer=f"{tmp_path}/my_reward.py:score", actor__entropy_coeff=0.01,
            algorithm__adv_estimator="examples/new_estimator.py:median_baseline", algorithm__adv_args={"scale": 2.0},
            actor__policy_loss="examples/new_loss.py:squared_ratio", **overrides,
        ))  # fmt: skip
        assert ended.status == 0 and not ended.left, ended.output
        return ended

    first = start().metrics
    assert [m["step"] for m in first] == [1, 2] and all(m["actor/grad_norm"] > 0 for m in first)
    assert first[0]["reward/length"] > 0
    resumed = start(
        trainer__total_training_steps=4, actor__parallel__pipeline_model_parallel_size=2, actor__parallel__zero_stage=1
    )
    assert [m["step"] for m in resumed.metrics] == [1, 2, 3, 4]
    assert resumed.metrics[:2] == first and "resuming after step 2" in resumed.output
    policy = folder / "export/step_000004/model.safetensors"
    command("export", str(folder / "checkpoints/step_000004"), str(tmp_path / "exported"))
    assert (tmp_path / "exported/model.safetensors").read_bytes() == policy.read_bytes()
    assert "plots/reward.png" in command("plot", str(folder))
    assert command("compare", str(folder), str(folder)).startswith("equal: 4 steps")
