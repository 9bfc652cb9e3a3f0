"""From YAML files and key=value overrides to a `Config`, or to one error that names everything that is wrong.

A file holds the keys of `rlscale.config.schema` and, optionally, ``base: other.yaml`` (relative to the file): recipes
hold differences only. Mappings are merged key by key, anything else is replaced. An override is ``section.key=value``
with the value in YAML; list elements are reached by number (``data.train.0.size=64``).

Types are exact: a bool is no int, a float with an integral value is no int; a float field takes ints and numeric
strings.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import types
import typing
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Union

import yaml

from rlscale.config.schema import TYPE_NAMES, Config, Violation, outside, show
from rlscale.config.yaml12 import Dumper, parse_yaml


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line each in ``violations``."""

    def __init__(self, violations: Sequence[str]) -> None:
        assert violations
        self.violations = list(violations)
        head = f"{len(violations)} errors in the configuration:\n  - " if len(violations) > 1 else "configuration: "
        super().__init__(head + "\n  - ".join(self.violations))


def read(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> tuple[Config, list[Violation]]:
    """The configuration in ``path`` with its bases and the overrides applied, and what is wrong with it key by key:
    unknown keys, wrong types, values out of bounds. A value that could not be read is replaced by its default.

    Raises:
        ConfigError: a file cannot be read; whatever else could be said follows from its absence.
    """
    reader = _Reader()
    reader.read(Path(path))
    if reader.violations:
        raise ConfigError([v.message for v in reader.violations])
    for override in overrides:
        reader.override(override)
    return reader.build(Config, reader.tree, ""), reader.violations


def drop_consequences(contradictions: Sequence[Violation], misread: Sequence[Violation]) -> list[Violation]:
    """The contradictions that do not follow from a value that could not be read and was replaced by its default."""
    wrong = [f"{key}." for v in misread for key in v.keys]  # the same key, one above it or one below
    follows = {
        v for v in contradictions for a in v.keys for b in wrong if f"{a}.".startswith(b) or b.startswith(f"{a}.")
    }
    return [v for v in contradictions if v not in follows]


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain mappings, lists and scalars."""
    return asdict(config)


def save(config: Config, path: str | os.PathLike[str]) -> None:
    """Write the resolved configuration as a YAML file that `read` reads back to an equal one."""
    text = yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True)
    Path(path).write_text(text, encoding="utf-8")


class _Reader:
    """One reading of a configuration: collects violations and remembers which file or override set which key."""

    def __init__(self) -> None:
        self.tree = to_dict(Config())
        self.violations: list[Violation] = []
        self.origin: dict[str, str] = {}

    def say(self, key: str, message: str, origin: str | None = None) -> None:
        above = key
        while origin is None:
            origin = self.origin.get(above) if above else ""
            above = above.rpartition(".")[0]
        self.violations.append(Violation((key,), f"{origin}: {message}" if origin else message))

    # ---- files

    def read(self, path: Path, children: tuple[Path, ...] = ()) -> None:
        """Merge a file, after its bases, into the tree."""
        tree = self._parse(path, children)
        base = tree.pop("base", None)
        if base is not None and not isinstance(base, str):
            self.say("base", f"base must be the name of a YAML file, not {show(base)}", str(path))
        elif base is not None:
            below = path.parent / base
            if below.resolve() in [p.resolve() for p in (*children, path)]:
                self.say("base", f"base: {base} leads back to a file that is being read", str(path))
            else:
                self.read(below, (*children, path))
        self._merge(self.tree, tree, str(path))

    def _parse(self, path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
        named_by = f" (base of {children[-1]})" if children else ""
        try:
            tree = parse_yaml(path.read_text(encoding="utf-8"))
            if tree is None or isinstance(tree, dict):
                return tree or {}
            problem = f"{path}: must hold a mapping of keys, not {show(tree)}"
        except FileNotFoundError:
            near = difflib.get_close_matches(path.name, sorted(p.name for p in path.parent.glob("*.y*ml")), 1)
            hint = f"; did you mean {path.parent / near[0]}?" if near else ""
            problem = f"no such configuration file: {path}{named_by}{hint}"
        except (OSError, UnicodeDecodeError) as error:
            problem = f"{path}{named_by} cannot be read: {error}"
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            problem = f"{path}{f', line {mark.line + 1}' if mark else ''}: {_problem(error)}"
        self.say("", problem, "")
        return {}

    def _merge(self, tree: dict[str, Any], other: dict[str, Any], origin: str, prefix: str = "") -> None:
        """Merge a file's tree into another, in place, and note where each key is from."""
        for key, value in other.items():
            path = f"{prefix}{key}"
            if isinstance(value, dict) and isinstance(tree.get(key), dict):
                self.origin.setdefault(path, origin)
                self._merge(tree[key], value, origin, f"{path}.")
            else:
                self.origin[path] = origin
                tree[key] = deepcopy(value)  # an alias in the file is the same object elsewhere

    # ---- overrides

    def override(self, text: str) -> None:
        """Apply one ``key=value`` to the tree."""
        key, equals, raw = text.partition("=")
        key = re.sub(r"\[(\d+)\]", r".\1", key.strip())
        origin = f"override {text!r}"
        if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
            self.say("", f"{origin} is not of the form section.key=value", "")
            return
        try:
            value = parse_yaml(raw)
        except yaml.YAMLError as error:
            self.say(key, f"value is not valid YAML: {_problem(error)}", origin)
            return
        at: Any = self.tree
        names = key.split(".")
        for depth, name in enumerate(names, 1):
            index: Any = name
            where = ".".join(names[: depth - 1])
            if isinstance(at, list):
                if not name.isdigit() or int(name) >= len(at):
                    self.say(key, f"{where} is a list of {len(at)}; {name!r} is not the number of an element", origin)
                    return
                index = int(name)
            elif not isinstance(at, dict):
                self.say(key, f"unknown key {key!r}: {where} holds a value, not a section", origin)
                return
            if depth == len(names):
                at[index] = value
            elif isinstance(at, dict) and index not in at:
                at[index] = {}
                self.origin[".".join(names[:depth])] = origin
            at = at[index]
        self.origin = {k: v for k, v in self.origin.items() if not k.startswith(f"{key}.")}
        self.origin[key] = origin

    # ---- values

    def build(self, cls: type, tree: Any, prefix: str) -> Any:
        """A dataclass from a mapping; what is wrong is noted and replaced by the default."""
        if not isinstance(tree, dict):
            self.say(prefix, f"{prefix} must be a section (mapping of keys), not {show(tree)}")
            return cls()
        known = {f.name: f for f in fields(cls)}
        hints = typing.get_type_hints(cls)
        for key in tree:
            if key not in known:
                path = f"{prefix}.{key}" if prefix else str(key)
                self.say(path, f"unknown key {path!r}{_nearest(str(key), path, prefix, list(known))}")
        values = {}
        for name, f in known.items():
            if name in tree:
                path = f"{prefix}.{name}" if prefix else name
                before = len(self.violations)
                value = self.value(hints[name], tree[name], path)
                if len(self.violations) == before:
                    self.bounds(f, value, path)
                if len(self.violations) == before or is_dataclass(value) or isinstance(value, list):
                    values[name] = value
        return cls(**values)

    def value(self, tp: Any, value: Any, path: str) -> Any:
        """``value`` as type ``tp``; a mismatch is noted."""
        if tp is Any:
            return value
        if is_dataclass(tp):
            return self.build(typing.cast(type, tp), value, path)
        origin, args = typing.get_origin(tp), typing.get_args(tp)
        if origin in (Union, types.UnionType):
            inner = next(a for a in args if a is not type(None))
            return None if value is None else self.value(inner, value, path)
        if origin is list:
            if not isinstance(value, list):
                self.say(path, f"{path} must be a list, not {show(value)}")
                return []
            return [self.value(args[0], v, f"{path}.{i}") for i, v in enumerate(value)]
        if origin is dict:
            if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
                self.say(path, f"{path} must be a mapping with strings as keys, not {show(value)}")
                return {}
            return value
        return self.scalar(tp, value, path)

    def scalar(self, tp: type, value: Any, path: str) -> Any:
        """``value`` as bool, int, float or str; a mismatch is noted."""
        if tp is float and isinstance(value, int | str) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):
                value = float(value)
        if type(value) is not tp:
            hint = f"; write {int(value)}" if tp is int and isinstance(value, float) and value == int(value) else ""
            self.say(path, f"{path} must be {TYPE_NAMES[tp]}, not {show(value)}{hint}")
        elif isinstance(value, float) and not math.isfinite(value):
            self.say(path, f"{path} must be finite, not {value}")
        return value

    def bounds(self, f: Field[Any], value: Any, path: str) -> None:
        """Note a value outside the field's choices or bounds."""
        choices = ["null" if c is None else str(c) for c in f.metadata.get("choices", ())]
        if choices and value not in f.metadata["choices"]:
            hint = "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(str(value), choices, 1))
            self.say(path, f"{path} must be one of {', '.join(choices)}, not {show(value)}{hint}")
        for message in outside(path, value, f.metadata):
            self.say(path, message)


