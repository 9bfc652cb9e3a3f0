"""tools/oracle.py: a right case passes, a wrong one fails with a message and exit status 1; the golden files, where
they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.algo import golden

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(os.environ.get("RLSCALE_ORACLE_DIR", ROOT.parent / "shared" / "oracle"))


def oracle(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "oracle.py"), *map(str, files)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def case(**changes: object) -> dict[str, object]:
    return {
        "name": "rloo__pair",
        "function": "rloo",
        "params": {},
        "dtype": "float64",
        "rtol": 1e-9,
        "atol": 1e-12,
        "tags": [],
        "inputs": {"token_level_rewards": [[0, 1], [0, 0]], "response_mask": [[1, 1], [1, 0]], "group": [0, 0]},
        "expected": {"advantages": [[1, 1], [-1, 0]]},
        **changes,
    }


@pytest.mark.parametrize(
    "changes,status,said",
    [
        ({}, 0, "1 passed, 0 failed"),
        (
            {"expected": {"advantages": [[1, 1], [-1, 1e-6]]}},
            1,
            "MISMATCH own: rloo__pair [float64]: advantages: error is",
        ),
        ({"expected": {"advantages": [[1, 1]]}}, 1, "error is inf"),
        ({"expected": {"volume": 1}}, 1, "volume: not answered"),
        ({"function": "rlooo"}, 1, "unknown function 'rlooo'"),
        (
            {"inputs": {"token_level_rewards": [[0, 1]], "response_mask": [[1, 1], [1, 0]], "group": [0, 0]}},
            1,
            "ValueError",
        ),
        (
            {
                "function": "grpo",
                "params": {"norm_by_std": True},
                "tags": ["singleton_group"],
                "expected": {"advantages": [[1, 1], [-9, 0]]},
                "inputs": {"token_level_rewards": [[0, 1], [0, 0]], "response_mask": [[1, 1], [1, 0]], "group": [0, 1]},
            },
            0,
            "1 groups of one",
        ),
        ({"function": "gsm8k_score"}, 0, "1 of other packages"),
    ],
)
def test_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], status: int, said: str
) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"family": "own", "cases": [case(**changes)]}))
    assert golden.main([str(path)]) == status
    assert said in capsys.readouterr().out


def test_file_that_is_no_case_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text("{}")
    result = oracle(path)
    assert result.returncode == 2 and "bad.json: not a case file" in result.stderr


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden files beside the repository")
def test_golden_files() -> None:
    result = oracle(*sorted(GOLDEN.glob("*.json")))
    assert result.returncode == 0, result.stdout
    assert "MISMATCH" not in result.stdout
