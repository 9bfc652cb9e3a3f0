"""Registries by name: an algorithm is a pure function, and the configuration names it.

Common keyword arguments (the ones that every run has, e.g. ``gamma``) reach a function only if it declares them; the
further arguments that a user wrote for this one algorithm must be declared by it, so that a misspelt one is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


class Registry:
    """Functions of one kind by name. ``kind`` is the word used in messages, e.g. ``advantage estimator``."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, Callable[..., Any]] = {}

    def register(self, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that adds a function under one or several names."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            for name in names:
                assert name not in self._functions, f"{self.kind} {name} is registered twice"
                self._functions[name] = function
            return function

        return add

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._functions)

    def get(self, name: str) -> Callable[..., Any]:
        """The function of that name.

        Raises:
            ValueError: no such name; the message lists those that exist.
        """
        if name not in self._functions:
            raise ValueError(f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}")
        return self._functions[name]

    def accepts(self, name: str) -> set[str]:
        """Names of the keyword arguments that the function declares."""
        parameters = inspect.signature(self.get(name)).parameters.values()
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
