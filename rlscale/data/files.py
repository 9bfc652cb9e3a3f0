"""Prompts out of JSONL and Parquet files, with the columns of veRL.

A malformed row never passes silently and never hides the next one: all rows are read, and what is wrong is collected
with file and line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlscale.data.procedural import Prompt

if TYPE_CHECKING:
    from rlscale.config.schema import DataConfig

ROLES = ("system", "developer", "user", "assistant", "tool")
_MISSING = object()


def read(files: list[str], cfg: DataConfig, errors: list[str]) -> list[Prompt]:
    """The prompts of all files in their order; what is malformed is left out and described in `errors`."""
    prompts = []
    for path in (Path(file).expanduser() for file in files):
        if not path.is_file():
            errors.append(f"{path}: no such file")
            continue
        for where, row in (_parquet_rows if path.suffix == ".parquet" else _json_rows)(path, errors):
            try:
                prompts.append(parse(row, cfg, where, path.stem))
            except ValueError as problem:
                errors.append(f"{where}: {problem}")
    return prompts


def _json_rows(path: Path, errors: list[str]) -> Iterator[tuple[str, Any]]:
    """(file:line, row) of each row."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                yield where, json.loads(line.decode("utf-8"))
            except json.JSONDecodeError as error:
                errors.append(f"{where}: not JSON: {error.msg} at column {error.colno}")
            except UnicodeDecodeError:
                errors.append(f"{where}: not UTF-8")


def _parquet_rows(path: Path, errors: list[str]) -> Iterator[tuple[str, Any]]:
    """(file:number, row) of each row, counted from 1."""
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        errors.append(f"{path}: reading Parquet needs the package pyarrow")
        return
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
        errors.append(f"{path}:{number + 1}: not readable as Parquet: {str(error).splitlines()[0]}")


def parse(row: Any, cfg: DataConfig, where: str, default_source: str) -> Prompt:
    """One row as a prompt. Without a data source column it is the file's name without its ending.

    Raises:
        ValueError: a column is missing or of the wrong kind; says which.
    """
    if not isinstance(row, dict):
        raise ValueError(f"a row is an object with columns, not {_kind(row)}")
    source = lookup(row, cfg.data_source_key, default_source)
    if not isinstance(source, str) or not source:
        raise ValueError(f"{cfg.data_source_key!r} (data.data_source_key) is {_kind(source)}, not a name")
    truth = lookup(row, cfg.ground_truth_key)
    if truth is _MISSING:
        columns = ", ".join(map(str, row))
        raise ValueError(f"no {cfg.ground_truth_key!r} (data.ground_truth_key) among the columns {columns}")
    extra = lookup(row, cfg.extra_info_key, None)
    extra = {} if extra is None else extra
    if not isinstance(extra, dict):
        raise ValueError(f"{cfg.extra_info_key!r} (data.extra_info_key) is {_kind(extra)}, not an object")
    prompt = _prompt(row, cfg.prompt_key)
    text, messages = (prompt, [{"role": "user", "content": prompt}]) if isinstance(prompt, str) else ("", prompt)
    return Prompt(messages, source, truth, extra, f"source:{source}", where, text)


def lookup(row: dict[str, Any], key: str, default: Any = _MISSING) -> Any:
    """A column by name; where there is none of the whole name, its dots go into structures."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return default
        value = value[part]
    return value


def _prompt(row: dict[str, Any], key: str) -> list[dict[str, Any]] | str:
    prompt = lookup(row, key)
    if prompt is _MISSING:
        raise ValueError(f"no {key!r} (data.prompt_key) among the columns {', '.join(map(str, row))}")
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{key!r} (data.prompt_key) is {_kind(prompt)}, neither a list of chat messages nor a text")
    for number, message in enumerate(prompt):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES:
            raise ValueError(f"message {number} of {key!r} has the role {role!r}, not one of {', '.join(ROLES)}")
        if not isinstance(content, str) and not (role == "assistant" and content is None):
            raise ValueError(f"message {number} of {key!r} has {_kind(content)} as its content, not a text")
    if prompt[-1]["role"] == "assistant":
        raise ValueError(f"{key!r} ends with an assistant message; the last message must ask for an answer")
    # Parquet gives every message every field of the column's type: drop those that are null
    return [{name: value for name, value in message.items() if value is not None} for message in prompt]


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if value in ("", []):
        return "empty"
    names = {dict: "an object", list: "a list", str: "a text", bool: "a bool", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
