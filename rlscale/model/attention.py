"""Attention over a packed sequence with shared prompts, as the core attention of Megatron's layers.

Rotary embedding and attention happen here, because only here the positions and borders of the packed sequence are known
(the GPTModel is built without position embedding). Three kernels compute the same thing:

* dense blocks: one small masked matrix product per block. At a few hundred tokens this beats a fused kernel on a CPU.
* segments: scaled_dot_product_attention of every response over prompt + itself; memory linear in the key length.
* varlen (CUDA): torch's variable-length flash attention, with the keys of each response gathered behind its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rlscale.model.packing import Block, PackedSequence
from rlscale.model.ulysses import gather_heads, scatter_heads

DENSE_BLOCK_TOKENS = 1024  # blocks up to this length use the dense kernel (its score matrix is length^2 per head)


@dataclass
class SequenceParams(PackedSeqParams):
    """What Megatron passes through its layers untouched: the sequence and the rotary table."""

    sequence: PackedSequence | None = None
    cos: Tensor | None = None  # [S, 1, head_dim]
    sin: Tensor | None = None  # [S, 1, head_dim]


def pack_params(sequence: PackedSequence, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> SequenceParams:
    """Rotary tables, in fp32 until the last cast (as transformers does it). ``inv_freq``: [head_dim / 2]."""
    angles = sequence.positions.float()[:, None] * inv_freq[None]
    both = torch.cat((angles, angles), dim=-1)[:, None]
    return SequenceParams(
        qkv_format="thd", sequence=sequence, cos=(both.cos() * scale).to(dtype), sin=(both.sin() * scale).to(dtype)
    )


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) in the half-split form of the Llama family. ``x``: [S, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def block_bias(block: Block, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[L, L] additive mask of a block: causal, and a response sees only its prompt and itself."""
    owner = torch.zeros(block.length, dtype=torch.int64)
    for i, (start, n) in enumerate(block.segments, start=1):
        owner[start - block.start : start - block.start + n] = i
    at = torch.arange(block.length)
    visible = (at[:, None] >= at[None]) & ((owner[None] == 0) | (owner[:, None] == owner[None]))
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf")).to(device)


def dense_block(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Masked softmax attention of one block. q: [L, H, D]; k, v: [L, G, D]; bias: [L, L]. Returns [L, H, D]."""
    return _DenseBlock.apply(q, k, v, bias, scale)


class _DenseBlock(torch.autograd.Function):
    """Softmax in fp32, but only its rounded weights are kept for the backward: a third of what autograd would keep."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        length, heads, dim = q.shape
        groups = k.shape[1]
        query = _by_group(q * scale, groups)
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        scores = torch.bmm(query, keys.transpose(1, 2)).view(groups, -1, length, length) + bias
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype).view(groups, -1, length)
        ctx.save_for_backward(query, keys, values, weights)
        ctx.scale = scale
        return _by_head(torch.bmm(weights, values), length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, keys, values, weights = ctx.saved_tensors
        length, groups = keys.shape[1], keys.shape[0]
        grad = _by_group(grad, groups)
        to_values = torch.bmm(weights.transpose(1, 2), grad)
        inner = torch.bmm(grad, values.transpose(1, 2)).float() * weights
        to_scores = (inner - weights * inner.sum(-1, keepdim=True)).to(query.dtype)
        to_query = torch.bmm(to_scores, keys) * ctx.scale
        to_keys = torch.bmm(to_scores.transpose(1, 2), query)
        return _by_head(to_query, length), to_keys.transpose(0, 1), to_values.transpose(0, 1), None, None


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[L, H, D] -> [G, H/G * L, D]: the heads that share keys, one after the other."""
    length, heads, dim = x.shape
    return x.reshape(length, groups, heads // groups, dim).permute(1, 2, 0, 3).reshape(groups, -1, dim)


def _by_head(x: Tensor, length: int) -> Tensor:
    """The inverse of `_by_group`."""
    groups, _, dim = x.shape
    return x.view(groups, -1, length, dim).permute(2, 0, 1, 3).reshape(length, -1, dim)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Tensor:
    """The same, response by response, without an L x L matrix. q: [L, H, D]; k, v: [L, G, D]."""
    gqa = q.shape[1] != k.shape[1]

    def attend(qs: Tensor, ks: Tensor, vs: Tensor, mask: Tensor | None) -> Tensor:
        qs, ks, vs = (x.transpose(0, 1)[None] for x in (qs, ks, vs))
        out = F.scaled_dot_product_attention(
            qs, ks, vs, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
        )
        return out[0].transpose(0, 1)

    p = block.prompt
    outs = [attend(q[:p], k[:p], v[:p], None)]
    for start, n in block.segments:
        a = start - block.start
        keys, values = (torch.cat((x[:p], x[a : a + n])) for x in (k, v))
        # token i of the response sees the whole prompt and its own first i + 1 tokens
        mask = torch.ones(n, p + n, dtype=torch.bool, device=q.device).tril(diagonal=p)
        outs.append(attend(q[a : a + n], keys, values, mask))
    return torch.cat(outs)


def varlen_plan(sequence: PackedSequence) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Key gather index and the two cumulative lengths of flash attention: cu_q, cu_k, and the longest of each."""
    device = sequence.tokens.device
    index: list[Tensor] = []
    q_len: list[int] = []
    k_len: list[int] = []
    for block in sequence.blocks:
        prompt = torch.arange(block.start, block.start + block.prompt)
        index.append(prompt)
        index.extend(part for start, n in block.segments for part in (prompt, torch.arange(start, start + n)))
        q_len += [block.prompt, *(n for _, n in block.segments)]
        k_len += [block.prompt, *(block.prompt + n for _, n in block.segments)]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(device, torch.int32) for x in (q_len, k_len))
    return torch.cat(index).to(device), cu_q, cu_k, max(q_len), max(k_len)


