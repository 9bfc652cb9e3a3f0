"""The contract of imports in pyproject.toml: packages import from lower layers only, and in no circle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """The check of the package in ``root`` by this repository's contracts."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    options = [str(ROOT / "pyproject.toml"), "--no-cache", "--no-logo"]
    env = os.environ | {"PYTHONPATH": str(root), "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run([*command, *options], cwd=root, env=env, capture_output=True, text=True)


def test_packages_import_from_lower_layers_only_and_in_no_circle() -> None:
    checked = lint(ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("module", "line", "said"),
    [
        ("config/schema.py", "import rlscale.train", "rlscale.config is not allowed to import rlscale.train"),
        ("algo/kl.py", "import rlscale.batch.types", "rlscale.algo is not allowed to import rlscale.batch"),
        ("algo/kl.py", "import rlscale.algo.advantages", "No cycles are allowed in rlscale.algo."),
        ("batch/types.py", "import transformers", "rlscale.batch is not allowed to import transformers"),
        ("attic/__init__.py", "", "attic"),
    ],
    ids=["upwards", "sideways", "circle", "heavy", "package-without-a-layer"],
)
def test_a_broken_contract_is_named(module: str, line: str, said: str, tmp_path: Path) -> None:
    """The same packages, with a sound import in them and one that breaks the contract."""
    folders = [p.name for p in (ROOT / "rlscale").iterdir() if p.is_dir() and p.name not in ("__pycache__", "testing")]
    for name in [f"{f}/__init__.py" for f in folders] + ["__init__.py", "config/schema.py", "batch/types.py"]:
        (tmp_path / "rlscale" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "rlscale" / name).touch()
    (tmp_path / "rlscale/algo/kl.py").write_text("import torch\n")
    (tmp_path / "rlscale/algo/advantages.py").write_text("import rlscale.algo.kl\n")
    sound = lint(tmp_path)
    assert sound.returncode == 0, sound.stdout + sound.stderr
    broken = tmp_path / "rlscale" / module
    broken.parent.mkdir(exist_ok=True)
    broken.write_text((broken.read_text() if broken.exists() else "") + line + "\n")
    checked = lint(tmp_path)
    assert checked.returncode != 0 and said in checked.stdout + checked.stderr, checked.stdout + checked.stderr
