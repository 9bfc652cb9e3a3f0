"""Tokenizers: of a Hugging Face folder or hub name, or a bare SentencePiece model; chat template; end-of-text ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlscale.config.paths import is_hub_name, read_chat_template, resolve_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlscale.config.schema import ModelConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tekken.json")


def load_tokenizer(cfg: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer_path` (null: `model.path`), with `model.chat_template` where that is set.

    A SentencePiece `.model` file, or a folder with nothing else to tokenize with, is read as it is; every other folder
    or hub name goes to transformers unchanged.

    Raises:
        ValueError: nothing there, not a tokenizer, or a chat template that is missing or doesn't work.
    """
    given = cfg.tokenizer_path
    tokenizer = _load("model.path", cfg.path) if given is None else _load("model.tokenizer_path", given)
    if cfg.chat_template is not None:
        tokenizer.chat_template = read_chat_template(cfg.chat_template)
        try:
            question = [{"role": "user", "content": "?"}]
            tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever a template does
            raise ValueError(f"model.chat_template: {type(error).__name__}: {error}") from error
    return tokenizer


def _load(key: str, name: str) -> Any:
    path = Path(name).expanduser()
    if not name:
        raise ValueError(f"{key} is empty")
    model = _sentencepiece_model(path)
    if model is not None:
        from rlscale.data.sentencepiece_model import SentencePieceTokenizer

        return SentencePieceTokenizer.load(model)
    if not path.is_dir() and not is_hub_name(name):
        raise ValueError(f"{key}: no folder {name}")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, AttributeError, ... here
        where = f"the folder {name}" if path.is_dir() else f"{name}, neither a local folder nor loadable from the hub"
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise ValueError(f"{key}: no tokenizer could be loaded from {where} ({reason})") from error


def _sentencepiece_model(path: Path) -> Path | None:
    """The bare SentencePiece model that `path` is or holds, if so."""
    if path.suffix == ".model" and path.is_file():
        return path
    if path.is_dir() and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        models = sorted(path.glob("*.model"))
        return models[0] if len(models) == 1 else None
    return None


def eos_token_ids(model_path: str, tokenizer: Any) -> list[int]:
    """Every id that ends a response, sorted: those of the model's generation config and the tokenizer's own.

    A chat model often ends a turn with another token than a text; only its generation config knows both.

    Raises:
        ValueError: there is none at all, so that no response could end.
    """
    file = resolve_folder(model_path) / "generation_config.json"
    named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    ids = {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id} - {None}
    if not ids:
        raise ValueError(f"model.path: {model_path} has no end-of-text token in its generation config or tokenizer")
    return sorted(ids)
