"""The parity tool: its documented command, what it refuses, and the table of docs/parallelism.md."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlscale.cluster.process import free_port
from rlscale.testing.models import ARCHITECTURES
from rlscale.testing.parity import cases, comparison, run
from rlscale.testing.parity.cases import Case, Difference

ROOT = Path(__file__).resolve().parents[2]
WITHIN = 240.0  # seconds for the command, on a machine that does other things too


def launch(processes: int, *options: str) -> subprocess.CompletedProcess[str]:
    """``deepspeed --num_gpus processes tools/parity.py options``"""
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", str(processes)]
    command += ["--master_port", str(free_port()), "tools/parity.py", *options]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=ROOT, env=env, timeout=WITHIN, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_the_documented_command_prints_differences() -> None:
    ended = launch(2, *"--tp 2 --sp --zero 2 --tied --kv 2 --recompute --arch llama".split())
    assert ended.returncode == 0, ended.stdout
    rows = {line[:18].strip(): line.split()[-2:] for line in ended.stdout.splitlines() if line.startswith("  ")}
    assert set(rows) == {
        "log-probs", "entropy", "loss", "gradient norm", "gradients", "parameters", "log-probs after",
    }  # fmt: skip
    assert "equal within 1e-05: 2 processes --tp 2 --sp --zero 2 --tied --kv 2 --arch llama --recompute" in ended.stdout


def test_a_refused_layout_ends_at_once_with_its_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert run.main(["--pp", "2", "--zero", "2", "--tied"]) == 2
    said = capsys.readouterr()
    [line] = said.err.splitlines()
    assert line.startswith("refused: ") and "actor.parallel.zero_stage is 2" in line and "tied" in line
    assert not said.out


REFUSED = {
    "zero 0": (Case(zero=0), ["zero_stage is 0", "use 1"]),
    "zero 2, pp, tied": (Case(pp=2, zero=2, tied=True), ["zero_stage is 2", "tied"]),
    "zero 3, pp": (Case(pp=2, zero=3), ["zero_stage is 3", "pipeline_model_parallel_size 2"]),
    "sp without tp": (Case(dp=2, sp=True), ["sequence_parallel", "tensor_model_parallel_size > 1"]),
    "experts": (Case(tp=2, ep=2), ["expert_model_parallel_size: 2", "no experts"]),
    "ep": (Case(tp=4, ep=2, arch="mixtral"), ["expert_model_parallel_size is 2", "tensor_model_parallel_size 4"]),
    "whole experts": (Case(tp=8, ep=8, kv=8, arch="mixtral"), ["tensor_model_parallel_size: 8", "4 experts"]),
    "heads": (Case(tp=16), ["tensor_model_parallel_size: 16", "8 attention heads"]),
    "layers": (Case(pp=3), ["pipeline_model_parallel_size: 3", "4 layers"]),
    "ulysses heads": (Case(ulysses=3), ["ulysses_sequence_parallel_size", "8 heads"]),
    "ulysses and tp": (Case(ulysses=8, tp=2), ["ulysses_sequence_parallel_size", "16", "8 heads"]),
    "critic": (Case(role="critic", pp=2, zero=3), ["critic.parallel.zero_stage is 3"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why_in_one_line(name: str) -> None:
    case, words = REFUSED[name]
    message = case.refused()
    assert message is not None and "\n" not in message
    assert message.startswith(f"{case.role}.parallel") and all(word in message for word in words), message


@pytest.mark.parametrize(
    ("options", "words"), [("--kv 3", ["--kv", "8 heads"]), ("--budget 4", ["--budget", "at least"])]
)
def test_a_model_that_cannot_be_is_refused_with_its_option(
    options: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(options.split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: ") and all(word in line for word in words)


def test_the_world_must_be_divisible() -> None:
    from rlscale.config.layouts import refusals

    [refusal] = refusals("actor", Case(tp=2, ulysses=2).parallel, 6, cases.spec_of(Case()))
    assert "4 does not divide the 6 processes" in refusal.message


def test_every_combination_is_refused_or_shown() -> None:
    shown = set(cases.matrix())
    for case in cases.product():
        assert (case in shown) != bool(case.refused())
    for case in (
        Case(tp=2), Case(tp=4), Case(tp=2, sp=True), Case(pp=2), Case(pp=4), Case(tp=2, pp=2, sp=True),
        Case(tp=2, dp=2), Case(tp=2, dp=2, zero=2), Case(pp=2, dp=2), Case(pp=2, dp=2, zero=2),
        Case(ulysses=2, kv=1), Case(ulysses=2, kv=2), Case(ulysses=4, kv=1), Case(ulysses=4, kv=2),
        Case(ulysses=2, tp=2, sp=True, dp=2), Case(ulysses=2, pp=2),
    ):  # fmt: skip
        names = ("tp", "pp", "ulysses", "dp", "sp", "zero") + (("kv",) if case.kv != 4 else ())
        layout = [getattr(case, name) for name in names]
        assert any([getattr(c, n) for n in names] == layout for c in shown), case
    assert {c.arch for c in shown} == set(ARCHITECTURES) and all(c.world <= 8 for c in shown)


def test_readme_table_is_current() -> None:
    text = (ROOT / "docs/parallelism.md").read_text(encoding="utf-8")
    assert cases.readme(text) == text, "run: python tools/parity.py --readme docs/parallelism.md"
    with pytest.raises(ValueError, match="lacks the marks"):
        cases.readme("no table")


def test_random_layouts_are_supported_and_new() -> None:
    drawn = cases.draw(20, seed=1)
    assert len(set(drawn)) == 20 and not set(drawn) & set(cases.matrix())
    assert all(c.refused() is None and c.world <= 8 for c in drawn)
    assert drawn == cases.draw(20, seed=1) != cases.draw(20, seed=2)


def test_options_ask_for_the_case() -> None:
    for case in cases.matrix():
        args = run.parse(case.options().split())
        assert Case(**{f: getattr(args, f) for f in vars(case) if f != "dp"}) == replace(case, dp=1)


def test_what_is_above_the_bound_or_no_number_is_different(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.report(Case(), [Difference("loss", 1e-6)])
    for value in (2e-5, math.nan, math.inf):
        assert not run.report(Case(), [Difference("loss", 1e-6), Difference("gradients", value, "model.norm.weight")])
    assert "model.norm.weight" in capsys.readouterr().out


def test_relative_difference() -> None:
    import torch

    a, b = torch.tensor([1.0, -4.0, 0.5]), torch.tensor([1.0, -4.0, 0.9])
    assert comparison.relative(a, b) == pytest.approx(0.1)
    assert comparison.relative(a[2:], b[2:], 4.0) == pytest.approx(0.1)
    nothing = torch.zeros(3)
    assert comparison.relative(nothing, nothing) == 0 and comparison.relative(a, nothing) == math.inf
    assert math.isnan(comparison.relative(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0])))
