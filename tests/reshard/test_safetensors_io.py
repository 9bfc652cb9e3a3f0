"""The Hugging Face folder as source and destination: what is read, what is refused, what is written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rlscale.cluster.mesh import ParallelDims
from rlscale.model.arch import ModelSpec
from rlscale.reshard import export_hf, hf_layout, hf_shapes, load_pieces, megatron_layout, safetensors_io
from rlscale.reshard.layout import volume
from rlscale.testing.models import make_spec, tiny_model
from tests import worlds
from tests.reshard.models import Tensors, assert_equal, canonical, megatron_shards


def write_folder(folder: Path, tensors: Tensors, shards: int = 1) -> Path:
    """A Hugging Face folder of one file, or of several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}))
    names = list(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def load(folder: Path, spec: ModelSpec, dims: ParallelDims, rank: int, dtype: torch.dtype = torch.float32,
         optional: tuple[str, ...] = ()) -> tuple[Tensors, set[str]]:  # fmt: skip
    layout = megatron_layout(spec, dims)
    shards = megatron_shards(spec, dims, rank, canonical(spec))
    dest = {key: torch.full_like(value, 7, dtype=dtype) for key, value in shards.items()}
    return dest, load_pieces(folder, layout.of_rank(rank), dest, shapes=layout.shapes, optional=optional)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(tp=2, dp=2), ParallelDims(tp=4, pp=2)])
@pytest.mark.parametrize("tied", [False, True])
def test_load(tmp_path: Path, tied: bool, dims: ParallelDims, shards: int) -> None:
    spec = make_spec(qkv_bias=True, qk_norm=True, tied=tied)
    hf = canonical(spec)
    folder = write_folder(tmp_path / "model", {n: v.to(torch.bfloat16) for n, v in hf.items()}, shards)
    rounded = {name: value.to(torch.bfloat16).float() for name, value in hf.items()}
    for rank in range(dims.world):
        got, absent = load(folder, spec, dims, rank)
        assert not absent
        assert_equal(got, megatron_shards(spec, dims, rank, rounded))  # padding rows are zero there too


def test_load_reads_large_slices_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_io, "READ_BYTES", 200)
    spec, dims = make_spec(), ParallelDims(tp=2)
    folder = write_folder(tmp_path / "model", canonical(spec))
    assert_equal(load(folder, spec, dims, 1)[0], megatron_shards(spec, dims, 1, canonical(spec)))


def test_the_value_head_may_be_absent(tmp_path: Path) -> None:
    actor, critic = make_spec(), make_spec(value_head=True)
    folder = write_folder(tmp_path / "model", canonical(actor))
    got, absent = load(folder, critic, ParallelDims(tp=2, pp=2), 3, optional=("score.weight",))
    assert absent == {"score.weight"} and bool((got["value_head.weight"] == 7).all())
    with pytest.raises(ValueError, match="tensor score.weight is missing"):
        load(folder, critic, ParallelDims(), 0)
    folder = write_folder(tmp_path / "critic", canonical(critic))
    got, absent = load(folder, critic, ParallelDims(), 0, optional=("score.weight",))
    assert not absent and torch.equal(got["value_head.weight"], canonical(critic)["score.weight"])


SPEC = make_spec()
NORM = "model.layers.1.input_layernorm.weight"


