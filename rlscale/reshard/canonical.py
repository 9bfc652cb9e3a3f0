"""The canonical tensors of a model: names and shapes of its Hugging Face folder, in which every layout is stated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rlscale.model.arch import ARCHITECTURES, ExpertNames, ModelSpec
from rlscale.reshard.layout import Held, Layout, Piece, whole

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
VALUE_HEAD, VALUE_BIAS = "score.weight", "score.bias"
_DENSE = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical tensors of a model, in checkpoint order, with their shapes.

    A tied output weight is no tensor of its own. A critic has ``score.weight`` ``[1, hidden]`` in place of one.
    """
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab, spec.hidden)}
    for number in range(spec.num_layers):
        layer = f"model.layers.{number}."
        shapes[layer + "input_layernorm.weight"] = (spec.hidden,)
        for proj, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{layer}self_attn.{proj}.weight"] = (rows, spec.hidden)
            if spec.qkv_bias:
                shapes[f"{layer}self_attn.{proj}.bias"] = (rows,)
        shapes[layer + "self_attn.o_proj.weight"] = (spec.hidden, q)
        if spec.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (spec.head_dim,)
        shapes[layer + "post_attention_layernorm.weight"] = (spec.hidden,)
        names, blocks, width = _DENSE, [layer + "mlp"], spec.ffn
        if spec.is_sparse(number):
            names, width = expert_names(spec), spec.expert_ffn
            shapes[f"{layer}{names.block}.gate.weight"] = (spec.experts, spec.hidden)
            blocks = [f"{layer}{names.block}.experts.{expert}" for expert in range(spec.experts)]
        for block in blocks:
            shapes[f"{block}.{names.gate}.weight"] = (width, spec.hidden)
            shapes[f"{block}.{names.up}.weight"] = (width, spec.hidden)
            shapes[f"{block}.{names.down}.weight"] = (spec.hidden, width)
    shapes[FINAL_NORM] = (spec.hidden,)
    if spec.value_head:
        shapes[VALUE_HEAD] = (1, spec.hidden)
        if spec.head_bias:
            shapes[VALUE_BIAS] = (1,)
    elif not spec.tied:
        shapes[HEAD] = (spec.vocab, spec.hidden)
    return shapes


def expert_names(spec: ModelSpec) -> ExpertNames:
    """What the architecture calls the tensors of its experts."""
    names = ARCHITECTURES[spec.architecture].experts
    assert names is not None, f"{spec.architecture} is no mixture of experts"
    return names


def hf_layout(shapes: Mapping[str, tuple[int, ...]], rank: int = 0) -> Layout:
    """Every canonical tensor whole on one rank under its own name: the layout of a Hugging Face folder."""
    return Layout(shapes, [Piece(name, rank, whole(s), name, whole(s)) for name, s in shapes.items()])


class TensorParallel(NamedTuple):
    """Slices of canonical tensors as rank ``rank`` of ``size`` tensor-parallel ranks holds them in local buffers."""

    shapes: Mapping[str, tuple[int, ...]]
    size: int
    rank: int

    def whole(self, name: str, key: str) -> Held:
        """A tensor that all ranks hold."""
        box = whole(self.shapes[name])
        return name, box, key, box

    def rows(self, name: str, key: str, start: int, count: int, at: int = 0) -> Held:
        """``count`` rows of a tensor from ``start`` on, as rows of the buffer from ``at`` on."""
        rest = whole(self.shapes[name][1:])
        return name, ((start, start + count), *rest), key, ((at, at + count), *rest)

    def columns(self, name: str, key: str) -> Held:
        """A row-parallel weight: the input dimension (1) is split evenly."""
        out, width = whole(self.shapes[name])
        count = width[1] // self.size
        return name, (out, (self.rank * count, (self.rank + 1) * count)), key, (out, (0, count))

    def vocabulary(self, name: str, key: str, padded: int) -> Iterator[Held]:
        """Rows of a vocabulary padded to ``padded`` rows; the last ranks may hold padding alone."""
        count = padded // self.size
        start, stop = self.rank * count, min((self.rank + 1) * count, self.shapes[name][0])
        if start < stop:
            yield self.rows(name, key, start, stop - start)
