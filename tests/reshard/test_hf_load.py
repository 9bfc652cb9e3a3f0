"""The Hugging Face folder as a source: what is read, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from rlscale.cluster.mesh import ParallelDims
from rlscale.model.arch import ModelSpec
from rlscale.reshard import hf_load
from rlscale.reshard.hf_load import load_pieces
from rlscale.reshard.layout import volume
from rlscale.reshard.megatron import megatron_layout
from rlscale.testing.models import make_spec
from tests.reshard.models import Tensors, assert_equal, canonical, megatron_shards, write_folder
from tools.common import bytes_read


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
    monkeypatch.setattr(hf_load, "READ_BYTES", 200)
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


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_loading_reads_only_the_bytes_of_the_shard(tmp_path: Path, stored: torch.dtype) -> None:
    """As the kernel counts them: the shard, each byte once, and the headers."""
    spec, dims = make_spec(num_layers=2, hidden=64, ffn=256, vocab=500), ParallelDims(tp=4, pp=2)
    hf = {name: value.to(stored) for name, value in canonical(spec).items()}
    folder = write_folder(tmp_path / "model", hf, shards=2)
    layout = megatron_layout(spec, dims)
    headers = 100_000  # the headers, the index, and this measurement
    assert layout.shapes["model.embed_tokens.weight"] == (500, 64)
    for rank in range(dims.world):
        expected = megatron_shards(spec, dims, rank, {name: value.float() for name, value in hf.items()})
        got = {key: torch.empty_like(value) for key, value in expected.items()}
        before = bytes_read()
        load_pieces(folder, layout.of_rank(rank), got, shapes=layout.shapes)
        passed = bytes_read() - before
        assert_equal(got, expected)
        size = sum(volume(piece.index) for piece in layout.of_rank(rank)) * stored.itemsize
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
    monkeypatch.setattr(hf_load, "READ_BYTES", 2**20)
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
    with pytest.raises(ValueError, match=r"model.safetensors: .*(truncated|which does not match its shape)"):
        load(path.parent, SPEC, ParallelDims(), 0)
