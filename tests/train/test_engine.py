"""The engine equals one process with transformers and AdamW, in every layout it supports."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from rlscale.config.schema import OptimConfig, ParallelConfig
from tests import worlds
from tests.tiny import tiny_model
from tests.train.reference import canonical_state, load_reference, random_batch, reference_logprobs

OPTIM = dict(lr=1e-3, eps=1e-4, weight_decay=0.01, grad_clip=0.05)
LAYOUTS = {  # name: world, tp, pp, sequence parallel, ZeRO stage, tied
    "dp1": (1, 1, 1, False, 1, True),
    "dp2-zero1": (2, 1, 1, False, 1, True),
    "dp2-zero2": (2, 1, 1, False, 2, False),
    "tp2": (2, 2, 1, False, 1, False),
    "tp2-sp": (2, 2, 1, True, 1, True),
    "pp2": (2, 1, 2, False, 1, False),
    "pp2-tied": (2, 1, 2, False, 1, True),
    "tp2-pp2-sp": (4, 2, 2, True, 1, True),
    "tp2-dp2-sp-zero2": (4, 2, 1, True, 2, True),
    "pp2-dp2-zero2": (4, 1, 2, False, 2, False),
}


def parallel(name: str) -> tuple[ParallelConfig, int, bool]:
    world, tp, pp, sp, zero, tied = LAYOUTS[name]
    layout = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, sequence_parallel=sp, zero_stage=zero
    )
    return layout, world, tied


def policy_gradient(out, micro):
    loss = torch.where(micro.weights != 0, -out.logprobs * micro.advantages * micro.weights, 0.0 * out.logprobs).sum()
    return loss, {"tokens": micro.mask.sum()}


def run_engine(
    folder: str, layout: ParallelConfig, batch, options: dict, steps: int, temperature: float, mutation: str = ""
) -> dict:
    """On every rank: log-probs before, two updates, log-probs after, and this rank's slices of every weight."""
    from unittest import mock

    from rlscale.cluster.device import init_distributed
    from rlscale.model import gpt, moe
    from rlscale.model.arch import ModelSpec
    from rlscale.reshard.transport import region
    from rlscale.train.engine import Batching, Engine

    device = init_distributed("cpu")
    faults = {
        "marks": mock.patch.object(gpt, "_mark_sharded", lambda body: None),
        "expert-marks": mock.patch.object(gpt, "Experts", ()),
    }
    with faults.get(mutation, nullcontext()):
        engine = Engine(
            "actor",
            ModelSpec.from_hf(folder),
            folder,
            layout,
            OptimConfig(**OPTIM),
            Batching(**options),
            device,
            dtype=torch.float32,
            temperature=temperature,
        )
    if mutation == "re-arming":
        engine.stage.on_backward = None
    elif mutation == "norm-sum":
        for module in engine.stage.modules():
            if isinstance(module, gpt.RMSNorm):
                module.tp_group = None
    elif mutation == "router-sum":
        for module in engine.stage.modules():
            if isinstance(module, moe.Router):
                module.group = None
    elif mutation == "expert-input-sum":
        for module in engine.stage.modules():
            if isinstance(module, moe.SparseMLP):
                without = mock.patch.object(moe, "copy_to_tensor_model_parallel_region", lambda x, group: x)
                module.forward = without(module.forward)
    elif mutation == "loss-scale":
        engine._loss_scale = lambda micro_batches: 1
    elif mutation == "tied-sum":
        engine._reduce_tied = lambda: None
    before, entropy = engine.logprobs(batch, entropy=True)
    metrics = [engine.update(batch, policy_gradient) for _ in range(steps)]
    after, _ = engine.logprobs(batch)
    pieces = [p for p in engine.layout.pieces if p.rank == device.rank]
    tensors = engine.tensors()
    shards = [(p.name, p.index, region(tensors[p.key], p).clone()) for p in pieces]
    return {"before": before, "entropy": entropy, "after": after, "metrics": metrics, "shards": shards}


