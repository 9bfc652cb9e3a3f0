"""Random models and layouts, and the oracle of the tests: whole tensors cut by plain reshapes, no layout algebra."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

from rlscale.cluster.mesh import ParallelDims
from rlscale.model.arch import ARCHITECTURES, ModelSpec
from rlscale.reshard.canonical import hf_shapes
from rlscale.reshard.layout import Layout, rank_pieces_from_dicts
from rlscale.reshard.plan import Plan
from rlscale.reshard.transport import region
from rlscale.testing.models import make_spec

Tensors = dict[str, torch.Tensor]
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|w1|up_proj|w3|down_proj|w2)\.weight")


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Models that TP 1, 2 and 4 and PP 1 and 2 can split; key-value heads from 1 to all, odd vocabularies."""
    arch = draw(st.sampled_from(sorted(ARCHITECTURES)))
    sparse = ARCHITECTURES[arch].experts is not None
    value_head = draw(st.booleans())
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    return make_spec(
        architecture=arch, num_layers=draw(st.sampled_from([2, 4])), hidden=draw(st.integers(1, 6)),
        ffn=4 * draw(st.integers(1, 3)), kv_heads=kv_heads,
        heads=kv_heads * draw(st.sampled_from([n for n in (1, 2, 4) if kv_heads * n >= 4])),
        head_dim=draw(st.sampled_from([2, 4])), vocab=draw(st.integers(13, 41)),
        qkv_bias=arch.startswith("Qwen2"), qk_norm=arch.startswith("Qwen3"), value_head=value_head,
        tied=not value_head and draw(st.booleans()), experts=4 * sparse, experts_per_token=2 * sparse,
        expert_ffn=4 * sparse * draw(st.integers(1, 2)),
        dense_layers=frozenset({1} if sparse and draw(st.booleans()) else ()),
        head_bias=value_head and draw(st.booleans()),
    )  # fmt: skip


@st.composite
def dims(draw: st.DrawFn, max_world: int = 8) -> ParallelDims:
    tp, pp = draw(st.sampled_from([(t, p) for t in (1, 2, 4) for p in (1, 2) if t * p <= max_world]))
    sp, dp = draw(st.sampled_from([(s, d) for s in (1, 2) for d in (1, 2, 3, 4) if tp * pp * s * d <= max_world]))
    return ParallelDims(tp=tp, pp=pp, sp=sp, dp=dp, ep=draw(st.sampled_from([1, tp])))


