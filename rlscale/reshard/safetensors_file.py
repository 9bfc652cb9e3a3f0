"""The safetensors format: 8 bytes with the length of a JSON header, the header, and the tensors in row-major order.

Source: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

TYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}


class TensorEntry(NamedTuple):
    """A tensor of a file: the format's name of its type, its shape, and its bytes from the end of the header on."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, shared with it."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_header(path: Path) -> tuple[dict[str, TensorEntry], int]:
    """The tensors of a file, and the byte at which their data begin.

    Raises:
        ValueError: the header cannot be read, or names bytes that the file does not have.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header: dict[str, Any] = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        tensors = {name: TensorEntry(e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()}
        for name, (_, shape, start, stop) in tensors.items():
            if not all(isinstance(n, int) for n in (*shape, start, stop)) or not 0 <= start <= stop:
                raise ValueError(f"the header puts {name} {list(shape)} at [{start}, {stop}]")
        end = 8 + length + max((entry.stop for entry in tensors.values()), default=0)
        if end > size:
            raise ValueError(f"the header names {end} bytes, the file has {size}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors, it may be truncated ({error})") from None
    return tensors, 8 + length


def make_header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], align: int) -> tuple[bytes, dict[str, int]]:
    """What a file begins with, and the byte at which each tensor starts if they follow in this order.

    Args:
        tensors: type and shape by name.
        align: the length of the JSON is made a multiple of it by spaces.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        stop = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        places[name], at = at, stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % align)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + place for name, place in places.items()}
