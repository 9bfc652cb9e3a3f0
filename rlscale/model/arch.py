"""The shapes of a model, read from its Hugging Face configuration: the one table of supported architectures.

Everything that builds, loads, splits or exports a model asks here, so that an architecture is added in one place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Architecture:
    qkv_bias: bool  # biases in the q, k, v projections (unless the configuration says otherwise)
    qk_norm: bool  # RMSNorm on each query and key head


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(qkv_bias=False, qk_norm=False),
    "MistralForCausalLM": Architecture(qkv_bias=False, qk_norm=False),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, qk_norm=False),
    "Qwen3ForCausalLM": Architecture(qkv_bias=False, qk_norm=True),
}
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
    value_head: bool = False  # one scalar a token instead of a vocabulary

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
    def from_config(cls, hf: Any) -> ModelSpec:
        """Read a transformers configuration object. Raises ValueError as `from_hf`."""
        name = (hf.architectures or [type(hf).__name__])[0]
        if name not in ARCHITECTURES:
            raise ValueError(f"architecture {name} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}")
        if hf.hidden_act not in ("silu", "swish"):
            raise ValueError(f"{name}: hidden_act {hf.hidden_act} is not supported; supported: silu")
        if getattr(hf, "mlp_bias", False):
            raise ValueError(f"{name}: mlp_bias is not supported")
        arch = ARCHITECTURES[name]
        qkv_bias = arch.qkv_bias or bool(getattr(hf, "attention_bias", False))
        if qkv_bias and not arch.qkv_bias:
            raise ValueError(f"{name}: attention_bias is not supported")
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        inv_freq, scale = _rope(hf, head_dim)
        window = getattr(hf, "sliding_window", None) if getattr(hf, "use_sliding_window", True) else None
        return cls(
            architecture=name,
            num_layers=hf.num_hidden_layers,
            hidden=hf.hidden_size,
            ffn=hf.intermediate_size,
            heads=hf.num_attention_heads,
            kv_heads=hf.num_key_value_heads,
            head_dim=head_dim,
            vocab=hf.vocab_size,
            norm_eps=hf.rms_norm_eps,
            inv_freq=inv_freq,
            rope_scale=scale,
            qkv_bias=qkv_bias,
            qk_norm=arch.qk_norm,
            tied=bool(hf.tie_word_embeddings),
            sliding_window=window,
            max_positions=hf.max_position_embeddings,
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

    def violations(self, key: str, tp: int, pp: int, sp: int = 1) -> list[str]:
        """Why this model cannot be split so; ``key`` is the configuration path that the messages name."""
        out = []
        for value, what in (
            (self.heads, "attention heads"),
            (self.kv_heads, "key-value heads"),
            (self.ffn, "ffn size"),
        ):
            if value % tp:
                fits = [t for t in range(1, value + 1) if self.heads % t == self.kv_heads % t == self.ffn % t == 0]
                out.append(
                    f"{key}.tensor_model_parallel_size: {tp} does not divide the model's {value} {what}; "
                    f"possible: {', '.join(map(str, fits))}"
                )
        if self.num_layers % pp:
            out.append(f"{key}.pipeline_model_parallel_size: {pp} does not divide the model's {self.num_layers} layers")
        if sp > 1 and self.heads % (tp * sp):
            out.append(f"{key}.ulysses_sequence_parallel_size: TP x SP = {tp * sp} does not divide {self.heads} heads")
        return out


def folder_problem(path: str) -> str | None:
    """Why a model path cannot be read (as far as the disk tells); None if it can, or may be a hub name."""
    if Path(path).is_dir():
        return None if (Path(path) / "config.json").is_file() else f"model folder has no config.json: {path}"
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path.split("/")[0]).is_dir()
    return f"model folder does not exist: {path}" if looks_local else None


def resolve_folder(path: str) -> Path:
    """The local folder of a model path; a hub name is fetched into the hub's cache (or found there)."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))


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
