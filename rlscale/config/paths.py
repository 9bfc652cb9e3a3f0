"""What a model's path means: a folder of this machine, or a name on the hub."""

from __future__ import annotations

import re
from pathlib import Path

LOCAL_FOLDERS = ("models", "runs", "checkpoints", "data", "outputs")


def is_hub_name(name: str) -> bool:
    """True where a model is to be looked up on the hub: ``name`` or ``org/name`` that is not meant as a local path."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name):
        return False
    first, slash, _ = name.partition("/")
    return not (slash and (first in LOCAL_FOLDERS or Path(first).exists()))


def folder_problem(path: str) -> str | None:
    """Why a model cannot be read (as far as the disk tells); None if it can, or may be ``org/name`` of the hub."""
    if Path(path).is_dir():
        return None if (Path(path) / "config.json").is_file() else f"model folder has no config.json: {path}"
    return None if "/" in path and is_hub_name(path) else f"model folder does not exist: {path}"


def resolve_folder(path: str) -> Path:
    """The local folder of a model path; a hub name is fetched into the hub's cache (or found there)."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
