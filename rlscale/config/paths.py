"""What the paths of a model mean: a folder of this machine or a name on the hub; a chat template or its file."""

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


def folder_problem(name: str) -> str | None:
    """Why a model cannot be read (as far as the disk tells); None if it can, or may be ``org/name`` of the hub."""
    if not Path(name).exists():
        hub = "/" in name and is_hub_name(name)
        return None if hub else f"no such folder: {name} (a hub name looks like org/name)"
    if not Path(name).is_dir():
        return f"{name} is a file; a model is a folder with config.json and safetensors files"
    found = (Path(name) / "config.json").is_file()
    return None if found else f"the folder {name} has no config.json, so it is not a Hugging Face model folder"


def resolve_folder(path: str) -> Path:
    """The local folder of a model path; a hub name is fetched into the hub's cache (or found there)."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))


def read_chat_template(template: str) -> str:
    """The Jinja text of a template given inline or as a path.

    Raises:
        ValueError: it contains no Jinja and there is no such file.
    """
    if "{{" in template or "{%" in template:
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise ValueError(f"model.chat_template: {template!r} is neither a Jinja template nor a file")
    return path.read_text(encoding="utf-8")
