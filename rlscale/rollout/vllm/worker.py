"""The engine's end of a weight update. This module runs inside vLLM's workers, which import it by name.

vLLM fuses q, k, v and gate, up into one parameter each, and on CPU it packs a linear layer's weight into the format of
its kernels and drops the original. A worker is handed nothing but the slices it needs: it writes each into its place in
the fused parameter, and packs a module as soon as the module is complete. What goes where follows from the live
modules.
"""

from __future__ import annotations

import base64
import glob
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from rlscale.cluster.process import shorten
from rlscale.reshard.layout import Box, Piece, volume, whole
from rlscale.reshard.transport import region
from rlscale.reshard.verify import MASK, position_checksum


@dataclass(frozen=True)
class Target:
    """``index`` of canonical tensor ``name`` (of ``shape``) lies at ``at`` of this worker's parameter ``key``."""

    name: str
    shape: tuple[int, ...]
    index: Box
    key: str
    at: Box
    dtype: torch.dtype

    @property
    def module(self) -> str:
        return self.key.rpartition(".")[0]

    def describe(self) -> dict[str, Any]:
        """Plain types, for the way to the trainer."""
        return vars(self) | {"dtype": str(self.dtype)[6:]}


def model_format(module: torch.nn.Module, parameter: str) -> torch.Tensor:
    """Shape and dtype of a parameter as the model defines it, also where packing has emptied the live one."""
    recorded = get_layerwise_info(module).restore_metadata[0].get(parameter)
    live = module._parameters[parameter]
    assert live is not None
    return live if recorded is None else recorded


def targets(model: torch.nn.Module) -> list[Target]:
    """Every slice that this worker needs, in the order of its modules; the tied copy of an embedding is none.

    Raises:
        ValueError: a quantized model, whose parameters are no slices of the checkpoint's.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    return [
        target
        for path, module in model.named_modules()
        for parameter, live in module._parameters.items()
        if live is not None and not is_tied_head(model, module)
        for target in _targets_of(packed, path, module, parameter)
        if all(lo < hi for lo, hi in target.index)  # the last of many ranks may hold nothing but vocabulary padding
    ]


def is_tied_head(model: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Whether a module is an output head that shares the weight of the embedding."""
    return isinstance(module, ParallelLMHead) and any(
        isinstance(other, VocabParallelEmbedding) and other is not module and other.weight is module.weight
        for other in model.modules()
    )


def _targets_of(packed: dict[str, list[str]], path: str, module: Any, parameter: str) -> Iterator[Target]:
    form, key = model_format(module, parameter), f"{path}.{parameter}"
    shape, rest = tuple(form.shape), tuple(form.shape[1:])  # only a row-parallel weight is split in the rest
    if not form.dtype.is_floating_point:
        raise ValueError(f"{key} is {form.dtype}: a quantized engine cannot take the trainer's weights")
    if isinstance(module, RoutedExperts):
        yield from _targets_of_experts(path, module, parameter, form)
        return
    base, _, leaf = path.rpartition(".")

    def rows(name: str, total: int, start: int, count: int, at: int) -> Target:
        full = f"{base}.{name}.{parameter}" if base else f"{name}.{parameter}"
        index, place = ((start, start + count), *whole(rest)), ((at, at + count), *whole(rest))
        return Target(full, (total, *rest), index, key, place, form.dtype)

    if isinstance(module, QKVParallelLinear):
        q, k, v = packed.get(leaf, ["q_proj", "k_proj", "v_proj"])
        size, v_size, kv = module.head_size, module.v_head_size, module.num_kv_heads
        heads, first_kv = module.num_heads, module.tp_rank // module.num_kv_head_replicas * kv
        yield rows(q, module.total_num_heads * size, module.tp_rank * heads * size, heads * size, 0)
        yield rows(k, module.total_num_kv_heads * size, first_kv * size, kv * size, heads * size)
        yield rows(v, module.total_num_kv_heads * v_size, first_kv * v_size, kv * v_size, (heads + kv) * size)
    elif isinstance(module, MergedColumnParallelLinear):
        at = 0
        for name, total in zip(packed[leaf], module.output_sizes, strict=True):
            count = total // module.tp_size
            yield rows(name, total, module.tp_rank * count, count, at)
            at += count
    elif isinstance(module, ColumnParallelLinear):
        count = module.output_size_per_partition
        yield rows(leaf, module.output_size, module.tp_rank * count, count, 0)
    elif isinstance(module, VocabParallelEmbedding):
        part = module.shard_indices
        yield rows(leaf, module.org_vocab_size, part.org_vocab_start_index, part.num_org_elements, 0)
    elif isinstance(module, RowParallelLinear) and len(shape) == 2:
        count = module.input_size_per_partition
        start, out = module.tp_rank * count, (0, shape[0])
        index = (out, (start, start + count))
        yield Target(key, (shape[0], module.input_size), index, key, (out, (0, count)), form.dtype)
    else:  # norms, biases of row-parallel layers: whole on every worker
        yield Target(key, shape, whole(shape), key, whole(shape), form.dtype)


