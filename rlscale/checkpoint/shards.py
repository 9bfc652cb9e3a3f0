"""Tensors of a checkpoint: each rank's file holds slices of canonical tensors, and the files together are a layout.

What is saved is a set of *states*, e.g. ``actor/exp_avg``: a `Layout` over canonical (Hugging Face) tensors and this
rank's buffers. Of a slice that several ranks hold one writes it, or each a part. Read as a layout whose ranks are
files, a checkpoint serves any other layout: a reader maps just the bytes of the slices it wants.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlscale.checkpoint.store import CHUNK, Damaged, FileRecord, Manifest, write_file
from rlscale.reshard.layout import Box, Layout, Piece, divide, intersect, subtract, volume, whole
from rlscale.reshard.safetensors_file import TYPES, make_header, raw_bytes, read_header
from rlscale.reshard.transport import region

LAYOUT = "layout.json"
SHARE_ELEMENTS = 2**16  # slices held by several ranks are divided among them from this size on

State = tuple[Layout, Mapping[str, Tensor]]  # who holds what, and this rank's buffers by the layout's keys


def file_of(rank: int) -> str:
    """Name of the tensors' file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


# Writing ------------------------------------------------------------------------------------------


def share_out(layout: Layout, load: dict[int, int] | None = None) -> list[Piece]:
    """Disjoint pieces that cover every tensor once: what each rank writes of what it holds.

    Larger slices come first, and each goes to the one of its holders with the fewest elements so far; one that is large
    and has several holders is divided among them. A pure function: all ranks compute the same.

    Args:
        load: elements that each rank writes already; updated, so that several layouts even out together.
    """
    load = {} if load is None else load
    out: list[Piece] = []
    for box, holders in sorted(_disjoint(layout), key=lambda entry: -volume(entry[0])):
        ranks = list({p.rank: p for p in reversed(holders)}.values())
        parts = divide(box, len(ranks)) if volume(box) >= SHARE_ELEMENTS else [box]
        for part in parts:
            writer = min(ranks, key=lambda p: (load.get(p.rank, 0), p.rank))
            load[writer.rank] = load.get(writer.rank, 0) + volume(part)
            out.append(writer.cut(part))
    return out


def _disjoint(layout: Layout) -> Iterator[tuple[Box, list[Piece]]]:
    """The slices of every tensor with their holders, cut so that none overlaps another."""
    for name, boxes in layout.boxes.items():
        if sum(map(volume, boxes)) == volume(whole(layout.shapes[name])):  # a layout covers all, so none overlap
            yield from boxes.items()
            continue
        taken: list[Box] = []
        for box, holders in boxes.items():
            for part in subtract([box], taken):
                yield part, holders
            taken.append(box)


