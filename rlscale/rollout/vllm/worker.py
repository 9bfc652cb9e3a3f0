"""The engine's end of a weight update. This module runs inside vLLM's workers, which import it by name.

vLLM fuses q, k, v and gate, up into one parameter each, and on CPU it packs a linear layer's weight into the format of
its kernels and drops the original. A worker is handed nothing but the slices it needs: it writes each into its place in
the fused parameter, and packs a module as soon as the module is complete. What goes where follows from the live
modules.
"""

from __future__ import annotations

import base64
import contextlib
import glob
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
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

from rlscale.reshard.layout import Piece
from rlscale.reshard.transport import region
from rlscale.reshard.verify import MASK, position_checksum

BACKEND = "rlscale"


@dataclass(frozen=True)
class Target:
    """``index`` of canonical tensor ``name`` (of ``shape``) lies at ``at`` of a module's parameter on this worker."""

    name: str
    shape: tuple[int, ...]
    index: tuple[tuple[int, int], ...]
    module: str
    parameter: str
    at: tuple[tuple[int, int], ...]
    dtype: torch.dtype

    def describe(self) -> dict[str, Any]:
        """Plain types, for the way to the trainer."""
        return {
            "name": self.name, "shape": list(self.shape), "index": [list(x) for x in self.index],
            "key": f"{self.module}.{self.parameter}", "at": [list(x) for x in self.at], "dtype": str(self.dtype)[6:],
        }  # fmt: skip


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
    form = model_format(module, parameter)
    rest = tuple(form.shape[1:])  # dimensions that only a row-parallel weight is split in
    if not form.dtype.is_floating_point:
        raise ValueError(f"{path}.{parameter} is {form.dtype}: a quantized engine cannot take the trainer's weights")
    if isinstance(module, RoutedExperts):
        yield from _targets_of_experts(path, module, parameter, form)
        return
    base, _, leaf = path.rpartition(".")

    def rows(name: str, total: int, start: int, count: int, at: int) -> Target:
        full = f"{base}.{name}.{parameter}" if base else f"{name}.{parameter}"
        tail = tuple((0, n) for n in rest)
        index, here = ((start, start + count), *tail), ((at, at + count), *tail)
        return Target(full, (total, *rest), index, path, parameter, here, form.dtype)

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
        mine = module.shard_indices
        yield rows(leaf, module.org_vocab_size, mine.org_vocab_start_index, mine.num_org_elements, 0)
    elif isinstance(module, RowParallelLinear) and len(form.shape) == 2:
        count = module.input_size_per_partition
        start, out = module.tp_rank * count, (0, form.shape[0])
        shape, index = (form.shape[0], module.input_size), (out, (start, start + count))
        yield Target(f"{path}.{parameter}", shape, index, path, parameter, (out, (0, count)), form.dtype)
    else:  # norms, biases of row-parallel layers: whole on every worker
        box = tuple((0, n) for n in form.shape)
        yield Target(f"{path}.{parameter}", tuple(form.shape), box, path, parameter, box, form.dtype)


def _targets_of_experts(path: str, module: Any, parameter: str, form: torch.Tensor) -> Iterator[Target]:
    """Slices of stacked experts: ``w13_weight`` is [experts, gate; up, hidden], ``w2_weight`` [experts, hidden, ffn].

    Some kernels want sizes rounded up; what lies beyond the real ones stays zero.

    Raises:
        ValueError: another parameter than these two.
    """
    config = module.moe_config
    parallel, hidden, width = config.moe_parallel_config, config.hidden_dim_unpadded, config.intermediate_size
    count = width // parallel.tp_size
    mine, whole = (parallel.tp_rank * count, (parallel.tp_rank + 1) * count), (0, hidden)
    prefix = path.removesuffix(".routed_experts")
    of_all = range(module.global_num_experts)
    places = of_all if module._expert_map is None else module._expert_map.tolist()

    def target(number: int, projection: str, shape: Any, index: Any, at: Any) -> Target:
        name = f"{prefix}.{number}.{projection}.weight"
        return Target(name, shape, index, path, parameter, ((place, place + 1), *at), form.dtype)

    for number, place in zip(of_all, places, strict=True):
        if place < 0:  # another worker's
            continue
        if parameter == "w13_weight":
            half = form.shape[1] // 2
            for projection, start in ((module.ckpt_gate_proj_name, 0), (module.ckpt_up_proj_name, half)):
                at = (start, start + count), whole
                yield target(number, projection, (width, hidden), (mine, whole), at)
        elif parameter == "w2_weight":
            at = whole, (0, count)
            yield target(number, module.ckpt_down_proj_name, (hidden, width), (whole, mine), at)
        else:
            raise ValueError(f"{path}.{parameter}: a parameter of experts that the trainer does not have")


