"""The trainer's end of an update, against workers that only keep what they are given: faults, checks, restarts.

The worker's own code (`ShardWriter`) runs on a plain module in the trainer's process, so that what
goes wrong can be arranged; `test_given_weights` does the same with real engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import worlds

SHAPES = {"a.weight": (40, 8), "b.weight": (13,), "c.weight": (30, 30)}


class Engine:
    """A `Backend` in this process, with one worker; dies in the step that it is told."""

    def __init__(self, device: Any):
        self.device, self.alive, self.starts = device, False, 0
        self.die_in: str | None = None

    def begin_start(self) -> None:
        model = torch.nn.Module()
        for name, shape in SHAPES.items():
            module = torch.nn.Module()
            module.weight = torch.nn.Parameter(torch.zeros(shape))
            model.add_module(name.partition(".")[0], module)
        self.model, self.alive, self.starts = model, True, self.starts + 1
        self.worker = SimpleNamespace(
            model_runner=SimpleNamespace(get_model=lambda: model), parallel_config=SimpleNamespace(rank=0),
            device=torch.device("cpu"), vllm_config=None,
        )  # fmt: skip

    def finish_start(self) -> None:
        pass

    def close(self) -> None:
        self.alive = False

    def _worker(self, method: str, *args: Any) -> Any:
        from rlscale.rollout.vllm.worker import WorkerExtension

        if not self.alive or method == self.die_in:
            self.alive, self.die_in = False, None
            raise RuntimeError(f"rank {self.device.rank}: the vLLM engine died during {method}")
        result, problem = WorkerExtension.rlscale_call(self.worker, method, *args)
        if problem:
            raise RuntimeError(problem)
        return result

    def targets(self) -> list[Any]:
        return [self._worker("targets")]

    def connect(self, mailboxes: list[Any]) -> None:
        self._worker("connect", mailboxes)

    def begin_update(self, verify: bool) -> None:
        self._worker("begin_update", verify)

    def take(self, bucket: int) -> None:
        self._worker("take", bucket)

    def finish_update(self) -> None:
        self._worker("finish_update")

    def checksums(self) -> list[Any]:
        return [self._worker("checksums")]

    def wake(self) -> None:
        pass


@contextmanager
def rollout_with(**options: Any) -> Iterator[Any]:
    """A rollout over the ranks of the world, one `Engine` each, and the trainer's layout and tensors."""
    from rlscale.cluster.device import Device
    from rlscale.config.schema import Config
    from rlscale.reshard.plan import plan
    from rlscale.rollout.rollout import Rollout

    cfg = Config()
    for key, value in options.items():
        setattr(cfg.rollout, key, value)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = Device("cpu", rank, rank, world, world)
    rollout = Rollout(cfg, device, [0], backend=Engine(device))
    rollout.start()
    update = rollout.weight_sync
    update.plan = lambda source: plan(source, update.destination, dtype=update.dtypes, bucket_bytes=1000, complete=True)
    yield rollout, *trainers_weights()
    rollout.close()


def trainers_weights() -> Any:
    """Layout of tensors whose rows are divided among the ranks, and this rank's rows."""
    from rlscale.reshard.layout import Layout, Piece

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    pieces, mine = [], {}
    for name, shape in SHAPES.items():
        for r in range(world):
            lo, hi = shape[0] * r // world, shape[0] * (r + 1) // world
            rest = tuple((0, n) for n in shape[1:])
            pieces.append(Piece(name, r, ((lo, hi), *rest), name, ((0, hi - lo), *rest)))
            if r == rank:
                mine[name] = whole(name)[lo:hi].clone()
    return Layout(dict(SHAPES), pieces), mine


def whole(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + ord(name[0])


def holds_everything(rollout: Any) -> bool:
    return all(torch.equal(getattr(rollout.backend.model, n[0]).weight.data, whole(n)) for n in SHAPES)


def checks(how: str) -> list[int]:
    """Number of comparisons after each of three updates."""
    with rollout_with(sync_verify=how) as (rollout, layout, mine):
        compared, compare = [0], rollout.weight_sync.compare
        counts = []

        def counted(*args: Any) -> None:
            compared[0] += 1
            compare(*args)

        rollout.weight_sync.compare = counted
        for _ in range(3):
            rollout.sync(lambda: (layout, mine))
            assert holds_everything(rollout)
            counts.append(compared[0])
        assert rollout.weight_sync.transfer.plan.rounds > 3
        return counts


@pytest.mark.parametrize(("how", "counts"), [("off", [0, 0, 0]), ("first", [1, 1, 1]), ("always", [1, 2, 3])])
def test_updates_are_compared_as_often_as_asked(how: str, counts: list[int]) -> None:
    assert worlds.run(2, checks, how, timeout=200) == [counts, counts]


def flipped(how: str) -> tuple[str, bool]:
    """A bit of the second bucket of rank 1 is wrong in the second update."""
    with rollout_with(sync_verify=how) as (rollout, layout, mine):
        rollout.sync(lambda: (layout, mine))
        fill = rollout.weight_sync.transfer.buckets

        def faulty(tensors: Any) -> Any:
            for bucket in fill(tensors):
                if rollout.device.rank == 1 and bucket.number == 1:
                    bucket.buffer[-1] ^= 1
                yield bucket

        rollout.weight_sync.transfer.buckets = faulty
        try:
            rollout.sync(lambda: (layout, mine))
            return "", holds_everything(rollout)
        except RuntimeError as error:
            assert rollout.weight_sync.stale and not rollout.restarts
            return str(error), holds_everything(rollout)


def test_a_flipped_bit_is_found_by_the_comparison_alone() -> None:
    (first, whole_0), (second, whole_1) = worlds.run(2, flipped, "always", timeout=200)
    assert first == second and whole_0 and not whole_1
    assert first.startswith("rank 1: after the weight update the engine holds other weights than the trainer: 1 tensor")
    assert first[-8:] in SHAPES
    assert worlds.run(2, flipped, "first", timeout=200) == [("", True), ("", False)]


def dying(during: str, allowed: int) -> tuple[str, int, bool]:
    """The engine of rank 1 dies in the second update."""
    with rollout_with(sync_verify="always", engine_restarts=allowed) as (rollout, layout, mine):
        rollout.sync(lambda: (layout, mine))
        if rollout.device.rank == 1:
            rollout.backend.die_in = during
        try:
            rollout.sync(lambda: (layout, mine))
            message = ""
        except RuntimeError as error:
            message = str(error)
            with pytest.raises(RuntimeError, match="no valid weights"):
                rollout.generate([], None)
        replaced = rollout.device.rank == 1 and allowed
        assert rollout.backend.starts == (2 if replaced else 1), "only the dead engine is replaced"
        return message, rollout.restarts, holds_everything(rollout)


@pytest.mark.parametrize("during", ["begin_update", "take", "finish_update", "checksums"])
def test_an_engine_that_dies_is_an_error_on_every_rank_or_is_replaced(during: str) -> None:
    for message, restarts, _ in worlds.run(2, dying, during, 0, timeout=200):
        assert message.startswith("rank 1: the vLLM engine died during") and restarts == 0
    assert worlds.run(2, dying, during, 1, timeout=200) == [("", 1, True), ("", 1, True)]
