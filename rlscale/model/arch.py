"""The shapes of a model, read from its Hugging Face configuration: the one table of supported architectures.

Everything that builds, loads, splits or exports a model asks here, so that an architecture is added in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rlscale.config.paths import folder_problem


class ExpertNames(NamedTuple):
    """What a checkpoint calls the sparse MLP of a layer and the three matrices of an expert in it."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Architecture:
    qkv_bias: bool = False  # biases in the q, k, v projections (unless the configuration says otherwise)
    qk_norm: bool = False  # RMSNorm on each query and key head
    experts: ExpertNames | None = None  # a mixture of experts


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(),
    "MixtralForCausalLM": Architecture(experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2")),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True),
    "Qwen3MoeForCausalLM": Architecture(qk_norm=True, experts=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")),
}
#: what stands in place of ForCausalLM where the model has one scalar per token (critics, reward models)
SCALAR_HEADS = ("ForSequenceClassification", "ForTokenClassification")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and options of a decoder-only model. Sizes are those of the whole, unsplit model."""

    architecture: str
    num_layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    inv_freq: tuple[float, ...]  # [head_dim / 2] rotary frequencies, scaling applied
    rope_scale: float = 1.0  # factor on the rotary cos and sin (YaRN)
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False  # output weight = embedding weight
    sliding_window: int | None = None
    max_positions: int = 0
    value_head: bool = False  # one scalar per token instead of a vocabulary
    head_bias: bool = False  # which may have a bias
    experts: int = 0  # of each sparse MLP; 0: all layers are dense
    experts_per_token: int = 0
    expert_ffn: int = 0  # width of an expert
    normalize_experts: bool = True  # the weights of a token's experts add up to 1
    dense_layers: frozenset[int] = frozenset()  # layers of a mixture of experts whose MLP is dense

    @classmethod
    def from_hf(cls, path: str) -> ModelSpec:
        """Read a local folder or a hub name (handed to transformers unchanged).

        Raises:
            ValueError: no such folder, or an architecture or option that is not supported; the message names it.
        """
        from transformers import AutoConfig

        problem = folder_problem(path)
        if problem:
            raise ValueError(problem)
        return cls.from_config(AutoConfig.from_pretrained(path))

    @classmethod
    def from_config(cls, hf: Any, rope: bool = True) -> ModelSpec:
        """Read a transformers configuration object. Raises ValueError as `from_hf`.

        A sequence or token classifier with one label is a model with a value head: an exported critic, a reward model.

        Args:
            rope: False leaves out the rotary frequencies: where only shapes matter, torch need not be imported.
        """
        given = (hf.architectures or [type(hf).__name__])[0]
        name = given
        for head in SCALAR_HEADS:
            name = name.replace(head, "ForCausalLM")
        if name not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise ValueError(
                f"architecture {given} is not supported; supported: {known}, and in place of ForCausalLM "
                f"{' or '.join(SCALAR_HEADS)} with one label"
            )
        arch = ARCHITECTURES[name]
        _refuse_options(hf, given)
        scalar = name != given
        heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads or hf.num_attention_heads
        if heads % kv_heads:
            raise ValueError(f"{given}: {kv_heads} key-value heads do not divide {heads} attention heads")
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        inv_freq, scale = _rope(hf, head_dim) if rope else ((), 1.0)
        window = getattr(hf, "sliding_window", None) if getattr(hf, "use_sliding_window", True) else None
        return cls(
            architecture=name,
            num_layers=hf.num_hidden_layers,
            hidden=hf.hidden_size,
            ffn=hf.intermediate_size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=hf.vocab_size,
            norm_eps=hf.rms_norm_eps,
            inv_freq=inv_freq,
            rope_scale=scale,
            qkv_bias=arch.qkv_bias,
            qk_norm=arch.qk_norm,
            tied=bool(hf.tie_word_embeddings) and not scalar,
            sliding_window=window,
            max_positions=hf.max_position_embeddings,
            value_head=scalar,
            head_bias=given.endswith("ForTokenClassification") and getattr(hf, "token_classification_bias", True),
            **(_experts(hf) if arch.experts else {}),
        )

    def as_critic(self) -> ModelSpec:
        """The same body with a scalar head."""
        return replace(self, value_head=True, tied=False)

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary rows rounded up so that every tensor-parallel rank holds equally many."""
        return -(-self.vocab // tp) * tp

    def layers_of_stage(self, pp_rank: int, pp: int) -> range:
        """Global layer numbers of one pipeline stage."""
        size = self.num_layers // pp
        return range(pp_rank * size, (pp_rank + 1) * size)

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return self.experts > 0 and layer not in self.dense_layers

    def experts_of_rank(self, tp_rank: int, tp: int, ep: int) -> tuple[range, range]:
        """The numbers of the experts that a tensor-parallel rank holds, and which rows of their width.

        Without expert parallelism (``ep`` 1) that is a slice of every expert, with it (``ep`` = ``tp``) whole experts.
        """
        if ep == 1:
            width = self.expert_ffn // tp
            return range(self.experts), range(tp_rank * width, (tp_rank + 1) * width)
        count = self.experts // tp
        return range(tp_rank * count, (tp_rank + 1) * count), range(self.expert_ffn)

    def violations(self, key: str, tp: int, pp: int, sp: int = 1, ep: int = 1) -> list[str]:
        """Why this model cannot be split so; ``key`` is the configuration path that the messages name."""
        out = []
        for what, value, fits in self._splits(ep):
            if not fits(tp):
                possible = [t for t in range(1, self.heads + 1) if all(good(t) for _, _, good in self._splits(ep))]
                out.append(
                    f"{key}.tensor_model_parallel_size: {tp} does not divide the model's {value} {what}; "
                    f"possible: {', '.join(map(str, possible))}"
                )
        if ep != 1 and not self.experts:
            out.append(f"{key}.expert_model_parallel_size: {ep}, but {self.architecture} has no experts; it must be 1")
        if self.num_layers % pp:
            out.append(f"{key}.pipeline_model_parallel_size: {pp} does not divide the model's {self.num_layers} layers")
        if sp > 1 and self.heads % (tp * sp):
            out.append(f"{key}.ulysses_sequence_parallel_size: TP x SP = {tp * sp} does not divide {self.heads} heads")
        return out

    def _splits(self, ep: int) -> list[tuple[str, int, Callable[[int], bool]]]:
        """What TP divides: its name, its size and whether a number of ranks fits."""

        def divides(value: int) -> Callable[[int], bool]:
            return lambda tp: value % tp == 0

        fused = (self.heads + 2 * self.kv_heads) * self.head_dim

        def share(tp: int) -> bool:  # several ranks may share a key-value head; they divide the fused projection evenly
            return self.kv_heads % tp == 0 or (tp % self.kv_heads == 0 and fused % tp == 0)

        sizes = {"ffn size": self.ffn} if not self.experts or self.dense_layers else {}
        if self.experts:
            sizes |= {"expert ffn size": self.expert_ffn} if ep == 1 else {"experts": self.experts}
        heads = [("attention heads", self.heads, divides(self.heads)), ("key-value heads", self.kv_heads, share)]
        return [*heads, *((what, size, divides(size)) for what, size in sizes.items())]


def _refuse_options(hf: Any, name: str) -> None:
    """Raises ValueError, naming it, for an option of the configuration that changes the model and is not built."""
    if hf.hidden_act not in ("silu", "swish"):
        raise ValueError(f"{name}: hidden_act {hf.hidden_act} is not supported; supported: silu")
    for option in ("mlp_bias", "attention_bias", "router_jitter_noise", "shared_expert_intermediate_size"):
        if getattr(hf, option, None):
            raise ValueError(f"{name}: {option} {getattr(hf, option)} is not supported")
    if name.endswith(SCALAR_HEADS) and hf.num_labels != 1:
        raise ValueError(f"{name}: num_labels {hf.num_labels} is not supported; a value or reward head has one label")


def _experts(hf: Any) -> dict[str, Any]:
    """The fields of a mixture of experts."""
    experts, chosen = hf.num_local_experts, hf.num_experts_per_tok
    if not 0 < chosen <= experts:
        raise ValueError(f"num_experts_per_tok {chosen} is not between 1 and the number of experts, {experts}")
    step, dense = getattr(hf, "decoder_sparse_step", 1), set(getattr(hf, "mlp_only_layers", None) or ())
    layers = range(hf.num_hidden_layers)
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_ffn": getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size,
        "normalize_experts": bool(getattr(hf, "norm_topk_prob", True)),
        "dense_layers": frozenset(i for i in layers if i in dense or (i + 1) % step),
    }


def _rope(hf: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    """Rotary frequencies and the scale of cos and sin; the scaling formulas are transformers' own."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    params = getattr(hf, "rope_parameters", None) or {"rope_type": "default", "rope_theta": hf.rope_theta}
    kind = params.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type {kind} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if params.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return tuple((1.0 / params["rope_theta"] ** exponent).tolist()), 1.0
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    return tuple(inv_freq.tolist()), float(scale)
