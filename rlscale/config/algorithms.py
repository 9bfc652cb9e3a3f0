"""Algorithms by name: each is a pure function that the configuration names, and says itself what it needs.

Validation, dry run, documentation and the step of RL read what an algorithm says where it registers, or with `declare`
where a user's function is named ``path/file.py:function``. An algorithm's own arguments are the keywords in its
signature, so a key such as ``algorithm.adv_args.eps`` has its type, default and bounds in one place. Common keywords
(those that every run sets, e.g. ``gamma``) reach a function only if it declares them. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlscale.config import functions
from rlscale.config.schema import TYPE_NAMES, outside, show

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
Function = TypeVar("Function", bound=Callable[..., Any])
_DECLARED = "__rlscale_algorithm__"


@dataclass(frozen=True)
class Argument:
    """One argument of an algorithm. ``bounds``: words of `rlscale.config.schema.BOUNDS` with their numbers."""

    type: Any
    default: Any = inspect.Parameter.empty
    bounds: Mapping[str, float] = field(default_factory=dict)

    def problems(self, key: str, value: Any) -> list[str]:
        """What is wrong with a value of this argument, named by its key."""
        expected = _mismatch(self.type, value)
        return [f"{key} must be {expected}, not {show(value)}"] if expected else outside(key, value, self.bounds)


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
    """A function of a registry.

    Attributes:
        needs: keys of `NEEDS`.
        zero_at_zero_advantage: (losses) a response whose advantages are all 0 has exactly no loss and no gradient.
        prepare: (losses) the statistic of the mini-batch, which the loss takes as its keyword ``statistic``.
        arguments: its own; common: those that every run has, and the keys that set them.
    """

    names: tuple[str, ...]
    function: Callable[..., Any]
    needs: frozenset[str] = frozenset()
    zero_at_zero_advantage: bool = False
    prepare: Callable[..., Any] | None = None
    paper: str = ""
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    common: Mapping[str, str] = field(default_factory=dict)

    def accepts(self) -> set[str]:
        """Names of the keyword arguments that the function declares."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}

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


def declare(
    *,
    needs: Collection[str] = (),
    zero_at_zero_advantage: bool = False,
    prepare: Callable[..., Any] | None = None,
    paper: str = "",
    bounds: Mapping[str, Mapping[str, float]] | None = None,
) -> Callable[[Function], Function]:
    """Decorator that notes what an algorithm needs. Arguments: as of `Algorithm`; ``bounds``: as in
    ``{"eps": {"above": 0}}``, with the words of `rlscale.config.schema.BOUNDS`.

    Raises:
        ValueError: a need that nothing knows.
    """
    if unknown := sorted(set(needs) - set(NEEDS)):
        raise ValueError(f"needs {', '.join(unknown)}: known are {', '.join(NEEDS)}")
    said = {"needs": frozenset(needs), "zero_at_zero_advantage": zero_at_zero_advantage, "prepare": prepare}

    def note(function: Function) -> Function:
        setattr(function, _DECLARED, {**said, "paper": paper, "bounds": bounds or {}})
        return function

    return note


@dataclass(eq=False)
class Registry:
    """Functions of one kind by name.

    Attributes:
        kind: the word used in messages, e.g. ``advantage estimator``.
        key: the key of the configuration that names one; args_key: the key of its own arguments. Without them, there
            are no functions from a path.
        common: keyword arguments that every run has, and the keys that set them; other reserved names have no key.
        suffix: an ending that any name may have (``k3+``); the function is the same.
    """

    kind: str
    key: str | None = None
    args_key: str | None = None
    common: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""
    _algorithms: dict[str, Algorithm] = field(default_factory=dict, init=False)
    _of_users: dict[str, Algorithm] = field(default_factory=dict, init=False)

    def register(self, *names: str, **said: Any) -> Callable[[Function], Function]:
        """Decorator that adds a function under one or several names; ``said``: as for `declare`."""

        def add(function: Function) -> Function:
            algorithm = self._describe(names, declare(**said)(function))
            for name in names:
                assert name not in self._algorithms, f"{self.kind} {name} is registered twice"
                self._algorithms[name] = algorithm
            return function

        return add

    def _describe(self, names: tuple[str, ...], function: Callable[..., Any]) -> Algorithm:
        said = dict(getattr(function, _DECLARED, {}))
        bounds = said.pop("bounds", {})
        try:
            hints = typing.get_type_hints(function)
        except Exception:  # a user's annotation that only a type checker can resolve: its type is not checked
            hints = {}
        own = {
            p.name: Argument(hints.get(p.name, Any), p.default, bounds.get(p.name, {}))
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name not in self.common
        }
        return Algorithm(names, function, arguments=own, common=self.common, **said)

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(n + s for n in self._algorithms for s in {"", self.suffix})

    def algorithms(self) -> list[Algorithm]:
        """Each registered algorithm once, in the order of registration."""
        return list({id(a): a for a in self._algorithms.values()}.values())

    def find(self, name: str) -> Algorithm:
        """The algorithm of that name, or of the user's function ``module:function`` or ``path/file.py:function``.

        Raises:
            ValueError: no such name (the message lists those that exist), or no function that can be called as one of
                this kind.
        """
        if ":" in name and self.key is not None:
            return self._from_path(self.key, name)
        known = name.removesuffix(self.suffix)
        if known not in self._algorithms:
            more = f", each also with {self.suffix} at its end" if self.suffix else ""
            raise ValueError(f"unknown {self.kind} {name!r}; known: {', '.join(sorted(self._algorithms))}{more}")
        return self._algorithms[known]

    def _from_path(self, key: str, name: str) -> Algorithm:
        target = functions.absolute(name)
        if target in self._of_users:
            return self._of_users[target]
        if wrong := functions.problem(key, name):
            raise ValueError(wrong)
        function = functions.load_function(key, target)
        signature = inspect.signature(function)
        if sum(p.kind is not p.KEYWORD_ONLY for p in signature.parameters.values()) != 1:
            raise ValueError(
                f"{key} {target}: must take one argument (what the {self.kind} reads) and its own by keyword, after *; "
                f"it is {target.rpartition(':')[2]}{signature}"
            )
        return self._of_users.setdefault(target, self._describe((name,), function))

    def choose(self, key: str, name: str) -> Algorithm:
        """The algorithm that a key of the configuration names, if a step can provide what it needs.

        Raises:
            ValueError: it cannot; the message names the key, the value and what would work.
        """
        offered = [n for n in self.names() if self.find(n).needs <= PROVIDED]
        if ":" not in name and name not in self.names():
            hint = "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(name, offered, 1))
            raise ValueError(f"{key}: {name!r} is not one of {', '.join(offered)}{hint}")
        chosen = self.find(name)
        if missing := " and ".join(NEEDS[n] for n in sorted(chosen.needs - PROVIDED)):
            others = ", ".join(offered)
            raise ValueError(f"{key}: {name!r} needs {missing}, which no step provides yet; use one of {others}")
        return chosen

    def arguments(self, name: str, common: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for a call: those of ``common`` that the function takes, all of ``extra``.

        Raises:
            ValueError: ``extra`` holds an argument that the function does not take.
        """
        accepted = self.find(name).accepts()
        if unknown := sorted(set(extra) - accepted):
            takes = ", ".join(sorted(accepted)) or "none"
            raise ValueError(f"{self.kind} {name!r} takes no argument {', '.join(unknown)}; it takes: {takes}")
        return {**{k: v for k, v in common.items() if k in accepted}, **extra}


Registries = Mapping[str, Registry]
