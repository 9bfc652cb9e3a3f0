"""The tables of docs/algorithms.md, from what each algorithm says where it registers.

    python tools/list_algorithms.py docs/algorithms.md      # write the tables of the page anew

A test checks that the page is what this program writes.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

from rlscale.algo.needs import registries
from rlscale.config.algorithms import NEEDS, PROVIDED, Algorithm

MARK, END = "<!-- algorithms of {key}, made by python tools/list_algorithms.py -->", "<!-- end of the algorithms -->"
HEAD = "| name | what it is | paper | needs | a run reaches it |\n| --- | --- | --- | --- | --- |\n"


def page(text: str) -> str:
    """The page with the table of every key that it has marks for made anew.

    Raises:
        ValueError: the page has no marks for one of the keys.
    """
    for key, registry in registries().items():
        start = MARK.format(key=key)
        if start not in text and key == "actor.kl_loss_type":
            continue  # the same registry as algorithm.kl_penalty, whose table names both keys
        head, found, rest = text.partition(start)
        _, end, tail = rest.partition(END)
        if not found or not end:
            raise ValueError(f"the page lacks {start} with {END} after it")
        text = f"{head}{start}\n{HEAD}{''.join(map(row, registry.algorithms()))}{END}{tail}"
    return text


def row(algorithm: Algorithm) -> str:
    """One line of a table."""
    missing = sorted(NEEDS[need] for need in algorithm.needs - PROVIDED)
    reached = "no: no step provides " + ", ".join(missing) if missing else "yes"
    names = ", ".join(f"`{name}`" for name in algorithm.names)
    needs = ", ".join(NEEDS[need] for need in sorted(algorithm.needs)) or "-"
    cells = (names, meaning(algorithm), algorithm.paper or "-", needs, reached)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def meaning(algorithm: Algorithm) -> str:
    """The first sentence of the function's docstring, without the citation that the paper's column has."""
    text = " ".join((inspect.getdoc(algorithm.function) or "").partition("\n\n")[0].split()).replace("``", "`")
    text = re.sub(r" \([^()]*\d{4}[^()]*\)", "", text)
    return text.rstrip(".")


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
