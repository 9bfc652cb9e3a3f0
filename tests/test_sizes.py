"""Functions of at most 60 lines, files of at most 400 unless they are lists of like things."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LISTS = {"rlscale/algo/advantages.py"}  # one estimator after the other
FUNCTION, FILE = 60, 400


def files() -> Iterator[Path]:
    yield from (ROOT / "rlscale").rglob("*.py")
    yield from (ROOT / "launchers").glob("*.py")


def too_long(source: str) -> list[str]:
    """Functions of more than `FUNCTION` lines, decorators and docstrings counted."""
    return [
        f"{node.name} has {lines} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := node.end_lineno - min([node.lineno, *(d.lineno for d in node.decorator_list)]) + 1) > FUNCTION
    ]


def test_functions_and_files_are_short() -> None:
    sources = {str(file.relative_to(ROOT)): file.read_text() for file in files()}
    assert [f"{path}: {function}" for path, source in sources.items() for function in too_long(source)] == []
    assert {path for path, source in sources.items() if source.count("\n") > FILE} <= LISTS


def test_a_long_function_is_found() -> None:
    assert too_long("def f():\n" + "    g()\n" * FUNCTION) == [f"f has {FUNCTION + 1} lines"]
