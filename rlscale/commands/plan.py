"""What a weight update moves between trainer and engines, from a model's configuration alone.

    rlscale plan --model FOLDER_OR_CONFIG --source tp=8,pp=4,dp=8 --destination tp=4

No weights and no processes: the plan is the one that a run with these layouts would make. The source is a Megatron
layout (tp, pp, dp, sp; tp fastest; ep=tp distributes experts over tp), the destination vLLM engines of tp x pp workers,
as many as fill the same ranks. Bytes are those of the destination's dtype. Beside the plan stand two ways in which
weights are moved elsewhere:

gather, then slice  (veRL) Every rank puts every tensor together over PP and TP, and the engine's loader takes its
    slice. A rank receives all that it does not hold: M - own bytes, M being the model. Counted as a chain over PP (a
    rank receives from the stage before it what it lacks of the slices at its TP place, S - own) followed by a ring
    over TP (it receives from its TP neighbour what it lacks of the model, M - S); each rank sends what the next one
    receives.
fused tensors whole  (vLLM's M-to-N engine) Tensors that vLLM fuses (q, k, v; gate, up; of experts all) go whole to
    every rank of their stage, the others as slices. Counted with the same choice of senders as the plan, and nothing
    that a rank holds is sent to it, which is kinder to this way than its implementation.

The lower bound of each way's destination is what its ranks want less what they hold. Ranks [n * R, (n + 1) * R) share
node n, with R = --ranks-per-node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from rlscale.cluster.mesh import ParallelDims
from rlscale.model.arch import ModelSpec
from rlscale.reshard.layout import Layout, volume, whole
from rlscale.reshard.megatron import megatron_layout
from rlscale.reshard.plan import Plan, Traffic, plan
from rlscale.reshard.vllm import fused_whole_layout, vllm_layout

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
SOURCE_KEYS = tuple(field.name for field in fields(ParallelDims))
DESTINATION_KEYS = ("tp", "pp")
DERIVED_HEAD_DIM = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")  # hidden size / heads if not given
UNCUT = 2**40  # a bucket that holds any tensor: where only bytes are counted


def read_spec(path: str) -> ModelSpec:
    """Shapes from a model folder or its config.json (or a hub name).

    Raises:
        ValueError: no such file, no JSON, or a model that is not supported.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        if file.suffix == ".json" and not Path(path).is_dir():
            raise ValueError(f"no such file: {path}")
        return ModelSpec.from_hf(path)  # raises for what looks like a local path
    try:
        config = json.loads(file.read_text())
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ValueError(f"{file}: not a JSON configuration ({error})") from None
    names = config.get("architectures") or ["none"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ValueError(f"{file}: architectures {names!r} is not a list of names")
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    check_sizes(file, {key: config.get(key) for key in (*sizes, "head_dim", "vocab_size")})
    spec = None
    if "head_dim" in config or names[0] in DERIVED_HEAD_DIM:
        with contextlib.suppress(AttributeError):  # leaves something to the defaults of its architecture
            spec = ModelSpec.from_config(SimpleNamespace(**config), rope=False)
    spec = spec or ModelSpec.from_config(completed(file, config), rope=False)
    read = ("num_layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")
    check_sizes(file, {key: getattr(spec, key) for key in read})
    return spec


def completed(file: Path, config: dict[str, Any]) -> Any:
    """The configuration with the defaults of its architecture, which transformers knows."""
    from transformers import AutoConfig

    if "model_type" not in config:
        raise ValueError(f"{file}: has no model_type")
    try:
        return AutoConfig.for_model(**config)
    except Exception as error:  # its validation has exceptions of its own
        raise ValueError(f"{file}: transformers refuses it: {' '.join(str(error).split())}") from None


def check_sizes(file: Path, sizes: dict[str, Any]) -> None:
    for key, size in sizes.items():
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"{file}: {key} {size!r} is not a positive number")


