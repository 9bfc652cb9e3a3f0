"""What an algorithm says about itself where it registers, as the configuration's checks read it.

`rlscale.algo.registry` fills these; nothing here imports torch. An algorithm's own arguments come out of the signature
of its function, so a key such as ``algorithm.adv_args.eps`` has its type, default and bounds in one place.
"""

from __future__ import annotations

import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlscale.config.schema import BOUNDS, TYPE_NAMES, show

#: inputs of an algorithm beyond rewards and log-probs, in words
NEEDS = {
    "values": "the values of a critic",
    "group": "several responses to one prompt",
    "ref_logprobs": "the log-probs of the reference policy",
    "old_logprobs": "the log-probs of the policy that sampled",
    "baselines": "the reward of a greedy response",
    "components": "several rewards per response",
    "sum_pi_squared": "sums over the vocabulary",
}
#: those that a step of RL provides, if the algorithm asks for them
PROVIDED = frozenset({"values", "group", "ref_logprobs", "old_logprobs"})


@dataclass(frozen=True)
class Argument:
    """One argument of an algorithm. ``bounds``: as in `rlscale.config.schema.opt`."""

    type: Any
    default: Any = inspect.Parameter.empty
    bounds: Mapping[str, float] = field(default_factory=dict)

    def problems(self, key: str, value: Any) -> Iterator[str]:
        """What is wrong with a value of this argument, named by its key."""
        expected = _mismatch(self.type, value)
        if expected:
            yield f"{key} must be {expected}, not {show(value)}"
        elif isinstance(value, int | float) and not isinstance(value, bool):
            for name, bound in self.bounds.items():
                words, holds = BOUNDS[name]
                if not holds(value, bound):
                    yield f"{key} must be {words} {bound}, not {value}"


def _mismatch(tp: Any, value: Any) -> str:
    """The type a value should have, in words; empty where it has it. What cannot be told from YAML passes."""
    if typing.get_origin(tp) in (typing.Union, types.UnionType):
        expected = [_mismatch(t, value) for t in typing.get_args(tp)]
        return "" if "" in expected else " or ".join(expected)
    if tp is type(None):
        return "" if value is None else "null"
    if typing.get_origin(tp) is list:
        inner = typing.get_args(tp)[0]
        right = isinstance(value, list) and not any(_mismatch(inner, v) for v in value)
        return "" if right else f"a list, each {_mismatch(inner, ...) or 'of any type'}"
    if tp is float and type(value) in (int, float) and math.isfinite(value):
        return ""
    return "" if tp not in TYPE_NAMES or (type(value) is tp and tp is not float) else TYPE_NAMES[tp]


@dataclass(frozen=True)
class Algorithm:
    """A function of a registry. ``needs``: keys of `NEEDS`. ``zero_at_zero_advantage`` (losses): a response whose
    advantages are all 0 has exactly no loss and no gradient. ``prepare`` (losses): the statistic of the mini-batch.
    ``arguments``: its own; ``common``: those that every run has, and the keys that set them.
    """

    names: tuple[str, ...]
    function: Callable[..., Any]
    needs: frozenset[str] = frozenset()
    zero_at_zero_advantage: bool = False
    prepare: Callable[..., Any] | None = None
    paper: str = ""
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    common: Mapping[str, str] = field(default_factory=dict)

    def problems(self, key: str, given: Mapping[str, Any]) -> Iterator[str]:
        """Everything wrong with the arguments that a user wrote for it under ``key``."""
        for name, value in given.items():
            if name in self.arguments:
                yield from self.arguments[name].problems(f"{key}.{name}", value)
            elif name in self.common:
                yield f"{key}.{name} is set by {self.common[name]}"
            else:
                near = difflib.get_close_matches(name, self.arguments, 1)
                hint = f"did you mean {key}.{near[0]}?" if near else f"it takes: {', '.join(self.arguments) or 'none'}"
                yield f"{key}.{name}: {self.names[0]} takes no such argument; {hint}"
        for name, argument in self.arguments.items():
            if argument.default is inspect.Parameter.empty and name not in given:
                yield f"{key}.{name} is missing: {self.names[0]} needs it"


class Algorithms(Protocol):
    """A registry (`rlscale.algo.registry.Registry`). ``args_key``: the key of their own arguments, if they have any."""

    args_key: str | None

    def names(self) -> list[str]:
        """All registered names."""

    def find(self, name: str) -> Algorithm:
        """The algorithm of that name or target (``path/file.py:function``).

        Raises:
            ValueError: no such name, or no such function; the message says which key.
        """


Registries = Mapping[str, Algorithms]


def choose(registries: Registries, key: str, name: str) -> Algorithm:
    """The algorithm that a key of the configuration names, if a step can provide what it needs.

    Raises:
        ValueError: it cannot; the message names the key, the value and what would work.
    """
    registry = registries[key]
    offered = [n for n in registry.names() if registry.find(n).needs <= PROVIDED]
    if ":" not in name and name not in registry.names():
        hint = "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(name, offered, 1))
        raise ValueError(f"{key}: {name!r} is none of {', '.join(offered)}{hint}")
    chosen = registry.find(name)
    missing = " and ".join(NEEDS[n] for n in sorted(chosen.needs - PROVIDED))
    if missing:
        others = ", ".join(offered)
        raise ValueError(f"{key}: {name!r} needs {missing}, which no step provides yet; use one of {others}")
    return chosen
