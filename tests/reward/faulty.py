"""Scorers that go wrong in every way, loaded by the workers of the pool under test. Imports nothing."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import Any


def by_text(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **more: Any) -> Any:
    """Do what the answer says."""
    return ACTIONS[solution_str](data_source, ground_truth, extra_info, more)


def _raise(*_: Any) -> None:
    raise RuntimeError("no idea")


def _regex(*_: Any) -> bool:
    """Holds the interpreter lock for ever: no thread or Python signal handler of the process runs."""
    return bool(re.match(r"(a+)+$", "a" * 64 + "b"))


ACTIONS = {
    "half": lambda *_: 0.5,
    "dict": lambda *_: {"score": 1, "format": 0.25, "pred": "x", "ok": True, "nan": float("nan")},
    "true": lambda *_: True,
    "raise": _raise,
    "nan": lambda *_: float("nan"),
    "inf": lambda *_: float("inf"),
    "none": lambda *_: None,
    "text": lambda *_: "1.0",
    "complex": lambda *_: 1j,
    "huge": lambda *_: 10**400,
    "keyless": lambda *_: {"reward": 1.0},
    "lambda": lambda *_: lambda: 1,
    "exit": lambda *_: sys.exit(0),
    "crash": lambda *_: os._exit(3),
    "sleep": lambda *_: time.sleep(60),
    "regex": _regex,
    "arguments": lambda source, truth, extra, more: float(
        (source, truth, extra["question"], more) == ("made_up", "7", "What is 3 + 4?", {"bonus": 2})
    ),
    "heavy": lambda *_: sum(name in sys.modules for name in ("torch", "transformers", "numpy", "vllm", "deepspeed")),
    "pid": lambda *_: os.getpid(),
}
