"""Procedural sources: prompts made on the spot, so that a run needs no data files.

A generator is a function `(size, seed, **params) -> list[Prompt]` in `GENERATORS`; `register` adds one. Equal arguments
give equal prompts everywhere.
"""

from __future__ import annotations

import difflib
import inspect
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Prompt:
    """One prompt as its source has it; `PromptData` adds what the tokenizer makes of it, and its place."""

    messages: list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    scorer: str = ""  # spec of rlscale.reward.scorers, used where reward.scorer is null
    where: str = ""  # for messages to the user: file and line, or task and number
    text: str = ""  # where the prompt is a mere text; then what token_ids stand for, template included
    token_ids: list[int] = field(default_factory=list)  # with the chat template and the opening of the answer
    uid: str = ""  # source and row, e.g. 0:addition:17; unique in the data set
    index: int = -1  # position in the data set


Generator = Callable[..., list[Prompt]]
GENERATORS: dict[str, Generator] = {}


def register(name: str) -> Callable[[Generator], Generator]:
    """Decorator: make a generator available as `task: name` of a source. A name can be taken once."""

    def add(generator: Generator) -> Generator:
        if GENERATORS.setdefault(name, generator) is not generator:
            raise ValueError(f"the procedural task {name!r} is registered twice")
        return generator

    return add


def make(name: str, size: int, seed: int, params: dict[str, Any]) -> list[Prompt]:
    """The prompts of a generator.

    Raises:
        ValueError: no such generator, or parameters it doesn't take.
    """
    if name not in GENERATORS:
        hint = "".join(f"did you mean {near!r}? " for near in difflib.get_close_matches(name, GENERATORS, 1))
        raise ValueError(f"task {name!r} doesn't exist: {hint}(there are: {', '.join(sorted(GENERATORS))})")
    try:
        inspect.signature(GENERATORS[name]).bind(size, seed, **params)
    except TypeError as error:
        raise ValueError(f"params of task {name!r}: {error}") from error
    prompts = GENERATORS[name](size, seed, **params)
    for number, prompt in enumerate(prompts):
        prompt.where = prompt.where or f"{name} {number}"
        if not isinstance(prompt.messages, list):
            raise ValueError(f"task {name!r}, prompt {number}: messages must be a list of {{role, content}}")
    return prompts


@register("addition")
def addition(
    size: int,
    seed: int,
    split: str = "train",
    digits: int = 1,
    template: str = "What is {a} + {b}? Answer with a number.",
) -> list[Prompt]:
    """Additions of two numbers of at most `digits` digits as chat; the ground truth is the sum as a string.

    `split` is "train" or "val". A fixed three in ten or so of all pairs {a, b}, whatever the seed, are held out for
    "val" in both orders, so training and validation share no prompt. Drawn without repetition as far as the pairs reach
    (one digit: 63 for training, 37 for validation), then all over again in another order.

    Raises:
        ValueError: `split` is something else, or `digits` isn't positive.
    """
    if split not in ("train", "val"):
        raise ValueError(f"params of task 'addition': split is {split!r}, not 'train' or 'val'")
    if digits < 1:
        raise ValueError(f"params of task 'addition': digits is {digits}, not positive")
    rng = random.Random(f"addition/{split}/{digits}/{seed}")
    pairs = _pairs(rng, size, 10**digits, split == "val")
    return [
        Prompt(
            messages=[{"role": "user", "content": template.format(a=a, b=b)}],
            data_source="addition",
            ground_truth=str(a + b),
            scorer="last_number",
            where=f"addition {i}",
        )
        for i, (a, b) in enumerate(pairs)
    ]


def _pairs(rng: random.Random, size: int, limit: int, held_out: bool) -> list[tuple[int, int]]:
    """`size` ordered pairs of numbers below `limit` out of one side of the split."""
    pairs: list[tuple[int, int]] = []
    if limit <= 100:
        part = [(a, b) for a in range(limit) for b in range(limit) if _is_held_out(a, b) == held_out]
        while len(pairs) < size:
            rng.shuffle(part)
            pairs += part
        return pairs[:size]
    seen: set[tuple[int, int]] = set()
    while len(pairs) < size:
        pair = (rng.randrange(limit), rng.randrange(limit))
        if _is_held_out(*pair) == held_out and (pair not in seen or len(seen) > limit * limit // 4):
            seen.add(pair)
            pairs.append(pair)
    return pairs


def _is_held_out(a: int, b: int) -> bool:
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 10 < 3
