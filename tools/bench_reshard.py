"""Weights from a trainer's layout to an engine's: the plan beside "gather whole tensors, then slice".

    deepspeed --num_gpus 4 tools/bench_reshard.py [--source tp=2,pp=2] [--destination tp=2] [--rounds 15]

Both sides start from the same Megatron shards and end with the same fused parameters of a vLLM engine on every rank
(replicas of ``tp`` ranks each), compared bit by bit. Rounds alternate, so that both meet the same load; the time is
that between two barriers. Both reuse their buffers and views, and both first try the bucket sizes of ``--buckets`` and
keep their best. CPU time is that of all ranks, which the load of other programs changes less.

The gather side packs a bucket of shards, all-gathers it over TP (`all_gather_into_tensor`) and broadcasts it over PP,
all stages at once; then each rank copies its slices straight out of the gathered bucket, without the whole tensors in
between that veRL and vLLM's loader build. The plan side is `Transfer.into`.

Without ``--model`` (a folder with config.json; weights are random in any case) the model has the shapes of a Qwen3 of
about 0.5 GB in bf16.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from rlscale.cluster.device import init_distributed
from rlscale.cluster.mesh import Mesh, ParallelDims
from rlscale.model.arch import ModelSpec
from rlscale.reshard import Layout, Piece, Plan, Transfer, megatron_layout, plan
from rlscale.reshard.layout import intersect
from rlscale.reshard.transport import region

MB = 2**20
Tensors = dict[str, torch.Tensor]
SHAPE = ModelSpec(
    architecture="Qwen3ForCausalLM", num_layers=16, hidden=1024, ffn=3072, heads=16, kv_heads=8, head_dim=128,
    vocab=16384, norm_eps=1e-6, inv_freq=(), qk_norm=True, tied=True,
)  # fmt: skip


def engine_layout(spec: ModelSpec, shapes: dict[str, tuple[int, ...]], tp: int, world: int) -> Layout:
    """Fused parameters of vLLM engines of ``tp`` ranks: [q; k; v] with repeated kv heads, [gate; up]."""
    pieces = []
    q, kv = spec.heads // tp * spec.head_dim, max(1, spec.kv_heads // tp) * spec.head_dim
    for rank in range(world):
        r = rank % tp
        kv_start = r // max(1, tp // spec.kv_heads) * kv
        for name, shape in shapes.items():
            leaf = name.split(".")[-2]
            dim, start, size, at, key = 0, 0, shape[0], 0, name
            if leaf == "q_proj":
                start, size = r * q, q
            elif leaf in ("k_proj", "v_proj"):
                start, size, at = kv_start, kv, q if leaf == "k_proj" else q + kv
            elif leaf in ("gate_proj", "up_proj"):
                size = spec.ffn // tp
                start, at = r * size, 0 if leaf == "gate_proj" else size
            elif leaf in ("o_proj", "down_proj"):
                dim, size = 1, shape[1] // tp
                start = r * size
            elif leaf in ("embed_tokens", "lm_head"):
                size = -(-shape[0] // tp)
                start = r * size
            if leaf in ("q_proj", "k_proj", "v_proj"):
                key = name.replace(leaf, "qkv_proj")
            elif leaf in ("gate_proj", "up_proj"):
                key = name.replace(leaf, "gate_up_proj")
            index, place = [(0, n) for n in shape], [(0, n) for n in shape]
            index[dim], place[dim] = (start, min(start + size, shape[dim])), (at, at + min(size, shape[dim] - start))
            pieces.append(Piece(name, rank, tuple(index), key, tuple(place)))
    return Layout(shapes, pieces)


def buffers_of(pieces: list[Piece], dtype: torch.dtype) -> Tensors:
    """Empty local buffers that the pieces of one rank fill."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        old = shapes.get(piece.key, (0,) * len(piece.at))
        shapes[piece.key] = tuple(max(n, hi) for n, (_, hi) in zip(old, piece.at, strict=True))
    return {key: torch.zeros(shape, dtype=dtype) for key, shape in shapes.items()}


