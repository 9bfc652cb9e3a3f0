"""Tiny models: random weights of a real architecture; a folder with them, a real tokenizer and a chat template.

A model of 0.1 to 1 M parameters shows every error of a layout that a large one shows, in milliseconds, if its outputs
are not nearly uniform: Hugging Face's initialisation (std 0.02) makes logits so flat that a wrong head or a swapped
shard moves nothing above rounding. The weights here are scaled to their fan-in, norms and biases are random, and the
row of the end-of-sequence token is set so that its probability is about 0.1, so that sampled responses end at
different lengths.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rlscale.model.arch import ModelSpec

PAD, EOS, START, END = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DENSE = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
EXPERTS = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}
ARCHITECTURES = DENSE | EXPERTS
# where a word begins with a space, which is \u0120 in the byte-level alphabet
WORDS = "user assistant system What _is _the _answer _sum _of _and _number _+ _= _please".replace("_", "\u0120").split()
CACHE_LIMIT = 200  # folders kept over sessions; each is 1 to 4 MB


def make_spec(**changes: Any) -> ModelSpec:
    """Shapes alone, of a Llama that most layouts can split; ``changes`` replace fields."""
    fields: dict[str, Any] = {
        "architecture": "LlamaForCausalLM", "num_layers": 4, "hidden": 8, "ffn": 16, "heads": 8, "kv_heads": 4,
        "head_dim": 2, "vocab": 37, "norm_eps": 1e-6, "inv_freq": (1.0,),
    }  # fmt: skip
    return ModelSpec(**(fields | changes))


def tiny_model(
    arch: str = "qwen2",
    *,
    tied: bool = True,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    hidden: int | None = None,
    ffn: int | None = None,
    vocab: int = 384,
    head_dim: int = 32,
    dtype: str = "float32",
    seed: int = 0,
    **config: Any,
) -> str:
    """The folder of a tiny model with the given shape, made on the first call and cached for later ones.

    Args:
        arch: llama, qwen2, qwen3, mistral, mixtral or qwen3_moe (4 experts as wide as ``ffn``, 2 for each token).
        hidden: hidden size; None: heads * head_dim (the only choice for qwen2, whose vLLM model ignores ``head_dim``).
        ffn: width of the MLP; None: 2 * hidden.
        vocab: rows of the embedding; the tokenizer has at most as many tokens (it needs 260).
        config: further fields of the Hugging Face config, e.g. ``rope_theta=5e5`` or ``sliding_window=8``.

    Several processes may ask for the same folder at one time: each builds its own and the first rename wins.
    """
    hidden = hidden or heads * head_dim
    shape: dict[str, Any] = {"arch": arch, "tied": tied, "heads": heads, "kv_heads": kv_heads, "layers": layers}
    shape |= {"hidden": hidden, "ffn": ffn or 2 * hidden, "head_dim": head_dim, "dtype": dtype, "seed": seed}
    shape |= {"vocab": vocab, "config": config}
    code = Path(__file__).read_bytes() + json.dumps(shape, sort_keys=True).encode()
    root = Path(tempfile.gettempdir()) / f"rlscale-tests-{os.getuid()}" / "models"
    folder = root / f"{arch}-{hashlib.sha256(code).hexdigest()[:16]}"
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        _forget_old(root)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=root))
        try:
            _build(building, **shape)
            building.chmod(0o755)
            building.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was first, with the same content
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return str(folder)


def _forget_old(root: Path) -> None:
    """Keep the cache bounded: folders of older versions of this file are never asked for again."""
    folders = sorted(
        (p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")), key=lambda p: p.stat().st_mtime
    )
    for folder in folders[:-CACHE_LIMIT]:
        shutil.rmtree(folder, ignore_errors=True)


def _build(
    folder: Path,
    *,
    arch: str,
    tied: bool,
    heads: int,
    kv_heads: int,
    layers: int,
    hidden: int,
    ffn: int,
    vocab: int,
    head_dim: int,
    dtype: str,
    seed: int,
    config: dict[str, Any],
) -> None:
    import torch
    import transformers

    tokenizer = tiny_tokenizer(min(vocab, 384))
    defaults = {"max_position_embeddings": 1024, "bos_token_id": tokenizer.convert_tokens_to_ids(START)}
    defaults |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    hf_config = model_config(
        arch, tied=tied, heads=heads, kv_heads=kv_heads, layers=layers, hidden=hidden, ffn=ffn, vocab=vocab,
        head_dim=head_dim, **(defaults | config),
    )  # fmt: skip
    model = getattr(transformers, f"{ARCHITECTURES[arch]}ForCausalLM")(hf_config).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    draw_weights(model, generator)
    _likely_end(model, generator, tokenizer.eos_token_id)
    model.to(getattr(torch, dtype))
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.should_save_on_this_rank = lambda *_: True  # in a process group transformers lets rank 0 alone write
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def model_config(
    arch: str, *, tied: bool, heads: int, kv_heads: int, layers: int, hidden: int, ffn: int, vocab: int, head_dim: int,
    **config: Any,
) -> Any:  # fmt: skip
    """The Hugging Face configuration of these sizes; ``config``: its further fields. 4 experts where the architecture
    has any."""
    import transformers

    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2} if arch in EXPERTS else {}
    if arch == "qwen3_moe":
        experts |= {"moe_intermediate_size": ffn, "norm_topk_prob": True}
    sizes = {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    return getattr(transformers, f"{ARCHITECTURES[arch]}Config")(**(experts | sizes | config))


def draw_weights(model: Any, generator: Any) -> None:
    """Random weights in place, scaled to their fan-in: logits have a standard deviation of about 2."""
    import torch

    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=generator)
            if "embed_tokens" in name or "lm_head" in name:
                p.copy_(noise * (2 / math.sqrt(p.shape[1])))
            elif name.endswith("norm.weight"):
                p.copy_(noise * 0.2 + 1.0)
            elif p.dim() == 1:
                p.copy_(noise * 0.3)
            else:
                p.copy_(noise * (1 / math.sqrt(p.shape[-1])))


def _likely_end(model: Any, generator: Any, eos: int) -> None:
    """Set the row of the end-of-sequence token so that its probability is about 0.1."""
    import torch

    with torch.no_grad():
        head = model.lm_head.weight
        tokens = torch.randint(head.shape[0], (8, 32), generator=generator)
        mean = model.model(tokens).last_hidden_state.mean((0, 1))
        likely = model(tokens).logits.logsumexp(-1).mean() - math.log(10)
        head[eos] += mean * (likely - head[eos] @ mean) / (mean @ mean)


def tiny_tokenizer(vocab: int = 384) -> Any:
    """A byte-level BPE tokenizer with at most ``vocab`` tokens and a ChatML template; pad and end-of-text are separate.

    The merges build up the words of a list from the left: the training of the `tokenizers` library breaks ties at
    random.
    """
    import tokenizers
    import transformers

    special = [PAD, EOS, START, END]
    tokens = special + sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert vocab >= len(tokens), f"a byte-level tokenizer needs {len(tokens)} tokens"
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for i in range(1, len(word)):
            if word[: i + 1] not in tokens and len(tokens) < vocab:
                tokens.append(word[: i + 1])
                merges.append((word[:i], word[i]))
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[EOS, START],
        model_max_length=1024,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