def read_sizes(option: str, text: str, keys: tuple[str, ...]) -> dict[str, int]:
    """``tp=8,pp=4`` as a dictionary. Raises ValueError for unknown or repeated keys and sizes below 1."""
    out: dict[str, int] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if key not in keys or not equals:
            raise ValueError(f"{option}: {part.strip()!r} is not one of {', '.join(f'{k}=N' for k in keys)}")
        if key in out:
            raise ValueError(f"{option}: {key} is given twice")
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(f"{option}: {key}={value} is not a positive number")
        out[key] = int(value)
    return out


def figures(
    received: dict[int, int], sent: dict[int, int], from_network: dict[int, int], links: dict[str, int], bound: int
) -> dict[str, Any]:
    """Figures of one way to move the weights, from what each rank receives and sends; bytes."""

    def min_mean_max(by_rank: dict[int, int]) -> dict[str, float]:
        values = by_rank.values()
        return {"min": min(values), "mean": sum(values) / len(values), "max": max(values)}

    total = sum(received.values())
    return {
        "total": total, **links, "lower_bound": bound, "ratio": total / bound if bound else 1.0,
        "received": min_mean_max(received), "sent": min_mean_max(sent), "from_network": min_mean_max(from_network),
    }  # fmt: skip


class Dtype(NamedTuple):
    """As much of a dtype as a plan needs; torch takes longer to import than the plan to make."""

    itemsize: int


def planned(t: Traffic) -> dict[str, Any]:
    return figures(t.received, t.sent, t.from_network, t.links, sum(t.lower_bound.values()))


