"""The vLLM end of resharding from configuration alone: what the workers of an engine will hold, before any runs.

A live worker describes itself (`rollout.vllm.worker.targets`), and weights are sent by that. The same arithmetic
without an engine serves to plan and to count bytes. vLLM fuses [q; k; v] and [gate; up] of each rank, repeats key-value
heads where there are fewer than TP ranks, pads the vocabulary to a multiple of 64, and splits layers over PP with the
remainder on the stages before the last. A tied output weight is the embedding's own.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlscale.model.arch import ModelSpec
from rlscale.reshard.canonical import EMBEDDING, FINAL_NORM, HEAD, hf_shapes
from rlscale.reshard.layout import Box, Held, Layout, whole

VOCAB_MULTIPLE = 64


def vllm_layout(spec: ModelSpec, tp: int, pp: int = 1, replicas: int = 1) -> Layout:
    """Layout of ``replicas`` engines of ``tp * pp`` workers each, on ranks 0 to ``replicas * tp * pp``, TP fastest.

    Keys are ``module.parameter`` as in vLLM's models; the order is that of their modules.

    Raises:
        ValueError: a dimension that vLLM cannot split so, or a model that it has no place for (a value head).
    """
    _check(spec, tp, pp)
    shapes = hf_shapes(spec)
    shards = []
    for stage in range(pp):
        for rank in range(tp):
            first = stage * tp + rank
            ranks = range(first, replicas * tp * pp, tp * pp)
            shards.append((ranks, list(_worker(spec, shapes, tp, rank, pp, stage))))
    return Layout.of_shards(shapes, shards)


def fused_whole_layout(spec: ModelSpec, tp: int, pp: int = 1, replicas: int = 1) -> Layout:
    """The same, but every rank of a stage takes the tensors that vLLM fuses (q, k, v, gate, up) whole."""
    layout = vllm_layout(spec, tp, pp, replicas)

    def held(one: Held) -> Held:
        name, _, _, _ = one
        fused = any(f".{part}_proj." in name for part in ("q", "k", "v", "gate", "up"))
        return (name, whole(layout.shapes[name]), name, whole(layout.shapes[name])) if fused else one

    return Layout.of_shards(layout.shapes, [(shard.ranks, [held(h) for h in shard.slices]) for shard in layout.shards])


def layers_of_stage(layers: int, pp: int, stage: int) -> range:
    """Layers of one of vLLM's pipeline stages: what does not divide goes to the stages before the last, last first."""
    each, rest = divmod(layers, pp)
    sizes = [each + (1 <= pp - 1 - i <= rest) for i in range(pp)]
    return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))


def _check(spec: ModelSpec, tp: int, pp: int) -> None:
    padded = -(-spec.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    for what, size in (
        ("attention heads", spec.heads), ("ffn size", spec.ffn), ("rows of the padded vocabulary", padded),
    ):  # fmt: skip
        if size % tp:
            raise ValueError(f"{spec.architecture} in vLLM: TP {tp} does not divide {size} {what}")
    if spec.kv_heads % tp and tp % spec.kv_heads:
        raise ValueError(
            f"{spec.architecture} in vLLM: TP {tp} neither divides nor is a multiple of {spec.kv_heads} key-value heads"
        )
    if pp > spec.num_layers:
        raise ValueError(f"{spec.architecture} in vLLM: {spec.num_layers} layers cannot be split over PP {pp}")
    if spec.experts:
        raise ValueError(
            f"{spec.architecture} in vLLM: the layout of a mixture of experts is not known without an engine"
        )
    if spec.value_head:
        raise ValueError(f"{spec.architecture} in vLLM: there is no place for a value head")


def _worker(
    spec: ModelSpec, shapes: dict[str, tuple[int, ...]], tp: int, rank: int, pp: int, stage: int
) -> Iterator[Held]:
    """What one worker holds, in the order of its modules."""
    last = stage == pp - 1
    if stage == 0 or (spec.tied and last):
        yield from _vocab(spec, EMBEDDING, tp, rank)
    for number in layers_of_stage(spec.num_layers, pp, stage):
        yield from _layer(spec, shapes, f"model.layers.{number}.", tp, rank)
    if last:
        yield _whole(shapes, FINAL_NORM)
        if not spec.tied:
            yield from _vocab(spec, HEAD, tp, rank)


def _layer(spec: ModelSpec, shapes: dict[str, tuple[int, ...]], layer: str, tp: int, rank: int) -> Iterator[Held]:
    attention, mlp, width = layer + "self_attn.", layer + "mlp.", ((0, spec.hidden),)
    yield from _qkv(spec, attention, "weight", width, tp, rank)
    if spec.qkv_bias:
        yield from _qkv(spec, attention, "bias", (), tp, rank)
    yield _columns(shapes, attention + "o_proj.weight", tp, rank)
    if spec.qk_norm:
        yield _whole(shapes, attention + "q_norm.weight")
        yield _whole(shapes, attention + "k_norm.weight")
    rows = spec.ffn // tp
    for number, proj in enumerate(("gate", "up")):
        yield _rows(f"{mlp}{proj}_proj.weight", mlp + "gate_up_proj.weight", width, rank * rows, rows, number * rows)
    yield _columns(shapes, mlp + "down_proj.weight", tp, rank)
    yield _whole(shapes, layer + "input_layernorm.weight")
    yield _whole(shapes, layer + "post_attention_layernorm.weight")


def _qkv(spec: ModelSpec, attention: str, leaf: str, width: Box, tp: int, rank: int) -> Iterator[Held]:
    """[q; k; v]; with more ranks than key-value heads, ``tp / kv_heads`` neighbours hold the same head."""
    key, head = f"{attention}qkv_proj.{leaf}", spec.head_dim
    q, kv = spec.heads // tp * head, max(1, spec.kv_heads // tp) * head
    first = rank // max(1, tp // spec.kv_heads) * kv
    yield _rows(f"{attention}q_proj.{leaf}", key, width, rank * q, q, 0)
    yield _rows(f"{attention}k_proj.{leaf}", key, width, first, kv, q)
    yield _rows(f"{attention}v_proj.{leaf}", key, width, first, kv, q + kv)


def _rows(name: str, key: str, width: Box, start: int, count: int, at: int) -> Held:
    return name, ((start, start + count), *width), key, ((at, at + count), *width)


def _columns(shapes: dict[str, tuple[int, ...]], name: str, tp: int, rank: int) -> Held:
    """A row-parallel weight: the input dimension (1) is split."""
    out, width = shapes[name]
    part = width // tp
    return name, ((0, out), (rank * part, (rank + 1) * part)), name, ((0, out), (0, part))


def _whole(shapes: dict[str, tuple[int, ...]], name: str) -> Held:
    box = whole(shapes[name])
    return name, box, name, box


def _vocab(spec: ModelSpec, name: str, tp: int, rank: int) -> Iterator[Held]:
    """Rows of the padded vocabulary; the last ranks may hold padding alone."""
    count = -(-spec.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // tp
    start, stop = rank * count, min((rank + 1) * count, spec.vocab)
    if start < stop:
        yield _rows(name, name, ((0, spec.hidden),), start, stop - start, 0)