def without(name: str) -> Tensors:
    return {n: v for n, v in canonical(SPEC).items() if n != name}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without("lm_head.weight"), "tensor lm_head.weight is missing"),
        (without(NORM), f"tensor {NORM} is missing"),
        (without(NORM) | {NORM: torch.ones(9)}, rf"tensor {NORM} has shape \[9\], expected \[8\]"),
        (without(NORM) | {NORM: torch.ones(8, dtype=torch.int32)}, f"tensor {NORM} has type I32, which cannot"),
        (without("") | {"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}, "q_proj.bias does not belong"),
        (without("") | {"model.layers.4.input_layernorm.weight": torch.ones(8)}, "layers.4.* does not belong"),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_wrong_tensors_are_named(tmp_path: Path, tensors: Tensors, message: str, shards: int) -> None:
    folder = write_folder(tmp_path / "model", tensors, shards)
    with pytest.raises(ValueError, match=message) as error:
        load(folder, SPEC, ParallelDims(), 0)
    assert str(folder) in str(error.value)


def test_harmless_extra_tensors(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1), "lm_head.weight": torch.ones(37, 8)}
    spec = make_spec(tied=True)
    folder = write_folder(tmp_path / "model", canonical(spec) | extra)
    assert_equal(load(folder, spec, ParallelDims(), 0)[0], megatron_shards(spec, ParallelDims(), 0, canonical(spec)))


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model folder does not exist: .*absent"):
        load(tmp_path / "absent", SPEC, ParallelDims(), 0)
    with pytest.raises(ValueError, match="holds neither model.safetensors nor model.safetensors.index.json"):
        load(tmp_path, SPEC, ParallelDims(), 0)
    single = write_folder(tmp_path / "single", canonical(SPEC)) / "model.safetensors"
    single.write_bytes(single.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors: cannot be read as safetensors, it may be truncated"):
        load(single.parent, SPEC, ParallelDims(), 0)
    folder = write_folder(tmp_path / "several", canonical(SPEC), shards=2)
    part = folder / "part-1.safetensors"
    part.write_bytes(part.read_bytes()[:50])
    with pytest.raises(ValueError, match="part-1.safetensors: cannot be read"):
        load(folder, SPEC, ParallelDims(), 0)
    part.unlink()
    with pytest.raises(ValueError, match="names a file that does not exist: part-1.safetensors"):
        load(folder, SPEC, ParallelDims(), 0)
    shutil.copy(folder / "part-0.safetensors", part)
    with pytest.raises(ValueError, match="part-1.safetensors: tensor .* is missing"):
        load(folder, SPEC, ParallelDims(), 0)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match="not an index of safetensors files"):
        load(folder, SPEC, ParallelDims(), 0)


def test_parameters_without_a_tensor_are_named(tmp_path: Path) -> None:
    folder, layout = write_folder(tmp_path / "model", canonical(SPEC)), megatron_layout(SPEC, ParallelDims())
    dest = megatron_shards(SPEC, ParallelDims(), 0, canonical(SPEC))
    with pytest.raises(ValueError, match="no tensor of the model belongs to parameter adapter.weight"):
        load_pieces(folder, layout.pieces, dest | {"adapter.weight": torch.ones(1)}, shapes=layout.shapes)
    del dest["decoder.final_layernorm.weight"]
    with pytest.raises(ValueError, match="no local buffer decoder.final_layernorm.weight for tensor model.norm.weight"):
        load_pieces(folder, layout.pieces, dest, shapes=layout.shapes)


def bytes_through_system_calls() -> int:
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_loading_reads_only_the_bytes_of_the_shard(tmp_path: Path, stored: torch.dtype) -> None:
    """As counted by the reader and by the kernel: the shard, each byte once, and the headers."""
    spec, dims = make_spec(num_layers=2, hidden=64, ffn=256, vocab=500), ParallelDims(tp=4, pp=2)
    hf = {name: value.to(stored) for name, value in canonical(spec).items()}
    folder = write_folder(tmp_path / "model", hf, shards=2)
    layout = megatron_layout(spec, dims)
    headers = 100_000  # the headers, the index, and this measurement
    assert layout.shapes["model.embed_tokens.weight"] == (500, 64)
    for rank in range(dims.world):
        expected = megatron_shards(spec, dims, rank, {name: value.float() for name, value in hf.items()})
        got, read = {key: torch.empty_like(value) for key, value in expected.items()}, []
        before = bytes_through_system_calls()
        load_pieces(folder, layout.of_rank(rank), got, shapes=layout.shapes, on_read=read.append)
        passed = bytes_through_system_calls() - before
        assert_equal(got, expected)
        size = sum(volume(piece.index) for piece in layout.of_rank(rank)) * stored.itemsize
        assert sum(read) == size
        assert size <= passed < size + headers < sum(value.nbytes for value in hf.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_needs_one_buffer_besides_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Peak memory as the kernel counts it, mapped files included; converting takes a buffer, copying none."""
    spec, dims = make_spec(num_layers=2, hidden=512, ffn=4096, vocab=20_000), ParallelDims(tp=2)
    folder = write_folder(tmp_path / "model", canonical(spec))
    layout = megatron_layout(spec, dims)
    dest = {key: value.to(dtype) for key, value in megatron_shards(spec, dims, 1, canonical(spec)).items()}
    size = sum(value.numel() * 4 for value in dest.values())
    monkeypatch.setattr(safetensors_io, "READ_BYTES", 2**20)
    load_pieces(folder, layout.of_rank(1), dest, shapes=layout.shapes)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the former peak
    except OSError:
        pytest.skip("this kernel does not reset the peak of a process's memory")
    before = memory("VmRSS")
    load_pieces(folder, layout.of_rank(1), dest, shapes=layout.shapes)
    slack = 4 * 2**20
    assert memory("VmHWM") - before < 2**20 + slack < size / 4


def memory(field: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024


def test_nothing_is_written_when_something_is_wrong(tmp_path: Path) -> None:
    """The fault is in the last file: buffers must not be half filled."""
    last = "model.norm.weight"
    tensors = without(last) | {last: torch.ones(9)}
    folder, layout = write_folder(tmp_path / "model", tensors, 3), megatron_layout(SPEC, ParallelDims())
    dest = {key: torch.full_like(value, 7) for key, value in megatron_shards(SPEC, ParallelDims(), 0, tensors).items()}
    with pytest.raises(ValueError, match=f"tensor {last} has shape"):
        load_pieces(folder, layout.pieces, dest, shapes=layout.shapes)
    assert all(bool((value == 7).all()) for value in dest.values())


@pytest.mark.parametrize("fault", ["length", "header", "offsets"])
def test_a_damaged_header_is_named(tmp_path: Path, fault: str) -> None:
    path = write_folder(tmp_path / "model", canonical(SPEC)) / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    if fault == "length":
        data[:8] = (2**60).to_bytes(8, "little")
    elif fault == "header":
        data[8] = ord("x")
    else:
        header = json.loads(data[8 : 8 + length])
        header["lm_head.weight"]["data_offsets"][1] += 4
        header["lm_head.weight"]["data_offsets"][0] += 8
        text = json.dumps(header).encode().ljust(length)
        data = bytearray(len(text).to_bytes(8, "little") + text + data[8 + length :] + bytes(64))
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"model.safetensors: .*(truncated|too few or many for its shape)"):
        load(path.parent, SPEC, ParallelDims(), 0)


# Export -------------------------------------------------------------------------------------------


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
    worlds.run(4, export, tmp_path / "many", reference, spec, dims, writer=3, bucket_bytes=700, shard_bytes=3000)
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
    layout = hf_layout(critic)
    weights = {name: torch.zeros(shape) for name, shape in layout.shapes.items()}
    load_pieces(reference, layout.pieces, weights, shapes=layout.shapes, optional=("score.weight",))
    weights["score.weight"].normal_(generator=torch.Generator().manual_seed(3))
    export_hf(tmp_path / "critic", layout, weights, reference_folder=reference, dtype=torch.float32)

    again = ModelSpec.from_hf(str(tmp_path / "critic"))
    assert again == critic
    got = {name: torch.zeros_like(value) for name, value in weights.items()}
    assert not load_pieces(tmp_path / "critic", hf_layout(again).pieces, got, shapes=layout.shapes)
    assert_equal(got, weights)

    from transformers import AutoModel, AutoModelForSequenceClassification

    tokens = torch.arange(5, 30)[None]
    with torch.no_grad():
        value = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")(tokens).logits
        hidden = AutoModel.from_pretrained(reference, dtype=torch.float32)(tokens).last_hidden_state[0, -1]
    torch.testing.assert_close(value[0], weights["score.weight"] @ hidden, atol=1e-5, rtol=1e-5)


def failing_export(folder: Path, reference: Path) -> str:
    """The disk of the writer fills up in the middle."""
    original, calls = safetensors_io._write_at, 0

    def full(file: int, offset: int, data: memoryview) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OSError(28, "No space left on device")
        original(file, offset, data)

    safetensors_io._write_at = full
    try:
        with pytest.raises(OSError, match=r"export to .* failed: .*No space left on device") as error:
            export(folder, reference, SPEC, ParallelDims(tp=2, pp=2), bucket_bytes=700)
    finally:
        safetensors_io._write_at = original
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
from rlscale.reshard import safetensors_io
from tests.reshard import test_safetensors_io as t

folder, where = Path(sys.argv[1]), sys.argv[2]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

if where == "writing":
    calls = iter(range(100))
    write = safetensors_io._write_at
    safetensors_io._write_at = lambda *a: write(*a) if next(calls) < 4 else die()
else:
    safetensors_io.shutil.rmtree = die  # the new folder has taken its place, the former one is about to be removed
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
    assert safetensors_io._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "x").exists() and not (tmp_path / "a" / "x").exists()
    assert not safetensors_io._exchange(tmp_path / "a", tmp_path / "absent")


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
    layout = hf_layout(spec)
    sources = {name: torch.zeros(shape) for name, shape in layout.shapes.items()}
    with pytest.raises(ValueError, match="is no exported model"):
        export_hf(out, layout, sources, reference_folder=folder, dtype=torch.float32)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
