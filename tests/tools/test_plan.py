"""`rlscale plan`: a 70B model from its configuration, figures against counting elements, and what it refuses."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlscale import cli
from rlscale.cluster.mesh import ParallelDims
from rlscale.commands import plan
from rlscale.reshard.canonical import hf_shapes
from rlscale.reshard.layout import Layout
from rlscale.reshard.megatron import megatron_layout
from rlscale.reshard.vllm import vllm_layout

ROOT = Path(__file__).parents[2]
LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}  # fmt: skip
TINY = LLAMA_70B | {
    "hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 67,
}  # fmt: skip


def save(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_70b_model_on_256_ranks(tmp_path: Path) -> None:
    """As a user calls it, from a configuration alone; torch, whose import takes longer, is not needed."""
    command = [sys.executable, "-X", "importtime", "-m", "rlscale.cli", "plan", "--json",
               "--model", save(tmp_path, LLAMA_70B), "--source", "tp=8,pp=4,dp=8", "--destination", "tp=4"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "numpy" in imported and not {"torch", "transformers"} & imported
    result = json.loads(done.stdout)
    assert result["ranks"] == 256 and result["model"]["parameters"] == 70_553_706_496
    mine, gather, fused = result["ways"].values()
    assert mine["total"] == mine["lower_bound"] == mine["node"] + mine["network"]
    assert mine["sent"]["max"] <= 1.25 * mine["sent"]["mean"]
    model = result["model"]["bytes"]
    assert gather["total"] == 256 * model - gather["device"] > 3.9 * mine["total"]
    assert fused["total"] == fused["lower_bound"] > 2.8 * mine["total"]
    for way in (mine, gather, fused):
        assert way["received"]["mean"] * 256 == way["sent"]["mean"] * 256 == way["total"]
        assert way["from_network"]["mean"] * 256 == way["network"] <= way["total"]


def count(layout: Layout, rank: int, fused_whole: bool = False) -> dict[str, torch.Tensor]:
    """For each tensor the elements that a rank holds."""
    out = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in layout.shapes.items()}
    for piece in layout.of_rank(rank):
        whole = fused_whole and any(part in piece.name for part in ("q_proj", "k_proj", "v_proj", "gate", "up_proj"))
        out[piece.name][... if whole else tuple(slice(*r) for r in piece.index)] = True
    return out


@pytest.mark.parametrize(
    ("source", "tp", "pp", "tied"), [("tp=2,pp=2,dp=2", 2, 1, True), ("tp=4,sp=2", 2, 2, False), ("pp=4", 4, 1, True)]
)
def test_figures_are_those_of_counting_elements(tmp_path: Path, source: str, tp: int, pp: int, tied: bool) -> None:
    model = save(tmp_path, TINY | {"tie_word_embeddings": tied})
    arguments = argparse.Namespace(
        model=model, source=source, destination=f"tp={tp},pp={pp}", dtype="float32", bucket_mb=1, ranks_per_node=2
    )
    result = plan.compare(arguments)
    spec, dims = plan.read_spec(model), ParallelDims(**result["source"])
    have, want = megatron_layout(spec, dims), vllm_layout(spec, tp, pp, dims.world // (tp * pp))
    everything = {name: torch.ones(shape, dtype=torch.bool) for name, shape in hf_shapes(spec).items()}
    for way, wanted in (
        ("this plan", [count(want, r) for r in range(dims.world)]),
        ("gather, then slice", [everything] * dims.world),
        ("fused tensors whole", [count(want, r, fused_whole=True) for r in range(dims.world)]),
    ):
        held = [count(have, r) for r in range(dims.world)]
        lacking = [
            4 * sum(int((mask & ~own[name]).sum()) for name, mask in whole.items())
            for whole, own in zip(wanted, held, strict=True)
        ]
        received = result["ways"][way]["received"]
        expected = {"min": min(lacking), "mean": sum(lacking) / dims.world, "max": max(lacking)}
        assert received == expected, way
        assert result["ways"][way]["lower_bound"] == sum(lacking)


def test_the_table_shows_all_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", save(tmp_path, TINY), "--source", "tp=2,pp=2", "--destination", "tp=1"]
    assert cli.main(["plan", *arguments]) == 0
    out = capsys.readouterr().out
    for words in ("this plan", "gather, then slice", "fused tensors whole", "lower bound", "from another node", "1.00"):
        assert words in out


def test_what_a_configuration_leaves_out_comes_from_its_architecture(tmp_path: Path) -> None:
    qwen3 = {key: value for key, value in LLAMA_70B.items() if key not in ("rope_theta", "tie_word_embeddings")}
    qwen3 |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024}
    spec = plan.read_spec(save(tmp_path, qwen3))
    assert spec.head_dim == 128 and not spec.tied, "and not hidden size / heads"
    assert plan.read_spec(str(tmp_path / "config.json")) == spec


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"hidden_size": -8}, {}, "hidden_size -8 is not a positive number"),
        ({"num_attention_heads": "64"}, {}, "num_attention_heads '64' is not a positive number"),
        ({"num_hidden_layers": 2.5}, {}, "num_hidden_layers 2.5 is not a positive number"),
        ({"num_key_value_heads": 0}, {}, "num_key_value_heads 0 is not a positive number"),
        ({"num_key_value_heads": 3}, {}, "3 key-value heads do not divide"),
        ({"architectures": [3]}, {}, "architectures [3] is not a list of names"),
        ({}, {"--source": "tp=2,cp=2"}, "--source: 'cp=2' is not one of tp=N, sp=N, dp=N, pp=N"),
        ({}, {"--source": "tp=4,ep=2"}, "--source: ep=2 must be 1 or tp=4"),
        ({}, {"--source": "tp=2,tp=4"}, "--source: tp is given twice"),
        ({}, {"--source": "tp=x"}, "--source: tp=x is not a positive number"),
        ({}, {"--source": "tp=0"}, "--source: tp=0 is not a positive number"),
        ({}, {"--destination": "tp"}, "--destination: 'tp' is not one of tp=N, pp=N"),
        ({}, {"--destination": "tp=3"}, "--destination: engines of 3 ranks do not fill the 4 ranks of the source"),
        ({}, {"--source": "tp=16"}, "16 ranks"),
        ({"num_hidden_layers": 3}, {}, "3 layers cannot be split over 2 ranks"),
        ({"num_key_value_heads": 8, "num_attention_heads": 8}, {"--source": "tp=8,pp=2,dp=2",
          "--destination": "tp=16"}, "TP 16 does not divide 8 attention heads"),
        ({}, {"--bucket-mb": "0"}, "--bucket-mb: 0 is not a positive number"),
        ({}, {"--ranks-per-node": "0"}, "--ranks-per-node: 0 is not a positive number"),
        ({"hidden_size": 2**20}, {"--bucket-mb": "1"}, "bucket_bytes 1048576 is smaller than one row"),
        ({"architectures": ["GPT2LMHeadModel"]}, {}, "architecture GPT2LMHeadModel is not supported"),
        ({"hidden_size": "12"}, {}, "config.json: hidden_size '12' is not a positive number"),
        ({"vocab_size": 0}, {}, "config.json: vocab_size 0 is not a positive number"),
        ({}, {"--model": "/nowhere/model"}, "model folder does not exist: /nowhere/model"),
        ({}, {"--model": "/nowhere/config.json"}, "no such file: /nowhere/config.json"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], arguments: dict[str, str], message: str
) -> None:
    given = {"--model": save(tmp_path, TINY | changes), "--source": "tp=2,pp=2", "--destination": "tp=2"} | arguments
    assert cli.main(["plan", *(word for pair in given.items() for word in pair)]) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and err.startswith("error: ") and err.count("\n") == 1


def test_a_configuration_that_is_no_json_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{")
    assert cli.main(["plan", "--model", str(tmp_path), "--source", "tp=1", "--destination", "tp=1"]) == 2
    assert f"{tmp_path / 'config.json'}: not a JSON configuration" in capsys.readouterr().err
