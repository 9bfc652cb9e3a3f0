"""YAML with the scalars of version 1.2 instead of 1.1: ``1e-6`` is a number; ``yes``, ``off``, ``1:30`` are strings.

Duplicate keys are errors.
"""

from __future__ import annotations

import re
from typing import Any

import yaml


def parse_yaml(text: str) -> Any:
    """A YAML document with these scalars. Raises yaml.YAMLError, also for duplicate keys and values beyond Python."""
    try:
        return yaml.load(text, Loader=Loader)  # a SafeLoader: builds plain values only
    except (ValueError, AttributeError, RecursionError) as error:  # PyYAML lets them through
        raise yaml.YAMLError(f"it holds a value that cannot be read: {error}") from error


class Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars that refuses duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                problem = f"key {key_node.value!r} appears a second time, after line {seen[key_node.value]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen[key_node.value] = line
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """SafeDumper that quotes strings as `Loader` needs it, and writes no anchors."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (Loader, Dumper):
    for _tag, _pattern, _first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
        (
            "float",
            r"[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
            "-+.0123456789",
        ),
        ("null", r"~|null|Null|NULL|", "~nN\0"),
        ("merge", r"<<", "<"),
    ):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), [c if c != "\0" else "" for c in _first]
        )
