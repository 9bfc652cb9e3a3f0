"""Bad input: one clear message, a non-zero exit within 30 s, nothing left running."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from launchers.train import main
from rlscale.data.tokenizers import load_tokenizer
from rlscale.loop.configure import configure
from rlscale.loop.tasks import load_task
from rlscale.testing.models import tiny_model
from tests.e2e.program import SCORERS, Ended, launch, small

YAML = "yamls/quickstart_cpu.yaml"
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


def message(overrides: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """What two ranks would be told before anything is started, as a dry run tells it."""
    values = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    assert main(["--yaml", YAML, "--dry-run", "--world-size", "2", *values]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("error: ") and "Traceback" not in said.err
    return said.err


@pytest.mark.unit
def test_contradictions_name_the_numbers_that_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = small(
        str(tmp_path / "no-model"), actor__ppo_mini_batch_size=3, actor__parallel__tensor_model_parallel_size=3
    )
    output = message(wrong, capsys)
    assert "no such folder" in output and "no-model" in output
    assert "ppo_mini_batch_size 3 does not divide" in output and "1, 2, 4" in output
    assert "does not divide the 2 processes" in output


@pytest.mark.unit
def test_unsupported_architecture_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(tiny_model("qwen2"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"})
    )
    output = message(small(str(model)), capsys)
    assert "GemmaForCausalLM" in output and "LlamaForCausalLM" in output and "Qwen3ForCausalLM" in output


def with_data(file: Path, *lines: str) -> dict[str, Any]:
    file.write_text("".join(line + "\n" for line in lines))
    return small(tiny_model("qwen2"), data__train=[{"files": [str(file)]}], data__val=[])


def test_bad_data_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    fine = '{"prompt": "fine", "data_source": "s", "reward_model": {"ground_truth": "1"}}'
    ended = refused(tmp_path / "run", with_data(file, fine, '{"prompt": '))
    assert f"{file}:2" in ended.output.split("error:", 1)[1]


@pytest.mark.unit
def test_no_data_is_an_error(tmp_path: Path) -> None:
    """Of the same kind as that of malformed data, with which a run ends as the test above says."""
    values = [f"{key}={json.dumps(value)}" for key, value in with_data(tmp_path / "data.jsonl").items()]
    cfg = configure(YAML, values, 2).cfg
    with pytest.raises(ValueError, match="data.train is empty"):
        load_task(cfg.task).data(cfg, load_tokenizer(cfg.model))


def test_scorer_that_always_raises_ends_the_run(tmp_path: Path) -> None:
    overrides = small(tiny_model("qwen2"), reward__scorer=f"{SCORERS}:broken")
    ended = refused(tmp_path / "run", overrides, limit=120, ranks=1)
    assert "this scorer is broken" in "\n".join(ended.errors)


def test_engine_that_cannot_start_ends_the_run(tmp_path: Path) -> None:
    overrides = small(tiny_model("qwen2"), rollout__engine_args={"quantization": "no-such-method"})
    ended = refused(tmp_path / "run", overrides, limit=90)
    assert "vLLM" in "\n".join(ended.errors)