class ShardWriter:
    """Takes one whole update, slice by slice, and knows at its end whether anything was missing.

    With ``verify`` it also sums up what every module holds when it is complete, before vLLM packs it: ``sums`` are the
    checksums (`rlscale.reshard.verify`) of this worker's part of each canonical tensor, read from the places where the
    model expects it. They prove everything but the packing itself, which is vLLM's and cannot be read back.
    """

    verify = False

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.targets = targets(model)
        self.tied = [m for m in model.modules() if is_tied_head(model, m)]
        self.missing: dict[str, dict[tuple[str, str], int]] = {}  # module -> (parameter, tensor) -> elements to come
        self.staged: dict[tuple[str, str], torch.Tensor] = {}
        self.sums: dict[str, int] = {}
        self.by_module: dict[str, list[Target]] = {}
        for target in self.targets:
            self.by_module.setdefault(target.module, []).append(target)

    def begin(self) -> None:
        self.missing, self.staged, self.sums = {}, {}, {}
        for target in self.targets:
            size = 1
            for lo, hi in target.index:
                size *= hi - lo
            self.missing.setdefault(target.module, {})[target.parameter, target.name] = size

    @torch.no_grad()
    def write(self, key: str, name: str, at: tuple[slice, ...], values: torch.Tensor) -> None:
        """Put ``values`` at ``at`` of parameter ``key``; its module is packed when nothing of it is missing any more.

        Raises:
            RuntimeError: more elements of a tensor than it has.
        """
        path, _, parameter = key.rpartition(".")
        self._destination(path, parameter)[at].copy_(values)
        open_here = self.missing[path]
        open_here[parameter, name] -= values.numel()
        if open_here[parameter, name] < 0:
            raise RuntimeError(f"weight update: more elements of {name} arrived than it has")
        if not any(open_here.values()):
            self._complete(path)

    def finish(self) -> None:
        """End the update. Raises RuntimeError, naming them, if tensors are missing or incomplete."""
        lost = sorted({name for entries in self.missing.values() for (_, name), n in entries.items() if n})
        self.staged.clear()
        if lost:
            names = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
            raise RuntimeError(f"weight update is incomplete: {len(lost)} tensor(s) missing: {names}")

    def _destination(self, path: str, parameter: str) -> torch.Tensor:
        module = self.modules[path]
        live, form = module._parameters[parameter].data, model_format(module, parameter)
        if live.shape == form.shape:
            return live
        key = (path, parameter)  # packed: the live parameter is empty
        if key not in self.staged:
            self.staged[key] = torch.zeros(form.shape, dtype=form.dtype)
        return self.staged[key]

    def _sum_up(self, path: str) -> None:
        for target in self.by_module[path]:
            piece = Piece(target.name, 0, target.index, target.parameter, target.at)
            values = region(self._destination(path, target.parameter), piece)
            total = self.sums.get(target.name, 0) + position_checksum(values, target.index)
            self.sums[target.name] = total & MASK

    def _complete(self, path: str) -> None:
        if self.verify:
            self._sum_up(path)
        module = self.modules[path]
        for key in [key for key in self.staged if key[0] == path]:
            setattr(module, key[1], torch.nn.Parameter(self.staged.pop(key), requires_grad=False))
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


@dataclass
class Mailbox(WeightTransferInitInfo):
    """Where each worker's buckets lie and what will be in them (`rlscale.rollout.weight_sync.Buckets.mailbox`)."""

    workers: list[dict[str, Any]]


@dataclass
class Round(WeightTransferUpdateInfo):
    """The bucket of this number has been filled."""

    number: int


class ShardTransfer(WeightTransferEngine[Mailbox, Round]):
    """vLLM's weight-transfer backend ``rlscale``.

    Nothing raises here: vLLM's executor reads the answers of several workers only up to the first error, and would take
    the rest for answers to its next call. What goes wrong is kept in ``problem``, which the trainer asks for after each
    update.
    """

    init_info_cls = Mailbox
    update_info_cls = Round
    supports_draft_weight_update = False

    writer: ShardWriter | None = None
    problem = ""

    def init_transfer_engine(self, init_info: Mailbox) -> None:
        self.problem = ""
        with self._reporting():
            mine = init_info.workers[self.parallel_config.rank]
            self.buffers = [open_memory(memory, self.device) for memory in mine["buffers"]]
            self.rounds = mine["rounds"]
            self.writer = self.writer or ShardWriter(self.model)

    def start_weight_update(self) -> None:
        self.problem = ""
        with self._reporting():
            assert self.writer is not None, "init_weight_transfer_engine comes first"
            self.writer.begin()

    def receive_weights(self, update_info: Round) -> None:
        if self.problem:
            return
        with self._reporting():
            assert self.writer is not None
            buffer = self.buffers[update_info.number % len(self.buffers)]
            for key, name, at, shape, offset, nbytes, dtype in self.rounds[update_info.number]:
                values = buffer[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)
                self.writer.write(key, name, tuple(slice(lo, hi) for lo, hi in at), values)

    def finish_weight_update(self) -> None:
        if self.problem:
            return
        with self._reporting():
            assert self.writer is not None
            self.writer.finish()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    def shutdown(self) -> None:
        self.buffers = []


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

    def rlscale_targets(self) -> list[dict[str, Any]]:
        """What this worker needs of the model."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return [target.describe() for target in targets(model)]

    def rlscale_verify(self, verify: bool) -> None:
        """Sum up the next updates, or not."""
        self.weight_transfer_engine.writer.verify = verify  # type: ignore[attr-defined]

    def rlscale_checksums(self) -> dict[str, int]:
        """Checksums of this worker's part of every tensor after an update that was summed up."""
        return dict(self.weight_transfer_engine.writer.sums)  # type: ignore[attr-defined]

    def rlscale_unlink_shared_memory(self) -> None:
        """Remove the names of the files through which CPU workers talk: a killed engine would leave them behind."""
        if identity := os.environ.get("VLLM_DIST_IDENT"):
            for path in Path("/dev/shm").glob(f"{glob.escape(identity)}-*"):
                path.unlink(missing_ok=True)

    def rlscale_update_problem(self) -> str:
        """What went wrong in the last update (or in connecting); empty if nothing."""
        return self.weight_transfer_engine.problem  # type: ignore[attr-defined]


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, ShardTransfer)
if current_platform.is_cpu():
    from rlscale.rollout.vllm import cpu

    cpu.install()
