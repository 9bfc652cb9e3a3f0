"""Weights from a trainer's layout to an engine's: the plan beside "gather whole tensors, then slice".

    deepspeed --num_gpus 4 tools/bench_reshard.py [--source tp=2,pp=2] [--destination tp=2] [--rounds 15]

Both sides start from the same Megatron shards and end with the same fused parameters of a vLLM engine on every rank
(replicas of ``tp`` ranks each), compared bit by bit. Rounds alternate, so that both meet the same load; the time is
that between two barriers. Both reuse their buffers and views, and both first try the bucket sizes of ``--buckets`` and
keep their best. CPU time is that of all ranks, which the load of other programs changes less.

The gather side packs a bucket of shards, all-gathers it over TP (`all_gather_into_tensor`), puts the whole tensors
together, broadcasts these over PP, all stages at once, and then every rank slices out of them what it needs. "direct"
is the same without whole tensors: each rank copies its slices straight out of the gathered shards, which no loader of
whole tensors can do. The plan side is a weight update's own `Transfer`: through two buckets, out of which every rank
copies its slices.

Without ``--model`` (a folder with config.json; weights are random in any case) the model has the shapes of a Qwen3 of
about 0.5 GB in bf16.

    deepspeed --num_gpus 4 tools/bench_reshard.py --source pp=2,dp=2 --load models/SmolLM2-135M-Instruct

instead reads a folder into the layout and shows, for every rank, the bytes that it read and by how much its memory grew
at most, beside the size of its shard. Linux counts that peak (VmHWM, reset through /proc/self/clear_refs).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

import torch
import torch.distributed as dist

from rlscale.cluster.device import init_distributed, prepare_process
from rlscale.cluster.mesh import Mesh, ParallelDims, mesh_of
from rlscale.cluster.process import leave
from rlscale.model.arch import ModelSpec
from rlscale.reshard.hf_load import load_pieces
from rlscale.reshard.layout import Layout, Piece, intersect
from rlscale.reshard.megatron import megatron_layout
from rlscale.reshard.plan import Plan, plan
from rlscale.reshard.transport import region
from rlscale.reshard.vllm import vllm_layout
from rlscale.testing.transfers import buffered, temporary_bytes
from tools.common import Timing, alternate, bytes_read, memory, reset_peak, timed

MB = 2**20
Tensors = dict[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]  # destination, source
Group = list[tuple[str, tuple[int, ...], int]]  # key, shape, bytes of the local buffers of one bucket
SHAPE = ModelSpec(
    architecture="Qwen3ForCausalLM", num_layers=16, hidden=1024, ffn=3072, heads=16, kv_heads=8, head_dim=128,
    vocab=16384, norm_eps=1e-6, inv_freq=(), qk_norm=True, tied=True,
)  # fmt: skip


def buffers_of(pieces: list[Piece], dtype: torch.dtype, new: Callable[..., torch.Tensor] = torch.zeros) -> Tensors:
    """New local buffers that the pieces of one rank fill."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        old = shapes.get(piece.key, (0,) * len(piece.at))
        shapes[piece.key] = tuple(max(n, hi) for n, (_, hi) in zip(old, piece.at, strict=True))
    return {key: new(shape, dtype=dtype) for key, shape in shapes.items()}


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
    """Gather bucket by bucket, then slice; with ``whole``, out of whole tensors."""

    def __init__(
        self, source: Layout, wanted: Layout, mesh: Mesh, held: Tensors, target: Tensors, bucket_bytes: int, whole: bool
    ):
        dims = mesh.dims
        assert dims.dp == dims.sp == 1, "the gather side is written for TP x PP"
        self.mesh, self.dims, self.shapes = mesh, dims, source.shapes
        self.dtype = next(iter(held.values())).dtype
        self.need: dict[str, list[Piece]] = {}
        for piece in wanted.of_rank(mesh.rank):
            self.need.setdefault(piece.name, []).append(piece)
        stages = [_groups(source, dims, pp, bucket_bytes // dims.tp, self.dtype.itemsize) for pp in range(dims.pp)]
        self.rounds = max(map(len, stages))
        total = [[sum(nbytes for _, _, nbytes in group) for group in stage] for stage in stages]
        self.sizes = [[of[n] if n < len(of) else 0 for of in total] for n in range(self.rounds)]  # of a rank's shards
        largest = max(size for sizes in self.sizes for size in sizes)
        self.mine = torch.empty(largest, dtype=torch.uint8)
        # one bucket per stage: those of all stages are on their way at one time
        self.sent = [torch.empty(dims.tp * largest, dtype=torch.uint8) for _ in range(dims.pp)]
        self.gathered = torch.empty(dims.tp * largest, dtype=torch.uint8) if whole else self.sent[mesh.coords.pp]
        self.packs: list[list[Pair]] = [[] for _ in range(self.rounds)]
        self.builds: list[list[Pair]] = [[] for _ in range(self.rounds)]
        self.slices: list[list[list[Pair]]] = [[[] for _ in range(dims.pp)] for _ in range(self.rounds)]
        for pp, stage in enumerate(stages):
            for number, group in enumerate(stage):
                self._prepare(source, number, pp, group, held, target, whole)

    @property
    def temporary_bytes(self) -> int:
        return sum({t.data_ptr(): t.nbytes for t in [self.mine, self.gathered, *self.sent]}.values())

    def _prepare(
        self, source: Layout, number: int, pp: int, group: Group, held: Tensors, target: Tensors, whole: bool
    ) -> None:
        """Views of one bucket of one stage: made once, as the buffers stay."""
        size, own = self.sizes[number][pp], pp == self.mesh.coords.pp
        at, end = 0, 0
        seen: set[tuple[str, Any]] = set()
        wholes: dict[str, torch.Tensor] = {}
        for key, shape, nbytes in group:
            if own:
                self.packs[number].append((self.mine[at : at + nbytes].view(self.dtype).view(shape), held[key]))
            for tp in range(self.dims.tp):
                memory = self.gathered if own else self.sent[pp]
                shard = memory[tp * size + at :][:nbytes].view(self.dtype).view(shape)
                for piece in source.of_rank(self.dims.rank_of(tp=tp, pp=pp)):
                    if piece.key != key or (piece.name, piece.index) in seen:
                        continue
                    seen.add((piece.name, piece.index))  # replicated tensors are taken from one rank
                    if not whole:
                        self._slice(number, pp, piece, region(shard, piece), target)
                        continue
                    if piece.name not in wholes:
                        length = math.prod(self.shapes[piece.name])
                        wholes[piece.name] = (
                            self.sent[pp].view(self.dtype)[end : end + length].view(self.shapes[piece.name])
                        )
                        end += length
                    if own:
                        box = tuple(slice(lo, hi) for lo, hi in piece.index)
                        self.builds[number].append((wholes[piece.name][box], region(shard, piece)))
            at += nbytes
        for name, tensor in wholes.items():
            everything = tuple((0, n) for n in tensor.shape)
            self._slice(number, pp, Piece(name, 0, everything, name, everything), tensor, target)

    def _slice(self, number: int, pp: int, piece: Piece, values: torch.Tensor, target: Tensors) -> None:
        for want in self.need[piece.name]:
            common = intersect(want.index, piece.index)
            if common is not None:
                box = tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(common, piece.index, strict=True))
                to = want.cut(common)
                self.slices[number][pp].append((region(target[to.key], to), values[box]))

    @torch.no_grad()
    def run(self) -> None:
        mesh, dims = self.mesh, self.dims
        stage = mesh.coords.pp
        for number in range(self.rounds):
            own = self.sizes[number][stage]
            _copy(self.packs[number])
            if dims.tp > 1:
                dist.all_gather_into_tensor(self.gathered[: dims.tp * own], self.mine[:own], group=mesh.tp_group)
            else:
                self.gathered[:own].copy_(self.mine[:own])
            _copy(self.builds[number])
            works = []
            for pp in range(dims.pp if dims.pp > 1 else 0):
                buffer = self.sent[pp][: dims.tp * self.sizes[number][pp]]
                root = dims.rank_of(tp=mesh.coords.tp, pp=pp)
                if buffer.numel():
                    works.append(dist.broadcast(buffer, root, group=mesh.pp_group, async_op=True))
            _copy(self.slices[number][stage])  # while the others are on their way
            for work in works:
                work.wait()
            for pp in range(dims.pp):
                if pp != stage:
                    _copy(self.slices[number][pp])


def _copy(pairs: list[Pair]) -> None:
    for to, values in pairs:
        to.copy_(values)


def _groups(source: Layout, dims: ParallelDims, pp: int, limit: int, itemsize: int) -> list[Group]:
    """Local buffers of a stage, alike on all its TP ranks, in buckets of at most ``limit`` bytes per rank."""
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
    parser.add_argument("--load", metavar="FOLDER", help="measure reading this folder into the layout of --source")
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


def load(folder: str, dims: ParallelDims, dtype: torch.dtype) -> None:
    """Read a folder into this rank's shard; rank 0 prints every rank's bytes and peak."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = megatron_layout(ModelSpec.from_hf(folder), dims)
    load_pieces(folder, (), {}, shapes=layout.shapes)  # whatever is imported or allocated once shall not count
    shard = buffers_of(layout.of_rank(rank), dtype, torch.empty)
    dist.barrier()
    reset_peak()
    before, read, started = memory("VmRSS"), bytes_read(), time.perf_counter()
    load_pieces(folder, layout.of_rank(rank), shard, shapes=layout.shapes)
    mine = [sum(t.nbytes for t in shard.values()), bytes_read() - read, memory("VmHWM") - before]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, [*(n / MB for n in mine), time.perf_counter() - started])
    if rank == 0:
        print(f"{folder} into {dims}, {dtype}; MiB")
        for number, (size, data, peak, seconds) in enumerate(everyone):
            print(
                f"rank {number}: shard {size:.1f}, read {data:.1f}, memory grew by {peak:.1f} at most, {seconds:.2f} s"
            )


def main() -> None:
    args = arguments()
    prepare_process("cpu")
    device = init_distributed("cpu")
    if args.load:
        load(args.load, ParallelDims(**args.source), getattr(torch, args.dtype))
        return
    spec = ModelSpec.from_hf(args.model) if args.model else SHAPE
    dims = ParallelDims(**args.source)
    if dims.world != device.world:
        raise SystemExit(f"--source needs {dims.world} ranks, started with {device.world}")
    mesh, dtype = mesh_of(dims), getattr(torch, args.dtype)
    source = megatron_layout(spec, dims)
    tp = args.destination["tp"]
    wanted = vllm_layout(spec, tp, replicas=device.world // tp)
    held = buffers_of(source.of_rank(device.rank), dtype)
    fill(source, device.rank, held)
    expected = buffers_of(wanted.of_rank(device.rank), dtype)
    fill(wanted, device.rank, expected)
    target = {key: torch.zeros_like(value) for key, value in expected.items()}
    sizes = [int(size) * MB for size in args.buckets.split(",")]
    temporary: dict[str, int] = {}

    def planned(size: int) -> Callable[[], None]:
        transfer = buffered(plan(source, wanted, dtype=dtype, bucket_bytes=size), device.rank, 2)
        pairs = [[(region(target[piece.key], piece), values) for piece, values in bucket.tensors()]
                 for bucket in transfer.buckets(held)]  # fmt: skip
        temporary["plan"] = temporary_bytes(transfer)

        def run() -> None:
            for bucket in transfer.buckets(held):
                _copy(pairs[bucket.number])

        return run

    def gathered(name: str, size: int) -> Callable[[], None]:
        gather = Gather(source, wanted, mesh, held, target, size, whole=name == "gather")
        temporary[name] = gather.temporary_bytes
        return gather.run

    sides: dict[str, Callable[[int], Callable[[], None]]] = {
        "plan": planned,
        "gather": partial(gathered, "gather"),
        "direct": partial(gathered, "direct"),
    }
    chosen = {name: best_bucket(make, sizes) for name, make in sides.items()}
    runs = {name: make(chosen[name]) for name, make in sides.items()}

    def checked(_: int, name: str) -> Timing:
        for tensor in target.values():
            tensor.zero_()
        timing = timed(runs[name])
        wrong = [key for key, value in expected.items() if not torch.equal(value, target[key])]
        if wrong:
            raise SystemExit(f"rank {device.rank}: {name} brought wrong values: {wrong[:3]}")
        return timing

    rounds = list(alternate({name: partial(checked, name=name) for name in sides}, args.rounds))
    times = {name: [row[name] for row in rounds] for name in sides}
    raw = point_to_point(64 * MB, args.rounds)
    cpu = {name: torch.tensor(sum(t.cpu_seconds for t in of_side)) / args.rounds for name, of_side in times.items()}
    for total in cpu.values():
        dist.all_reduce(total)
    if device.rank == 0:
        made = plan(source, wanted, dtype=dtype)
        report(args, held, made, times, {name: float(x) for name, x in cpu.items()}, chosen, temporary, raw)


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
    for name in ("gather", "direct"):
        ratios = sorted(b.seconds / a.seconds for a, b in zip(times["plan"], times[name], strict=True))
        rest = f"of pairs of rounds: median {statistics.median(ratios):.2f}, least {ratios[0]:.2f}"
        print(f"{name} / plan: {median[name] / median['plan']:.2f} ({rest}; CPU {cpu[name] / cpu['plan']:.2f})")
    moved, local = sum(made.received.values()), sum(made.local.values())
    print(f"plan: {moved / 1e6:.0f} MB between ranks, {local / 1e6:.0f} MB within ranks")
    rate = moved / world / median["plan"] / 1e9
    print(f"plan: {rate:.2f} GB/s received by rank; raw point to point: {raw:.2f} GB/s by rank")


def _text(dims: dict[str, int]) -> str:
    return "x".join(f"{name.upper()}{size}" for name, size in dims.items())


if __name__ == "__main__":
    main()
    leave()
