"""README and pages as tests read them: blocks of code, and the commands in blocks, tables and sentences."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/README.md"]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
#: files whose comments show commands
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for path in [*(ROOT / "examples").glob("*.py"), *(ROOT / "yamls").glob("*.yaml")]
    if path.name != "reference.yaml"
)
PROGRAMS = ("bash", "deepspeed", "mypy", "pip", "python", "rlscale", "ruff", "source")


@dataclass(frozen=True)
class Block:
    """A block of code; ``line`` is that of its first line, ``language`` is empty where the block is indented."""

    page: str
    line: int
    language: str
    text: str

    @property
    def is_shell(self) -> bool:
        """Whether its lines are commands; an indented block of anything else shows an output."""
        return self.language == "bash" or (not self.language and self.text.split()[0] in PROGRAMS)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """The fenced and the indented blocks of a page, in their order."""
    found: list[Block] = []
    lines = PAGES[page].splitlines()
    at = 0
    while at < len(lines):
        begin = at
        if fence := re.match(r"```(\w+)", lines[at]):
            end = next(i for i in range(at + 1, len(lines)) if lines[i] == "```")
            found.append(Block(page, at + 2, fence[1], "\n".join(lines[at + 1 : end])))
            at = end
        elif lines[at].startswith("    ") and not (at and lines[at - 1].strip()):
            while at < len(lines) and lines[at].startswith("    "):
                at += 1
            found.append(Block(page, begin + 1, "", textwrap.dedent("\n".join(lines[begin:at]))))
        at += 1
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]


def _split(line: str) -> tuple[str, ...]:
    words = shlex.split(line, comments=True)
    return tuple(words[:-1] if words[-1:] == ["&"] else words)


def _of_blocks(page: str) -> list[str]:
    return [line for block in blocks(page) if block.is_shell for line in block.text.splitlines()]


def _of_sentences(page: str) -> list[str]:
    """Commands between backticks; a program's name alone, or with one word after it, names the program."""
    spans = re.findall(r"`([^`\n]+)`", PAGES[page])
    return [span for span in spans if span.split()[0] in PROGRAMS and len(span.split()) > 1]


def _of_comments(file: str) -> list[str]:
    text = (ROOT / file).read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(rf"^#? {{4,5}}((?:{'|'.join(PROGRAMS)}) [^\n]+)", text, re.MULTILINE)


def commands() -> dict[tuple[str, ...], str]:
    """The words of every command, and the file that it is in."""
    found: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        for line in [*_of_blocks(page), *_of_sentences(page)]:
            if line.split() and line.split()[0] in PROGRAMS:
                found.setdefault(_split(line), page)
    for file in SOURCES:
        for line in _of_comments(file):
            found.setdefault(_split(line), file)
    return found