def train_reference(folder: str, batch, steps: int, temperature: float):
    model = load_reference(folder)
    optim = torch.optim.AdamW(model.parameters(), lr=OPTIM["lr"], eps=OPTIM["eps"], weight_decay=OPTIM["weight_decay"])
    before, entropy = (x.detach() for x in reference_logprobs(model, batch, temperature))
    norms, losses = [], []
    for _ in range(steps):
        optim.zero_grad()
        logp, _ = reference_logprobs(model, batch, temperature)
        loss = -(logp * batch.advantages * batch.weights).sum()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM["grad_clip"])))
        losses.append(float(loss.detach()))
        optim.step()
    after = reference_logprobs(model, batch, temperature)[0].detach()
    return before, entropy, after, norms, losses, canonical_state(model)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(name: str) -> None:
    layout, world, tied = parallel(name)
    arch = {"tp2": "qwen2", "pp2": "llama", "dp2-zero2": "mistral"}.get(name, "qwen3")
    folder = tiny_model(arch, tied=tied, layers=4)
    batch = random_batch()
    check(folder, layout, world, batch, dict(max_tokens=48), temperature=0.7)


@pytest.mark.parametrize(
    "options",
    [
        dict(max_tokens=1000),
        dict(max_tokens=24, share_prefix=False),
        dict(max_tokens=None, max_sequences=2),
        dict(max_tokens=48, recompute=True, head_chunk=5),
    ],
    ids=["one", "no-sharing", "by-sequences", "recompute"],
)
def test_division_does_not_matter(options: dict) -> None:
    layout, world, tied = parallel("dp2-zero1")
    check(tiny_model("qwen3", tied=tied, layers=4), layout, world, random_batch(), options, temperature=1.0)


def test_one_response_over_two_ranks_of_which_one_is_empty() -> None:
    layout, world, tied = parallel("dp2-zero2")
    batch = random_batch(groups=1, n=1, seed=3)
    check(tiny_model("mistral", tied=tied, layers=4), layout, world, batch, dict(max_tokens=64), temperature=1.0)


@pytest.mark.parametrize(
    "mutation, name",
    [
        ("re-arming", "pp2-dp2-zero2"),
        ("norm-sum", "tp2-sp"),
        ("loss-scale", "dp2-zero1"),
        ("marks", "tp2"),
        ("tied-sum", "pp2-tied"),
    ],
)
def test_comparison_catches_a_mend_taken_out(mutation: str, name: str) -> None:
    """Each of these faults gives wrong numbers (re-arming: no gradient to reduce); the comparison must fail on it."""
    layout, world, tied = parallel(name)
    folder = tiny_model("qwen3", tied=tied, layers=4)
    with pytest.raises((AssertionError, TypeError)):
        check(folder, layout, world, random_batch(), dict(max_tokens=24), temperature=1.0, mutation=mutation)


def check(folder, layout, world, batch, options, temperature, mutation="") -> None:
    before, entropy, after, norms, losses, weights = train_reference(folder, batch, 2, temperature)
    results = worlds.run(world, run_engine, folder, layout, batch, options, 2, temperature, mutation)
    for result in results:
        torch.testing.assert_close(result["before"], before, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(result["entropy"], entropy, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(result["after"], after, atol=5e-5, rtol=1e-4)
        for step, metrics in enumerate(result["metrics"]):
            assert metrics["grad_norm"] == pytest.approx(norms[step], rel=1e-4)
            assert metrics["loss"] == pytest.approx(losses[step], rel=1e-4, abs=1e-6)
            assert metrics["tokens"] == batch.mask.sum()
        for tensor, index, mine in result["shards"]:
            expected = weights[tensor][tuple(slice(a, b) for a, b in index)]
            torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4, msg=lambda m, t=tensor: f"{t}: {m}")
