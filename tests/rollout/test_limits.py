"""What vLLM cannot do is refused before a run starts."""

from __future__ import annotations

import pytest

from rlscale.config.schema import Config
from rlscale.model.arch import ModelSpec
from rlscale.rollout.vllm.limits import violations
from rlscale.testing.models import make_spec


@pytest.mark.parametrize(
    "spec, tp, device, said",
    [
        (make_spec(value_head=True), 1, "cpu", "model.path: the model has a value head"),
        (make_spec(architecture="Qwen2ForCausalLM", heads=8, head_dim=2, hidden=8), 1, "cpu", "vLLM's Qwen2 ignores"),
        (make_spec(architecture="MixtralForCausalLM", experts=4, expert_ffn=6, hidden=32), 4, "cpu", "width 6"),
        (make_spec(architecture="MixtralForCausalLM", experts=2, expert_ffn=8, hidden=32), 4, "cpu", "exceeds the"),
        (make_spec(architecture="MixtralForCausalLM", experts=2, expert_ffn=8, hidden=48), 1, "cpu", "multiple of 32"),
        (make_spec(architecture="MixtralForCausalLM", experts=2, expert_ffn=8, hidden=48), 1, "cuda", ""),
        (make_spec(), 2, "cpu", ""),
    ],
)
def test_what_the_engine_cannot_do_is_refused(spec: ModelSpec, tp: int, device: str, said: str) -> None:
    cfg = Config()
    cfg.rollout.tensor_model_parallel_size = tp
    problems = violations(cfg, spec, device)
    assert len(problems) == bool(said) and all(said in problem for problem in problems), problems