def _targets_of_experts(path: str, module: Any, parameter: str, form: torch.Tensor) -> Iterator[Target]:
    """Slices of stacked experts: ``w13_weight`` is [experts, gate; up, hidden], ``w2_weight`` [experts, hidden, ffn].

    Some kernels want sizes rounded up; what lies beyond the real ones stays zero.

    Raises:
        ValueError: another parameter than these two.
    """
    config = module.moe_config
    parallel, hidden, width = config.moe_parallel_config, config.hidden_dim_unpadded, config.intermediate_size
    count, key = width // parallel.tp_size, f"{path}.{parameter}"
    part, full = (parallel.tp_rank * count, (parallel.tp_rank + 1) * count), (0, hidden)
    if parameter == "w13_weight":
        half = form.shape[1] // 2
        parts = [
            (projection, (width, hidden), (part, full), ((start, start + count), full))
            for projection, start in ((module.ckpt_gate_proj_name, 0), (module.ckpt_up_proj_name, half))
        ]
    elif parameter == "w2_weight":
        parts = [(module.ckpt_down_proj_name, (hidden, width), (full, part), (full, (0, count)))]
    else:
        raise ValueError(f"{key}: a parameter of experts that the trainer does not have")
    of_all, prefix = range(module.global_num_experts), path.removesuffix(".routed_experts")
    places = of_all if module._expert_map is None else module._expert_map.tolist()
    for number, place in zip(of_all, places, strict=True):
        if place >= 0:  # otherwise another worker's
            for projection, shape, index, at in parts:
                name = f"{prefix}.{number}.{projection}.weight"
                yield Target(name, shape, index, key, ((place, place + 1), *at), form.dtype)


