"""Tensors of a checkpoint: every element written once and evenly, read under any other layout, nothing else read."""

from __future__ import annotations

import mmap
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlscale.checkpoint import shards as module
from rlscale.checkpoint.shards import LAYOUT, Shards, collect, file_of, share_out, snapshot, write_tensors
from rlscale.checkpoint.store import Damaged, Store, checksum_of, read_manifest, write_json
from rlscale.cluster.mesh import ParallelDims
from rlscale.model.arch import ModelSpec
from rlscale.reshard.layout import Layout, Piece, volume, whole
from rlscale.reshard.megatron import megatron_layout
from rlscale.reshard.transport import region
from rlscale.testing.models import tiny_model

DIMS = {
    "dp1": ParallelDims(),
    "tp2": ParallelDims(tp=2),
    "pp2": ParallelDims(pp=2),
    "dp2": ParallelDims(dp=2),
    "tp2-pp2": ParallelDims(tp=2, pp=2),
    "tp2-dp3-pp2": ParallelDims(tp=2, dp=3, pp=2),
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return ModelSpec.from_hf(tiny_model("qwen3", tied=request.param, layers=4))


def random_layout(seed: int) -> Layout:
    """Slices that overlap in every manner, as partitions of replicas with other borders do."""
    draw = random.Random(seed)
    shapes = {f"t{i}": tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3))) for i in range(6)}
    pieces = [Piece(n, draw.randrange(4), whole(s), n, whole(s)) for n, s in shapes.items()]
    for _ in range(40):
        name, shape = draw.choice(sorted(shapes.items()))
        box = tuple(sorted(draw.sample(range(n + 1), 2)) for n in shape)
        index = tuple((lo, hi) for lo, hi in box)
        pieces.insert(0, Piece(name, draw.randrange(4), index, name, index))
    return Layout(shapes, pieces)


def whole_tensors(layout: Layout, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in layout.shapes.items()}


