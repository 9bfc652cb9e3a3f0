"""The Hugging Face folder as a source of resharding: ranks read only their slices of it."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rlscale.reshard.layout import Box, Piece, volume
from rlscale.reshard.safetensors_file import TYPES, raw_bytes, read_header
from rlscale.reshard.transport import region

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
READ_BYTES = 32 * 2**20  # most that is read (and, where it must be converted, buffered) at a time


def load_pieces(
    folder: str | Path, pieces: Iterable[Piece], dest: Mapping[str, torch.Tensor], *,
    shapes: Mapping[str, tuple[int, ...]], optional: Collection[str] = (),
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

    Returns:
        The optional tensors that the folder lacks.

    Raises:
        ValueError: no such folder or file, a truncated file, a missing tensor, one of another shape or not floating
            point, or one that the architecture doesn't have; before anything is written to the buffers. The message
            names it.
    """
    pieces, folder = list(pieces), Path(folder)
    places = _tensor_files(folder)
    _refuse_unknown(folder, places, shapes)
    absent: set[str] = set()
    wanted: dict[Path, list[Piece]] = {}
    for piece in pieces:
        if piece.key not in dest:
            raise ValueError(f"{folder}: no local buffer {piece.key} for tensor {piece.name}")
        if piece.name in places:
            wanted.setdefault(places[piece.name], []).append(piece)
        elif piece.name in optional:
            absent.add(piece.name)
        else:
            raise ValueError(f"{folder}: tensor {piece.name} is missing")
    files = [(_File(path), of_file) for path, of_file in wanted.items()]
    for file, of_file in files:
        for piece in of_file:
            file.check(piece.name, shapes[piece.name])
    _zero_padding(folder, pieces, dest, absent)
    for file, of_file in files:
        with open(file.path, "rb", buffering=0) as handle:
            for piece in of_file:
                file.read(handle.fileno(), piece, region(dest[piece.key], piece))
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
    return dict.fromkeys(read_header(folder / SINGLE)[0], folder / SINGLE)


class _File:
    """A safetensors file. Raises ValueError where its header cannot be read."""

    def __init__(self, path: Path):
        self.path = path
        self.tensors, self.data = read_header(path)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a tensor is not here, has another shape than expected, or cannot be converted."""
        if name not in self.tensors:  # an index that names the wrong file
            raise ValueError(f"{self.path}: tensor {name} is missing (the index says that it is here)")
        kind, stored, start, stop = self.tensors[name]
        if stored != shape:
            raise ValueError(f"{self.path}: tensor {name} has shape {list(stored)}, expected {list(shape)}")
        if kind not in TYPES:
            raise ValueError(f"{self.path}: tensor {name} has type {kind}, which cannot be converted")
        if stop - start != math.prod(shape) * TYPES[kind].itemsize:
            raise ValueError(f"{self.path}: tensor {name} has {stop - start} bytes, which does not match its shape")

    def read(self, file: int, piece: Piece, target: torch.Tensor) -> None:
        """Fill ``target`` with a slice, in parts of at most `READ_BYTES`."""
        kind, shape, start, _ = self.tensors[piece.name]
        dtype = TYPES[kind]
        straight = target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu"
        row_bytes = volume(piece.index[1:]) * dtype.itemsize
        (lo, hi), rest = piece.index[0], piece.index[1:]
        step = hi - lo if straight else max(1, READ_BYTES // max(1, row_bytes))
        for first in range(lo, hi, step):
            last = min(first + step, hi)
            part = target[first - lo : last - lo]
            values = part if straight else torch.empty(part.shape, dtype=dtype)
            memory = raw_bytes(values)
            at = 0
            for offset, nbytes in _runs(shape, ((first, last), *rest), dtype.itemsize):
                self._read_at(file, self.data + start + offset, memory[at : at + nbytes])
                at += nbytes
            if not straight:
                part.copy_(values)

    def _read_at(self, file: int, offset: int, memory: memoryview) -> None:
        while memory:
            count = os.preadv(file, [memory[:READ_BYTES]], offset)
            if count == 0:
                raise ValueError(f"{self.path}: ends at byte {offset}; the file was truncated while it was read")
            memory, offset = memory[count:], offset + count


def _runs(shape: tuple[int, ...], index: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """Bytes of a slice that lie behind each other, (offset in the tensor, number), in row-major order."""
    # rows (of one or more dimensions) of runs: the last dimensions that the slice takes whole are one run
    split = len(shape)
    while split > 1 and index[split - 1] == (0, shape[split - 1]):
        split -= 1
    strides = [itemsize * math.prod(shape[dim + 1 :]) for dim in range(split)]
    (lo, hi), stride = index[split - 1], strides[-1]
    for place in itertools.product(*(range(*bounds) for bounds in index[: split - 1])):
        base = sum(i * step for i, step in zip(place, strides, strict=False))
        yield base + lo * stride, (hi - lo) * stride


def _refuse_unknown(folder: Path, names: Iterable[str], shapes: Mapping[str, Any]) -> None:
    """A weight left over means another architecture or number of layers; heads and rotary buffers are harmless."""
    for name in sorted(names):
        if name.startswith("model.") and name not in shapes and not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(f"{folder}: tensor {name} does not belong to the architecture of its config.json")


def _zero_padding(folder: Path, pieces: Iterable[Piece], dest: Mapping[str, torch.Tensor], absent: set[str]) -> None:
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
