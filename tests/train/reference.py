"""A single process with transformers and torch.optim.AdamW: what every layout of the engine must agree with."""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor

from rlscale.batch.types import PackedBatch, Trajectory, pack


def random_batch(vocab: int = 300, groups: int = 4, n: int = 3, seed: int = 0, longest: int = 12) -> PackedBatch:
    """Ragged prompts and responses, some tokens masked out, random advantages and weights."""
    g = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(4, vocab, (count,), generator=g).tolist()

    out = []
    for group in range(groups):
        prompt = tokens(int(torch.randint(3, 9, (1,), generator=g)))
        for sample in range(n):
            size = 1 if (group, sample) == (0, 0) else int(torch.randint(1, longest, (1,), generator=g))
            response = tokens(size)
            mask = [int(x) for x in torch.rand(size, generator=g) > 0.2]
            mask[-1] = 1
            out.append(Trajectory(group, sample, prompt, response, mask, [0.0] * size, reward=float(sample)))
    batch = pack(out)
    batch.advantages = torch.randn(batch.tokens.numel(), generator=g)
    batch.weights = torch.rand(batch.tokens.numel(), generator=g) * batch.mask / batch.mask.sum()
    return batch


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
