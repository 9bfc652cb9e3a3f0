"""The Megatron end of resharding: where each Hugging Face tensor lies in a Megatron-core GPT model split over ranks.

Megatron fuses q, k, v of each key-value group ([q heads, k, v] group after group) and [gate; up] of each rank, pads the
vocabulary, splits columns or rows over TP and layers over PP, and keeps a second copy of a tied embedding on the last
stage. All of that is index arithmetic, written here once for loading, syncing and exporting alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlscale.cluster.mesh import ParallelDims
from rlscale.model.arch import ModelSpec
from rlscale.reshard.canonical import EMBEDDING, FINAL_NORM, HEAD, VALUE_BIAS, VALUE_HEAD, expert_names, hf_shapes
from rlscale.reshard.layout import Held, Layout, Piece, whole


def megatron_layout(spec: ModelSpec, dims: ParallelDims) -> Layout:
    """Layout of the GPT model over ``dims``; keys are the names of ``named_parameters()`` on each rank's stage.

    Data-parallel and Ulysses ranks are replicas: each holds all the pieces of its TP and PP place. Padding rows of the
    vocabulary belong to no canonical tensor.

    Raises:
        ValueError: a dimension that TP or PP doesn't divide.
    """
    for what, size, parts in (
        ("ffn size", spec.ffn if not spec.experts or spec.dense_layers else 0, dims.tp),
        ("experts", spec.experts, dims.ep),
        ("expert ffn size", spec.expert_ffn, dims.tp if dims.ep == 1 else 1),
        ("attention heads", spec.heads, dims.tp),
        ("rows of the fused qkv projection", (spec.heads + 2 * spec.kv_heads) * spec.head_dim, dims.tp),
        ("layers", spec.num_layers, dims.pp),
    ):
        if size % parts:
            raise ValueError(f"{spec.architecture}: {size} {what} cannot be split over {parts} ranks")
    shapes = hf_shapes(spec)
    pieces: list[Piece] = []
    for pp in range(dims.pp):
        for tp in range(dims.tp):
            ranks = [dims.rank_of(tp=tp, sp=sp, dp=dp, pp=pp) for dp in range(dims.dp) for sp in range(dims.sp)]
            for name, index, key, at in _stage(spec, shapes, dims, tp, pp):
                pieces.extend(Piece(name, rank, index, key, at) for rank in ranks)
    return Layout(shapes, pieces)


def _stage(spec: ModelSpec, shapes: dict[str, tuple[int, ...]], dims: ParallelDims, tp: int, pp: int) -> Iterator[Held]:
    """What one pipeline stage holds at one TP rank, in the order of its layers."""
    last = pp == dims.pp - 1
    if pp == 0:
        yield from _vocab(spec, EMBEDDING, "embedding.word_embeddings.weight", dims.tp, tp)
    for local, number in enumerate(spec.layers_of_stage(pp, dims.pp)):
        hf, mcore = f"model.layers.{number}.", f"decoder.layers.{local}."
        yield from _attention(spec, shapes, hf, mcore, dims.tp, tp)
        yield _replicated(shapes, hf + "post_attention_layernorm.weight", mcore + "pre_mlp_layernorm.weight")
        if spec.is_sparse(number):
            yield from _sparse_mlp(spec, shapes, hf, mcore, dims, tp)
        else:
            yield from _dense_mlp(spec, shapes, hf, mcore, dims.tp, tp)
    if last:
        yield _replicated(shapes, FINAL_NORM, "decoder.final_layernorm.weight")
        if spec.value_head:
            yield _replicated(shapes, VALUE_HEAD, "value_head.weight")
            if spec.head_bias:
                yield _replicated(shapes, VALUE_BIAS, "value_head.bias")
        elif not spec.tied:
            yield from _vocab(spec, HEAD, "output_layer.weight", dims.tp, tp)
        elif pp > 0:
            yield from _vocab(spec, EMBEDDING, "output_layer.weight", dims.tp, tp)


def _attention(
    spec: ModelSpec, shapes: dict[str, tuple[int, ...]], hf: str, mcore: str, size: int, tp: int
) -> Iterator[Held]:
    attention = mcore + "self_attention."
    yield _replicated(shapes, hf + "input_layernorm.weight", mcore + "input_layernorm.weight")
    yield from _qkv(spec, hf + "self_attn.", attention + "linear_qkv.", "weight", size, tp)
    if spec.qkv_bias:
        yield from _qkv(spec, hf + "self_attn.", attention + "linear_qkv.", "bias", size, tp)
    if spec.qk_norm:
        yield _replicated(shapes, hf + "self_attn.q_norm.weight", attention + "q_layernorm.weight")
        yield _replicated(shapes, hf + "self_attn.k_norm.weight", attention + "k_layernorm.weight")
    yield _columns(shapes, hf + "self_attn.o_proj.weight", attention + "linear_proj.weight", size, tp)


def _dense_mlp(
    spec: ModelSpec, shapes: dict[str, tuple[int, ...]], hf: str, mcore: str, size: int, tp: int
) -> Iterator[Held]:
    rows, width = spec.ffn // size, (0, spec.hidden)
    mine = ((tp * rows, (tp + 1) * rows), width)
    yield hf + "mlp.gate_proj.weight", mine, mcore + "mlp.linear_fc1.weight", ((0, rows), width)
    yield hf + "mlp.up_proj.weight", mine, mcore + "mlp.linear_fc1.weight", ((rows, 2 * rows), width)
    yield _columns(shapes, hf + "mlp.down_proj.weight", mcore + "mlp.linear_fc2.weight", size, tp)


def _sparse_mlp(
    spec: ModelSpec, shapes: dict[str, tuple[int, ...]], hf: str, mcore: str, dims: ParallelDims, tp: int
) -> Iterator[Held]:
    """The router, and of the rank's experts (or its slices of all) the two stacks of `rlscale.model.moe.Experts`."""
    names = expert_names(spec)
    block, gate_up, down = f"{hf}{names.block}.", mcore + "mlp.experts.gate_up", mcore + "mlp.experts.down"
    yield _replicated(shapes, block + "gate.weight", mcore + "mlp.router.weight")
    numbers, rows = spec.experts_of_rank(tp, dims.tp, dims.ep)
    count, hidden = len(rows), (0, spec.hidden)
    mine = (rows.start, rows.stop)
    for place, number in enumerate(numbers):
        here, expert = (place, place + 1), f"{block}experts.{number}."
        yield f"{expert}{names.gate}.weight", (mine, hidden), gate_up, (here, (0, count), hidden)
        yield f"{expert}{names.up}.weight", (mine, hidden), gate_up, (here, (count, 2 * count), hidden)
        yield f"{expert}{names.down}.weight", (hidden, mine), down, (here, hidden, (0, count))


