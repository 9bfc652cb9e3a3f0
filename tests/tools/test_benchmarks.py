"""The benchmarks of docs/benchmarks.md that have no file of tests of their own run, at sizes of a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rlscale.cluster.process import free_port
from rlscale.testing.models import tiny_model

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    """What a benchmark prints."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_algorithms() -> None:
    printed = run(sys.executable, "tools/bench_algo.py", "--repeat", "1", "--only", "partition")
    assert "16384" in printed.replace(",", ""), printed


def test_checkpoints(tmp_path: Path) -> None:
    options = ("--ranks", "1", "--rounds", "1", "--model", tiny_model("llama"), "--folder", str(tmp_path))
    assert "asynchronous" in run(sys.executable, "tools/bench_checkpoint.py", *options)
    assert not list(tmp_path.iterdir())


def test_a_weight_update_and_loading() -> None:
    model = tiny_model("qwen3")
    command = (str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port()))
    sizes = ("tools/bench_reshard.py", "--source", "tp=2")
    printed = run(*command, *sizes, "--model", model, "--destination", "tp=1", "--rounds", "1", "--buckets", "1")
    assert "direct" in printed, printed
    assert "MiB" in run(*command, *sizes, "--load", model)
