"""Bad input: one clear message, a non-zero exit within 30 s, nothing left running."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlscale.testing.models import tiny_model
from tests.e2e.program import SCORERS, Ended, launch, small

WITHIN = 30.0


def refused(folder: Path, overrides: dict[str, Any], limit: float = WITHIN, **how: Any) -> Ended:
    """The ended program, after checking how it ended."""
    ended = launch(folder, overrides, limit=limit, **how)
    assert ended.status != 0 and not ended.left, ended.output
    assert ended.errors, ended.output
    return ended


def test_several_violations_are_reported_together(tmp_path: Path) -> None:
    wrong = small(str(tmp_path / "no-model"), rollout__temprature=0.5, actor__ppo_mini_batch_size=3)
    ended = refused(tmp_path / "run", wrong, limit=WITHIN)
    assert "rollout.temprature" in ended.output and "rollout.temperature" in ended.output
    assert "Traceback" not in ended.output.split("error:")[1]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_contradictions_name_the_numbers_that_would_do(tmp_path: Path) -> None:
    wrong = small(
        str(tmp_path / "no-model"), actor__ppo_mini_batch_size=3, actor__parallel__tensor_model_parallel_size=3
    )
    output = refused(tmp_path / "run", wrong).output
    assert "no such folder" in output and "no-model" in output
    assert "ppo_mini_batch_size 3 does not divide" in output and "1, 2, 4" in output
    assert "does not divide the 2 processes" in output


def test_unsupported_architecture_is_named(tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model("qwen2"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"})
    )
    output = refused(tmp_path / "run", small(str(model))).output
    assert "GemmaForCausalLM" in output and "LlamaForCausalLM" in output and "Qwen3ForCausalLM" in output


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"prompt": "fine", "data_source": "s", "reward_model": {"ground_truth": "1"}}', '{"prompt": '], "{file}:2"),
        ([], "data.train is empty"),
    ],
    ids=["malformed", "empty"],
)
def test_bad_data_names_file_and_line(tmp_path: Path, rows: list[str], message: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(row + "\n" for row in rows))
    sources = [{"files": [str(file)]}]
    ended = refused(tmp_path / "run", small(tiny_model("qwen2"), data__train=sources, data__val=[]))
    assert message.format(file=file) in ended.output.split("error:", 1)[1]


def test_scorer_that_always_raises_ends_the_run(tmp_path: Path) -> None:
    overrides = small(tiny_model("qwen2"), reward__scorer=f"{SCORERS}:broken")
    ended = refused(tmp_path / "run", overrides, limit=120, ranks=1)
    assert "this scorer is broken" in "\n".join(ended.errors)


def test_engine_that_cannot_start_ends_the_run(tmp_path: Path) -> None:
    overrides = small(tiny_model("qwen2"), rollout__engine_args={"quantization": "no-such-method"})
    ended = refused(tmp_path / "run", overrides, limit=90)
    assert "vLLM" in "\n".join(ended.errors)
