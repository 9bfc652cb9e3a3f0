"""A single process with transformers and torch.optim.AdamW: what every layout of the engine must agree with."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from rlscale.batch.types import PackedBatch
from rlscale.config.schema import OptimConfig, ParallelConfig
from tests import worlds

OPTIM = dict(lr=1e-3, eps=1e-4, weight_decay=0.01, grad_clip=0.05)


def load_reference(folder: str, critic: bool = False) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.train()


def canonical_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """The weights under the names and in the shapes of a checkpoint (in memory transformers stacks experts)."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


def reference_logprobs(model: torch.nn.Module, batch: PackedBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """[T] log-probs and entropies, one sequence at a time."""
    logps, entropies = [], []
    for row in range(batch.num_samples):
        group = int(batch.group[row])
        prompt = batch.prompt_tokens[batch.prompt_cu_seqlens[group] : batch.prompt_cu_seqlens[group + 1]]
        response = batch.tokens[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
        ids = torch.cat((prompt, response))[None]
        logits = model(input_ids=ids).logits[0, prompt.numel() - 1 : -1].float() / temperature
        logp = logits.log_softmax(-1)
        logps.append(logp.gather(1, response[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


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
        engine.optimizer.reduce_tied = lambda: None
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