def gathered(source: Layout, dims: ParallelDims, itemsize: int, ranks_per_node: int) -> dict[str, Any]:
    """Whole tensors on every rank: a chain over PP, then a ring over TP (formulas in the module's docstring)."""
    model = sum(volume(whole(shape)) for shape in source.shapes.values()) * itemsize
    held_bytes: dict[int, int] = {}
    places: dict[int, set[Any]] = {tp: set() for tp in range(dims.tp)}
    for shard in source.shards:
        slices = {held[:2] for held in shard.slices}
        places[dims.coords(shard.ranks[0]).tp] |= slices
        held_bytes |= dict.fromkeys(shard.ranks, sum(volume(index) for _, index in slices) * itemsize)
    of_place = {tp: sum(volume(index) for _, index in slices) * itemsize for tp, slices in places.items()}
    received, sent, from_network = (dict.fromkeys(range(dims.world), 0) for _ in range(3))
    for rank in range(dims.world):
        at = dims.coords(rank)
        for before, nbytes in (
            (at._replace(pp=(at.pp - 1) % dims.pp), of_place[at.tp] - held_bytes[rank]),
            (at._replace(tp=(at.tp - 1) % dims.tp), model - of_place[at.tp]),
        ):
            sender = dims.rank_of(**before._asdict())
            received[rank] += nbytes
            sent[sender] += nbytes
            from_network[rank] += nbytes if sender // ranks_per_node != rank // ranks_per_node else 0
    network = sum(from_network.values())
    links = {"device": sum(held_bytes.values()), "node": sum(received.values()) - network, "network": network}
    return figures(received, sent, from_network, links, sum(received.values()))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, ready for JSON. Raises ValueError for input that makes no plan."""
    dims = ParallelDims(**read_sizes("--source", args.source, SOURCE_KEYS))
    if dims.ep not in (1, dims.tp):
        raise ValueError(f"--source: ep={dims.ep} must be 1 or tp={dims.tp}")
    engine = {"tp": 1, "pp": 1} | read_sizes("--destination", args.destination, DESTINATION_KEYS)
    size = engine["tp"] * engine["pp"]
    if dims.world % size:
        raise ValueError(f"--destination: engines of {size} ranks do not fill the {dims.world} ranks of the source")
    for option, value in (("--ranks-per-node", args.ranks_per_node), ("--bucket-mb", args.bucket_mb)):
        if value < 1:
            raise ValueError(f"{option}: {value} is not a positive number")
    spec, dtype = read_spec(args.model), Dtype(ITEMSIZES[args.dtype])
    begin = time.perf_counter()
    source = megatron_layout(spec, dims)
    shape = dict(tp=engine["tp"], pp=engine["pp"], replicas=dims.world // size)
    made: Plan = plan(
        source, vllm_layout(spec, **shape), dtype=dtype,  # type: ignore[arg-type]
        bucket_bytes=args.bucket_mb * 2**20, ranks_per_node=args.ranks_per_node,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    fused = Traffic(
        source, fused_whole_layout(spec, **shape), dict.fromkeys(source.shapes, dtype),  # type: ignore[arg-type]
        UNCUT, args.ranks_per_node,
    )  # fmt: skip
    parameters = sum(volume(whole(shape)) for shape in source.shapes.values())
    return {
        "model": {"architecture": spec.architecture, "parameters": parameters, "bytes": parameters * dtype.itemsize},
        "source": {key: getattr(dims, key) for key in SOURCE_KEYS},
        "destination": shape,
        "dtype": args.dtype,
        "ranks": dims.world,
        "ranks_per_node": args.ranks_per_node,
        "bucket_bytes": made.bucket_bytes,
        "rounds": made.rounds,
        "seconds": seconds,
        "ways": {
            "this plan": planned(made),
            "gather, then slice": gathered(source, dims, dtype.itemsize, args.ranks_per_node),
            "fused tensors whole": planned(fused),
        },
    }


def text(result: dict[str, Any]) -> str:
    """The figures as a table."""
    model, ways, engine = result["model"], result["ways"], result["destination"]
    sizes = " ".join(f"{key}={value}" for key, value in result["source"].items())
    lines = [
        f"{model['architecture']}: {model['parameters'] / 1e9:.2f} G parameters, {gb(model['bytes'])} GB "
        f"as {result['dtype']}",
        f"from Megatron {sizes} to {engine['replicas']} vLLM engines of tp={engine['tp']} pp={engine['pp']}",
        f"{result['ranks']} ranks, {result['ranks_per_node']} per node; {result['rounds']} rounds of buckets of "
        f"{result['bucket_bytes'] / 2**20:.0f} MiB; planned in {result['seconds']:.2f} s",
        "",
        f"{'GB (10^9 bytes)':<34}" + "".join(f"{name:>26}" for name in ways),
    ]

    def row(title: str, value: Callable[[dict[str, Any]], str]) -> None:
        lines.append(f"{title:<34}" + "".join(f"{value(way):>26}" for way in ways.values()))

    def min_mean_max(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda way: " / ".join(gb(way[key][which]) for which in ("min", "mean", "max"))

    row("received from other ranks, total", lambda way: gb(way["total"]))
    row("  within a node", lambda way: gb(way["node"]))
    row("  from another node", lambda way: gb(way["network"]))
    row("stays on its device, total", lambda way: gb(way["device"]))
    row("received, rank min/mean/max", min_mean_max("received"))
    row("sent, rank min/mean/max", min_mean_max("sent"))
    row("from other nodes, min/mean/max", min_mean_max("from_network"))
    bound, sent = ways["this plan"]["lower_bound"], ways["this plan"]["sent"]
    row("times the plan's lower bound", lambda way: f"{way['total'] / bound:.2f}" if bound else "-")
    most = sent["max"] / sent["mean"] if sent["mean"] else 1.0
    lines += [
        "",
        f"lower bound: {gb(bound)} GB wanted and not held; in this plan no rank sends more than {most:.2f} x mean",
    ]
    return "\n".join(lines)


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f}" if nbytes >= 1e9 or not nbytes else f"{nbytes / 1e9:.3g}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="model folder or config.json; weights are not read")
    parser.add_argument("--source", required=True, help="Megatron layout, e.g. tp=8,pp=4,dp=8 (also sp=, ep=)")
    parser.add_argument("--destination", required=True, help="one vLLM engine, e.g. tp=4 (also pp=)")
    parser.add_argument("--dtype", choices=list(ITEMSIZES), default="bfloat16", help="dtype of the engines' weights")
    parser.add_argument("--bucket-mb", type=int, default=64, help="size of a bucket in MiB")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="ranks that share a node")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table; sizes in bytes")


def run(args: argparse.Namespace) -> int:
    result = compare(args)
    print(json.dumps(result, indent=1) if args.json else text(result))
    return 0
