"""What leaves the device between phases goes to the host, and comes back bit for bit the same.

vLLM and the models of a run take turns on the same devices. What moves is *storages*, not tensors: the bytes go to the
host and the storage is resized to nothing, so that every view (DeepSpeed's flat buffers and the parameters inside
them) stays the object it was, and is valid again when the bytes are back. On a CPU the same code moves them to another
place in the same memory; that is useful only to test it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rlscale.cluster.device import Device


class HostCopies:
    """Storages that are away from the device, by the name under which they left. Pinned host buffers are kept for the
    next time, because pinning is slow.
    """

    def __init__(self, device: Device):
        self.device = device
        self.away: dict[str, list[tuple[torch.UntypedStorage, Tensor]]] = {}
        self._pinned: dict[int, Tensor] = {}  # by the identity of the storage

    def offload(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Move the storages of the tensors to the host until `reload`, unless this kind is away already."""
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


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def make_resizable(parameters: Iterable[Tensor]) -> None:
    """Give parameters that NumPy has seen (on a CPU, while they were loaded) a storage that can leave."""
    for parameter in parameters:
        if not parameter.data.untyped_storage().resizable():
            parameter.data = parameter.data.clone()
