"""README and pages say what the code does: tables are current, links lead somewhere, named files and modules exist,
and every documented command has arguments that its program takes.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlscale import cli
from rlscale.config import load
from rlscale.config.reference import ALL_KEYS, SOME_KEYS, page
from rlscale.loop import launch

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/README.md"]
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES}
FOLDERS = r"(?:tools|yamls|launchers|tests|requirements|examples|docs)"


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 150


@pytest.mark.parametrize("name, mark", [("README.md", SOME_KEYS), ("docs/configuration.md", ALL_KEYS)])
def test_tables_of_keys_are_current(name: str, mark: str) -> None:
    assert mark in TEXTS[name]
    assert page(TEXTS[name]) == TEXTS[name], f"run: python -m rlscale.config.reference --page {name}"


def test_the_table_of_algorithms_is_current(tmp_path: Path) -> None:
    copy = tmp_path / "algorithms.md"
    copy.write_text(TEXTS["docs/algorithms.md"], encoding="utf-8")
    subprocess.run([sys.executable, "tools/list_algorithms.py", str(copy)], cwd=ROOT, check=True)
    assert copy.read_text(encoding="utf-8") == TEXTS["docs/algorithms.md"], (
        "run: python tools/list_algorithms.py docs/algorithms.md"
    )


def test_the_layers_are_those_of_the_contract() -> None:
    rows = re.findall(r"^\| \d \| (`[^|]+) \|", TEXTS["docs/architecture.md"], re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = next(c["layers"] for c in project["tool"]["importlinter"]["contracts"] if c["id"] == "rooms")
    rooms = [set(re.findall(r"\w+", layer)) for layer in layers if not layer.startswith("(")]
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == rooms


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("name", TEXTS)
def test_named_files_exist(name: str) -> None:
    named = set(re.findall(rf"\b({FOLDERS}/[\w/]+\.(?:py|sh|yaml|lock|md|svg))\b", TEXTS[name]))
    named |= set(re.findall(r"`(rlscale/[\w/]+(?:\.py)?)`", TEXTS[name]))
    assert not [f for f in named if not (ROOT / f).exists() and not (ROOT / f"{f}.py").exists()]


def commands(text: str) -> list[list[str]]:
    """The words of every command of a page that runs a program of this project."""
    found = []
    for line in text.splitlines():
        if re.match(r"\s+(?:deepspeed|python|rlscale) ", line) or re.match(r"(?:deepspeed|python|rlscale) ", line):
            words = shlex.split(line, comments=True)
            if words[-1] == "&":
                words.pop()
            if words[-1] != "\\" and "|" not in words and words[1:2] != ["trains"]:  # "rlscale trains ...", a sentence
                found.append(words)
    in_tables = re.findall(r"`((?:deepspeed|python|rlscale) [^`]+)`", text)
    return found + [words for words in map(shlex.split, in_tables) if len(words) > 2 and "..." not in words]


COMMANDS = sorted({tuple(c) for text in TEXTS.values() for c in commands(text)})


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_documented_commands_are_taken(command: tuple[str, ...]) -> None:
    """Their programs exist and take the arguments. The commands themselves run in tests/e2e and tests/tools."""
    words = list(command)
    if words[0] == "rlscale":
        assert words[1] in cli.COMMANDS
        if words[1] != "train":
            cli.parse(words[1], words[2:])
        return
    script = next(w for w in words if w.endswith(".py") or w == "-m")
    arguments = words[words.index(script) + 1 :]
    if script in ("launchers/train.py", "examples/minimal_grpo.py"):
        args = launch.parse(arguments)
        assert (ROOT / args.yaml).is_file() or args.yaml.startswith("my")
        if (ROOT / args.yaml).is_file():
            load(ROOT / args.yaml, args.overrides)  # every key exists and has a value of its type
        return
    options = [w for w in arguments if w.startswith("--")]
    assert script == "-m" or (ROOT / script).is_file()
    if script != "-m" and options:
        usage = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
        assert not [w for w in options if w.partition("=")[0] not in usage.stdout]
