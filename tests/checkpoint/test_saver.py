"""All ranks save together: in the step or beside it, and what goes wrong on one is an error on all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from rlscale.checkpoint import saver as module
from rlscale.checkpoint.saver import RUN, CheckpointData, SaveError, Saver, own_file
from rlscale.checkpoint.shards import Shards
from rlscale.checkpoint.store import Retention, Store, read_manifest
from rlscale.reshard.layout import Layout, Piece, whole
from tests import worlds
from tests.disk import small_file_system

SHAPES = {"a": (64, 33), "b": (5,), "c": (700, 200)}


def content(rank: int, value: float, elements: int = 1) -> CheckpointData:
    """Tensors that both ranks hold."""
    shapes = {**SHAPES, "c": (700 * elements, 200)}
    layout = Layout(shapes, [Piece(n, r, whole(s), n, whole(s)) for r in (0, 1) for n, s in shapes.items()])
    buffers = {name: torch.full(shape, value) for name, shape in shapes.items()}
    states = {"actor/master": (layout, buffers)}
    return CheckpointData(states, {"step": value}, {"rank": rank}, {"metrics": {"val": value}})


def values(folder: Path, step: int) -> set[float]:
    manifest = read_manifest(Store(folder).path(step))
    manifest.verify()
    shards = Shards(manifest)
    return {x for rank in (0, 1) for t in shards.tensors(rank).values() for x in t.unique().tolist()}


def save_twice(folder: str, asynchronous: bool) -> None:
    rank = torch.distributed.get_rank()
    saver = Saver(Store(folder), Retention(keep_last=2, keep_best="-val"), asynchronous=asynchronous, timeout_s=60)
    for step in (1, 2, 3, 4):
        what = content(rank, float(step))
        saver.save(step, what)
        for buffer in what.states["actor/master"][1].values():
            buffer.zero_()  # training goes on
    saver.wait()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in-step", "beside"])
def test_all_ranks_save_together(tmp_path: Path, asynchronous: bool) -> None:
    worlds.run(2, save_twice, str(tmp_path), asynchronous)
    assert Store(tmp_path).steps() == [1, 3, 4]
    for step in (1, 3, 4):
        assert values(tmp_path, step) == {float(step)}
        manifest = read_manifest(Store(tmp_path).path(step))
        assert manifest.json(RUN) == {"step": float(step)}
        assert [manifest.json(own_file(rank)) for rank in (0, 1)] == [{"rank": 0}, {"rank": 1}]
    sizes = [read_manifest(Store(tmp_path).path(4)).files[f"rank_0000{rank}.safetensors"].size for rank in (0, 1)]
    assert max(sizes) < 1.05 * min(sizes)


def save_with_a_failure(folder: str, asynchronous: bool, failing: int) -> list[str]:
    rank = torch.distributed.get_rank()
    saver = Saver(Store(folder), Retention(keep_last=1), asynchronous=asynchronous, timeout_s=60)
    saver.save(1, content(rank, 1.0))
    saver.wait()
    errors = []
    error = OSError(28, "No space left on device") if failing else TypeError("a fault in the program")
    with mock.patch.object(module, "write_tensors", side_effect=error) if rank == failing else mock.MagicMock():
        try:
            saver.save(2, content(rank, 2.0))
            saver.wait()
        except SaveError as failure:
            errors.append(str(failure))
    saver.save(3, content(rank, 3.0))
    saver.wait()
    return errors


@pytest.mark.parametrize("asynchronous, failing", [(False, 1), (True, 1), (False, 0)])
def test_failure_on_one_rank_is_one_on_all_and_costs_nothing(tmp_path: Path, asynchronous: bool, failing: int) -> None:
    first, second = worlds.run(2, save_with_a_failure, str(tmp_path), asynchronous, failing)
    assert first == second and len(first) == 1
    reason = "rank 1: No space left on device" if failing else "rank 0: TypeError: a fault in the program"
    assert "step_000002 could not be written" in first[0] and reason in first[0]
    assert [p.name for p in tmp_path.iterdir()] == ["step_000003"]  # 1 went when 3 was there, of 2 nothing is left
    assert values(tmp_path, 3) == {3.0}


def blocked_while_saving(folder: str) -> tuple[bool, list[int]]:
    """Whether `save` returned while nothing could be written yet, and the steps that were there after the next save
    was asked for (which has to wait)."""
    rank = torch.distributed.get_rank()
    saver = Saver(Store(folder), Retention(), asynchronous=True, timeout_s=60)
    gate, real = threading.Event(), module.write_tensors
    with mock.patch.object(module, "write_tensors", side_effect=lambda *a: gate.wait(60) and real(*a)):
        saver.save(1, content(rank, 1.0))
        returned = saver.thread is not None and saver.thread.is_alive() and Store(folder).steps() == []
        torch.distributed.barrier()  # collectives of the step, while the save is on its way
        threading.Timer(0.3, gate.set).start()
        saver.save(2, content(rank, 2.0))
        there = Store(folder).steps()
        saver.wait()
    return returned, there


def test_asynchronous_save_blocks_the_step_for_the_copy_only(tmp_path: Path) -> None:
    for returned, there in worlds.run(2, blocked_while_saving, str(tmp_path)):
        assert returned and 1 in there
    assert Store(tmp_path).steps() == [1, 2] and values(tmp_path, 2) == {2.0}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "disk", 3 * 2**20) as folder:
        yield folder


def fill_up(folder: str, asynchronous: bool) -> str:
    rank = torch.distributed.get_rank()
    saver = Saver(Store(folder), Retention(keep_last=1), asynchronous=asynchronous, timeout_s=60)
    saver.save(1, content(rank, 1.0))
    saver.wait()
    with pytest.raises(SaveError) as failure:
        saver.save(2, content(rank, 2.0, elements=10))
        saver.wait()
    return str(failure.value)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in-step", "beside"])
def test_full_disk_in_the_middle_of_a_save(small_disk: Path, asynchronous: bool) -> None:
    root = small_disk / "checkpoints"
    for message in worlds.run(2, fill_up, str(root), asynchronous):
        assert "step_000002 could not be written: rank" in message and "No space left on device" in message
    assert [p.name for p in root.iterdir()] == ["step_000001"] and values(root, 1) == {1.0}
