"""Megatron's configuration of a `ModelSpec`."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F

from rlscale.cluster import megatron_cpu
from rlscale.cluster.mesh import Mesh
from rlscale.model.arch import ModelSpec

megatron_cpu.enable()  # before any Megatron module is imported

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class MegatronConfig(TransformerConfig):
    """Megatron copies its configuration deeply in places, which process groups do not allow and nothing here needs."""

    def __deepcopy__(self, memo: dict[int, Any]) -> MegatronConfig:
        return copy.copy(self)


def build_config(spec: ModelSpec, mesh: Mesh, *, dtype: torch.dtype, sequence_parallel: bool, recompute: bool) -> Any:
    """Megatron's configuration of this model.

    The fused activation is on, because its autograd function keeps its input only; without CUDA it is plain torch. The
    other fusions, off by default, need CUDA extensions that this project does not ask for.
    """
    config = MegatronConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden,
        ffn_hidden_size=spec.ffn,
        kv_channels=spec.head_dim,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        layernorm_epsilon=spec.norm_eps,
        tensor_model_parallel_size=mesh.dims.tp,
        pipeline_model_parallel_size=mesh.dims.pp,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=True,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True,
        perform_initialization=False,
        variable_seq_lengths=mesh.dims.pp > 1,
        batch_p2p_comm=False,
        **(dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1) if recompute else {}),
    )
    config.rlscale_tp_group, config.rlscale_tp_rank = mesh.tp_group, mesh.coords.tp
    config.rlscale_sp_group = mesh.sp_group if mesh.dims.sp > 1 else None
    config.rlscale_spec, config.rlscale_ep = spec, mesh.dims.ep
    return config