def _replicated(shapes: dict[str, tuple[int, ...]], name: str, key: str) -> Held:
    box = whole(shapes[name])
    return name, box, key, box


def _columns(shapes: dict[str, tuple[int, ...]], name: str, key: str, size: int, tp: int) -> Held:
    """A row-parallel weight: the input dimension (1) is split."""
    out, width = shapes[name]
    part = width // size
    return name, ((0, out), (tp * part, (tp + 1) * part)), key, ((0, out), (0, part))


def _vocab(spec: ModelSpec, name: str, key: str, size: int, tp: int) -> Iterator[Held]:
    """Rows of the padded vocabulary; the last ranks may hold padding alone."""
    rows = spec.padded_vocab(size) // size
    start, stop = tp * rows, min((tp + 1) * rows, spec.vocab)
    if start < stop:
        width = (0, spec.hidden)
        yield name, ((start, stop), width), key, ((0, stop - start), width)


def _qkv(spec: ModelSpec, hf: str, mcore: str, leaf: str, size: int, tp: int) -> Iterator[Held]:
    """The rank's rows of the fused projection: [q heads, k, v] of one key-value group after the other.

    With more ranks than groups Megatron splits the same rows evenly, so that a rank may hold part of a group.
    """
    head = spec.head_dim
    per_group = spec.heads // spec.kv_heads * head
    rows = (per_group + 2 * head) * spec.kv_heads // size
    first, last = tp * rows, (tp + 1) * rows
    width = ((0, spec.hidden),) if leaf == "weight" else ()
    fused = 0
    for group in range(spec.kv_heads):
        for proj, length in (("q_proj", per_group), ("k_proj", head), ("v_proj", head)):
            lo, hi = max(fused, first), min(fused + length, last)
            if lo < hi:
                start = group * length + lo - fused
                index, at = (start, start + hi - lo), (lo - first, hi - first)
                yield f"{hf}{proj}.{leaf}", (index, *width), mcore + leaf, (at, *width)
            fused += length
