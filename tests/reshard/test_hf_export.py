"""The Hugging Face folder as a destination: what is written, and what is left after a failure."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlscale.cluster.mesh import ParallelDims
from rlscale.model.arch import ModelSpec
from rlscale.reshard import hf_export
from rlscale.reshard.canonical import hf_layout, hf_shapes
from rlscale.reshard.hf_export import export_hf
from rlscale.reshard.hf_load import load_pieces
from rlscale.reshard.megatron import megatron_layout
from rlscale.testing.models import make_spec, tiny_model
from tests import worlds
from tests.reshard.models import Tensors, assert_equal, canonical, megatron_shards, write_folder

SPEC = make_spec()


def export(folder: Path, reference: Path, spec: ModelSpec, dims: ParallelDims, **options: object) -> None:
    hf = canonical(spec)
    rank = dist.get_rank() if dist.is_initialized() else 0
    layout, shards = megatron_layout(spec, dims), megatron_shards(spec, dims, rank, hf)
    export_hf(folder, layout, shards, reference_folder=reference, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "dims"),
    [
        (make_spec(qkv_bias=True), ParallelDims(tp=2, pp=2)),
        (make_spec(qk_norm=True, tied=True), ParallelDims(tp=2, pp=2)),
        (make_spec(tied=True), ParallelDims(tp=4)),
    ],
)
def test_export_streams_and_shards(tmp_path: Path, spec: ModelSpec, dims: ParallelDims) -> None:
    reference = write_folder(tmp_path / "reference", canonical(spec))
    (reference / "tokenizer.json").write_text("{}")
    (reference / "chat_template.jinja").write_text("{{ messages }}")
    (reference / "README.md").write_text("not copied")
    worlds.run(4, export, tmp_path / "one", reference, spec, dims, dtype=torch.float32, bucket_bytes=700)
    assert_equal(load_file(tmp_path / "one" / "model.safetensors"), canonical(spec))
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    worlds.run(4, export, tmp_path / "many", reference, spec, dims, bucket_bytes=700, shard_bytes=3000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    got: Tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        assert (tmp_path / "many" / file).stat().st_size < 3000 + 2000  # data and header
        got |= load_file(tmp_path / "many" / file)
    assert len(set(index["weight_map"].values())) > 2
    assert_equal(got, {name: value.to(torch.bfloat16) for name, value in canonical(spec).items()})
    assert json.loads((tmp_path / "many" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert index["metadata"]["total_size"] == sum(2 * torch.Size(s).numel() for s in hf_shapes(spec).values())


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe"])
def test_a_model_survives_the_round_trip_through_every_rank(tmp_path: Path, arch: str) -> None:
    """Hugging Face folder -> TP2 x PP2 -> Hugging Face folder: transformers reads the same model from it."""
    folder = Path(tiny_model(arch, tied=arch in ("qwen2", "llama")))
    ep = 2 if arch == "qwen3_moe" else 1
    worlds.run(4, load_and_export, folder, tmp_path / "again", ParallelDims(tp=2, pp=2, ep=ep))
    assert_equal(load_file(tmp_path / "again" / "model.safetensors"), expected_tensors(folder))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "<|im_start|>hello"
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    assert AutoTokenizer.from_pretrained(tmp_path / "again")(text).input_ids == tokens.input_ids[0].tolist()
    with torch.no_grad():
        one, two = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(**tokens).logits
            for path in (folder, tmp_path / "again")
        )
    assert torch.equal(one, two)


def expected_tensors(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def load_and_export(folder: Path, target: Path, dims: ParallelDims) -> None:
    spec, rank = ModelSpec.from_hf(str(folder)), dist.get_rank()
    layout = megatron_layout(spec, dims)
    zeros = {name: torch.zeros(shape) for name, shape in hf_shapes(spec).items()}
    shards = megatron_shards(spec, dims, rank, zeros)
    load_pieces(folder, layout.of_rank(rank), shards, shapes=layout.shapes)
    export_hf(target, layout, shards, reference_folder=folder, dtype=torch.float32)


def test_a_critic_is_exported_as_a_sequence_classifier(tmp_path: Path) -> None:
    spec = make_spec(value_head=True)
    reference = write_folder(tmp_path / "reference", canonical(make_spec()))
    export(tmp_path / "critic", reference, spec, ParallelDims(), dtype=torch.float32)
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and len(config["id2label"]) == 1
    assert_equal(load_file(tmp_path / "critic" / "model.safetensors"), canonical(spec))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe"])
def test_an_exported_critic_opens_in_transformers_and_again_as_a_critic(tmp_path: Path, arch: str) -> None:
    reference = tiny_model(arch, tied=True)
    critic = ModelSpec.from_hf(reference).as_critic()
    layout = hf_layout(hf_shapes(critic))
    weights = {name: torch.zeros(shape) for name, shape in layout.shapes.items()}
    load_pieces(reference, layout.pieces, weights, shapes=layout.shapes, optional=("score.weight",))
    weights["score.weight"].normal_(generator=torch.Generator().manual_seed(3))
    export_hf(tmp_path / "critic", layout, weights, reference_folder=reference, dtype=torch.float32)

    again = ModelSpec.from_hf(str(tmp_path / "critic"))
    assert again == critic
    got = {name: torch.zeros_like(value) for name, value in weights.items()}
    assert not load_pieces(tmp_path / "critic", hf_layout(hf_shapes(again)).pieces, got, shapes=layout.shapes)
    assert_equal(got, weights)

    from transformers import AutoModel, AutoModelForSequenceClassification

    tokens = torch.arange(5, 30)[None]
    with torch.no_grad():
        value = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")(tokens).logits
        hidden = AutoModel.from_pretrained(reference, dtype=torch.float32)(tokens).last_hidden_state[0, -1]
    torch.testing.assert_close(value[0], weights["score.weight"] @ hidden, atol=1e-5, rtol=1e-5)


def failing_export(folder: Path, reference: Path) -> str:
    """The disk of the writer fills up in the middle."""
    original, calls = hf_export._write_at, 0

    def full(file: int, offset: int, data: memoryview) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OSError(28, "No space left on device")
        original(file, offset, data)

    hf_export._write_at = full
    try:
        with pytest.raises(OSError, match=r"export to .* failed: .*No space left on device") as error:
            export(folder, reference, SPEC, ParallelDims(tp=2, pp=2), bucket_bytes=700)
    finally:
        hf_export._write_at = original
    return str(error.value)


def test_a_failed_export_leaves_the_former_one(tmp_path: Path) -> None:
    reference = write_folder(tmp_path / "reference", canonical(SPEC))
    target = write_folder(tmp_path / "out", {"w": torch.ones(1)})
    errors = worlds.run(4, failing_export, target, reference)
    assert len(set(errors)) == 1, "every rank reports the same"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "reference"]
    assert_equal(load_file(target / "model.safetensors"), {"w": torch.ones(1)})
    worlds.run(4, export, target, reference, SPEC, ParallelDims(tp=2, pp=2), dtype=torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "reference"]
    assert_equal(load_file(target / "model.safetensors"), canonical(SPEC))


def test_an_export_killed_between_its_renames_is_restored(tmp_path: Path) -> None:
    reference = write_folder(tmp_path / "reference", canonical(SPEC))
    write_folder(tmp_path / ".out.old", {"w": torch.ones(1)})
    with pytest.raises(ValueError, match="reference folder has no config.json"):
        export(tmp_path / "out", tmp_path / "absent", SPEC, ParallelDims())
    export(tmp_path / "out", reference, SPEC, ParallelDims(), dtype=torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "reference"]


def test_a_full_disk_leaves_the_former_export(tmp_path: Path) -> None:
    """The kernel refuses to let files grow: an error of the real write, whichever it is."""
    spec = make_spec(vocab=5003)
    reference = write_folder(tmp_path / "reference", canonical(SPEC))
    target = write_folder(tmp_path / "out", {"w": torch.ones(1)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"export to .*out failed: .*File too large"):
            export(target, reference, spec, ParallelDims(), bucket_bytes=20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "reference"]
    assert_equal(load_file(target / "model.safetensors"), {"w": torch.ones(1)})


KILLED = """
import os, signal, sys
from pathlib import Path
from rlscale.reshard import hf_export
from tests.reshard import test_hf_export as t

