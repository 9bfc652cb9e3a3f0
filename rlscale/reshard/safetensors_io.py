"""The Hugging Face folder as an end of resharding: ranks read only their slices of it; any layout is written to one.

Writing streams every tensor to one rank, a bounded bucket at a time, into a folder beside the wanted one, which takes
its place once it is complete: an export that fails or is killed leaves the former one as it was.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlscale.cluster.collective import gather
from rlscale.reshard.canonical import VALUE_HEAD
from rlscale.reshard.layout import Box, Layout, Piece, volume, whole
from rlscale.reshard.plan import DEFAULT_BUCKET_BYTES, plan
from rlscale.reshard.transport import Bucket, default_device, execute, region

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
READ_BYTES = 32 * 2**20  # most that is read (and, where it must be converted, buffered) at a time
SHARD_BYTES = 5 * 10**9
TYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
COMPANIONS = (
    "generation_config.json", "tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "additional_chat_templates",
)  # fmt: skip
TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}


# Reading ------------------------------------------------------------------------------------------


def load_pieces(
    folder: str | Path, pieces: Iterable[Piece], dest: Mapping[str, torch.Tensor], *,
    shapes: Mapping[str, tuple[int, ...]], optional: Collection[str] = (),
    on_read: Callable[[int], None] | None = None,
) -> set[str]:  # fmt: skip
    """Fill this rank's local buffers from a Hugging Face folder, converting to their dtypes; not collective.

    Only the bytes of the pieces are read, where possible straight into the buffers: a memory map would read, and keep
    in memory, whole pages around every part of a row. Elements of a buffer that belong to no piece (vocabulary padding)
    are set to zero.

    Args:
        folder: local folder with ``model.safetensors`` or shards and an index.
        pieces: what this rank holds, ``layout.of_rank(rank)``.
        dest: local buffers by key, e.g. ``dict(model.named_parameters())``; each must be the target of some piece.
        shapes: canonical shapes of the whole model, ``layout.shapes``.
        optional: tensors that the folder may lack (the value head of a new critic); their buffers stay untouched.
        on_read: called with the number of bytes of every read of tensor data.

    Returns:
        The optional tensors that the folder lacks.

    Raises:
        ValueError: no such folder or file, a truncated file, a missing tensor, one of another shape or not floating
            point, or one that the architecture doesn't have; before anything is written to the buffers. The message
            names it.
    """
    pieces = list(pieces)
    places = _tensor_files(Path(folder))
    _refuse_unknown(Path(folder), places, shapes)
    absent = set()
    for piece in pieces:
        if piece.key not in dest:
            raise ValueError(f"{folder}: no local buffer {piece.key} for tensor {piece.name}")
        if piece.name not in places:
            if piece.name not in optional:
                raise ValueError(f"{folder}: tensor {piece.name} is missing")
            absent.add(piece.name)
    wanted: dict[Path, list[Piece]] = {}
    for piece in pieces:
        if piece.name not in absent:
            wanted.setdefault(places[piece.name], []).append(piece)
    files = {path: _File(path) for path in wanted}
    for path, of_file in wanted.items():
        for piece in of_file:
            files[path].check(piece.name, shapes[piece.name])
    _zero_padding(folder, pieces, dest, absent)
    for path, of_file in wanted.items():
        with open(path, "rb", buffering=0) as handle:
            for piece in of_file:
                files[path].read(handle.fileno(), piece, region(dest[piece.key], piece), on_read or (lambda _: None))
    return absent


def _tensor_files(folder: Path) -> dict[str, Path]:
    """For every tensor of the folder the file that holds it."""
    if not folder.is_dir():
        raise ValueError(f"model folder does not exist: {folder}")
    if (folder / INDEX).is_file():
        try:
            weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
            files = {str(name): folder / str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{folder / INDEX}: not an index of safetensors files ({error!r})") from None
        for path in sorted(set(files.values())):
            if not path.is_file():
                raise ValueError(f"{folder / INDEX}: names a file that does not exist: {path.name}")
        return files
    if not (folder / SINGLE).is_file():
        raise ValueError(f"{folder}: holds neither {SINGLE} nor {INDEX}")
    return dict.fromkeys(_File(folder / SINGLE).tensors, folder / SINGLE)


class _File:
    """A safetensors file: 8 bytes with the length of a JSON header, the header, and the tensors in row-major order.

    Raises:
        ValueError: the header cannot be read, or names bytes that the file does not have.
    """

    def __init__(self, path: Path):
        self.path = path
        size = path.stat().st_size
        try:
            with open(path, "rb") as handle:
                length = int.from_bytes(handle.read(8), "little")
                if not 2 <= length <= size - 8:
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                header: dict[str, Any] = json.loads(handle.read(length))
            header.pop("__metadata__", None)
            self.data = 8 + length
            self.tensors = {
                name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]) for name, entry in header.items()
            }
            for name, (_, shape, start, stop) in self.tensors.items():
                if not all(isinstance(n, int) for n in (*shape, start, stop)) or not 0 <= start <= stop:
                    raise ValueError(f"the header puts {name} {list(shape)} at [{start}, {stop}]")
            end = self.data + max((stop for *_, stop in self.tensors.values()), default=0)
            if end > size:
                raise ValueError(f"the header names {end} bytes, the file has {size}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: cannot be read as safetensors, it may be truncated ({error})") from None

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a tensor is not here, has another shape than expected, or cannot be converted."""
        if name not in self.tensors:  # an index that names the wrong file
            raise ValueError(f"{self.path}: tensor {name} is missing (the index says that it is here)")
        kind, stored, start, stop = self.tensors[name]
        if stored != shape:
            raise ValueError(f"{self.path}: tensor {name} has shape {list(stored)}, expected {list(shape)}")
        if kind not in TYPES:
            raise ValueError(f"{self.path}: tensor {name} has type {kind}, which cannot be converted")
        if stop - start != volume(whole(shape)) * TYPES[kind].itemsize:
            raise ValueError(f"{self.path}: tensor {name} has {stop - start} bytes, too few or many for its shape")

    def read(self, file: int, piece: Piece, target: torch.Tensor, on_read: Callable[[int], None]) -> None:
        """Fill ``target`` with a slice, in parts of at most `READ_BYTES`."""
        kind, shape, start, _ = self.tensors[piece.name]
        dtype = TYPES[kind]
        # the slice is rows (of one or more dimensions) of runs: the last dimensions that it takes whole are one run
        split = len(shape)
        while split > 1 and piece.index[split - 1] == (0, shape[split - 1]):
            split -= 1
        straight = target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu"
        row_bytes = volume(piece.index[1:]) * dtype.itemsize
        (lo, hi), rest = piece.index[0], piece.index[1:]
        step = hi - lo if straight else max(1, READ_BYTES // max(1, row_bytes))
        for first in range(lo, hi, step):
            last = min(first + step, hi)
            part = target[first - lo : last - lo]
            values = part if straight else torch.empty(part.shape, dtype=dtype)
            memory = memoryview(values.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            at = 0
            for offset, nbytes in _runs(shape, ((first, last), *rest), split, dtype.itemsize):
                self._read_at(file, self.data + start + offset, memory[at : at + nbytes])
                on_read(nbytes)
                at += nbytes
            if not straight:
                part.copy_(values)

    def _read_at(self, file: int, offset: int, memory: memoryview) -> None:
        while memory:
            count = os.preadv(file, [memory[:READ_BYTES]], offset)
            if count == 0:
                raise ValueError(f"{self.path}: ends at byte {offset}; it was cut while it was read")
            memory, offset = memory[count:], offset + count


def _runs(shape: tuple[int, ...], index: Box, split: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Bytes of a slice that lie behind each other, (offset in the tensor, number), in row-major order."""
    strides = [itemsize * volume(whole(shape[dim + 1 :])) for dim in range(len(shape))]
    if not shape:
        yield 0, itemsize
        return
    run_dim = split - 1
    (lo, hi), outer = index[run_dim], index[:run_dim]
    for place in itertools.product(*(range(a, b) for a, b in outer)):
        base = sum(i * stride for i, stride in zip(place, strides, strict=False))
        yield base + lo * strides[run_dim], (hi - lo) * strides[run_dim]


def _refuse_unknown(folder: Path, names: Iterable[str], shapes: Mapping[str, Any]) -> None:
    """A weight left over means another architecture or number of layers; heads and rotary buffers are harmless."""
    for name in sorted(names):
        if name.startswith("model.") and name not in shapes and not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(f"{folder}: tensor {name} does not belong to the architecture of its config.json")


def _zero_padding(
    folder: str | Path, pieces: Iterable[Piece], dest: Mapping[str, torch.Tensor], absent: set[str]
) -> None:
    held: dict[str, int] = dict.fromkeys(dest, 0)
    for piece in pieces:
        held[piece.key] += volume(piece.at)
    untouched = {piece.key for piece in pieces if piece.name in absent}
    for key, elements in held.items():
        if elements == 0:
            raise ValueError(f"{folder}: no tensor of the model belongs to parameter {key}")
    for key, elements in held.items():
        if elements < dest[key].numel() and key not in untouched:
            dest[key].detach().zero_()


# Writing ------------------------------------------------------------------------------------------


def export_hf(
    folder: str | Path, layout: Layout, sources: Mapping[str, torch.Tensor], *, reference_folder: str | Path,
    dtype: torch.dtype = torch.bfloat16, group: dist.ProcessGroup | None = None, writer: int = 0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES, shard_bytes: int = SHARD_BYTES,
) -> None:  # fmt: skip
    """Write a model as a Hugging Face folder that transformers and vLLM open; collective over ``group``.

    Args:
        folder: replaced as a whole once the export is complete.
        layout: of the model; ``sources`` are this rank's local buffers by its keys.
        reference_folder: the folder the model came from: its configuration (with the new dtype), tokenizer, chat
            template and generation configuration are copied.
        writer: global rank that writes; it holds at most two buckets besides its own shards.
        shard_bytes: a larger model is written as several files and an index.

    Raises:
        ValueError, OSError: on every rank, naming the folder and the reason (no reference, disk full, ...).
    """
    folder = Path(folder)
    rank = dist.get_rank() if dist.is_initialized() else 0
    destination = Layout(layout.shapes, [Piece(n, writer, whole(s), n, whole(s)) for n, s in layout.shapes.items()])
    copies = plan(layout, destination, dtype=dtype, bucket_bytes=bucket_bytes)
    output = _Folder(folder, layout.shapes, dtype, shard_bytes) if rank == writer else None
    try:
        _together(folder, group, lambda: output.prepare(Path(reference_folder)) if output else None)
        device = next((tensor.device for tensor in sources.values()), default_device(group))
        buffer = torch.empty(copies.buffer_bytes(rank), dtype=torch.uint8, device=device)
        failure: Exception | None = None
        for bucket in execute(copies, sources, [buffer], group=group):
            if output is not None and failure is None:
                try:
                    output.write(bucket)
                except OSError as error:  # the others are in the middle of sending: go on receiving, then tell them
                    failure = error
                    output.discard()
        _together(folder, group, lambda: output.publish(failure) if output else None)
    finally:
        if output is not None:
            output.discard()


def _together(folder: Path, group: dist.ProcessGroup | None, action: Callable[[], None]) -> None:
    """Run an action of the writer; if it fails, raise the same error on every rank."""
    failure: tuple[type[Exception], str] | None = None
    cause: Exception | None = None
    try:
        action()
    except (OSError, ValueError) as error:
        cause = error
        failure = (ValueError if isinstance(error, ValueError) else OSError, str(error))
    failure = next((told for told in gather(failure, group) if told is not None), None)
    if failure is not None:
        raise failure[0](f"export to {folder} failed: {failure[1]}") from cause


def _stranger(folder: Path) -> str | None:
    """What in an existing folder is not part of an export, so that nothing else is ever replaced by one."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return "not a folder"
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if names and "config.json" not in names:
        return "it has no config.json"
    known = ("config.json", INDEX, "*.safetensors", *COMPANIONS)
    return next((name for name in names if not any(fnmatch(name, pattern) for pattern in known)), None)


class _Folder:
    """The folder under construction, on the writing rank."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, shard_bytes: int):
        self.final, self.shapes, self.dtype = folder, shapes, dtype
        self.partial = folder.with_name(f".{folder.name}.partial")
        self.old = folder.with_name(f".{folder.name}.old")
        self.shards = _split(shapes, dtype.itemsize, shard_bytes)
        self.files: dict[str, tuple[int, int]] = {}  # tensor -> open file, byte at which the tensor starts
        self.missing = sum(volume(whole(shape)) for shape in shapes.values()) * dtype.itemsize

    def prepare(self, reference: Path) -> None:
        """Create the folder with everything but the weights."""
        if not (reference / "config.json").is_file():
            raise ValueError(f"reference folder has no config.json: {reference}")
        if (stranger := _stranger(self.final)) is not None:
            raise ValueError(f"{self.final} is there and is no exported model ({stranger}); it is left as it is")
        if self.old.exists() and not self.final.exists():  # killed between the two renames of `publish`
            self.old.rename(self.final)
        for stale in (self.partial, self.old):
            if stale.exists():
                shutil.rmtree(stale)
        self.partial.mkdir(parents=True)
        (self.partial / "config.json").write_text(json.dumps(self._config(reference), indent=2) + "\n")
        for pattern in COMPANIONS:
            for path in sorted(reference.glob(pattern)):
                if path.is_dir():
                    shutil.copytree(path, self.partial / path.name, dirs_exist_ok=True)
                else:
                    shutil.copyfile(path, self.partial / path.name)
        for name, tensors in self.shards.items():
            self._open(name, tensors)
        if len(self.shards) > 1:
            total = {"total_size": self.missing}
            weight_map = {tensor: name for name, tensors in self.shards.items() for tensor in tensors}
            (self.partial / INDEX).write_text(
                json.dumps({"metadata": total, "weight_map": weight_map}, indent=2) + "\n"
            )

    def _config(self, reference: Path) -> dict[str, Any]:
        config = json.loads((reference / "config.json").read_text())
        for key in {"dtype", "torch_dtype"} & set(config) or {"torch_dtype"}:  # both names are in use
            config[key] = str(self.dtype).removeprefix("torch.")
        if VALUE_HEAD in self.shapes:
            config["architectures"] = [
                name.replace("ForCausalLM", "ForSequenceClassification") for name in config.get("architectures") or []
            ]
            config["id2label"], config["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}  # one label: a scalar
        return config

    def _open(self, name: str, tensors: list[str]) -> None:
        """Write the header of one safetensors file: 8 bytes of length, then JSON with the place of every tensor."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        places, at = {}, 0
        for tensor in tensors:
            places[tensor] = at
            stop = at + volume(whole(self.shapes[tensor])) * self.dtype.itemsize
            header[tensor] = {
                "dtype": TYPE_NAMES[self.dtype], "shape": list(self.shapes[tensor]), "data_offsets": [at, stop]
            }  # fmt: skip
            at = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = os.open(self.partial / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self.files.update({tensor: (file, 8 + len(text) + place) for tensor, place in places.items()})
        _write_at(file, 0, len(text).to_bytes(8, "little") + text)

    def write(self, bucket: Bucket) -> None:
        """Write the rows that a bucket holds: runs of whole rows of each tensor, in one or more parts."""
        parts: dict[str, list[tuple[Piece, torch.Tensor]]] = {}
        for piece, values in bucket.tensors():
            parts.setdefault(piece.name, []).append((piece, values))
        for name, of_tensor in parts.items():
            first = min(piece.index[0][0] for piece, _ in of_tensor)
            last = max(piece.index[0][1] for piece, _ in of_tensor)
            rows = of_tensor[0][1]
            if len(of_tensor) > 1:
                rows = torch.empty((last - first, *self.shapes[name][1:]), dtype=self.dtype)
                for piece, values in of_tensor:
                    rows[tuple(slice(lo, hi) for lo, hi in _from_row(piece, first))] = values
            file, start = self.files[name]
            row_bytes = volume(whole(self.shapes[name][1:])) * self.dtype.itemsize
            assert rows.numel() * self.dtype.itemsize == (last - first) * row_bytes, f"{name}: rows come whole"
            data = rows.cpu().reshape(-1).view(torch.uint8).numpy()
            _write_at(file, start + first * row_bytes, memoryview(data))  # type: ignore[arg-type]
            self.missing -= data.nbytes

    def publish(self, failure: Exception | None) -> None:
        """Put the finished folder in its place."""
        if failure is not None:
            raise failure
        assert self.missing == 0, f"export lacks {self.missing} bytes"
        self._close(sync=True)
        if self.final.exists() and _exchange(self.partial, self.final):
            self.partial.rename(self.old)
        else:
            if self.final.exists():
                self.final.rename(self.old)
            self.partial.rename(self.final)
        shutil.rmtree(self.old, ignore_errors=True)

    def discard(self) -> None:
        """Remove what is unfinished; nothing to do after `publish`."""
        self._close(sync=False)
        shutil.rmtree(self.partial, ignore_errors=True)

    def _close(self, sync: bool) -> None:
        for file in {file for file, _ in self.files.values()}:
            if sync:
                os.fsync(file)
            os.close(file)
        self.files = {}


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, so that at no time there is none; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux with glibc 2.28 or later
    at_fdcwd, exchange = -100, 2
    return rename is not None and rename(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), exchange) == 0


def _from_row(piece: Piece, first: int) -> tuple[tuple[int, int], ...]:
    (lo, hi), rest = piece.index[0], piece.index[1:]
    return ((lo - first, hi - first), *rest)


def _split(shapes: Mapping[str, tuple[int, ...]], itemsize: int, shard_bytes: int) -> dict[str, list[str]]:
    """Tensors by file, in order; a file closes before it would exceed ``shard_bytes``."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        nbytes = volume(whole(shape)) * itemsize
        if groups[-1] and used + nbytes > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def _write_at(file: int, offset: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
