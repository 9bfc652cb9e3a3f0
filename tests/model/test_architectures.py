"""Every architecture and option of the table computes what transformers computes; every other is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from rlscale.config.schema import ParallelConfig
from rlscale.model.arch import ModelSpec
from rlscale.testing.batches import random_batch
from rlscale.testing.models import make_spec, tiny_model
from tests import worlds
from tests.train.reference import check, load_reference, reference_logprobs

EXACT = 2e-5
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0)
TRAINED = dict(original_max_position_embeddings=64)  # the batch is longer, and none of the frequencies stays as it was
MODELS: dict[str, tuple[int, dict[str, Any]]] = {  # name: tensor-parallel size, tiny model
    "llama": (1, dict(arch="llama")),
    "mistral": (2, dict(arch="mistral", tied=False, sliding_window=None)),
    "mistral with a window that holds all": (1, dict(arch="mistral", sliding_window=160)),
    "qwen2 with biases": (2, dict(arch="qwen2")),
    "qwen2 with head size of its own": (1, dict(arch="qwen2", hidden=96)),
    "qwen3 with head size of its own": (2, dict(arch="qwen3", hidden=48)),
    "qwen3 with one key-value head": (2, dict(arch="qwen3", kv_heads=1)),
    "qwen2 with one key-value head": (2, dict(arch="qwen2", kv_heads=1)),
    "odd vocabulary": (2, dict(arch="llama", vocab=389, tied=False)),
    "odd tied vocabulary": (2, dict(arch="llama", vocab=389)),
    "llama3 scaling": (1, dict(arch="llama", rope_parameters=LLAMA3 | TRAINED)),
    "yarn": (1, dict(arch="qwen3", rope_parameters=YARN | TRAINED)),
    "yarn with its own factor": (1, dict(arch="qwen2", rope_parameters=YARN | TRAINED | dict(attention_factor=1.3))),
    "yarn with other ends": (
        1,
        dict(arch="llama", rope_parameters=YARN | TRAINED | dict(beta_fast=16.0, beta_slow=2.0, truncate=False)),
    ),
    "linear scaling": (1, dict(arch="llama", rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.5))),
    "rope theta": (1, dict(arch="qwen3", rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "mixtral": (2, dict(arch="mixtral", tied=False, ffn=32)),
    "qwen3_moe": (2, dict(arch="qwen3_moe", ffn=32, norm_topk_prob=False, num_experts=6, num_experts_per_tok=3)),
    "qwen3_moe with dense layers": (2, dict(arch="qwen3_moe", layers=3, moe_intermediate_size=32, mlp_only_layers=[1])),
    "qwen3_moe with every other layer dense": (1, dict(arch="qwen3_moe", layers=3, decoder_sparse_step=2)),
}


def forward(folder: str, tp: int, batch: Any, of: str) -> Tensor:
    from rlscale.cluster.device import init_distributed
    from rlscale.train.engine import Batching, Engine

    device = init_distributed("cpu")
    layout = ParallelConfig(tensor_model_parallel_size=tp)
    spec = ModelSpec.from_hf(folder)
    engine = Engine("actor", spec, folder, layout, None, Batching(max_tokens=1024), device, dtype=torch.float32)
    return engine.values(batch) if of == "values" else engine.logprobs(batch)[0]


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_those_of_transformers(name: str) -> None:
    tp, shape = MODELS[name]
    folder = tiny_model(**shape)
    batch = random_batch(groups=2, n=2, longest=150, seed=5)
    with torch.no_grad():
        expected, _ = reference_logprobs(load_reference(folder), batch)
    assert batch.response_lengths.max() > 70
    for got in worlds.run(tp, forward, folder, tp, batch, "logprobs"):
        torch.testing.assert_close(got, expected, atol=EXACT, rtol=0)


def test_a_sample_longer_than_the_sliding_window_is_refused() -> None:
    folder, batch = tiny_model("mistral", sliding_window=15), random_batch()
    with pytest.raises(ValueError, match=r"actor: a sample has \d+ tokens, and the model attends to a window of 15"):
        worlds.run(1, forward, folder, 1, batch, "logprobs")


@pytest.mark.parametrize("tp, sp, arch, kv_heads", [(2, True, "qwen3", 1), (4, False, "qwen2", 2)])
def test_key_value_heads_shared_by_ranks_are_trained_alike(tp: int, sp: bool, arch: str, kv_heads: int) -> None:
    layout = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sp)
    folder = tiny_model(arch, tied=False, layers=2, kv_heads=kv_heads)
    check(folder, layout, tp, random_batch(), dict(max_tokens=48), temperature=1.0)


@pytest.mark.parametrize("head, arch", [("SequenceClassification", "Qwen3"), ("TokenClassification", "Llama")])
def test_a_classifier_with_one_label_is_a_value_model(tmp_path: Path, head: str, arch: str) -> None:
    """Its value before a token is what the classifier says at the token before; a token classifier has a bias."""
    body = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(arch.lower()), dtype=torch.float32)
    config = body.config
    config.num_labels = 1
    model = getattr(transformers, f"{arch}For{head}")(config)
    model.model.load_state_dict(body.model.state_dict())
    with torch.no_grad():
        for p in model.score.parameters():
            p.normal_(std=0.3)
    model.eval().save_pretrained(tmp_path)
    batch = random_batch(groups=2, n=2)
    expected = []
    for row in range(batch.num_samples):
        group = int(batch.group[row])
        prompt = batch.prompt_tokens[batch.prompt_cu_seqlens[group] : batch.prompt_cu_seqlens[group + 1]]
        ids = torch.cat((prompt, batch.tokens[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]))[None]
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state
            expected.append(model.score(hidden)[0, prompt.numel() - 1 : -1, 0])
    spec = ModelSpec.from_hf(str(tmp_path))
    assert spec.value_head and not spec.tied and spec.head_bias == (head == "TokenClassification")
    for got in worlds.run(2, forward, str(tmp_path), 2, batch, "values"):
        torch.testing.assert_close(got, torch.cat(expected), atol=EXACT, rtol=0)


@pytest.mark.parametrize(
    "config, said",
    [
        (transformers.Qwen2MoeConfig(), "Qwen2MoeConfig is not supported"),
        (transformers.LlamaConfig(attention_bias=True), "attention_bias"),
        (transformers.LlamaConfig(mlp_bias=True), "mlp_bias"),
        (transformers.LlamaConfig(hidden_act="gelu"), "hidden_act gelu"),
        (transformers.MixtralConfig(router_jitter_noise=0.1), "router_jitter_noise"),
        (transformers.Qwen3MoeConfig(num_experts_per_tok=9, num_experts=8), "num_experts_per_tok 9"),
        (transformers.LlamaConfig(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)), "dynamic"),
        (
            transformers.LlamaConfig(architectures=["LlamaForSequenceClassification"], num_labels=3),
            "LlamaForSequenceClassification: num_labels 3",
        ),
    ],
    ids=lambda x: x.replace(" ", "-") if isinstance(x, str) else "",
)
def test_what_is_not_built_is_refused_by_name(config: Any, said: str) -> None:
    if not config.architectures:
        name = type(config).__name__.replace("Config", "ForCausalLM")
        config.architectures = [name] if "Qwen2Moe" not in name else None
    with pytest.raises(ValueError, match=said):
        ModelSpec.from_config(config)


def test_an_exported_critic_is_read_as_one(tmp_path: Path) -> None:
    folder = Path(tiny_model("qwen2"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelSpec.from_hf(str(tmp_path)) == ModelSpec.from_hf(str(folder)).as_critic()


MOE = make_spec(
    architecture="MixtralForCausalLM", heads=12, kv_heads=6, experts=4, experts_per_token=2, expert_ffn=18, ffn=5
)


@pytest.mark.parametrize(
    "spec, tp, pp, ep, said",
    [
        (MOE, 2, 1, 1, ""),
        (MOE, 2, 1, 2, ""),
        (MOE, 4, 1, 4, "tensor_model_parallel_size: 4 does not divide the model's 6 key-value heads"),
        (MOE, 3, 1, 1, ""),
        (MOE, 3, 1, 3, "tensor_model_parallel_size: 3 does not divide the model's 4 experts; possible: 1, 2"),
        (MOE, 12, 1, 1, "tensor_model_parallel_size: 12 does not divide the model's 18 expert ffn size"),
        (make_spec(), 2, 1, 2, "expert_model_parallel_size: 2, but LlamaForCausalLM has no experts"),
        (make_spec(), 8, 1, 1, ""),  # 4 key-value heads, shared by two ranks each
        (make_spec(ffn=12), 8, 1, 1, "tensor_model_parallel_size: 8 does not divide the model's 12 ffn size"),
        (make_spec(), 1, 3, 1, "pipeline_model_parallel_size: 3 does not divide the model's 4 layers"),
    ],
)
def test_what_cannot_be_split_is_refused_with_its_key(spec: ModelSpec, tp: int, pp: int, ep: int, said: str) -> None:
    problems = spec.violations("actor.parallel", tp, pp, ep=ep)
    assert bool(problems) == bool(said), problems
    assert said == "" or any(problem.startswith("actor.parallel." + said) for problem in problems), problems
