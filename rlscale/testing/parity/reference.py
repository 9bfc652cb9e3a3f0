"""The plain process: a transformers model and torch.optim.AdamW, one document at a time without any packing."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.value_loss import value_loss
from rlscale.batch.types import ModelOut, PackedBatch
from rlscale.config.schema import OptimConfig
from rlscale.testing.batches import difficult_batch
from rlscale.testing.models import ARCHITECTURES, draw_weights
from rlscale.testing.parity.cases import HEADS, LONGEST, Case, hf_config

STEPS = 2
TEMPERATURE = 0.7
OPTIM = OptimConfig(lr=1e-3, eps=1e-4, weight_decay=0.01, grad_clip=0.05, max_skipped_steps=1)
ENTROPY_COEFF = 0.01
VALUE_CLIP = 0.2


def build_model(case: Case) -> Any:
    """The transformers model in fp32 with weights whose outputs are far from uniform."""
    import transformers

    config = hf_config(case)
    config._attn_implementation = "eager"
    model = getattr(transformers, ARCHITECTURES[case.arch] + HEADS[case.role])(config).float()
    draw_weights(model, torch.Generator().manual_seed(0))
    return model.train()


def draw_batch(case: Case) -> PackedBatch:
    """The case's batch; its longest document fills the budget exactly."""
    return difficult_batch(min(case.budget, LONGEST), case.groups, case.order)


def objective(out: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A policy gradient with an entropy bonus, or a clipped value loss: what `Engine.update` minimises."""
    if out.values is not None:
        loss, _ = value_loss(out.values, batch.values, batch.returns, batch.mask, batch.weights, clip=VALUE_CLIP)
    else:
        live = batch.weights != 0
        advantages = torch.where(live, batch.advantages, 0.0)  # before the product: the gradient of 0 times NaN is NaN
        loss = -((out.logprobs * advantages + ENTROPY_COEFF * out.entropy) * batch.weights).sum()
    return loss, {"tokens": batch.mask.sum()}


@dataclass
class Truth:
    """What one process computes. Tensors by their names in a Hugging Face checkpoint."""

    start: dict[str, Tensor]  # weights
    before: Tensor  # [T] log-probs or values
    entropy: Tensor | None  # [T]; None: a critic
    after: Tensor  # [T]
    losses: list[float]
    norms: list[float]
    moments: list[dict[str, Tensor]]  # AdamW's first moments after each step
    weights: dict[str, Tensor]


def outputs(model: Any, batch: PackedBatch) -> ModelOut:
    """Log-probs and entropies, or values, of all response tokens, one document at a time without any packing."""
    columns: list[list[Tensor]] = [[], []]
    for row in range(batch.num_samples):
        group = int(batch.group[row])
        prompt = batch.prompt_tokens[batch.prompt_cu_seqlens[group] : batch.prompt_cu_seqlens[group + 1]]
        response = batch.tokens[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
        ids = torch.cat((prompt, response))[None]
        states = slice(prompt.numel() - 1, -1)  # those in which the response tokens were chosen
        if hasattr(model, "score"):
            columns[0].append(model.score(model.model(input_ids=ids).last_hidden_state[0, states])[:, 0])
            continue
        logp = (model(input_ids=ids).logits[0, states] / TEMPERATURE).log_softmax(-1)
        columns[0].append(logp.gather(1, response[:, None])[:, 0])
        columns[1].append(-(logp.exp() * logp).sum(-1))
    first = torch.cat(columns[0])
    return ModelOut(values=first) if not columns[1] else ModelOut(logprobs=first, entropy=torch.cat(columns[1]))


def train_alone(case: Case) -> Truth:
    """What a single process makes of the case's model."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, batch = build_model(case), draw_batch(case)
    start = checkpoint(model)
    betas = (OPTIM.betas[0], OPTIM.betas[1])
    optim = torch.optim.AdamW(
        model.parameters(), lr=OPTIM.lr, betas=betas, eps=OPTIM.eps, weight_decay=OPTIM.weight_decay
    )
    first = outputs(model, batch)
    before, entropy = _main(first).detach(), None if first.entropy is None else first.entropy.detach()
    losses, norms, moments = [], [], []
    for _ in range(STEPS):
        optim.zero_grad()
        loss, _ = objective(outputs(model, batch), batch)
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.grad_clip)))
        optim.step()
        moments.append(checkpoint(model, [optim.state[p]["exp_avg"] for p in model.parameters()]))
    after = _main(outputs(model, batch)).detach()
    return Truth(start, before, entropy, after, losses, norms, moments, checkpoint(model))


def _main(out: ModelOut) -> Any:
    return out.logprobs if out.values is None else out.values


def checkpoint(model: Any, values: list[Tensor] | None = None) -> dict[str, Tensor]:
    """Parameters, or values in their places, by name and shape as in a checkpoint: in memory experts are stacked."""
    from safetensors.torch import load_file

    if values is not None:
        model = copy.deepcopy(model)
        with torch.no_grad():
            for p, value in zip(model.parameters(), values, strict=True):
                p.copy_(value)
    with tempfile.TemporaryDirectory(prefix="rlscale-parity-") as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


@lru_cache(maxsize=32)
def shared_truth(model_and_batch: Case) -> Truth:
    """The truth, made by rank 0 and known to all. Collective."""
    made = [train_alone(model_and_batch) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0)
    assert made[0] is not None
    return made[0]


@contextmanager
def shared_folder(weights: dict[str, Tensor]) -> Iterator[str]:
    """A folder of rank 0 with these weights, as long as any rank reads it. Collective."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="rlscale-parity-") if dist.get_rank() == 0 else nullcontext() as mine:
        if mine is not None:
            save_file(weights, f"{mine}/model.safetensors", metadata={"format": "pt"})
        name: list[Any] = [mine]
        dist.broadcast_object_list(name, src=0)
        yield name[0]
        dist.barrier()
