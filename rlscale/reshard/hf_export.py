"""The Hugging Face folder as a destination of resharding: any layout is written to one.

Every tensor streams to one rank, a bounded bucket at a time, into a folder beside the wanted one, which takes its place
once it is complete: an export that fails or is killed leaves the former one as it was.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlscale.cluster.collective import on_first
from rlscale.reshard.canonical import VALUE_HEAD, hf_layout
from rlscale.reshard.hf_load import INDEX, SINGLE
from rlscale.reshard.layout import Box, Layout
from rlscale.reshard.plan import DEFAULT_BUCKET_BYTES, plan
from rlscale.reshard.safetensors_file import make_header, raw_bytes
from rlscale.reshard.transport import Bucket, Transfer, default_device

SHARD_BYTES = 5 * 10**9
COMPANIONS = (
    "generation_config.json", "tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "additional_chat_templates",
)  # fmt: skip


def export_hf(
    folder: str | Path, layout: Layout, sources: Mapping[str, torch.Tensor], *, reference_folder: str | Path,
    dtype: torch.dtype = torch.bfloat16, group: dist.ProcessGroup | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES, shard_bytes: int = SHARD_BYTES,
) -> None:  # fmt: skip
    """Write a model as a Hugging Face folder that transformers and vLLM open; collective over ``group``.

    Global rank 0 writes; it holds at most two buckets besides its own shards.

    Args:
        folder: replaced as a whole once the export is complete.
        layout: of the model; ``sources`` are this rank's local buffers by its keys.
        reference_folder: the folder the model came from: its configuration (with the new dtype), tokenizer, chat
            template and generation configuration are copied.
        shard_bytes: a larger model is written as several files and an index.

    Raises:
        ValueError, OSError: on every rank, naming the folder and the reason (no reference, disk full, ...).
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    copies = plan(layout, hf_layout(layout.shapes), dtype=dtype, bucket_bytes=bucket_bytes)
    output = _Folder(Path(folder), layout.shapes, dtype, shard_bytes)
    # rank 0 acts; if it fails, the same error is raised on every rank
    together = partial(
        on_first, group=group, catch=(OSError, ValueError),
        describe=lambda error: (ValueError if isinstance(error, ValueError) else OSError, str(error)),
        raised=lambda told: told[0](f"export to {folder} failed: {told[1]}"),
    )  # fmt: skip
    try:
        together(lambda: output.prepare(Path(reference_folder)))
        device = next((tensor.device for tensor in sources.values()), default_device(group))
        buffer = torch.empty(copies.buffer_bytes(rank), dtype=torch.uint8, device=device)
        failure: Exception | None = None
        for bucket in Transfer(copies, group=group, buffers=[buffer]).buckets(sources):
            if rank == 0 and failure is None:
                try:
                    output.write(bucket)
                except OSError as error:  # the other ranks are sending: keep receiving, then report the error
                    failure = error
                    output.discard()
        together(lambda: output.publish(failure))
    finally:
        if rank == 0:
            output.discard()


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
        self.missing = sum(map(math.prod, shapes.values())) * dtype.itemsize

    def prepare(self, reference: Path) -> None:
        """Create the folder with everything but the weights."""
        if not (reference / "config.json").is_file():
            raise ValueError(f"reference folder has no config.json: {reference}")
        if (stranger := _stranger(self.final)) is not None:
            raise ValueError(f"{self.final} exists and is not an exported model ({stranger}); it was not replaced")
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
        """Create one safetensors file with its header."""
        head, places = make_header({tensor: (self.dtype, self.shapes[tensor]) for tensor in tensors}, align=8)
        file = os.open(self.partial / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self.files.update({tensor: (file, place) for tensor, place in places.items()})
        _write_at(file, 0, head)

    def write(self, bucket: Bucket) -> None:
        """Write the rows that a bucket holds: runs of whole rows of each tensor, in one or more parts."""
        parts: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for piece, values in bucket.tensors():
            parts.setdefault(piece.name, []).append((piece.index, values))
        for name, of_tensor in parts.items():
            first, last = min(index[0][0] for index, _ in of_tensor), max(index[0][1] for index, _ in of_tensor)
            rest, rows = self.shapes[name][1:], of_tensor[0][1]
            if len(of_tensor) > 1:
                rows = torch.empty((last - first, *rest), dtype=self.dtype)
                for ((lo, hi), *others), values in of_tensor:
                    rows[tuple(slice(*bounds) for bounds in ((lo - first, hi - first), *others))] = values
            assert rows.shape == (last - first, *rest), f"{name}: rows come whole"
            data = raw_bytes(rows.cpu())
            file, start = self.files[name]
            _write_at(file, start + first * math.prod(rest) * self.dtype.itemsize, data)
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


def _split(shapes: Mapping[str, tuple[int, ...]], itemsize: int, shard_bytes: int) -> dict[str, list[str]]:
    """Tensors by file, in order; a file closes before it would exceed ``shard_bytes``."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * itemsize
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