def _paths(cls: type, prefix: str = "") -> Iterator[str]:
    """The dotted paths of all keys below a configuration dataclass."""
    for name, tp in typing.get_type_hints(cls).items():
        yield f"{prefix}{name}"
        if is_dataclass(tp):
            yield from _paths(typing.cast(type, tp), f"{prefix}{name}.")


def _nearest(key: str, path: str, prefix: str, siblings: list[str]) -> str:
    """A hint at what was meant: a sibling of nearly this name, the same name in another section, or a similar path."""
    everywhere = list(_paths(Config))
    name = key.lower()
    dot = f"{prefix}." if prefix else ""
    near = [dot + s for s in difflib.get_close_matches(name, siblings, 1, 0.75)]
    near = near or difflib.get_close_matches(path, [p for p in everywhere if p.rpartition(".")[2] == name], 1, 0.0)
    near = near or [dot + s for s in difflib.get_close_matches(name, siblings, 1)]
    alike = [p for p in everywhere if difflib.get_close_matches(name, [p.rpartition(".")[2]])]
    near = near or difflib.get_close_matches(path, alike, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; {prefix or 'the top level'} has: {', '.join(siblings)}"


def _problem(error: yaml.YAMLError) -> str:
    """One line: what PyYAML has to say, without the excerpt."""
    return getattr(error, "problem", None) or str(error).splitlines()[0]
