"""tools/bench_engine.py: what it measures is the same work on both sides, and Ulysses divides the activations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlscale.testing.models import tiny_model
from tests import worlds
from tools import bench_engine

ROOT = Path(__file__).resolve().parents[2]


def test_layouts_by_name() -> None:
    parse = bench_engine.parse_layout
    assert parse("dp1") == (1, {})
    assert parse("dp2-tp2-sp-zero2") == (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "zero_stage": 2},
    )
    assert parse("ulysses4") == (4, {"ulysses_sequence_parallel_size": 4})
    for wrong in ("tp0", "cp2", "dp2tp2", ""):
        with pytest.raises(ValueError, match="is not one of"):
            parse(wrong)


def test_padding_adds_tokens_and_nothing_else() -> None:
    job = dict(model="", dtype="float32", sequences=16, prompt=4, median=10.0, longest=60)
    packed, padded = (bench_engine.make_batch(bench_engine.Job("dp1", padded=p, **job), 100) for p in (False, True))
    own = padded.mask != 0
    assert (padded.tokens[own] == packed.tokens).all() and (padded.advantages[own] == packed.advantages).all()
    assert (padded.weights[own] == packed.weights).all() and padded.weights[~own].sum() == 0
    lengths = packed.response_lengths
    assert (padded.response_lengths == lengths.max()).all() and padded.tokens.numel() > 1.5 * packed.tokens.numel()
    assert bench_engine.real_tokens(bench_engine.Job("dp1", **job), padded) == 16 * 4 + int(lengths.sum())


def test_plain_micro_batches_are_sorted_whole_and_within_the_budget() -> None:
    lengths = [5, 30, 7, 8, 29, 1, 30]
    micros = bench_engine.padded_micro_batches(lengths, 60)
    assert sorted(row for micro in micros for row in micro) == list(range(7))
    assert all(len(micro) * max(lengths[row] for row in micro) <= 60 for micro in micros)
    assert [lengths[row] for micro in micros for row in micro] == sorted(lengths, reverse=True)
    assert len(micros) == 3


def test_a_run_prints_figures_of_equal_work(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench_engine.py"), "--layouts", "dp1", "--rounds", "1"]
    command += ["--model", tiny_model("llama"), "--dtype", "float32", "--json", str(tmp_path / "out.json")]
    command += ["--sequences", "6", "--longest", "40", "--median", "12", "--prompt", "4", "--cores", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    figures = json.loads((tmp_path / "out.json").read_text())
    assert {"dp1", "plain-sdpa", "plain-eager"} <= figures.keys()
    rows = [figures[name] for name in ("dp1", "plain-sdpa", "plain-eager")]
    assert all(row["forward_tokens_per_s"] > 0 and row["train_tokens_per_s"] > 0 for row in rows)
    assert all(0.05 < row["peak_gib"] < 8 and row["tokens"] == rows[0]["tokens"] for row in rows)
    assert [row["loss"] for row in rows] == pytest.approx([rows[0]["loss"]] * 3, rel=1e-4)
    assert "train: dp1 / better plain loop" in figures["ratios"] and "better plain loop" in run.stdout


def test_a_bad_layout_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_engine.py", "--layouts", "dp1,xp2"])
    with pytest.raises(SystemExit) as ended:
        bench_engine.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "'xp2'" in said and "Traceback" not in said


def activation_bytes(layout: str) -> int:
    from rlscale.cluster.device import init_distributed

    shape = dict(sequences=8, prompt=8, median=90.0, sigma=0.5, longest=160)
    model = tiny_model("llama", heads=4, kv_heads=4, layers=4, head_dim=32)
    job = bench_engine.Job(layout, model, "float32", layout=layout, one_row=True, **shape)
    passes, _, engine = bench_engine.build_engine(job, init_distributed("cpu"))
    bench_engine.count_tensors(passes, engine)  # what is made once
    return int(bench_engine.count_tensors(passes, engine)["activation_bytes"])


def test_ulysses_divides_the_activations() -> None:
    """Peak of all tensors of forward and backward, gradients included; ideal would be a quarter."""
    [whole] = worlds.run(1, activation_bytes, "dp1")
    assert max(worlds.run(4, activation_bytes, "ulysses4")) <= 0.35 * whole
