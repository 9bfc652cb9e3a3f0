"""The benchmarks of docs/benchmarks.md that have no file of tests of their own run, at sizes of a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlscale.cluster.process import free_port
from rlscale.testing.models import tiny_model
from tests.e2e.program import busy
from tools import bench_start

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    """What a benchmark prints."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120 * busy())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_algorithms() -> None:
    printed = run(sys.executable, "tools/bench_algo.py", "--repeat", "1", "--only", "partition")
    assert "16384" in printed.replace(",", ""), printed


def test_checkpoints(tmp_path: Path) -> None:
    options = ("--ranks", "1", "--rounds", "1", "--model", tiny_model("llama"), "--folder", str(tmp_path))
    assert "asynchronous" in run(sys.executable, "tools/bench_checkpoint.py", *options)
    assert not list(tmp_path.iterdir())


def test_a_start() -> None:
    """One start, without the one that fills torch's cache of kernels; its parts are the whole."""
    seconds = bench_start.start(1, ROOT, tiny_model("qwen2", tied=False, layers=2), [], limit=120 * busy())
    assert min(seconds[part] for part in bench_start.PARTS if part != bench_start.LOADING) > 0, seconds
    assert sum(seconds[part] for part in bench_start.PARTS) == pytest.approx(seconds["total"]), seconds


def test_a_weight_update_and_loading() -> None:
    """The update on two ranks; a folder is read by one."""
    model, bench = tiny_model("qwen3"), "tools/bench_reshard.py"
    command = (str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port()))
    options = ("--source", "tp=2", "--destination", "tp=1", "--rounds", "1", "--buckets", "1")
    printed = run(*command, bench, "--model", model, *options)
    assert "all results equal bit by bit" in printed and "gather / plan" in printed, printed
    assert "rank 0: shard" in run(sys.executable, bench, "--source", "tp=1", "--load", model)