class ShardWriter:
    """Takes one whole update, slice by slice, and knows at its end whether anything was missing.

    The trainer calls its public methods on every worker (`WorkerExtension.rlscale_call`).
    """

    def __init__(self, model: torch.nn.Module, rank: int, device: torch.device):
        self.model, self.rank, self.device = model, rank, device
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.tied = [m for m in model.modules() if is_tied_head(model, m)]
        self.by_module: dict[str, list[Target]] = {}
        for target in targets(model):
            self.by_module.setdefault(target.module, []).append(target)

    def targets(self) -> list[dict[str, Any]]:
        """What this worker needs of the model."""
        return [target.describe() for of_module in self.by_module.values() for target in of_module]

    def connect(self, mailboxes: list[dict[str, Any]]) -> None:
        """Map the buckets that the trainer fills for this worker (`rlscale.rollout.weight_sync`)."""
        self.buffers = [open_memory(memory, self.device) for memory in mailboxes[self.rank]["buffers"]]
        self.rounds: list[list[Any]] = mailboxes[self.rank]["rounds"]

    def begin_update(self, verify: bool) -> None:
        """With ``verify``, what every module holds when it is complete is summed up before vLLM packs it.

        `checksums` are those of `rlscale.reshard.verify`, read from the places where the model expects the tensors.
        They prove everything but the packing itself, which is vLLM's and cannot be read back.
        """
        self.verify = verify
        self.sums: dict[str, int] = {}
        self.staged: dict[str, torch.Tensor] = {}  # what packed modules get, by key
        self.missing = {  # elements to come
            module: {(target.key, target.name): volume(target.index) for target in of_module}
            for module, of_module in self.by_module.items()
        }

    def take(self, number: int) -> None:
        """Copy what the trainer has put into the bucket of this number."""
        buffer = self.buffers[number % len(self.buffers)]
        for key, name, at, shape, offset, nbytes, dtype in self.rounds[number]:
            values = buffer[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)
            self._write(key, name, tuple(slice(lo, hi) for lo, hi in at), values)
        if self.device.type != "cpu":  # the trainer fills the bucket anew: it must have been read, not queued
            torch.accelerator.synchronize()

    def finish_update(self) -> None:
        """End the update. Raises RuntimeError, naming them, if tensors are missing or incomplete."""
        lost = sorted({name for entries in self.missing.values() for (_, name), n in entries.items() if n})
        self.staged.clear()
        if lost:
            raise RuntimeError(f"weight update is incomplete: {len(lost)} tensor(s) missing: {shorten(lost)}")

    def checksums(self) -> dict[str, int]:
        """Checksums of this worker's part of every tensor after an update that was summed up."""
        return self.sums

    @torch.no_grad()
    def _write(self, key: str, name: str, at: tuple[slice, ...], values: torch.Tensor) -> None:
        """Put ``values`` at ``at`` of parameter ``key``; its module is packed when nothing of it is missing any more.

        Raises:
            RuntimeError: more elements of a tensor than it has.
        """
        path = key.rpartition(".")[0]
        self._destination(key)[at].copy_(values)
        to_come = self.missing[path]
        to_come[key, name] -= values.numel()
        if to_come[key, name] < 0:
            raise RuntimeError(f"weight update: more elements of {name} arrived than it has")
        if not any(to_come.values()):
            self._complete(path)

    def _destination(self, key: str) -> torch.Tensor:
        path, _, parameter = key.rpartition(".")
        module = self.modules[path]
        live, form = module._parameters[parameter].data, model_format(module, parameter)
        if live.shape == form.shape:
            return live
        if key not in self.staged:  # packed: the live parameter is empty
            self.staged[key] = torch.zeros(form.shape, dtype=form.dtype)
        return self.staged[key]

    def _complete(self, path: str) -> None:
        module = self.modules[path]
        for target in self.by_module[path] if self.verify else ():
            values = region(self._destination(target.key), Piece(target.name, 0, target.index, target.key, target.at))
            total = self.sums.get(target.name, 0) + position_checksum(values, target.index)
            self.sums[target.name] = total & MASK
        for key in {target.key for target in self.by_module[path]} & self.staged.keys():
            parameter = torch.nn.Parameter(self.staged.pop(key), requires_grad=False)
            setattr(module, key.rpartition(".")[2], parameter)
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
            heads: list[Any] = [head for head in self.tied if head.weight is module.weight]
            if module is getattr(self.model, "lm_head", None):
                heads.append(module)
            for head in heads:  # shares the weight, but has a packed copy of its own
                _pack(head)
        else:
            _pack(module)


def _pack(module: Any) -> None:
    method = getattr(module, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        method.process_weights_after_loading(module)
    if isinstance(module, RoutedExperts) and current_platform.is_cpu():
        # vLLM packs experts when it makes their kernel, which it does only once
        module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def open_memory(memory: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Map a trainer's bucket (uint8 ``[nbytes]``): a memory file's path, or an exported CUDA allocation."""
    if "path" in memory:
        return torch.from_file(memory["path"], shared=True, size=memory["nbytes"], dtype=torch.uint8)
    rebuild: Callable[..., torch.Tensor]
    rebuild, arguments = pickle.loads(base64.b64decode(memory["cuda"]))
    arguments = list(arguments)
    arguments[6] = device.index or 0  # the same device, in this process's numbering
    return rebuild(*arguments)


class WorkerExtension:
    """Methods that the trainer calls on every worker by name, beside vLLM's own."""

    def rlscale_call(self: Any, method: str, *args: Any) -> tuple[Any, str]:
        """The result of a method of this worker's `ShardWriter`, and what went wrong in it; empty if nothing.

        Nothing raises: vLLM's executor reads the answers of several workers only up to the first error, and would take
        the rest for answers to its next call.
        """
        try:
            with set_current_vllm_config(self.vllm_config):
                if not hasattr(self, "rlscale_writer"):
                    model = self.model_runner.get_model()
                    self.rlscale_writer = ShardWriter(model, self.parallel_config.rank, self.device)
                return getattr(self.rlscale_writer, method)(*args), ""
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"

    def rlscale_unlink_shared_memory(self) -> None:
        """Remove the names of the files through which CPU workers talk: a killed engine would leave them behind."""
        if identity := os.environ.get("VLLM_DIST_IDENT"):
            for path in Path("/dev/shm").glob(f"{glob.escape(identity)}-*"):
                path.unlink(missing_ok=True)


if current_platform.is_cpu():
    from rlscale.rollout.vllm import cpu

    cpu.install()
