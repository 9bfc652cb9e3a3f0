"""The command `rlscale`: every command tells its use at once, and wrong use is one clear message and status 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlscale import cli

ROOT = Path(__file__).resolve().parents[2]


def test_no_command_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in cli.COMMANDS)


def test_an_unknown_command_is_named_with_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["exprot"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "exprot" in said and all(name in said for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_imports_nothing_heavy(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "rlscale.cli", name, "--help"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "usage: " in done.stdout
    assert not {"torch", "transformers", "matplotlib", "vllm"} & imported


def test_the_reader_of_the_output_may_leave() -> None:
    command = f"{sys.executable} -m rlscale.cli keys | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.startswith("# Every key") and not done.stderr


def test_keys_are_those_of_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys"]) == 0
    assert capsys.readouterr().out == (ROOT / "yamls" / "reference.yaml").read_text(encoding="utf-8")
    assert cli.main(["keys", "actor.optim"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("actor.optim.lr: ") for line in lines)
    assert all(line.startswith("actor.optim") and "  # " in line for line in lines)


def test_plots_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"step": n, "critic/score/mean": 0.1 * n} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert cli.main(["plot", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "plots" / "reward.png")]
    assert (tmp_path / "plots" / "reward.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["keys", "actor.nothing"], "no key begins with 'actor.nothing'"),
        (["plot", "/nowhere"], "/nowhere"),
        (["export", "/nowhere", "out"], "/nowhere"),
        (["compare", "/nowhere", "/nowhere"], "/nowhere"),
        (["compare", "a", "b", "--rtol", "-1"], "--rtol -1 is not a relative difference"),
        (["train", "--yaml", "/nowhere.yaml", "--dry-run"], "/nowhere.yaml"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and message in err and err.count("\n") == 1