folder, where = Path(sys.argv[1]), sys.argv[2]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

if where == "writing":
    calls = iter(range(100))
    write = hf_export._write_at
    hf_export._write_at = lambda *a: write(*a) if next(calls) < 4 else die()
else:
    hf_export.shutil.rmtree = die  # the new folder has taken its place, the former one is about to be removed
t.export(folder / "out", folder / "reference", t.SPEC, t.ParallelDims(), dtype=t.torch.float32, bucket_bytes=700)
"""


@pytest.mark.parametrize("where", ["writing", "removing"])
def test_an_export_killed_at_any_time_leaves_a_whole_one(tmp_path: Path, where: str) -> None:
    reference = write_folder(tmp_path / "reference", canonical(SPEC))
    target = write_folder(tmp_path / "out", {"w": torch.ones(1)})
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", KILLED, str(tmp_path), where]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": str(root)}).returncode == -signal.SIGKILL
    kept = {"w": torch.ones(1)} if where == "writing" else canonical(SPEC)
    assert_equal(load_file(target / "model.safetensors"), kept)
    assert len(list(tmp_path.iterdir())) == 3, "the killed process could not clean up"
    export(target, reference, SPEC, ParallelDims(), dtype=torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "reference"], "the next export does"
    assert_equal(load_file(target / "model.safetensors"), canonical(SPEC))


def test_folders_are_exchanged_in_one_step(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    assert hf_export._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "x").exists() and not (tmp_path / "a" / "x").exists()
    assert not hf_export._exchange(tmp_path / "a", tmp_path / "absent")


def missing_reference(folder: Path) -> str:
    with pytest.raises(ValueError, match="reference folder has no config.json") as error:
        export(folder / "out", folder / "absent", SPEC, ParallelDims(tp=4))
    return str(error.value)


def test_a_missing_reference_stops_every_rank(tmp_path: Path) -> None:
    assert len(set(worlds.run(4, missing_reference, tmp_path))) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["run", "checkpoint", "document", "file"])
def test_an_export_replaces_nothing_but_an_export(what: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if what == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        {"run": out / "config.yaml", "checkpoint": out / "manifest.json", "document": out / "thesis.txt"}[
            what
        ].write_text("mine")
        if what == "document":
            (out / "config.json").write_text("{}")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    folder = Path(tiny_model("llama", layers=1))
    spec = ModelSpec.from_hf(str(folder))
    layout = hf_layout(hf_shapes(spec))
    sources = {name: torch.zeros(shape) for name, shape in layout.shapes.items()}
    with pytest.raises(ValueError, match="is not an exported model"):
        export_hf(out, layout, sources, reference_folder=folder, dtype=torch.float32)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
