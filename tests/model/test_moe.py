"""The sparse MLP alone, in one process, against transformers' blocks; ranks are compared in tests/train/test_moe.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from rlscale.model.arch import ModelSpec
from rlscale.model.moe import Router, SparseMLP

CONFIGS: dict[str, Any] = {
    "mixtral": transformers.MixtralConfig(
        hidden_size=32, intermediate_size=24, num_local_experts=5, num_experts_per_tok=2
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=3, norm_topk_prob=False
    ),
    "qwen3_moe, normalized": transformers.Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=3, norm_topk_prob=True
    ),
}


def pair(name: str, dtype: torch.dtype) -> tuple[SparseMLP, torch.nn.Module]:
    """Ours and transformers' with the same weights."""
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    hf = CONFIGS[name]
    hf.architectures = [type(hf).__name__.replace("Config", "ForCausalLM")]
    hf._experts_implementation = "eager"
    theirs = (MixtralSparseMoeBlock if name == "mixtral" else Qwen3MoeSparseMoeBlock)(hf)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5)
    theirs.to(dtype)
    config = SimpleNamespace(
        rlscale_spec=ModelSpec.from_config(hf), params_dtype=dtype, tensor_model_parallel_size=1,
        rlscale_tp_rank=0, rlscale_ep=1, sequence_parallel=False,
    )  # fmt: skip
    ours = SparseMLP(config)
    with torch.no_grad():
        for mine, other in zip(weights(ours), weights(theirs), strict=True):
            mine.copy_(other)
    return ours, theirs


def weights(block: Any) -> list[Tensor]:
    experts = block.experts
    if isinstance(block, SparseMLP):
        return [block.router.weight, experts.gate_up, experts.down]
    return [block.gate.weight, experts.gate_up_proj, experts.down_proj]


@pytest.mark.parametrize("tokens", [17, 1], ids=["many", "one"])
@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_and_gradients_are_those_of_transformers(name: str, tokens: int) -> None:
    """With one token most experts get none: their gradients are there, and zero."""
    ours, theirs = pair(name, torch.float32)
    g = torch.Generator().manual_seed(2)
    x, up = (torch.randn(tokens, 32, generator=g) for _ in range(2))
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got = ours(mine[:, None])[0][:, 0]
    expected = theirs(other[None])[0]
    got.backward(up)
    expected.backward(up)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(mine.grad, other.grad, atol=1e-6, rtol=1e-5)
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-5)
    if tokens == 1:
        empty = ours.experts.gate_up.grad.abs().amax((1, 2)) == 0
        assert empty.sum() == 5 - ours.router.top_k


def test_bf16_differs_by_its_rounding() -> None:
    exact, _ = pair("qwen3_moe", torch.float32)
    ours, theirs = pair("qwen3_moe", torch.bfloat16)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for mine, rounded in zip(weights(exact), weights(ours), strict=True):
            mine.copy_(rounded)
        expected = exact(x.bfloat16().float()[:, None])[0][:, 0]
        errors = [
            (out.float() - expected).norm() / expected.norm()
            for out in (ours(x.bfloat16()[:, None])[0][:, 0], theirs(x.bfloat16()[None])[0])
        ]
    assert errors[0] <= errors[1] * 1.05 and errors[0] < 0.02, errors


def test_equal_experts_are_taken_in_order() -> None:
    router = Router(experts=8, hidden=4, top_k=3, normalize=True, group=None, dtype=torch.float32)
    with torch.no_grad():
        router.weight.fill_(0.5)
        router.weight[6] = 0.7
        shares, chosen = router(torch.ones(2, 4))
    assert chosen.tolist() == [[6, 0, 1]] * 2
    torch.testing.assert_close(shares.sum(-1), torch.ones(2))
