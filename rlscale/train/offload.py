"""What leaves the device between phases: a model's working parameters, its optimizer state, its gradients.

vLLM and the models of a run take turns on the same devices. What moves is *storages*, not tensors: the bytes go to the
host and the storage is resized to nothing, so that every view (DeepSpeed's flat buffers and the parameters inside
them) stays the object it was, and is valid again when the bytes are back. On a CPU the same code moves them to another
place in the same memory; that is useful only to test it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlscale.cluster.device import Device
from rlscale.train import zero

if TYPE_CHECKING:
    from rlscale.train.engine import Engine

KINDS = ("parameters", "optimizer")


class HostCopies:
    """Storages that are away from the device, by the name under which they left.

    Host buffers are pinned for CUDA, and kept for the next time, because pinning is slow.
    """

    def __init__(self, device: Device):
        self.device = device
        self.away: dict[str, list[tuple[torch.UntypedStorage, Tensor]]] = {}
        self._pinned: dict[int, Tensor] = {}  # by the identity of the storage

    def offload(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Move the storages of the tensors to the host; their device bytes are 0 until `reload`. Nothing happens if
        this kind is away already.
        """
        if kind in self.away:
            return
        moved = [(storage, self._host(storage)) for storage in storages(tensors)]
        for storage, host in moved:
            host.copy_(_bytes(storage), non_blocking=True)
        self.device.synchronize()
        for storage, _ in moved:
            storage.resize_(0)
        self.device.empty_cache()
        self.away[kind] = moved

    def reload(self, kind: str) -> None:
        """Bring the storages of this kind back to the device, if they are away."""
        for storage, host in self.away.pop(kind, []):
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)

    def _host(self, storage: torch.UntypedStorage) -> Tensor:
        """[bytes] uint8 for the contents of a storage."""
        if self.device.kind == "cpu":
            return torch.empty(storage.nbytes(), dtype=torch.uint8)
        key = storage._cdata
        if key not in self._pinned or self._pinned[key].numel() != storage.nbytes():
            self._pinned[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        return self._pinned[key]


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The distinct storages of some tensors that hold any bytes."""
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def device_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages of some tensors."""
    return sum(storage.nbytes() for storage in storages(tensors))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def tensors_of(engine: Engine, kind: str) -> list[Tensor]:
    """The tensors of an engine that are of a kind. Masters that *are* the working parameters (ZeRO-3 in fp32) count as
    parameters.
    """
    if kind == "parameters":
        return list(_parameters(engine))
    own = {storage._cdata for storage in storages(_parameters(engine))}
    return [t for t in _optimizer_state(engine) if t.untyped_storage()._cdata not in own]


def make_resizable(engine: Engine) -> None:
    """Give parameters that NumPy has seen (on a CPU, while they were loaded) a storage that can leave."""
    for parameter in engine.stage.parameters():
        if not parameter.data.untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def _parameters(engine: Engine) -> Iterator[Tensor]:
    for parameter in engine.stage.parameters():
        yield parameter.data
        if hasattr(parameter, "ds_tensor"):  # this rank's part of it under ZeRO-3
            yield parameter.ds_tensor.data


def _optimizer_state(engine: Engine) -> Iterator[Tensor]:
    """fp32 masters and AdamW's moments; its count of steps, one number, stays where it can be read."""
    if engine.engine is None:
        return
    for flat in zero.masters(engine):
        yield flat.data
        yield from (
            v for v in engine.engine.optimizer.optimizer.state[flat].values() if isinstance(v, Tensor) and v.dim()
        )


def release_gradients(engine: Engine) -> None:
    """Free every gradient buffer. Some of DeepSpeed's are made once and kept; they are emptied here and get their
    memory back from `restore_gradients`.
    """
    optimizer = _deepspeed_optimizer(engine)
    for parameter in engine.stage.parameters():
        parameter.grad = None
        if hasattr(parameter, "grad_accum"):
            parameter.grad_accum = None
    for flat in zero.masters(engine):
        flat.grad = None
    for buffer in (*_kept_gradients(optimizer), *_buckets(optimizer)):
        buffer.untyped_storage().resize_(0)


def restore_gradients(engine: Engine) -> None:
    """Give DeepSpeed's own buffers their memory back, the sums zeroed, before the backward passes of a step."""
    optimizer = _deepspeed_optimizer(engine)
    for buffer in (*_kept_gradients(optimizer), *_buckets(optimizer)):
        buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
    for buffer in _kept_gradients(optimizer):
        buffer.zero_()


def _kept_gradients(optimizer: Any) -> list[Tensor]:
    """Sums of gradients that live as long as the optimizer: all of bf16 ZeRO-1, this rank's part of ZeRO-3."""
    flat = getattr(optimizer, "grad_partitions_flat_buffer", None)
    return [*getattr(optimizer, "fp32_groups_gradients_flat", []), *([] if flat is None else [flat])]


def _buckets(optimizer: Any) -> list[Tensor]:
    """The buffers into which ZeRO-3 collects gradients on their way to other ranks."""
    buckets = [getattr(bucket, "buffer", None) for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    return [buffer for buffer in buckets if isinstance(buffer, Tensor)]


def _deepspeed_optimizer(engine: Engine) -> Any:
    assert engine.engine is not None, f"{engine.role} was built without an optimizer"
    return engine.engine.optimizer
