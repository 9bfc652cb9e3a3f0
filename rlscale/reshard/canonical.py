"""The canonical tensors of a model: names and shapes of its Hugging Face folder, in which every layout is stated."""

from __future__ import annotations

from rlscale.model.arch import ARCHITECTURES, ExpertNames, ModelSpec
from rlscale.reshard.layout import Layout, Piece, whole

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
        shapes |= _mlp_shapes(spec, layer, spec.is_sparse(number))
    shapes[FINAL_NORM] = (spec.hidden,)
    if spec.value_head:
        shapes[VALUE_HEAD] = (1, spec.hidden)
        if spec.head_bias:
            shapes[VALUE_BIAS] = (1,)
    elif not spec.tied:
        shapes[HEAD] = (spec.vocab, spec.hidden)
    return shapes


def _mlp_shapes(spec: ModelSpec, layer: str, sparse: bool) -> dict[str, tuple[int, ...]]:
    if not sparse:
        return _gated(layer + _DENSE.block, _DENSE, spec.ffn, spec.hidden)
    names = expert_names(spec)
    shapes: dict[str, tuple[int, ...]] = {f"{layer}{names.block}.gate.weight": (spec.experts, spec.hidden)}
    for number in range(spec.experts):
        shapes |= _gated(f"{layer}{names.block}.experts.{number}", names, spec.expert_ffn, spec.hidden)
    return shapes


def _gated(prefix: str, names: ExpertNames, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.{names.gate}.weight": (width, hidden),
        f"{prefix}.{names.up}.weight": (width, hidden),
        f"{prefix}.{names.down}.weight": (hidden, width),
    }


def expert_names(spec: ModelSpec) -> ExpertNames:
    """What the architecture calls the tensors of its experts."""
    names = ARCHITECTURES[spec.architecture].experts
    assert names is not None, f"{spec.architecture} is no mixture of experts"
    return names


def hf_layout(spec: ModelSpec, rank: int = 0) -> Layout:
    """Every canonical tensor whole on one rank under its own name: the layout of a Hugging Face folder."""
    shapes = hf_shapes(spec)
    return Layout(shapes, [Piece(name, rank, whole(s), name, whole(s)) for name, s in shapes.items()])
