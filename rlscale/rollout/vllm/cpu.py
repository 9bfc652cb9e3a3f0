"""A decoding step on CPU without detours; imported in vLLM's workers there.

On one core two thirds of a decoding step are matrix products. This module replaces most of the rest: operations that
vLLM's CPU backend runs as sequences of torch calls (norms, gated activation), and noise for the whole vocabulary
(sampling), through vLLM's registry of out-of-tree operators where there is one. Results are the same up to rounding.
"""

from __future__ import annotations

import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.sample import sampler as vllm_sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from rlscale.rollout.vllm.draw import draw, uniform_numbers


class FusedSiluAndMul(SiluAndMul):
    """``silu(x[:d]) * x[d:]`` in one kernel."""

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype)
        torch.ops._C.silu_and_mul(out, x)
        return out


class FusedRMSNorm(RMSNorm):
    """RMSNorm, with the addition of the residual where there is one, in one kernel."""

    def forward_cpu(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        plain = self.has_weight and self.variance_size_override is None and x.dtype == self.weight.dtype
        if not plain or (residual is not None and not (x.is_contiguous() and residual.is_contiguous())):
            return self.forward_native(x, residual)
        if residual is None:
            out = torch.empty(x.shape, dtype=x.dtype)
            torch.ops._C.rms_norm(out, x.contiguous(), self.weight, self.variance_epsilon)
            return out
        torch.ops._C.fused_add_rms_norm(x, residual, self.weight, self.variance_epsilon)  # both in place
        return x, residual


def without_ranks(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """In place of the ranks of sampled tokens in the vocabulary, which nobody reads: [B] zeros."""
    return torch.zeros(x.shape[0], dtype=torch.int64)


def sample(
    self: TopKTopPSampler,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B] and the log-probs [B, V] after temperature, top-k and top-p that they were drawn from."""
    assert self.logprobs_mode == "processed_logprobs"
    logprobs = apply_top_k_top_p(logits, k, p).log_softmax(-1, dtype=torch.float32)
    return draw(logprobs.exp(), uniform_numbers(len(logprobs), generators)), logprobs


def install() -> None:
    """Put the replacements in place, before the worker builds its model and its sampler. May be called again."""
    for replaced, by in ((SiluAndMul, FusedSiluAndMul), (RMSNorm, FusedRMSNorm)):
        if replaced.__name__ not in op_registry_oot and hasattr(torch.ops._C, replaced.name):
            replaced.register_oot(by)
    TopKTopPSampler.forward_cpu = sample
    vllm_sampler.batched_count_greater_than = without_ranks
