"""Attention over packed sequences with shared prompts: three kernels, one answer, that of each sequence on its own."""

from __future__ import annotations

import pytest
import torch

from rlscale.batch.types import PackedBatch
from rlscale.model import attention
from rlscale.model.packing import pack_sequence
from rlscale.testing.batches import random_batch

HEADS, GROUPS, DIM = 4, 2, 32


@pytest.fixture(scope="module")
def batch() -> PackedBatch:
    return random_batch(groups=3, n=3, seed=5)


def alone(batch: PackedBatch, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions of prompt + response of one sequence, without the last token."""
    group = int(batch.group[row])
    prompt = batch.prompt_tokens[batch.prompt_cu_seqlens[group] : batch.prompt_cu_seqlens[group + 1]]
    ids = torch.cat((prompt, batch.tokens[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]))[:-1]
    return ids, torch.arange(ids.numel())


def embedded(ids: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """[S, count, DIM] a fixed function of token and position: equal context gives equal queries, keys, values."""
    g = torch.Generator().manual_seed(count)
    table = torch.randn(400, count, DIM, generator=g)
    return table[ids] + 0.1 * torch.sin(positions.float())[:, None, None]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kernel", ["dense", "segments", "varlen"])
@pytest.mark.parametrize("multiple", [1, 16])
def test_a_row_equals_its_sequences(batch: PackedBatch, share: bool, kernel: str, multiple: int) -> None:
    rows = torch.tensor([4, 0, 8, 1, 3])
    row = pack_sequence(batch, rows, share_prefix=share, multiple=multiple)
    assert row.length % multiple == 0
    q, k, v = (embedded(row.tokens, row.positions, n) for n in (HEADS, GROUPS, GROUPS + 1))
    v = v[:, :GROUPS]
    scale = DIM**-0.5
    if kernel == "varlen":
        out = emulated_varlen(q, k, v, row, scale)
    else:
        outs = []
        for block in row.blocks:
            span = slice(block.start, block.start + block.length)
            if kernel == "dense":
                bias = attention.block_bias(block, q.dtype, q.device)
                outs.append(attention.dense_block(q[span], k[span], v[span], bias, scale))
            else:
                outs.append(attention.segment_attention(q[span], k[span], v[span], block, scale))
        out = torch.cat(outs)
    predicted = out[row.predictors]
    expected = []
    for r in row.samples.tolist():
        ids, positions = alone(batch, r)
        qs, ks, vs = (embedded(ids, positions, n).transpose(0, 1)[None] for n in (HEADS, GROUPS, GROUPS + 1))
        full = torch.nn.functional.scaled_dot_product_attention(
            qs, ks, vs[:, :GROUPS], is_causal=True, scale=scale, enable_gqa=True
        )[0].transpose(0, 1)
        expected.append(full[-int(batch.response_lengths[r]) :])
    torch.testing.assert_close(predicted, torch.cat(expected), atol=1e-5, rtol=1e-5)


def emulated_varlen(q, k, v, row, scale):
    """The contract of variable-length flash attention in plain torch: mask aligned with the end of the keys."""
    index, cu_q, cu_k, _, _ = attention.varlen_plan(row)
    k, v = k[index], v[index]
    outs = []
    for i in range(cu_q.numel() - 1):
        qs = q[cu_q[i] : cu_q[i + 1]].transpose(0, 1)[None]
        ks, vs = (x[cu_k[i] : cu_k[i + 1]].transpose(0, 1)[None] for x in (k, v))
        n, m = qs.shape[2], ks.shape[2]
        mask = torch.ones(n, m, dtype=torch.bool).tril(diagonal=m - n)
        outs.append(torch.nn.functional.scaled_dot_product_attention(qs, ks, vs, mask, scale=scale, enable_gqa=True)[0])
    return torch.cat([o.transpose(0, 1) for o in outs])


def test_sharing_computes_each_prompt_once(batch: PackedBatch) -> None:
    rows = torch.arange(batch.num_samples)
    shared = pack_sequence(batch, rows, share_prefix=True)
    apart = pack_sequence(batch, rows, share_prefix=False)
    tails = int((batch.response_lengths - 1).sum())
    assert shared.length == int(batch.prompt_lengths.sum()) + tails
    assert apart.length == int(batch.prompt_lengths[batch.group].sum()) + tails
    assert shared.targets.numel() == apart.targets.numel() == batch.tokens.numel()


def test_targets_follow_the_order_of_rows(batch: PackedBatch) -> None:
    row = pack_sequence(batch, torch.tensor([7, 2, 6]), share_prefix=True)
    expected = [batch.tokens[batch.cu_seqlens[r] : batch.cu_seqlens[r + 1]] for r in row.samples.tolist()]
    assert torch.equal(row.targets, torch.cat(expected))
    assert sorted(row.samples.tolist()) == [2, 6, 7]


def test_an_empty_micro_batch_is_padding_without_targets(batch: PackedBatch) -> None:
    row = pack_sequence(batch, torch.zeros(0, dtype=torch.int64), share_prefix=True, multiple=4)
    assert row.length == 4 and row.targets.numel() == 0 and row.predictors.numel() == 0


def test_rotary_tables_equal_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    from rlscale.model.arch import ModelSpec

    scalings = [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    ]
    for rope in scalings:
        hf = LlamaConfig(
            hidden_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_parameters=rope,
            max_position_embeddings=256,
            architectures=["LlamaForCausalLM"],
        )
        spec = ModelSpec.from_config(hf)
        positions = torch.arange(200)
        q = torch.randn(200, 4, 32, generator=torch.Generator().manual_seed(0))
        row = type("Row", (), {"positions": positions})
        params = attention.pack_params(row, torch.tensor(spec.inv_freq), spec.rope_scale, torch.float32)
        cos, sin = LlamaRotaryEmbedding(hf)(q, positions[None])
        expected, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos, sin)
        mine = attention.apply_rotary(q, params.cos, params.sin)
        torch.testing.assert_close(mine, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