class PackedAttention(MegatronModule):
    """Causal attention inside the blocks of a packed sequence; takes the place of Megatron's core attention."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any):
        super().__init__(config=config)
        self.scale = config.kv_channels**-0.5
        self.sp_group = config.rlscale_sp_group  # None: this rank holds whole sequences

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: SequenceParams | None = None,
    ) -> Tensor:
        """query: [s, H, D]; key, value: [s, G, D] of this tensor-parallel rank. Returns [s, H * D].

        ``s`` is the length of the sequence, or this Ulysses rank's part of it.
        """
        assert packed_seq_params is not None
        sequence, cos, sin = packed_seq_params.sequence, packed_seq_params.cos, packed_seq_params.sin
        assert sequence is not None and cos is not None and sin is not None
        if self.sp_group is not None:
            query, key, value = scatter_heads(query, key, value, self.sp_group)
        q, k = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        attend = self._varlen if q.is_cuda and q.dtype != torch.float32 else self._blocks
        out = attend(q, k, value, sequence)
        if self.sp_group is not None:
            out = gather_heads(out, self.sp_group)
        return out.reshape(out.shape[0], -1)

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, sequence: PackedSequence) -> Tensor:
        outs = []
        for i, block in enumerate(sequence.blocks):
            span = slice(block.start, block.start + block.length)
            if block.length <= DENSE_BLOCK_TOKENS:
                if ("bias", i) not in sequence.cache:
                    sequence.cache["bias", i] = block_bias(block, q.dtype, q.device)
                outs.append(dense_block(q[span], k[span], v[span], sequence.cache["bias", i], self.scale))
            else:
                outs.append(segment_attention(q[span], k[span], v[span], block, self.scale))
        return torch.cat(outs)

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, sequence: PackedSequence) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if "varlen" not in sequence.cache:
            sequence.cache["varlen"] = varlen_plan(sequence)
        index, cu_q, cu_k, max_q, max_k = sequence.cache["varlen"]
        keys, values = k.index_select(0, index), v.index_select(0, index)
        # flash attention aligns the causal mask with the end of the keys: a response sees its whole prompt
        options: dict[str, Any] = dict(scale=self.scale, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1])
        out = varlen_attn(q, keys, values, cu_q, cu_k, max_q, max_k, **options)
        assert isinstance(out, Tensor)
        return out