def canonical(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Tensors:
    """Tensors with a different integer in every element (as far as the dtype can tell them apart)."""
    out, start = {}, 1
    for name, shape in hf_shapes(spec).items():
        n = int(torch.Size(shape).numel())
        out[name] = torch.arange(start, start + n, dtype=torch.float64).reshape(shape).to(dtype)
        start += n
    return out


def megatron_shards(spec: ModelSpec, dims: ParallelDims, rank: int, hf: Tensors) -> Tensors:
    """The parameters of one rank: build Megatron's fused whole tensors, then split them."""
    at, tp = dims.coords(rank), dims.tp

    def rows(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(tp, 0)[at.tp].clone()

    def vocab(whole: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros(spec.padded_vocab(tp) - spec.vocab, whole.shape[1], dtype=whole.dtype)
        return rows(torch.cat([whole, padding]))

    def qkv(prefix: str, leaf: str) -> torch.Tensor:
        parts = [hf[f"{prefix}{p}_proj.{leaf}"] for p in "qkv"]
        groups = torch.cat([p.reshape(spec.kv_heads, -1, spec.head_dim, *p.shape[1:]) for p in parts], 1)
        return rows(groups.reshape(-1, *parts[0].shape[1:]))

    def experts(prefix: str) -> Tensors:
        mixtral = spec.architecture.startswith("Mixtral")
        block = prefix + ("block_sparse_moe." if mixtral else "mlp.")
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (
            torch.stack([hf[f"{block}experts.{e}.{name}.weight"] for e in range(spec.experts)]) for name in names
        )
        whole = dims.ep == tp  # experts, or (also where tp is 1) slices of each
        gate, up, down = (t.chunk(tp, 0 if whole else dim)[at.tp] for t, dim in ((gate, 1), (up, 1), (down, 2)))
        out = {"router.weight": hf[block + "gate.weight"], "experts.gate_up": torch.cat([gate, up], 1)}
        return {key: value.clone() for key, value in (out | {"experts.down": down}).items()}

    out: Tensors = {}
    size = spec.num_layers // dims.pp
    for local in range(size):
        i, m = f"model.layers.{at.pp * size + local}.", f"decoder.layers.{local}."
        out[m + "self_attention.linear_qkv.weight"] = qkv(i + "self_attn.", "weight")
        if spec.qkv_bias:
            out[m + "self_attention.linear_qkv.bias"] = qkv(i + "self_attn.", "bias")
        if spec.qk_norm:
            out[m + "self_attention.q_layernorm.weight"] = hf[i + "self_attn.q_norm.weight"].clone()
            out[m + "self_attention.k_layernorm.weight"] = hf[i + "self_attn.k_norm.weight"].clone()
        out[m + "self_attention.linear_proj.weight"] = hf[i + "self_attn.o_proj.weight"].chunk(tp, 1)[at.tp].clone()
        if spec.is_sparse(at.pp * size + local):
            out |= {m + "mlp." + key: value for key, value in experts(i).items()}
        else:
            out[m + "mlp.linear_fc1.weight"] = torch.cat([rows(hf[i + f"mlp.{p}_proj.weight"]) for p in ("gate", "up")])
            out[m + "mlp.linear_fc2.weight"] = hf[i + "mlp.down_proj.weight"].chunk(tp, 1)[at.tp].clone()
        out[m + "input_layernorm.weight"] = hf[i + "input_layernorm.weight"].clone()
        out[m + "pre_mlp_layernorm.weight"] = hf[i + "post_attention_layernorm.weight"].clone()
    if at.pp == 0:
        out["embedding.word_embeddings.weight"] = vocab(hf["model.embed_tokens.weight"])
    if at.pp == dims.pp - 1:
        out["decoder.final_layernorm.weight"] = hf["model.norm.weight"].clone()
        if spec.value_head:
            out["value_head.weight"] = hf["score.weight"].clone()
            if spec.head_bias:
                out["value_head.bias"] = hf["score.bias"].clone()
        elif not spec.tied or dims.pp > 1:
            out["output_layer.weight"] = vocab(hf["model.embed_tokens.weight" if spec.tied else "lm_head.weight"])
    return out


def vllm_shards(spec: ModelSpec, tp: int, rank: int, hf: Tensors) -> Tensors:
    """Parameters of one worker of a vLLM engine: [q; k; v] with replicated kv heads, [gate; up], vocabulary to 64."""

    def rows(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(tp, 0)[rank % tp].clone()

    def kv(whole: torch.Tensor) -> torch.Tensor:
        heads = whole.reshape(spec.kv_heads, spec.head_dim, *whole.shape[1:])
        heads = heads.repeat_interleave(max(1, tp // spec.kv_heads), 0)
        return heads.chunk(tp, 0)[rank % tp].reshape(-1, *whole.shape[1:]).clone()

    def vocab(whole: torch.Tensor) -> torch.Tensor:
        return rows(torch.cat([whole, torch.zeros(-spec.vocab % 64, whole.shape[1], dtype=whole.dtype)]))

    out: Tensors = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, whole in hf.items():
        if match := EXPERT.fullmatch(name):
            down = match[3] in ("down_proj", "w2")
            part = whole.chunk(tp, 1)[rank % tp] if down else rows(whole)
            stacks.setdefault(f"{match[1]}.{'w2' if down else 'w13'}_weight", []).append(part)
            continue
        prefix, _, tail = name.rpartition("self_attn.")
        if tail.startswith("q_proj"):
            leaf = tail.split(".")[1]
            k, v = (kv(hf[f"{prefix}self_attn.{p}_proj.{leaf}"]) for p in "kv")
            out[f"{prefix}self_attn.qkv_proj.{leaf}"] = torch.cat([rows(whole), k, v])
        elif "gate_proj" in name:
            up = hf[name.replace("gate_proj", "up_proj")]
            out[name.replace("gate_proj", "gate_up_proj")] = torch.cat([rows(whole), rows(up)])
        elif "o_proj" in name or "down_proj" in name:
            out[name] = whole.chunk(tp, 1)[rank % tp].clone()
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            out[name] = vocab(whole)
        elif not any(p in name for p in ("k_proj", "v_proj", "up_proj")):
            out[name] = whole.clone()
    for key, parts in stacks.items():  # gate and up of one expert after the other
        out[key] = torch.stack(parts).reshape(spec.experts, -1, parts[0].shape[1])
    return out


def vllm_layout(spec: ModelSpec, tp: int, world: int) -> Layout:
    """The layout of `vllm_shards` on every rank of ``world / tp`` replicas, as dictionaries read from live modules."""
    shapes, out = hf_shapes(spec), []
    for rank in range(world):
        r = rank % tp
        for name, shape in shapes.items():
            key, dim, start, size, at = name, 0, 0, shape[0], 0
            q, kv = spec.heads // tp * spec.head_dim, max(1, spec.kv_heads // tp) * spec.head_dim
            if "q_proj" in name:
                key, start, size = name.replace("q_proj", "qkv_proj"), r * q, q
            elif "k_proj" in name or "v_proj" in name:
                key = re.sub("[kv]_proj", "qkv_proj", name)
                start, size = r // max(1, tp // spec.kv_heads) * kv, kv
                at = q if "k_proj" in name else q + kv
            elif re.search(r"mlp\.(gate|up)_proj", name):
                key = re.sub("(gate|up)_proj", "gate_up_proj", name)
                size = spec.ffn // tp
                start, at = r * size, 0 if "gate_proj" in name else size
            elif "o_proj" in name or "mlp.down_proj" in name:
                dim, size = 1, shape[1] // tp
                start = r * size
            elif name in ("model.embed_tokens.weight", "lm_head.weight"):
                rows = -(-spec.vocab // 64) * 64 // tp
                start = r * rows
                size = min(rows, spec.vocab - start)
            elif match := EXPERT.fullmatch(name):
                dim = int(match[3] in ("down_proj", "w2"))
                size = shape[dim] // tp
                start, at = r * size, size if match[3] in ("up_proj", "w3") else 0
                key = f"{match[1]}.{'w2' if dim else 'w13'}_weight"
            if size <= 0:
                continue
            index, place = [[0, n] for n in shape], [[0, n] for n in shape]
            index[dim], place[dim] = [start, start + size], [at, at + size]
            if match := EXPERT.fullmatch(name):
                place = [[int(match[2]), int(match[2]) + 1], *place]
            out.append({"name": name, "rank": rank, "index": index, "key": key, "at": place})
    return rank_pieces_from_dicts(out, shapes)


def simulate(plan: Plan, sources: dict[int, Tensors], destinations: dict[int, Tensors]) -> None:
    """Carry out a plan with all ranks in one process."""
    for rank in plan.copies.receivers:
        for copies in plan.incoming(rank):
            for copy in copies:
                values = region(sources[copy.sender][copy.source.key], copy.source)
                region(destinations[rank][copy.destination.key], copy.destination).copy_(values)


def blank(shards: Tensors) -> Tensors:
    """Zeros in the shapes of the shards (what padding rows hold)."""
    return {key: torch.zeros_like(value) for key, value in shards.items()}


def assert_equal(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(got[key], value), key


def write_folder(folder: Path, tensors: Tensors, shards: int = 1) -> Path:
    """A Hugging Face folder of one file, or of several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}))
    names = list(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
