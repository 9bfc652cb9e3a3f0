"""The README says what the code does: its table of keys, its recipes and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

from rlscale.config.reference import readme

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_table_of_keys_is_current() -> None:
    assert readme(README) == README, "run: python -m rlscale.config.reference --readme README.md"


def test_named_files_exist() -> None:
    named = set(re.findall(r"\b(?:tools|yamls|launchers|tests|requirements)/[\w/]+\.(?:py|sh|yaml|lock)\b", README))
    assert {"tools/quickstart.sh", "tools/test.sh", "yamls/quickstart_cpu.yaml"} <= named
    assert not [name for name in named if not (ROOT / name).is_file()]
