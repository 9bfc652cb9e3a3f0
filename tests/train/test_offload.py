"""What leaves the device between phases comes back bit for bit, and nothing but the state outlives an update."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from rlscale.testing.batches import random_batch
from tests import worlds
from tests.train.helpers import small_engine
from tests.train.reference import OPTIM, policy_gradient

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(zero: int, dtype: str, role: str = "actor", train: bool = True, **parallel: Any) -> Any:
    optim = OPTIM if train else None
    return small_engine(dict(zero_stage=zero, **parallel), FLOATS[dtype], role, optim=optim)


def device_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages of some tensors."""
    from rlscale.train.offload import storages

    return sum(storage.nbytes() for storage in storages(tensors))


def everything(engine: Any) -> list[torch.Tensor]:
    from rlscale.train.engine import KINDS

    return [t for kind in KINDS for t in engine.tensors_of(kind)]


def with_and_without(zero: int, dtype: str) -> dict[str, Any]:
    """Two updates and a pass, with everything away in between, and without."""
    batch = random_batch()
    stays, moves = build(zero, dtype), build(zero, dtype)
    results: dict[str, list[Any]] = {"stays": [], "moves": []}
    sizes = []
    for _ in range(2):
        for name, engine in (("stays", stays), ("moves", moves)):
            if name == "moves":
                before = device_bytes(everything(engine))
                engine.offload()
                engine.offload()  # a second time changes nothing
                sizes.append((before, device_bytes(everything(engine))))
            results[name].append(engine.logprobs(batch)[0].tolist())
            results[name].append(engine.update(batch, policy_gradient))
    moves.offload("optimizer")
    partly = device_bytes(moves.tensors_of("parameters"))
    for engine in (stays, moves):
        engine.offload()  # ZeRO-3 then holds no gathered parameters, or both would have to hold the same ones
        engine.reload()
    same = all(torch.equal(a, b) for a, b in zip(everything(stays), everything(moves), strict=True))
    return {"results": results, "sizes": sizes, "same": same, "partly": partly}


@pytest.mark.parametrize("zero, dtype", [(1, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")])
def test_away_and_back_changes_no_bit(zero: int, dtype: str) -> None:
    for rank in worlds.run(2, with_and_without, zero, dtype):
        assert rank["results"]["stays"] == rank["results"]["moves"] and rank["same"]
        assert rank["partly"] > 0
        (first, gone), (second, gone_again) = rank["sizes"]
        assert gone == gone_again == 0 and second > first > 0  # the moments come with the first step


def forget_a_view() -> bool:
    """The fault that views would suffer if tensors were moved instead of storages."""
    engine, batch = build(1, "bf16"), random_batch()
    for parameter in engine.stage.parameters():
        parameter.data = parameter.data.clone()
    before = [t.clone() for t in engine.tensors().values()]
    engine.update(batch, policy_gradient)
    return all(torch.equal(a, b) for a, b in zip(before, engine.tensors().values(), strict=True))


def test_a_parameter_that_is_no_longer_a_view_would_be_seen() -> None:
    assert worlds.run(1, forget_a_view) == [True]


def live_bytes() -> int:
    """Bytes of all storages that some tensor made since `gc.freeze` keeps alive."""
    gc.collect()
    return device_bytes([t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and not t.is_meta])


def after_an_update(zero: int, dtype: str) -> dict[str, float]:
    """Bytes beyond weights and optimizer state, as shares of the weights: after updates of actor and critic in turn."""
    gc.collect()
    gc.freeze()  # what is there already is not looked at
    batch = random_batch()
    batch.values = batch.returns = batch.advantages
    engines = [build(zero, dtype), build(zero, dtype, "critic")]
    out = {"weights": device_bytes(engines[0].tensors_of("parameters"))}

    def value_loss(result: Any, micro: Any) -> Any:
        return ((result.values - micro.returns) ** 2 * micro.weights).sum(), {"tokens": micro.mask.sum()}

    for turn in range(2):
        for engine, loss in zip(engines, (policy_gradient, value_loss), strict=True):
            engine.update(batch, loss)
            state = sum(device_bytes(everything(e)) for e in engines)
            out[f"{turn} {engine.role}"] = live_bytes() - state
    for engine in engines:
        engine.offload("optimizer")
    state = sum(device_bytes(e.tensors_of("parameters")) for e in engines)
    hosts = sum(host.numel() for e in engines for _, host in e.host.away["optimizer"])
    out["optimizer away"] = live_bytes() - state - hosts
    gc.unfreeze()
    return out


@pytest.mark.parametrize("zero, dtype", [(1, "bf16"), (2, "fp32"), (3, "fp32")])
def test_only_weights_and_optimizer_state_outlive_an_update(zero: int, dtype: str) -> None:
    for rank in worlds.run(2, after_an_update, zero, dtype):
        weights = rank.pop("weights")
        assert all(0 <= extra < 0.05 * weights for extra in rank.values()), (weights, rank)


def keeps_gradients() -> dict[str, float]:
    from unittest import mock

    from rlscale.train.zero import ShardedOptimizer

    with mock.patch.object(ShardedOptimizer, "release_gradients", lambda _: None):
        return after_an_update(1, "bf16")


def test_gradients_that_stay_would_be_seen() -> None:
    (rank, _) = worlds.run(2, keeps_gradients)
    assert rank["0 actor"] > rank["weights"]  # fp32 gradients of all weights


def released(**parallel: Any) -> dict[str, tuple[bool, bool]]:
    """Of a trained actor and a frozen reference: are the parameters, is the optimizer on the device afterwards?"""
    from rlscale.train.engine import KINDS

    out = {}
    for role, train in (("actor", True), ("reference", False)):
        engine = build(1, "fp32", role, train, **parallel)
        if train:
            engine.update(random_batch(), policy_gradient)
        engine.release_device()
        on = [device_bytes(engine.tensors_of(kind)) > 0 for kind in KINDS]
        engine.reload()
        engine.release_device(parameters=False)
        on.append(device_bytes(engine.tensors_of("parameters")) > 0)
        out[role] = tuple(on)
    return out


def test_releasing_the_device_does_what_the_keys_say() -> None:
    assert worlds.run(1, released)[0] == {"actor": (True, True, True), "reference": (True, False, True)}
    assert worlds.run(1, released, param_offload=True)[0]["reference"] == (False, False, True)
    assert worlds.run(1, released, param_offload=True)[0]["actor"] == (False, True, True)
    assert worlds.run(1, released, optimizer_offload=True)[0]["actor"] == (True, False, True)
