"""The vLLM end of resharding from configuration alone: what the workers of an engine will hold, before any runs.

A live worker describes itself (`rollout.vllm.worker.targets`), and weights are sent by that. The same arithmetic
without an engine serves to plan and to count bytes. vLLM fuses [q; k; v] and [gate; up] of each rank, repeats key-value
heads where there are fewer than TP ranks, pads the vocabulary to a multiple of 64, and splits layers over PP with the
remainder on the stages before the last. A tied output weight is the embedding's own.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlscale.model.arch import ModelSpec
from rlscale.reshard.canonical import EMBEDDING, FINAL_NORM, HEAD, TensorParallel, hf_shapes
from rlscale.reshard.layout import Held, Layout, whole

VOCAB_MULTIPLE = 64


def vllm_layout(spec: ModelSpec, tp: int, pp: int = 1, replicas: int = 1) -> Layout:
    """Layout of ``replicas`` engines of ``tp * pp`` workers each, on ranks 0 to ``replicas * tp * pp``, TP fastest.

    Keys are ``module.parameter`` as in vLLM's models; the order is that of their modules.

    Raises:
        ValueError: a dimension that vLLM cannot split so, or a model that it has no place for (a value head).
    """
    _check(spec, tp, pp)
    shapes, shards = hf_shapes(spec), []
    for stage in range(pp):
        for rank in range(tp):
            ranks = range(stage * tp + rank, replicas * tp * pp, tp * pp)
            shards.append((ranks, list(_worker(spec, TensorParallel(shapes, tp, rank), pp, stage))))
    return Layout(shapes, shards=shards)


def fused_whole_layout(spec: ModelSpec, tp: int, pp: int = 1, replicas: int = 1) -> Layout:
    """The same, but every rank of a stage takes the tensors that vLLM fuses (q, k, v, gate, up) whole."""
    layout = vllm_layout(spec, tp, pp, replicas)

    def taken(held: Held) -> Held:
        name, box = held[0], whole(layout.shapes[held[0]])
        fused = any(f".{part}_proj." in name for part in ("q", "k", "v", "gate", "up"))
        return (name, box, name, box) if fused else held

    return Layout(layout.shapes, shards=[(shard.ranks, [*map(taken, shard.slices)]) for shard in layout.shards])


def layers_of_stage(layers: int, pp: int, stage: int) -> range:
    """Layers of one of vLLM's pipeline stages: what does not divide goes to the stages before the last, last first."""
    each, rest = divmod(layers, pp)
    sizes = [each + (1 <= pp - 1 - i <= rest) for i in range(pp)]
    return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))


def _check(spec: ModelSpec, tp: int, pp: int) -> None:
    where = f"{spec.architecture} in vLLM"
    for what, size in (
        ("attention heads", spec.heads),
        ("ffn size", spec.ffn),
        ("rows of the padded vocabulary", spec.padded_vocab(VOCAB_MULTIPLE)),
    ):
        if size % tp:
            raise ValueError(f"{where}: TP {tp} does not divide {size} {what}")
    if spec.kv_heads % tp and tp % spec.kv_heads:
        raise ValueError(f"{where}: TP {tp} neither divides nor is a multiple of {spec.kv_heads} key-value heads")
    if pp > spec.num_layers:
        raise ValueError(f"{where}: {spec.num_layers} layers cannot be split over PP {pp}")
    if spec.experts:
        raise ValueError(f"{where}: the layout of a mixture of experts is not known without an engine")
    if spec.value_head:
        raise ValueError(f"{where}: there is no place for a value head")


def _worker(spec: ModelSpec, of: TensorParallel, pp: int, stage: int) -> Iterator[Held]:
    """What one worker holds, in the order of its modules."""
    last, padded = stage == pp - 1, spec.padded_vocab(VOCAB_MULTIPLE)
    if stage == 0 or (spec.tied and last):
        yield from of.vocabulary(EMBEDDING, EMBEDDING, padded)
    for number in layers_of_stage(spec.num_layers, pp, stage):
        yield from _layer(spec, of, f"model.layers.{number}.")
    if last:
        yield of.whole(FINAL_NORM, FINAL_NORM)
        if not spec.tied:
            yield from of.vocabulary(HEAD, HEAD, padded)


def _layer(spec: ModelSpec, of: TensorParallel, layer: str) -> Iterator[Held]:
    attention, mlp = layer + "self_attn.", layer + "mlp."
    # [q; k; v]; with more ranks than key-value heads, tp / kv_heads neighbours hold the same head
    q, kv = spec.heads // of.size * spec.head_dim, max(1, spec.kv_heads // of.size) * spec.head_dim
    first_kv = of.rank // max(1, of.size // spec.kv_heads) * kv
    for leaf in ("weight", "bias") if spec.qkv_bias else ("weight",):
        key = f"{attention}qkv_proj.{leaf}"
        yield of.rows(f"{attention}q_proj.{leaf}", key, of.rank * q, q)
        yield of.rows(f"{attention}k_proj.{leaf}", key, first_kv, kv, at=q)
        yield of.rows(f"{attention}v_proj.{leaf}", key, first_kv, kv, at=q + kv)
    yield of.columns(attention + "o_proj.weight", attention + "o_proj.weight")
    if spec.qk_norm:
        for name in (attention + "q_norm.weight", attention + "k_norm.weight"):
            yield of.whole(name, name)
    rows = spec.ffn // of.size
    yield of.rows(mlp + "gate_proj.weight", mlp + "gate_up_proj.weight", of.rank * rows, rows)
    yield of.rows(mlp + "up_proj.weight", mlp + "gate_up_proj.weight", of.rank * rows, rows, at=rows)
    yield of.columns(mlp + "down_proj.weight", mlp + "down_proj.weight")
    for name in (layer + "input_layernorm.weight", layer + "post_attention_layernorm.weight"):
        yield of.whole(name, name)
