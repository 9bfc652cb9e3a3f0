"""What saving costs: a checkpoint beside the same bytes written to plain files, side by side.

    python tools/bench_checkpoint.py [--ranks 2] [--rounds 5] [--folder runs] [--model models/SmolLM2-135M-Instruct]

Each round does three things, in another order each time and from a quiet disk: plain files (one per rank, written in
large pieces and flushed, the former one deleted), a save in the step, and an asynchronous save with the time for which
it blocks and until it is complete; then a load by the same ranks. The tensors are fp32 master weights and both AdamW
moments of the model, divided over the ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlscale.checkpoint.saver import CheckpointData, Saver
from rlscale.checkpoint.shards import Shards, State, collect
from rlscale.checkpoint.store import Retention, Store, read_manifest
from rlscale.cluster.process import free_port, leave
from rlscale.model.arch import ModelSpec
from rlscale.reshard.canonical import hf_shapes
from rlscale.reshard.layout import Layout, Piece, whole
from rlscale.reshard.zero_layout import Fragment, zero_layout
from tools.common import alternate, table, timed

PIECE = 8 * 2**20


def model_states(model: str, rank: int, ranks: int, count: int = 3) -> dict[str, State]:
    """States of the model, each tensor's elements divided evenly over the ranks as ZeRO does."""
    shapes = hf_shapes(ModelSpec.from_hf(model))
    replicas = Layout(shapes, [Piece(n, r, whole(s), n, whole(s)) for r in range(ranks) for n, s in shapes.items()])
    fragments: dict[int, list[Fragment]] = {r: [] for r in range(ranks)}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        for r in range(ranks):
            fragments[r].append(Fragment(name, shape, size * r // ranks, size * (r + 1) // ranks))
    layout = zero_layout(replicas, fragments)
    states: dict[str, State] = {}
    for state in ("master", "exp_avg", "exp_avg_sq")[:count]:
        buffers = {}
        for fragment in fragments[rank]:
            buffers.update(fragment.views(torch.randn(fragment.stop - fragment.start)))
        states[f"actor/{state}"] = (layout, buffers)
    return states


def replace_plain(folder: Path, rank: int, number: int, values: torch.Tensor) -> None:
    """Write a new file, flush it, and delete the one of the round before: the least that keeps a good one at all times.

    (To write into the old file is quicker, because the system has its memory at hand, and loses it when interrupted.)
    """
    handle = os.open(folder / f"plain{rank}-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    data = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
    while data:
        data = data[os.write(handle, data[:PIECE]) :]
    os.fsync(handle)
    os.close(handle)
    (folder / f"plain{rank}-{number - 1}").unlink(missing_ok=True)


def from_quiet_disk(action: Callable[[], object]) -> float:
    """Seconds until all ranks have done it, with nothing left to write from before."""
    if dist.get_rank() == 0:
        os.sync()
    return timed(action).seconds


def measure(rank: int, args: argparse.Namespace, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    torch.set_num_threads(1)
    states = model_states(args.model, rank, args.ranks, args.states)
    content = CheckpointData(states, {"step": 1})
    values = torch.cat([t.reshape(-1) for t in collect(states, rank)[0].values()])
    root = Path(folder)
    savers = {kind: Saver(Store(root / kind), Retention(keep_last=1), asynchronous=kind == "beside")
              for kind in ("step", "beside")}  # fmt: skip

    def plain(number: int) -> dict[str, float]:
        return {"plain": from_quiet_disk(lambda: replace_plain(root, rank, number, values))}

    def save(number: int) -> dict[str, float]:
        return {"save": from_quiet_disk(lambda: savers["step"].save(number + 1, content))}

    def beside(number: int) -> dict[str, float]:
        started = time.perf_counter()
        blocked = from_quiet_disk(lambda: savers["beside"].save(number + 1, content))
        savers["beside"].wait()
        return {"blocked": blocked, "complete": time.perf_counter() - started}

    rows: list[dict[str, float]] = []
    for results in alternate({"plain": plain, "save": save, "beside": beside}, args.rounds + 1):
        row = {name: seconds for result in results.values() for name, seconds in result.items()}
        step = len(rows) + 1
        rows.append(row | {"load": from_quiet_disk(lambda step=step: load(savers["step"].store, step, states, rank))})
    rows = rows[1:]  # the first round makes the memory of the copies
    if rank == 0:
        report(rows, values.numel() * 4 * args.ranks)
    leave()


def load(store: Store, step: int, states: dict[str, State], rank: int) -> None:
    manifest = read_manifest(store.path(step))
    manifest.verify(sorted(manifest.files)[rank :: dist.get_world_size()])
    shards = Shards(manifest)
    for state, (layout, buffers) in states.items():
        shards.read(state, layout.of_rank(rank), buffers)


def report(rows: list[dict[str, float]], size: int) -> None:
    print(f"{size / 2**20:.0f} MiB; median of {len(rows)} rounds, ratio to plain files of the same round")
    lines = []
    for name, text in (
        ("plain", "plain files, flushed"),
        ("save", "save in the step"),
        ("blocked", "asynchronous save: the step waits"),
        ("complete", "asynchronous save: until it is complete"),
        ("load", "load, checksums compared"),
    ):
        ratio = statistics.median(row[name] / row["plain"] for row in rows)
        lines.append([text, f"{statistics.median(row[name] for row in rows):.3f}", f"{ratio:.2f}"])
    print(table(["", "seconds", "ratio"], lines))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="Hugging Face folder")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--states", type=int, default=3, help="1: the weights alone, 3: with both moments (default)")
    parser.add_argument("--folder", default="runs", help="where to write (on the disk that matters)")
    args = parser.parse_args(argv)
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="bench_checkpoint-", dir=args.folder)
    try:
        mp.spawn(measure, (args, free_port(), folder), nprocs=args.ranks)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
