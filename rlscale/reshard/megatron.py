"""The Megatron end of resharding: where each Hugging Face tensor lies in a Megatron-core GPT model split over ranks.

Megatron fuses q, k, v of each key-value group ([q heads, k, v] group after group) and [gate; up] of each rank, pads the
vocabulary, splits columns or rows over TP and layers over PP, and keeps a second copy of a tied embedding on the last
stage. All of that is index arithmetic, written here once for loading, syncing and exporting alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlscale.cluster.mesh import ParallelDims
from rlscale.model.arch import ModelSpec
from rlscale.reshard import canonical
from rlscale.reshard.canonical import EMBEDDING, FINAL_NORM, HEAD, TensorParallel, hf_shapes
from rlscale.reshard.layout import Held, Layout


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
    shapes, shards = hf_shapes(spec), []
    for pp in range(dims.pp):
        for tp in range(dims.tp):
            ranks = [dims.rank_of(tp=tp, sp=sp, dp=dp, pp=pp) for dp in range(dims.dp) for sp in range(dims.sp)]
            shards.append((ranks, list(_stage(spec, TensorParallel(shapes, dims.tp, tp), dims, pp))))
    return Layout(shapes, shards=shards)


def _stage(spec: ModelSpec, of: TensorParallel, dims: ParallelDims, pp: int) -> Iterator[Held]:
    """What one pipeline stage holds at one TP rank, in the order of its layers."""
    padded = spec.padded_vocab(dims.tp)
    if pp == 0:
        yield from of.vocabulary(EMBEDDING, "embedding.word_embeddings.weight", padded)
    for local, number in enumerate(spec.layers_of_stage(pp, dims.pp)):
        hf, mcore = f"model.layers.{number}.", f"decoder.layers.{local}."
        yield from _attention(spec, of, hf, mcore)
        yield of.whole(hf + "post_attention_layernorm.weight", mcore + "pre_mlp_layernorm.weight")
        if spec.is_sparse(number):
            yield from _sparse_mlp(spec, of, hf, mcore, dims.ep)
        else:
            rows, fused = spec.ffn // dims.tp, mcore + "mlp.linear_fc1.weight"
            yield of.rows(hf + "mlp.gate_proj.weight", fused, of.rank * rows, rows)
            yield of.rows(hf + "mlp.up_proj.weight", fused, of.rank * rows, rows, at=rows)
            yield of.columns(hf + "mlp.down_proj.weight", mcore + "mlp.linear_fc2.weight")
    if pp == dims.pp - 1:
        yield of.whole(FINAL_NORM, "decoder.final_layernorm.weight")
        if spec.value_head:
            yield of.whole(canonical.VALUE_HEAD, "value_head.weight")
            if spec.head_bias:
                yield of.whole(canonical.VALUE_BIAS, "value_head.bias")
        elif not spec.tied or pp > 0:
            yield from of.vocabulary(EMBEDDING if spec.tied else HEAD, "output_layer.weight", padded)


def _attention(spec: ModelSpec, of: TensorParallel, hf: str, mcore: str) -> Iterator[Held]:
    source, attention = hf + "self_attn.", mcore + "self_attention."
    yield of.whole(hf + "input_layernorm.weight", mcore + "input_layernorm.weight")
    for leaf in ("weight", "bias") if spec.qkv_bias else ("weight",):
        yield from _qkv(spec, of, source, f"{attention}linear_qkv.{leaf}", leaf)
    if spec.qk_norm:
        yield of.whole(source + "q_norm.weight", attention + "q_layernorm.weight")
        yield of.whole(source + "k_norm.weight", attention + "k_layernorm.weight")
    yield of.columns(source + "o_proj.weight", attention + "linear_proj.weight")


def _qkv(spec: ModelSpec, of: TensorParallel, source: str, key: str, leaf: str) -> Iterator[Held]:
    """The rank's rows of the fused projection: [q heads, k, v] of one key-value group after the other.

    With more ranks than groups Megatron splits the same rows evenly, so that a rank may hold part of a group.
    """
    head = spec.head_dim
    per_group = spec.heads // spec.kv_heads * head
    rows = (per_group + 2 * head) * spec.kv_heads // of.size
    first, fused = of.rank * rows, 0
    for group in range(spec.kv_heads):
        for proj, length in (("q_proj", per_group), ("k_proj", head), ("v_proj", head)):
            lo, hi = max(fused, first), min(fused + length, first + rows)
            if lo < hi:
                yield of.rows(f"{source}{proj}.{leaf}", key, group * length + lo - fused, hi - lo, at=lo - first)
            fused += length


def _sparse_mlp(spec: ModelSpec, of: TensorParallel, hf: str, mcore: str, ep: int) -> Iterator[Held]:
    """The router, and of the rank's experts (or its slices of all) the two stacks of `rlscale.model.moe.Experts`."""
    names = canonical.expert_names(spec)
    block, gate_up, down = f"{hf}{names.block}.", mcore + "mlp.experts.gate_up", mcore + "mlp.experts.down"
    yield of.whole(block + "gate.weight", mcore + "mlp.router.weight")
    numbers, rows = spec.experts_of_rank(of.rank, of.size, ep)
    part = of if ep == 1 else of._replace(size=1, rank=0)  # with expert parallelism each expert is whole
    for place, number in enumerate(numbers):
        expert = f"{block}experts.{number}."
        for name, index, key, at in (
            of.rows(f"{expert}{names.gate}.weight", gate_up, rows.start, len(rows)),
            of.rows(f"{expert}{names.up}.weight", gate_up, rows.start, len(rows), at=len(rows)),
            part.columns(f"{expert}{names.down}.weight", down),
        ):
            yield name, index, key, ((place, place + 1), *at)
