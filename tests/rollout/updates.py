"""Checks of updates of real engines, for any layout: what the engines then compute, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import worlds
from tests.rollout.helpers import PROMPTS, START, check, generate, model, prompts, rollout_of, together, weights


def computes_what_it_was_given(layout: str, run_dir: str) -> None:
    """The model's own weights, others, the first again; each time prompts are cached under the old weights."""
    for seed in (None, 1, 0):
        shares = worlds.run(2, generate, layout, run_dir, seed, untouched=seed is None, temperature=0.0, timeout=START)
        got = together(shares)
        assert [t.prompt_index for t in got] == list(range(len(PROMPTS)))
        check(got, model(layout, seed or 0), greedy=True)


def sync_incomplete(layout: str, run_dir: str, how: str) -> str:
    """An update that lacks something, in the source or (a fault) in what is handed over; returns the error."""
    from rlscale.reshard.layout import Layout
    from rlscale.reshard.plan import plan as make_plan
    from rlscale.rollout.sampling import Sampling

    rollout = rollout_of(layout, run_dir)
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "source":
        with pytest.raises(ValueError) as caught:
            rollout.sync(lambda: weights(layout, 1, without=name))
        return str(caught.value)
    source, tensors = weights(layout, 1)
    rollout.sync(lambda: (source, tensors))
    source, tensors = weights(layout, 1)  # another object with the same content: the plan stays
    rollout.weight_sync.source = None
    update = rollout.weight_sync
    plan = update.plan

    def faulty(source: Any) -> Any:
        whole = update.destination
        shapes = {of: shape for of, shape in whole.shapes.items() if of != name}
        rest = Layout(shapes, [piece for piece in whole.pieces if piece.name != name])
        return make_plan(source, rest, dtype=update.dtypes, bucket_bytes=2**20 * 2 // 3)

    update.plan = faulty
    try:
        with pytest.raises(RuntimeError) as caught:
            rollout.sync(lambda: (source, tensors))
        with pytest.raises(RuntimeError, match="no valid weights"):
            rollout.generate(prompts(PROMPTS), Sampling(n=1))
    finally:
        update.plan, update.source = plan, None
    return str(caught.value)


def refuses_an_incomplete_update(layout: str, run_dir: str) -> None:
    for how in ("source", "transfer"):
        for message in worlds.run(2, sync_incomplete, layout, run_dir, how, timeout=START):
            assert "model.layers.1.mlp.up_proj.weight" in message
    check(together(worlds.run(2, generate, layout, run_dir, 1, timeout=START)), model(layout, 1))


def sync_with_a_flipped_bit(layout: str, run_dir: str, verify: str) -> str:
    """One bit of what rank 1 hands to its worker is wrong; returns the error and the tensor that was hit."""
    from rlscale.rollout.sampling import Sampling

    rollout = rollout_of(layout, run_dir)
    rollout.sync(lambda: weights(layout, 1))
    before, rollout.cfg.rollout.sync_verify = rollout.cfg.rollout.sync_verify, verify
    transfer = rollout.weight_sync.transfer
    fill = transfer.buckets

    def faulty(tensors: Any) -> Any:
        for bucket in fill(tensors):
            if rollout.device.rank == 1 and bucket.number == 0:
                _, values = list(bucket.tensors())[-1]
                values.view(torch.uint8).view(-1)[-1] ^= 1
            yield bucket

    transfer.buckets = faulty
    hit = transfer.plan.incoming(1)[0][-1].destination.name
    try:
        if verify == "off":
            rollout.sync(lambda: weights(layout, 1))
            return ""
        with pytest.raises(RuntimeError) as caught:
            rollout.sync(lambda: weights(layout, 1))
        with pytest.raises(RuntimeError, match="no valid weights"):
            rollout.generate(prompts(PROMPTS), Sampling(n=1))
    finally:
        transfer.buckets, rollout.cfg.rollout.sync_verify = fill, before
    assert str(caught.value).endswith(f"1 tensor(s) differ: {hit}"), hit
    return str(caught.value)


def finds_a_flipped_bit(layout: str, run_dir: str) -> None:
    messages = worlds.run(2, sync_with_a_flipped_bit, layout, run_dir, "always", timeout=START)
    assert messages[0] == messages[1] and messages[0].startswith("rank 1: after the weight update the engine holds")
    assert worlds.run(2, sync_with_a_flipped_bit, layout, run_dir, "off", timeout=START) == ["", ""]
    check(together(worlds.run(2, generate, layout, run_dir, 1, timeout=START)), model(layout, 1))
