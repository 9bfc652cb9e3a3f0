"""What vLLM cannot do with a model, said before a run starts."""

from __future__ import annotations

from rlscale.config.schema import Config
from rlscale.model.arch import ModelSpec
from rlscale.rollout.vllm.settings import CPU_BLOCK_SIZE


def violations(cfg: Config, spec: ModelSpec, device_kind: str) -> list[str]:
    """One message for each reason why ``spec`` cannot be sampled as ``cfg.rollout`` says on a ``cpu`` or ``cuda``."""
    out, tp = [], cfg.rollout.tensor_model_parallel_size
    if spec.value_head:
        out.append("model.path: the model has a value head in place of a vocabulary and cannot be the policy")
    if spec.architecture == "Qwen2ForCausalLM" and spec.head_dim * spec.heads != spec.hidden:
        out.append(
            f"model.path: head_dim {spec.head_dim} of a Qwen2 model is not hidden_size / num_attention_heads = "
            f"{spec.hidden / spec.heads:g}, and vLLM's Qwen2 ignores head_dim"
        )
    if spec.experts and (spec.expert_ffn % tp or spec.experts < tp):
        out.append(
            f"rollout.tensor_model_parallel_size: {tp} does not divide the width {spec.expert_ffn} of the model's "
            f"{spec.experts} experts, or exceeds the number of experts"
        )
    if device_kind != "cpu":
        return out
    if spec.experts and spec.hidden % 32:
        out.append(
            f"model.path: hidden_size {spec.hidden} is not a multiple of 32, which vLLM's kernel for experts on a CPU "
            "needs"
        )
    width = 4 if (cfg.rollout.dtype or cfg.model.dtype) == "float32" else 2
    token = 2 * spec.num_layers * spec.kv_heads * spec.head_dim * width / tp
    tokens = cfg.data.max_prompt_length + cfg.data.max_response_length
    need = (-(-tokens // CPU_BLOCK_SIZE) + 1) * CPU_BLOCK_SIZE * token / 2**30
    if cfg.rollout.kv_cache_memory_gb < need:  # configured on a CPU: one response must fit in
        out.append(
            f"rollout.kv_cache_memory_gb: {cfg.rollout.kv_cache_memory_gb:g} GiB cannot hold one response of "
            f"data.max_prompt_length + data.max_response_length tokens, which needs {need:.4f}; all "
            f"rollout.max_num_seqs need {need * cfg.rollout.max_num_seqs:.2f}"
        )
    return out
