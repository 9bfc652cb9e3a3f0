"""One pipeline stage of a Megatron GPTModel, built from a `ModelSpec`, that yields log-probs or values instead of
logits.

`Stage` is what DeepSpeed wraps. It embeds and runs its layers; on the last stage it takes only the hidden states that
predict a response token through the head, in chunks, so that full logits never exist.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlscale.cluster import megatron_cpu
from rlscale.cluster.mesh import Mesh
from rlscale.model.arch import ModelSpec
from rlscale.model.head import vocab_parallel_logprob_entropy
from rlscale.model.packing import PackedSequence, SequencePart
from rlscale.model.ulysses import collect

megatron_cpu.enable()  # before any Megatron module is imported

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.layers import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.mappings import (  # noqa: E402
    all_gather_last_dim_from_tensor_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from rlscale.model.attention import PackedAttention, pack_params  # noqa: E402
from rlscale.model.moe import Experts, SparseMLP  # noqa: E402
from rlscale.model.norms import HeadNorm, RMSNorm  # noqa: E402


class FewKeyHeads(SelfAttention):
    """Grouped-query attention with fewer key-value heads than tensor-parallel ranks, several of which share one.

    The fused projection is split evenly, so a rank's share may begin inside a group: the projections of the sequence
    are gathered, and each rank takes its query heads and their key-value head. What several ranks do with a
    key is summed on the way back. (Megatron's own way there needs its global process groups.)
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Any = None, output_gate: bool = False, split_qkv: bool = True
    ) -> Any:
        """hidden_states: [s, 1, hidden]. Returns query [S, 1, heads / tp, D], key and value [S, 1, 1, D]."""
        groups, dim = self.config.num_query_groups, self.hidden_size_per_attention_head
        mixed, _ = self.linear_qkv(hidden_states)
        mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.tp_group)
        group, place = divmod(self.config.rlscale_tp_rank, self.world_size // groups)
        heads = mixed.unflatten(-1, (groups, -1, dim))[:, :, group]  # [S, 1, query heads of the group + 2, D]
        count = self.config.num_attention_heads // self.world_size
        query, key, value = heads[:, :, place * count : (place + 1) * count], heads[:, :, -2:-1], heads[:, :, -1:]
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value


class Body(GPTModel):
    """A GPTModel whose forward ends with the final norm, and whose tied weights need no broadcast at construction."""

    def setup_embeddings_and_output_layer(self) -> None:
        """Weights are always loaded, so the copies of a tied embedding are equal without Megatron's all-reduce."""
        if self.pre_process:
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        if self.post_process and self.output_layer.weight is not None:
            self.output_layer.weight.is_embedding_or_output_parameter = True

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    def head_weight(self) -> nn.Parameter:
        """[vocab / tp, hidden] output weight of the last stage."""
        if self.share_embeddings_and_output_weights and self.pre_process:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight


class VocabHead(nn.Module):
    """Log-probs, and entropies, of given tokens: the output layer of the last stage.

    Its weight belongs to another module, the output layer or (tied) the embedding. That this is a module of its own
    lets ZeRO-3, which gathers weights for the modules that use them, gather this one for as long as it is needed here.
    """

    def __init__(self, weight: nn.Parameter, spec: ModelSpec, mesh: Mesh, temperature: float, chunk: int):
        super().__init__()
        self.shared = (weight,)  # a tuple, so that it is no parameter of this module
        self.spec, self.mesh, self.temperature, self.chunk = spec, mesh, temperature, chunk

    def forward(self, hidden: Tensor, targets: Tensor, with_entropy: bool, entropy_grad: bool) -> Tensor:
        """[1, t] fp32 log-probs of ``targets`` [t] from ``hidden`` [t, hidden]; [2, t] with entropies."""
        (weight,) = self.shared
        logprob, entropy = vocab_parallel_logprob_entropy(
            hidden,
            weight,
            targets,
            temperature=self.temperature,
            chunk=self.chunk,
            tp_group=self.mesh.tp_group if self.mesh.dims.tp > 1 else None,
            vocab_start=self.mesh.coords.tp * weight.shape[0],
            vocab_real=self.spec.vocab,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
        )
        return logprob[None] if entropy is None else torch.stack((logprob, entropy))


class Stage(nn.Module):
    """This rank's part of a model: layers of its pipeline stage, its tensor-parallel slice of each."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, config: TransformerConfig, *, temperature: float, head_chunk: int):
        super().__init__()
        self.spec, self.mesh, self.config = spec, mesh, config
        self.body = _build_body(spec, mesh, config)
        self.model_type = self.body.model_type  # Megatron's schedules ask for it
        if spec.value_head and mesh.is_last_stage:
            self.value_head = nn.Linear(spec.hidden, 1, bias=spec.head_bias, dtype=config.params_dtype)
        elif mesh.is_last_stage:
            self.head = VocabHead(self.body.head_weight(), spec, mesh, temperature, head_chunk)
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", torch.tensor(spec.inv_freq, dtype=torch.float32), persistent=False)
        self.with_entropy = False  # compute the entropy of each predicted token
        self.entropy_grad = False  # and let gradient flow through it
        self.on_backward: Any = None  # called when the backward of this stage begins (see train.zero)

    def set_input_tensor(self, tensor: Any) -> None:
        self.body.set_input_tensor(tensor)

    def forward(self, sequence: PackedSequence) -> Tensor:
        """Hidden states for the next stage, or on the last one [k, t] fp32: values (k = 1), log-probs (1), entropy (2).

        With Ulysses each rank of the group runs its part; the last stage's output is the whole sequence's on all of
        them.
        """
        params = pack_params(sequence, self.inv_freq, self.spec.rope_scale, self.config.params_dtype)
        part = sequence.part(self.mesh.coords.sp, self.mesh.dims.sp)
        # the body has no position embedding (attention knows the positions), so it needs no position ids
        hidden = self.body(
            input_ids=part.tokens[None], position_ids=None, attention_mask=None, packed_seq_params=params
        )
        out = self._head(hidden, part) if self.mesh.is_last_stage else hidden
        if self.mesh.is_last_stage and part.places is not None:
            out = collect(out, part.places, sequence.targets.numel(), self.mesh.sp_group)
        if self.on_backward is not None and torch.is_grad_enabled() and out.requires_grad:
            out.register_hook(lambda _grad: self.on_backward())
        return out

    def _head(self, hidden: Tensor, part: SequencePart) -> Tensor:
        if self.config.sequence_parallel:
            # behind it the gradient is complete on every rank (the vocabulary head sums its own), so it is only split
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.mesh.tp_group
            )
        hidden = hidden.squeeze(1).index_select(0, part.predictors)
        if self.spec.value_head:
            return self.value_head(hidden).float().t()
        return self.head(hidden, part.targets, self.with_entropy, self.entropy_grad and torch.is_grad_enabled())


def _build_body(spec: ModelSpec, mesh: Mesh, config: TransformerConfig) -> Body:
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        # sequence parallelism gathers into a buffer of Megatron's global state even when groups are handed over
        parallel_state._set_global_memory_buffer()
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=spec.qk_norm)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if spec.kv_heads < mesh.dims.tp:
        layer.submodules.self_attention.module = FewKeyHeads
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = HeadNorm
    sparse = replace(layer, submodules=replace(layer.submodules, mlp=SparseMLP))
    numbers = spec.layers_of_stage(mesh.coords.pp, mesh.dims.pp)
    layers = [sparse if spec.is_sparse(number) else layer for number in numbers]
    body = Body(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layers, layer_norm=RMSNorm),
        vocab_size=spec.padded_vocab(mesh.dims.tp),
        max_sequence_length=spec.max_positions,
        pre_process=mesh.is_first_stage,
        post_process=mesh.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="none",
        pg_collection=mesh.pg,
    )
    if spec.value_head and mesh.is_last_stage:
        del body.output_layer  # Megatron ties the final norm to the presence of a vocabulary head
    _mark_sharded(body)
    return body


def _mark_sharded(body: Body) -> None:
    """Tell split parameters from replicated ones: DeepSpeed's gradient norm counts replicas once and slices all.

    Megatron sets these marks while it initialises weights, which is skipped here because they are loaded.
    """
    for module in body.modules():
        split = isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding, Experts))
        for name, p in module.named_parameters(recurse=False):
            if split or (isinstance(module, RowParallelLinear) and name == "weight"):
                p.tensor_model_parallel = True
