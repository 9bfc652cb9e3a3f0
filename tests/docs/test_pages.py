"""README and pages say what the code has: tables and pictures are current, links lead somewhere, what a page names
exists. Commands, scripts and blocks of code are in tests/docs/test_commands.py.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlscale.config.reference import ALL_KEYS, SOME_KEYS, page, table
from tests.docs.pages import PAGES, PROGRAMS, ROOT

FOLDERS = r"(?:tools|yamls|launchers|tests|requirements|examples|docs)"
SECTIONS = "trainer|data|model|actor|critic|rollout|reward|algorithm"
OF_OTHERS = {"VLLM_BATCH_INVARIANT", "SEED"}  # names that are not this project's code


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150


@pytest.mark.parametrize("name, mark", [("README.md", SOME_KEYS), ("docs/configuration.md", ALL_KEYS)])
def test_tables_of_keys_are_current(name: str, mark: str) -> None:
    assert mark in PAGES[name]
    assert page(PAGES[name]) == PAGES[name], f"run: python -m rlscale.config.reference --page {name}"


def test_the_table_of_algorithms_is_current(tmp_path: Path) -> None:
    copy = tmp_path / "algorithms.md"
    copy.write_text(PAGES["docs/algorithms.md"], encoding="utf-8")
    subprocess.run([sys.executable, "tools/list_algorithms.py", str(copy)], cwd=ROOT, check=True)
    assert copy.read_text(encoding="utf-8") == PAGES["docs/algorithms.md"], (
        "run: python tools/list_algorithms.py docs/algorithms.md"
    )


def test_functions_that_no_key_reaches_are_those_that_no_run_imports() -> None:
    section = PAGES["docs/algorithms.md"].partition("## Functions that no key reaches")[2]
    rows = re.findall(r"^\| `(rlscale/algo/(\w+)\.py)` \| (.+) \|$", section, re.MULTILINE)
    imported = {
        (node.module, alias.name)
        for file in (ROOT / "rlscale").rglob("*.py")
        if file.parent.name != "algo"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert rows
    for file, module, text in rows:
        source = (ROOT / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", text):
            assert re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE), f"{file} has no {name}"
            assert (f"rlscale.algo.{module}", name) not in imported, f"a run imports {name}"


def test_pictures_are_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the reward curve are what the script draws; the curve is drawn from any run."""
    from tools import draw_pictures

    monkeypatch.setattr(draw_pictures, "FOLDER", tmp_path / "pictures")
    records = [{"step": n, "critic/score/mean": n / 4} for n in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert draw_pictures.main(["--run", str(tmp_path)]) == 0
    drawn = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "pictures").iterdir()}
    assert "4 steps" in drawn.pop("reward.svg")
    for name, text in drawn.items():
        assert text == (ROOT / "docs/pictures" / name).read_text(encoding="utf-8"), "run: python tools/draw_pictures.py"


def test_the_number_of_layouts_is_that_of_the_parity_tool() -> None:
    from rlscale.testing.parity.cases import matrix

    for name in ("README.md", "docs/parallelism.md", "docs/benchmarks.md"):
        assert f"{len(matrix())} layouts" in PAGES[name]


def test_the_layers_are_those_of_the_contract() -> None:
    rows = re.findall(r"^\| \d+ \| (`[^|]+) \|", PAGES["docs/architecture.md"], re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = next(c["layers"] for c in project["tool"]["importlinter"]["contracts"] if c["id"] == "layers")
    packages = [set(re.findall(r"\w+", layer)) for layer in layers]
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == packages


def test_the_code_tour_names_what_is_in_the_files() -> None:
    tour = PAGES["docs/architecture.md"].partition("## A tour of the code")[2].partition("\n## ")[0]
    for files, text in re.findall(r"^\| (`[^|]+`) \| (.+) \|$", tour, re.MULTILINE):
        source = "".join((ROOT / f).read_text(encoding="utf-8") for f in re.findall(r"`([^`]+)`", files))
        for name in re.findall(r"`(\w+)`", text):
            assert re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE), f"{files} has no {name}"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("name", PAGES)
def test_named_files_exist(name: str) -> None:
    named = set(re.findall(rf"\b({FOLDERS}/[\w/]+\.(?:py|sh|yaml|lock|md|svg))\b", PAGES[name]))
    named |= set(re.findall(r"`(rlscale/[\w/]+(?:\.py)?)`", PAGES[name]))
    assert not [f for f in named if not (ROOT / f).exists() and not (ROOT / f"{f}.py").exists()]


@pytest.fixture(scope="module")
def sources() -> str:
    """The text of all code and configurations."""
    folders = ("rlscale", "launchers", "tools", "requirements", "examples", "yamls", "tests/e2e")
    found = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in (".py", ".sh", ".yaml", ".lock")]
    found += [ROOT / "setup.py", ROOT / "pyproject.toml", ROOT / "tests/leftovers.py"]
    return "\n".join([*map(str, found), *(path.read_text(encoding="utf-8") for path in found)])


@pytest.mark.parametrize("name", PAGES)
def test_named_keys_metrics_and_functions_exist(name: str, sources: str) -> None:
    """What stands between backticks: keys of the configuration, metrics, and words of the code."""
    keys, words = [key for key, _, _ in table()], set(re.findall(r"\w+", sources))
    prose = re.sub(r"^```.*?^```$", "", PAGES[name], flags=re.DOTALL | re.MULTILINE)
    wrong = []
    for span in re.findall(r"`([^`\n]+)`", prose):
        if span.split()[0] in PROGRAMS:
            continue  # a command
        for key in re.findall(rf"(?<![\w./])(?:{SECTIONS})\.[a-z][\w.]*\w", span):
            known = any(k == key or k.startswith(f"{key}.") or key.startswith(f"{k}.") for k in keys)
            wrong += [] if known or key.endswith(".py") else [key]
        if re.fullmatch(r"(?:actor|critic|rollout|group|batch|timing_s|perf)/\w+", span) and span not in sources:
            wrong.append(span)
        wrong += [w for w in re.findall(r"[A-Za-z_]\w{2,}", span) if w not in words and w not in OF_OTHERS]
    assert not wrong
