"""Tokenizers against their own libraries, and clear errors."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoTokenizer

from rlscale.config.schema import ModelConfig
from rlscale.data.tokenizers import eos_token_ids, load_tokenizer

TEXTS = [
    "the model adds 12+3.",
    "  two   spaces ",
    "na\u00efve \ufb01ne \u6f22\u5b57 \n tab\t",
    "",
    "Unseen Words, \u20ac5",
]
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}</s>{% endfor %}"


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small SentencePiece model with the default Unicode normalisation and byte fallback."""
    rng = random.Random(0)
    words = "the a model learns to add numbers and reads long chains of thought about sums caf\u00e9".split()
    lines = [" ".join(rng.choices(words, k=9)) + f" {rng.randint(0, 999)}+{rng.randint(0, 9)}." for _ in range(300)]
    folder = tmp_path_factory.mktemp(request.param)
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "spm"), model_type=request.param, vocab_size=320,
        hard_vocab_limit=False, byte_fallback=True, split_digits=True, user_defined_symbols=["<|user|>"], minloglevel=2,
    )  # fmt: skip
    return folder / "spm.model"


@pytest.mark.parametrize("as_folder", [False, True])
def test_sentencepiece_ids_are_its_own(model: Path, as_folder: bool, tmp_path: Path) -> None:
    path = model
    if as_folder:
        shutil.copy(model, tmp_path / "tokenizer.model")
        path = tmp_path
    tokenizer = load_tokenizer(ModelConfig(path="unused", tokenizer_path=str(path)))
    own = SentencePieceProcessor(model_file=str(model))
    for text in TEXTS:
        ids = own.encode(text)
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
        assert tokenizer.decode(ids) == own.decode(ids)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id and len(tokenizer) == own.get_piece_size()


def test_sentencepiece_with_a_chat_template(model: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(model), chat_template=TEMPLATE))
    own = SentencePieceProcessor(model_file=str(model))
    messages = [{"role": "user", "content": "the model adds 1"}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids[-1] == own.eos_id() and own.piece_to_id("<|user|>") in ids
    assert ids[:-1] == own.encode("<|user|>the model adds 1")
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith("the model adds 1")


def test_folder_is_loaded_as_transformers_does(tiny_model: Callable[..., str]) -> None:
    path = tiny_model()
    ours, theirs = load_tokenizer(ModelConfig(path=path)), AutoTokenizer.from_pretrained(path)
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    assert ours.chat_template == theirs.chat_template
    assert ours.apply_chat_template(messages, return_dict=False) == theirs.apply_chat_template(
        messages, return_dict=False
    )


def test_chat_template_inline_and_from_a_file(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    for template in (TEMPLATE, str(file)):
        tokenizer = load_tokenizer(ModelConfig(path=tiny_model(), chat_template=template))
        text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        assert text == "<|user|>x</s>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": ""}, "model.path is empty"),
        ({"path": "/no/such/folder"}, "model.path: no folder /no/such/folder"),
        ({"path": "./nothing"}, "model.path: no folder ./nothing"),
        ({"path": "tests/nothing"}, "model.path: no folder tests/nothing"),
        ({"tokenizer_path": "/no/such/file.model"}, "model.tokenizer_path: no folder"),
        ({"path": "tests/data"}, "model.path: no tokenizer could be loaded from the folder tests/data"),
        ({"path": "an-organisation/no-model"}, "neither a local folder nor loadable from the hub"),
        ({"chat_template": "missing.jinja"}, "model.chat_template: 'missing.jinja' is neither"),
        ({"chat_template": "{{ nothing() }}"}, "model.chat_template: UndefinedError"),
        ({"chat_template": "{% for %}"}, "model.chat_template: TemplateSyntaxError"),
    ],
)
def test_errors(tiny_model: Callable[..., str], change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        load_tokenizer(ModelConfig(**{"path": tiny_model(), **change}))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_not_a_sentencepiece_model(tmp_path: Path) -> None:
    (tmp_path / "x.model").write_text("nothing of the kind")
    with pytest.raises(ValueError, match="isn't a SentencePiece model"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "x.model")))


def test_eos_ids_of_generation_config_and_tokenizer(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=tiny_model()))
    own = tokenizer.eos_token_id
    for config, ids in [
        (None, [own]),
        ({}, [own]),
        ({"eos_token_id": 301}, [own, 301]),
        ({"eos_token_id": [5, 9]}, [own, 5, 9]),
    ]:
        if config is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(config))
        assert eos_token_ids(str(tmp_path), tokenizer) == sorted(ids)
    tokenizer.eos_token = None
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="no end-of-text token"):
        eos_token_ids(str(tmp_path), tokenizer)