def fill(layout: Layout, rank: int, tensors: Tensors) -> None:
    """Values that follow from name and place in the whole tensor: every rank knows what any other must hold."""
    for number, (name, shape) in enumerate(layout.shapes.items()):
        for piece in layout.of_rank(rank):
            if piece.name == name:
                grid = [torch.arange(lo, hi) for lo, hi in piece.index]
                value = grid[0] * (shape[1] if len(shape) > 1 else 1)
                value = value[:, None] + grid[1] if len(shape) > 1 else value
                region(tensors[piece.key], piece).copy_((value * 7 + number) % 251)


class Gather:
    """Gather whole tensors, bucket by bucket, then slice."""

    def __init__(self, source: Layout, wanted: Layout, mesh: Mesh, held: Tensors, target: Tensors, bucket_bytes: int):
        dims = mesh.dims
        assert dims.dp == dims.sp == 1, "the gather side is written for TP x PP"
        self.mesh, self.dims = mesh, dims
        self.dtype = next(iter(held.values())).dtype
        self.need: dict[str, list[Piece]] = {}
        for piece in wanted.of_rank(mesh.rank):
            self.need.setdefault(piece.name, []).append(piece)
        stages = [_groups(source, dims, pp, bucket_bytes // dims.tp, self.dtype.itemsize) for pp in range(dims.pp)]
        self.rounds = max(map(len, stages))
        # by round and stage: bytes of one rank's shards; what this rank packs; what it copies out of a gathered bucket
        self.sizes = [[0] * dims.pp for _ in range(self.rounds)]
        self.packs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(self.rounds)]
        self.unpacks: list[list[list[tuple[torch.Tensor, torch.Tensor]]]] = [
            [[] for _ in range(dims.pp)] for _ in range(self.rounds)
        ]
        total = [[sum(nbytes for _, _, nbytes in group) for group in stage] for stage in stages]
        largest = max(size for stage in total for size in stage)
        # a gathered bucket a stage: those of all stages are on their way at one time
        self.memory = [torch.empty(dims.tp * largest, dtype=torch.uint8) for _ in range(dims.pp)]
        self.mine = torch.empty(largest, dtype=torch.uint8)
        seen: set[tuple[str, Any]] = set()
        for pp, stage in enumerate(stages):
            for number, group in enumerate(stage):
                self.sizes[number][pp] = total[pp][number]
                self._prepare(source, number, pp, group, held, target, seen)

    def _prepare(
        self, source: Layout, number: int, pp: int, group: Any, held: Tensors, target: Tensors, seen: set[Any]
    ) -> None:
        """Views of one bucket of one stage: made once, as the buffers stay."""
        at, size = 0, self.sizes[number][pp]
        for key, shape, nbytes in group:
            if pp == self.mesh.coords.pp:
                self.packs[number].append((self.mine[at : at + nbytes].view(self.dtype).view(shape), held[key]))
            for tp in range(self.dims.tp):
                gathered = self.memory[pp][tp * size + at :][:nbytes].view(self.dtype).view(shape)
                for piece in source.of_rank(self.dims.rank_of(tp=tp, pp=pp)):
                    if piece.key == key and (piece.name, piece.index) not in seen:
                        seen.add((piece.name, piece.index))  # replicated tensors are taken from one rank
                        for want in self.need[piece.name]:
                            common = intersect(want.index, piece.index)
                            if common is not None:
                                to = want.cut(common)
                                pair = region(target[to.key], to), region(gathered, piece.cut(common))
                                self.unpacks[number][pp].append(pair)
            at += nbytes

    @torch.no_grad()
    def run(self) -> None:
        mesh, dims = self.mesh, self.dims
        for number in range(self.rounds):
            own = self.sizes[number][mesh.coords.pp]
            for packed, shard in self.packs[number]:
                packed.copy_(shard)
            whole = self.memory[mesh.coords.pp][: dims.tp * own]
            if dims.tp > 1:
                dist.all_gather_into_tensor(whole, self.mine[:own], group=mesh.tp_group)
            else:
                whole.copy_(self.mine[:own])
            works = []
            for pp in range(dims.pp if dims.pp > 1 else 0):
                buffer = self.memory[pp][: dims.tp * self.sizes[number][pp]]
                root = dims.rank_of(tp=mesh.coords.tp, pp=pp)
                if buffer.numel():
                    works.append(dist.broadcast(buffer, root, group=mesh.pp_group, async_op=True))
            for to, values in self.unpacks[number][mesh.coords.pp]:  # while the others are on their way
                to.copy_(values)
            for work in works:
                work.wait()
            for pp in range(dims.pp):
                if pp != mesh.coords.pp:
                    for to, values in self.unpacks[number][pp]:
                        to.copy_(values)


Group = list[tuple[str, tuple[int, ...], int]]  # key, shape, bytes of the local buffers of one bucket


def _groups(source: Layout, dims: ParallelDims, pp: int, limit: int, itemsize: int) -> list[Group]:
    """Local buffers of a stage, alike on all its TP ranks, in buckets of at most ``limit`` bytes a rank."""
    earlier = {piece.name for stage in range(pp) for piece in source.of_rank(dims.rank_of(pp=stage))}
    pieces = [piece for piece in source.of_rank(dims.rank_of(pp=pp)) if piece.name not in earlier]  # tied embedding
    groups: list[Group] = [[]]
    used = 0
    for key, buffer in buffers_of(pieces, torch.int8).items():
        nbytes = buffer.numel() * itemsize
        if groups[-1] and used + nbytes > limit:
            groups.append([])
            used = 0
        groups[-1].append((key, tuple(buffer.shape), nbytes))
        used += nbytes
    return groups


@dataclass
class Timing:
    seconds: float
    cpu_seconds: float  # of this rank


def timed(work: Callable[[], None]) -> Timing:
    """Between two barriers."""
    dist.barrier()
    started, cpu = time.perf_counter(), time.process_time()
    work()
    cpu = time.process_time() - cpu
    dist.barrier()
    return Timing(time.perf_counter() - started, cpu)


def point_to_point(nbytes: int, rounds: int) -> float:
    """Raw rate in GB/s by rank and direction: every rank sends a buffer and receives one, all at once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out, into = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    partner = (rank + world // 2) % world

    def exchange() -> None:
        operations = [dist.P2POp(dist.isend, out, partner), dist.P2POp(dist.irecv, into, partner)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    exchange()
    return nbytes / statistics.median(timed(exchange).seconds for _ in range(rounds)) / 1e9


def dimensions(text: str) -> dict[str, int]:
    """``tp=2,pp=2``"""
    return {name: int(value) for name, _, value in (part.partition("=") for part in text.split(","))}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="folder with config.json; default: a Qwen3 of about 0.5 GB")
    parser.add_argument("--source", type=dimensions, default=dimensions("tp=2,pp=2"), help="trainer, e.g. tp=2,pp=2")
    parser.add_argument("--destination", type=dimensions, default=dimensions("tp=2"), help="engines, e.g. tp=2")
    parser.add_argument("--buckets", default="8,16,32,64,128", help="MiB to try; each side keeps its best")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--local_rank", type=int, default=0)  # the launcher adds it
    return parser.parse_args()


def best_bucket(make: Callable[[int], Callable[[], None]], sizes: list[int]) -> int:
    """The bucket size with the least of three times, the same on every rank."""
    times = []
    for size in sizes:
        run = make(size)
        times.append(min(timed(run).seconds for _ in range(4)))
    choice = torch.tensor(sizes[times.index(min(times))])
    dist.broadcast(choice, 0)
    return int(choice)


def main() -> None:
    args = arguments()
    device = init_distributed("cpu")
    spec = ModelSpec.from_hf(args.model) if args.model else SHAPE
    dims = ParallelDims(**args.source)
    if dims.world != device.world:
        raise SystemExit(f"--source needs {dims.world} ranks, started with {device.world}")
    mesh, dtype = Mesh.get(dims), getattr(torch, args.dtype)
    source = megatron_layout(spec, dims)
    wanted = engine_layout(spec, source.shapes, args.destination["tp"], device.world)
    held = buffers_of(source.of_rank(device.rank), dtype)
    fill(source, device.rank, held)
    expected = buffers_of(wanted.of_rank(device.rank), dtype)
    fill(wanted, device.rank, expected)
    target = {key: torch.zeros_like(value) for key, value in expected.items()}
    sizes = [int(size) * MB for size in args.buckets.split(",")]
    temporary: dict[str, int] = {}

    def planned(size: int) -> Callable[[], None]:
        transfer = Transfer(plan(source, wanted, dtype=dtype, bucket_bytes=size))
        transfer.into(held, target)
        temporary["plan"] = transfer.temporary_bytes
        return lambda: transfer.into(held, target)

    def gathered(size: int) -> Callable[[], None]:
        gather = Gather(source, wanted, mesh, held, target, size)
        temporary["gather"] = sum(buffer.nbytes for buffer in [*gather.memory, gather.mine])
        return gather.run

    sides = {"plan": planned, "gather": gathered}
    chosen = {name: best_bucket(make, sizes) for name, make in sides.items()}
    runs = {name: make(chosen[name]) for name, make in sides.items()}
    times: dict[str, list[Timing]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, run in runs.items():
            for tensor in target.values():
                tensor.zero_()
            times[name].append(timed(run))
            wrong = [key for key, value in expected.items() if not torch.equal(value, target[key])]
            if wrong:
                raise SystemExit(f"rank {device.rank}: {name} brought wrong values: {wrong[:3]}")
    raw = point_to_point(64 * MB, args.rounds)
    cpu = {name: torch.tensor(sum(t.cpu_seconds for t in of_side)) / args.rounds for name, of_side in times.items()}
    for total in cpu.values():
        dist.all_reduce(total)
    if device.rank == 0:
        made = plan(source, wanted, dtype=dtype)
        report(args, held, made, times, {name: float(x) for name, x in cpu.items()}, chosen, temporary, raw)
    dist.destroy_process_group()


def report(
    args: argparse.Namespace, held: Tensors, made: Plan, times: dict[str, list[Timing]], cpu: dict[str, float],
    chosen: dict[str, int], temporary: dict[str, int], raw: float,
) -> None:  # fmt: skip
    world = dist.get_world_size()
    replicas = world // args.destination["tp"]
    print(f"{_text(args.source)} -> {_text(args.destination)} x {replicas} replicas, {args.dtype}")
    print(f"{args.rounds} alternating rounds; all results equal bit by bit")
    median = {name: statistics.median(t.seconds for t in of_side) for name, of_side in times.items()}
    for name, of_side in times.items():
        seconds = sorted(t.seconds for t in of_side)
        spread = f"median {median[name]:.3f} s (least {seconds[0]:.3f}, most {seconds[-1]:.3f}), CPU {cpu[name]:.2f} s"
        memory = f"bucket {chosen[name] // MB} MiB, temporary memory {temporary[name] / MB:.0f} MiB"
        print(f"{name:6} {spread}, {memory}")
    ratios = sorted(b.seconds / a.seconds for a, b in zip(times["plan"], times["gather"], strict=True))
    pairs = f"of pairs of rounds: median {statistics.median(ratios):.2f}, least {ratios[0]:.2f}"
    print(f"gather / plan: {median['gather'] / median['plan']:.2f} ({pairs}; CPU {cpu['gather'] / cpu['plan']:.2f})")
    moved, local = sum(made.received.values()), sum(made.local.values())
    print(f"plan: {moved / 1e6:.0f} MB between ranks, {local / 1e6:.0f} MB within ranks")
    rate = moved / world / median["plan"] / 1e9
    print(f"plan: {rate:.2f} GB/s received by rank; raw point to point: {raw:.2f} GB/s by rank")


def _text(dims: dict[str, int]) -> str:
    return "x".join(f"{name.upper()}{size}" for name, size in dims.items())


if __name__ == "__main__":
    main()
