"""The reference file `yamls/reference.yaml`, written from the schema: every key with its default, unit and bounds.

    python -m rlscale.config.reference > yamls/reference.yaml
    python -m rlscale.config.reference --page docs/configuration.md README.md   # and the tables of these pages

Tests check that all are what this module writes.
"""

from __future__ import annotations

import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from rlscale.config.schema import Config

WIDTH = 120
ALL_KEYS = "<!-- table of all keys, made by python -m rlscale.config.reference -->"
SOME_KEYS = "<!-- table of some keys, made by python -m rlscale.config.reference -->"
TABLE_MARKS, TABLE_END = (ALL_KEYS, SOME_KEYS), "<!-- end of the table -->"
HEAD = """\
Every key of rlscale, with its default. A file of your own holds only what differs; it may start from another file
with `base: other.yaml` (a path relative to the file), and any key can be set on the command line: section.key=value.
Sizes say what they count (prompts, sequences, tokens) and where (global, or per rank).
Written by `python -m rlscale.config.reference`: change the schema, not this file."""


def reference() -> str:
    """The text of yamls/reference.yaml."""
    return "\n".join([*_comment(HEAD, ""), "", *_section(Config(), "")]) + "\n"


def table(prefix: str = "") -> list[tuple[str, str, str]]:
    """Rows (dotted key, default, help) of all keys below a section, for documentation."""
    return [row for row in _rows(Config(), "") if row[0].startswith(prefix)]


def page(text: str) -> str:
    """A page's text with its table of keys made anew: of every key, or of those that its table names already.

    Raises:
        ValueError: the page has no table of keys between the two marks, or names a key that does not exist.
    """
    mark = next((mark for mark in TABLE_MARKS if mark in text), "no mark")
    head, found, rest = text.partition(mark)
    current, end, tail = rest.partition(TABLE_END)
    if not found or not end:
        raise ValueError(f"the page lacks {' or '.join(TABLE_MARKS)} with {TABLE_END} after it")
    rows = {key: (f"`{key}`", f"`{default}`", meaning) for key, default, meaning in table()}
    if mark == SOME_KEYS:
        named = re.findall(r"^\| `([\w.]+)` \|", current, re.MULTILINE)
        if unknown := [key for key in named if key not in rows]:
            raise ValueError(f"the page names keys that do not exist: {', '.join(unknown)}")
        rows = {key: rows[key] for key in named}
    cells = [("key", "default", "meaning"), ("---", "---", "---"), *rows.values()]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join([head + mark, *lines, TABLE_END + tail])


def _rows(section: Any, path: str) -> Iterator[tuple[str, str, str]]:
    for f in fields(section):
        value = getattr(section, f.name)
        if is_dataclass(value):
            yield from _rows(value, f"{path}{f.name}.")
        else:
            yield f"{path}{f.name}", _scalar(value), f.metadata["help"] + _limits(f)


def _section(section: Any, indent: str) -> Iterator[str]:
    hints = typing.get_type_hints(type(section))
    for f in fields(section):
        value = getattr(section, f.name)
        if is_dataclass(value):
            if not indent:
                yield ""
            yield from _comment(f.metadata["help"], indent)
            yield f"{indent}{f.name}:"
            yield from _section(value, indent + "  ")
            continue
        yield from _comment(f.metadata["help"] + _limits(f), indent)
        yield f"{indent}{f.name}: {_scalar(value)}"
        (item, *_) = typing.get_args(hints[f.name]) or (None,)
        if isinstance(value, list) and is_dataclass(item):
            for i, (key, default, meaning) in enumerate(_rows(typing.cast(Any, item)(), "")):
                shown = f"{' ' if i else '-'} {key}: {default}"
                yield f"{indent}# {shown:<24} # {meaning}"


def _comment(text: str, indent: str) -> Iterator[str]:
    wrapper = textwrap.TextWrapper(WIDTH, f"{indent}# ", f"{indent}# ", break_long_words=False, break_on_hyphens=False)
    for paragraph in text.split("\n"):
        yield from wrapper.wrap(paragraph)


def _limits(f: Field[Any]) -> str:
    """The choices or bounds of a field, as the end of its help text."""
    meta = f.metadata
    if "choices" in meta:
        return f" [{' | '.join('null' if c is None else str(c) for c in meta['choices'])}]"
    signs = {"min": ">=", "above": ">", "max": "<=", "below": "<"}
    bounds = [f"{sign} {meta[name]}" for name, sign in signs.items() if name in meta]
    return f" [{', '.join(bounds)}]" if bounds else ""


def _scalar(value: Any) -> str:
    if isinstance(value, float) and "e" in repr(value):
        return repr(value)  # PyYAML would write 1.0e-06
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("...").strip()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--page"]:
        for path in map(Path, sys.argv[2:]):
            path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(reference(), end="")
