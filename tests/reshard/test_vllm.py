"""The layout of vLLM from configuration, against what vLLM's own modules say of themselves."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from rlscale.model.arch import ModelSpec
from rlscale.reshard.layout import rank_pieces_from_dicts
from rlscale.reshard.vllm import vllm_layout
from rlscale.testing.models import make_spec
from tests import worlds
from tests.reshard import models

MODELS: list[dict[str, Any]] = [
    dict(arch="Llama", tied=False, kv_heads=2, layers=5, vocab=391),
    dict(arch="Mistral", tied=False, kv_heads=8, layers=3, vocab=449),
    dict(arch="Qwen2", tied=True, kv_heads=4, layers=3, vocab=333),
    dict(arch="Qwen3", tied=True, kv_heads=1, layers=4, vocab=257),
]
SPLITS = [(1, 1), (4, 1), (8, 1), (2, 3)]


def save_config(folder: str, arch: str, tied: bool, kv_heads: int, layers: int, vocab: int) -> None:
    import transformers

    config = getattr(transformers, f"{arch}Config")(
        vocab_size=vocab, hidden_size=256, intermediate_size=192, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=kv_heads, head_dim=32, tie_word_embeddings=tied, max_position_embeddings=1024,
        architectures=[f"{arch}ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)


def differences(folders: list[str]) -> list[str]:
    """Build the workers' models without memory, one after the other, and compare what they describe."""
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.models.registry import ModelRegistry

    from rlscale.rollout.vllm.worker import targets

    def group(size: int, rank: int) -> SimpleNamespace:
        return SimpleNamespace(
            world_size=size, rank=rank, rank_in_group=rank, is_first_rank=rank == 0, is_last_rank=rank == size - 1
        )

    out = []
    for folder in folders:
        spec = ModelSpec.from_hf(folder)
        config = VllmConfig(
            model_config=ModelConfig(folder, skip_tokenizer_init=True, dtype="float32", max_model_len=64)
        )
        model_class, _ = ModelRegistry.resolve_model_cls(config.model_config.architectures, config.model_config)
        for tp, pp in SPLITS:
            described: list[dict[str, Any]] = []
            for rank in range(tp * pp):
                groups = patch.multiple(parallel_state, _TP=group(tp, rank % tp), _PP=group(pp, rank // tp))
                with groups, set_current_vllm_config(config), torch.device("meta"):
                    config.compilation_config.static_forward_context.clear()
                    described += [
                        {**target.describe(), "rank": rank} for target in targets(model_class(vllm_config=config))
                    ]
            live = rank_pieces_from_dicts(described, {d["name"]: tuple(d["shape"]) for d in described})
            planned = vllm_layout(spec, tp, pp)
            if live.shards != planned.shards or dict(live.shapes) != dict(planned.shapes):
                pairs = zip(live.pieces, planned.pieces, strict=False)
                first = next((f"{a} != {b}" for a, b in pairs if a != b), "number of pieces, or shapes")
                out.append(f"{spec.architecture} tied={spec.tied} TP{tp} PP{pp}: {first}")
    return out


def test_the_layout_is_what_live_modules_describe(tmp_path: Path) -> None:
    folders = [str(tmp_path / str(i)) for i in range(len(MODELS))]
    for folder, model in zip(folders, MODELS, strict=True):
        save_config(folder, **model)
    assert worlds.run(1, differences, folders, timeout=300)[0] == []


def test_replicated_heads_and_padding_agree_with_the_oracle() -> None:
    for kv_heads, tp, tied in product((1, 2, 4, 8), (1, 2, 4, 8), (False, True)):
        spec = make_spec(kv_heads=kv_heads, tied=tied, qkv_bias=tied, qk_norm=not tied)
        ours, theirs = vllm_layout(spec, tp, 1, 8 // tp), models.vllm_layout(spec, tp, 8)
        assert all(set(ours.of_rank(rank)) == set(theirs.of_rank(rank)) for rank in range(8))