def collect(states: Mapping[str, State], rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's share of the states: tensors by their names in its file, and the whole layout for `LAYOUT` (on every
    rank). No copies: the tensors are views of the live buffers."""
    load: dict[int, int] = {}
    tensors: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    shared: dict[int, list[Piece]] = {}  # states of one model have one layout
    for state, (layout, buffers) in sorted(states.items()):
        if id(layout) not in shared:
            shared[id(layout)] = share_out(layout, load)
        pieces = shared[id(layout)]
        slices = [[piece.name, piece.rank, piece.index] for piece in pieces]
        described[state] = {"shapes": layout.shapes, "slices": slices}
        for piece in pieces:
            if piece.rank == rank:
                tensors[_key(state, piece.name, piece.index)] = region(buffers[piece.key], piece)
    return tensors, described


def _key(state: str, name: str, index: Box) -> str:
    return f"{state}/{name}[{','.join(f'{lo}:{hi}' for lo, hi in index)}]"


def snapshot(tensors: Mapping[str, Tensor], memory: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    """Copies of the tensors in one block of host memory, and that block for the next time (uint8, pinned for CUDA)."""
    places, size = {}, 0
    for name, tensor in tensors.items():
        places[name] = size
        size += -(-tensor.numel() * tensor.element_size() // 64) * 64
    if memory is None or memory.numel() < size:
        on_device = any(tensor.is_cuda for tensor in tensors.values())
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=on_device)
    copies = {}
    for name, tensor in tensors.items():
        block = memory[places[name] : places[name] + tensor.numel() * tensor.element_size()]
        copies[name] = block.view(tensor.dtype).view(tensor.shape)
        copies[name].copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies, memory


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write a safetensors file and flush it to the disk; at most two chunks are held besides the tensors."""
    head, _ = make_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, align=64)
    return write_file(path, chain([head], *map(_chunks, tensors.values())))


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order; what is not contiguous or not on the host is copied piece by piece."""
    if tensor.is_contiguous() and not tensor.is_cuda:
        yield raw_bytes(tensor)
        return
    row = max(1, tensor[0].numel() * tensor.element_size())
    step = max(1, CHUNK // row)
    for lo in range(0, tensor.shape[0], step):
        yield raw_bytes(tensor[lo : lo + step].cpu().contiguous())


# Reading ------------------------------------------------------------------------------------------


class Shards:
    """The tensors of a checkpoint. Files are opened when something of them is asked for, and then stay mapped.

    Attributes:
        states: shapes and slices of all that was saved, by name.

    Raises:
        Damaged: from every method, where a file does not hold what the layout says.
    """

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self.states: dict[str, Any] = manifest.json(LAYOUT)
        self._layouts: dict[str, Layout] = {}
        self._files: dict[int, dict[str, Tensor]] = {}

    def layout(self, state: str) -> Layout:
        """The slices of a state; ranks are files, keys are the names of tensors in them."""
        if state not in self._layouts:
            pieces = []
            for name, rank, index in self.states[state]["slices"]:
                box = tuple((lo, hi) for lo, hi in index)
                pieces.append(Piece(name, rank, box, _key(state, name, box), tuple((0, hi - lo) for lo, hi in box)))
            self._layouts[state] = Layout(self.states[state]["shapes"], pieces)
        return self._layouts[state]

    def tensors(self, rank: int) -> dict[str, Tensor]:
        """All tensors of one file, mapped and not read; writing into them changes memory only."""
        if rank not in self._files:
            self._files[rank] = _mapped(self.manifest.path / file_of(rank))
        return self._files[rank]

    def read(self, state: str, wanted: Iterable[Piece], into: Mapping[str, Tensor]) -> int:
        """Fill the wanted pieces of local buffers, converting to their dtypes; returns the bytes that were read.

        Raises:
            ValueError: a tensor that was not saved.
        """
        source, read = self.layout(state), 0
        for piece in wanted:
            if piece.name not in source.shapes:
                raise ValueError(f"{self.manifest.path}: {state} of tensor {piece.name} is not in this checkpoint")
            for box, [held, *_] in source.boxes[piece.name].items():
                common = intersect(box, piece.index)
                if common is not None:
                    values = region(self._tensor(held), held.cut(common))
                    region(into[piece.key], piece.cut(common)).copy_(values)
                    read += values.numel() * values.element_size()
        return read

    def _tensor(self, piece: Piece) -> Tensor:
        tensor = self.tensors(piece.rank).get(piece.key)
        if tensor is None or tuple(tensor.shape) != piece.shape:
            raise Damaged(f"{self.manifest.path / file_of(piece.rank)}: lacks {piece.key} of shape {list(piece.shape)}")
        return tensor


def _mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file as views of its mapping."""
    try:
        entries, data = read_header(path)
        with open(path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise Damaged(str(error)) from error
    out = {}
    for name, (kind, shape, start, stop) in entries.items():
        try:
            count = (stop - start) // TYPES[kind].itemsize
            out[name] = torch.frombuffer(mapping, dtype=TYPES[kind], count=count, offset=data + start).view(shape)
        except (ValueError, KeyError, RuntimeError) as error:
            raise Damaged(f"{path}: tensor {name} of type {kind} cannot be read ({error})") from error
    return out