def buffers_of(layout: Layout, rank: int, full: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """A rank's local buffers, filled from whole tensors or with NaN."""
    sizes: dict[str, list[int]] = {}
    for piece in layout.of_rank(rank):
        ends = [hi for _, hi in piece.at]
        sizes[piece.key] = [max(a, b) for a, b in zip(sizes.get(piece.key, ends), ends, strict=True)]
    out = {key: torch.full(size, float("nan")) for key, size in sizes.items()}
    for piece in layout.of_rank(rank) if full is not None else []:
        region(out[piece.key], piece).copy_(full[piece.name][tuple(slice(a, b) for a, b in piece.index)])
    return out


def saved(folder: Path, states: dict[str, tuple[Layout, dict[str, Tensor]]]) -> Shards:
    """A checkpoint that all ranks of the layouts have written, in one process."""
    store, files = Store(folder), {}
    partial = store.begin(1)
    for rank in sorted({rank for layout, _ in states.values() for rank in layout.shard_of}):
        held = {name: (layout, buffers_of(layout, rank, full)) for name, (layout, full) in states.items()}
        tensors, described = collect(held, rank)
        files[file_of(rank)] = write_tensors(partial / file_of(rank), tensors)
        files[LAYOUT] = write_json(partial / LAYOUT, described)
    store.publish(1, files, {})
    return Shards(read_manifest(store.path(1)))


@pytest.mark.parametrize("name", DIMS)
def test_every_element_is_written_once_and_the_work_is_even(spec: ModelSpec, name: str) -> None:
    layout = megatron_layout(spec, DIMS[name])
    pieces = share_out(layout)
    written = Layout(layout.shapes, pieces)  # covers everything
    total = sum(volume(whole(shape)) for shape in layout.shapes.values())
    assert sum(volume(piece.index) for piece in pieces) == total  # and nothing twice
    assert {(p.name, p.rank) for p in pieces} <= {(p.name, p.rank) for p in layout.pieces}
    loads = {rank: sum(volume(p.index) for p in written.of_rank(rank)) for rank in range(DIMS[name].world)}
    if DIMS[name].pp == 1 or not spec.tied:
        assert max(loads.values()) <= 1.02 * total / DIMS[name].world, loads


@pytest.mark.parametrize("seed", range(20))
def test_slices_that_overlap_are_written_once(seed: int) -> None:
    layout = random_layout(seed)
    pieces = share_out(layout)
    assert Layout(layout.shapes, pieces)
    assert sum(volume(p.index) for p in pieces) == sum(volume(whole(shape)) for shape in layout.shapes.values())


@pytest.mark.parametrize("seed", range(6))
def test_any_layout_reads_what_any_other_wrote(tmp_path: Path, seed: int) -> None:
    source, target = random_layout(seed), random_layout(seed + 100)
    source = Layout(target.shapes, [Piece(n, i % 3, whole(s), n, whole(s)) for i, (n, s) in enumerate(
        target.shapes.items())]) if seed % 2 else source  # fmt: skip
    target = target if seed % 2 else Layout(source.shapes, [Piece(n, 0, whole(s), n, whole(s))
                                                            for n, s in source.shapes.items()])  # fmt: skip
    full, other = whole_tensors(source), whole_tensors(source, 1)
    shards = saved(tmp_path, {"actor/master": (source, full), "actor/exp_avg": (source, other)})
    assert set(shards.states) == {"actor/master", "actor/exp_avg"}
    for rank in sorted(target.shard_of):
        for state, expected in (("actor/master", full), ("actor/exp_avg", other)):
            into = buffers_of(target, rank, None)
            shards.read(state, target.of_rank(rank), into)
            for key, wanted in buffers_of(target, rank, expected).items():
                assert torch.equal(into[key].nan_to_num(), wanted.nan_to_num()), key


@pytest.mark.parametrize("before, after", [("tp2", "pp2"), ("pp2", "dp2"), ("dp2", "tp2-pp2"), ("tp2-pp2", "dp1")])
def test_each_rank_reads_its_own_bytes_only(spec: ModelSpec, tmp_path: Path, before: str, after: str) -> None:
    source, target = megatron_layout(spec, DIMS[before]), megatron_layout(spec, DIMS[after])
    full = whole_tensors(source)
    shards = saved(tmp_path, {"actor/master": (source, full)})
    for rank in range(DIMS[after].world):
        into = buffers_of(target, rank, None)
        read = shards.read("actor/master", target.of_rank(rank), into)
        assert read == 4 * sum(volume(piece.index) for piece in target.of_rank(rank))
        assert all(torch.equal(into[k].nan_to_num(), v.nan_to_num()) for k, v in buffers_of(target, rank, full).items())
    with pytest.raises(ValueError, match="exp_avg|other"):
        shards.read("actor/master", [Piece("other", 0, ((0, 1),), "x", ((0, 1),))], {})


def test_files_are_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        "large": torch.randn(3_000_000),
        "odd": torch.randn(7, 5)[:, 1:4],
        "half": torch.randn(5).bfloat16(),
        "tall": torch.randn(40_000, 101).t(),
        "long": torch.arange(9.0)[::2],
    }
    entry = write_tensors(tmp_path / "x.safetensors", tensors)
    assert entry.size == (tmp_path / "x.safetensors").stat().st_size
    assert entry.checksum == checksum_of(tmp_path / "x.safetensors")
    for found in (load_file(tmp_path / "x.safetensors"), module._mapped(tmp_path / "x.safetensors")):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_snapshot_is_a_copy_in_memory_that_is_used_again() -> None:
    tensors = {"a": torch.randn(5), "b": torch.randn(3, 4).t(), "c": torch.randn(2).bfloat16()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    copies, memory = snapshot(tensors, None)
    for tensor in tensors.values():
        tensor.zero_()
    assert all(torch.equal(copies[name], before[name]) for name in tensors)
    again, same = snapshot(tensors, memory)
    assert same is memory and all(not copy.any() for copy in again.values())


@pytest.mark.parametrize("harm", ["truncate", "header", "swap"])
def test_a_file_that_lies_is_named(tmp_path: Path, harm: str) -> None:
    layout = random_layout(0)
    shards = saved(tmp_path, {"actor/master": (layout, whole_tensors(layout))})
    path = shards.manifest.path / file_of(1)
    if harm == "truncate":
        path.write_bytes(path.read_bytes()[:-4])
    elif harm == "header":
        path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    else:
        path.write_bytes((path.parent / file_of(0)).read_bytes())
    with pytest.raises(Damaged, match=file_of(1)):
        shards.read("actor/master", share_out(layout), buffers_of(layout, 0, None) | buffers_of(layout, 1, None)
                    | buffers_of(layout, 2, None) | buffers_of(layout, 3, None))  # fmt: skip


def test_reading_does_not_map_files_that_are_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {f"t{i}": (4, 4) for i in range(4)}
    layout = Layout(shapes, [Piece(n, i, whole(s), n, whole(s)) for i, (n, s) in enumerate(shapes.items())])
    shards = saved(tmp_path, {"actor/master": (layout, whole_tensors(layout))})
    opened = []
    real = mmap.mmap
    monkeypatch.setattr(module.mmap, "mmap", lambda *a, **k: opened.append(1) or real(*a, **k))
    shards.read("actor/master", layout.of_rank(2), buffers_of(layout, 2, None))
    assert len(opened) == 1
