"""Registries by name: an algorithm is a pure function, and the configuration names it.

It says where it registers what it needs and what bounds its arguments have; validation, dry run, documentation and the
step of RL read that. A function of the user's, named ``path/file.py:function``, says it with `declare`.

Common keyword arguments (the ones that every run has, e.g. ``gamma``) reach a function only if it declares them; the
further arguments that a user wrote for this one algorithm must be declared by it, so that a misspelt one is an error.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from rlscale.config import functions
from rlscale.config.algorithms import NEEDS, Algorithm, Argument

Function = TypeVar("Function", bound=Callable[..., Any])
_DECLARED = "__rlscale_algorithm__"


def declare(
    *,
    needs: Collection[str] = (),
    zero_at_zero_advantage: bool = False,
    prepare: Callable[..., Any] | None = None,
    paper: str = "",
    bounds: Mapping[str, Mapping[str, float]] | None = None,
) -> Callable[[Function], Function]:
    """Decorator that notes what an algorithm needs. Arguments: as of `rlscale.config.algorithms.Algorithm`;
    ``bounds``: ``{"eps": {"above": 0}}``, with the words of `rlscale.config.schema.opt`.

    Raises:
        ValueError: a need that nothing knows.
    """
    unknown = sorted(set(needs) - set(NEEDS))
    if unknown:
        raise ValueError(f"needs {', '.join(unknown)}: known are {', '.join(NEEDS)}")
    said = {"needs": frozenset(needs), "zero_at_zero_advantage": zero_at_zero_advantage, "prepare": prepare}

    def note(function: Function) -> Function:
        setattr(function, _DECLARED, {**said, "paper": paper, "bounds": bounds or {}})
        return function

    return note


class Registry:
    """Functions of one kind by name.

    Args:
        kind: the word used in messages, e.g. ``advantage estimator``.
        key: the key of the configuration that names one; args_key: the key of its own arguments. Without them, there
            are no functions from a path.
        common: keyword arguments that every run has, and the keys that set them; other reserved names have no key.
        suffix: an ending that any name may have (``k3+``); the function is the same.
    """

    def __init__(
        self,
        kind: str,
        key: str | None = None,
        args_key: str | None = None,
        common: Mapping[str, str] | None = None,
        suffix: str = "",
    ) -> None:
        self.kind, self.key, self.args_key, self.suffix = kind, key, args_key, suffix
        self.common = dict(common or {})
        self._algorithms: dict[str, Algorithm] = {}
        self._of_users: dict[str, Algorithm] = {}

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
        return Algorithm(names, function, arguments=own, common={k: v for k, v in self.common.items() if v}, **said)

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(n + s for n in self._algorithms for s in dict.fromkeys(("", self.suffix)))

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
        known = name.removesuffix(self.suffix) if self.suffix else name
        if known not in self._algorithms:
            more = f", each also with {self.suffix} at its end" if self.suffix else ""
            raise ValueError(f"unknown {self.kind} {name!r}; known: {', '.join(sorted(self._algorithms))}{more}")
        return self._algorithms[known]

    def _from_path(self, key: str, name: str) -> Algorithm:
        target = functions.absolute(name)
        if target in self._of_users:
            return self._of_users[target]
        wrong = functions.problem(key, name)
        if wrong:
            raise ValueError(wrong)
        function = functions.load(key, target)
        parameters = list(inspect.signature(function).parameters.values())
        if sum(p.kind is not p.KEYWORD_ONLY for p in parameters) != 1:
            raise ValueError(
                f"{key} {target}: must take one argument (what the {self.kind} reads) and its own by keyword, after *; "
                f"it is {target.rpartition(':')[2]}{inspect.signature(function)}"
            )
        return self._of_users.setdefault(target, self._describe((name,), function))

    def accepts(self, name: str) -> set[str]:
        """Names of the keyword arguments that the function declares."""
        parameters = inspect.signature(self.find(name).function).parameters.values()
        return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def arguments(self, name: str, common: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for a call: those of ``common`` that it takes, all of ``extra``.

        Raises:
            ValueError: ``extra`` holds an argument that the function does not take.
        """
        accepted = self.accepts(name)
        unknown = sorted(set(extra) - accepted)
        if unknown:
            raise ValueError(
                f"{self.kind} {name!r} takes no argument {', '.join(unknown)}; "
                f"it takes: {', '.join(sorted(accepted)) or 'none'}"
            )
        return {**{k: v for k, v in common.items() if k in accepted}, **extra}
