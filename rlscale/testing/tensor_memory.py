"""Bytes of the tensors that a piece of code makes and keeps alive: a count, not a sample of the process's memory, in
which the allocator, threads and libraries hide on a CPU what a layout saves.

Storages count from the operator that makes them (if it reaches PyTorch's dispatcher, in the forward or the backward
pass) until the last tensor that uses them is gone, those that autograd keeps included.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class TensorMemory(TorchDispatchMode):
    """Counts inside a ``with`` block: ``live``, the bytes of storages made in it that are alive now, and ``peak``.

    Buffers inside one operator, which never become tensors, aren't counted.
    """

    def __init__(self, *known: torch.Tensor) -> None:
        """``known``: tensors made before the block, whose storages are not counted."""
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}  # by storage
        self._known = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        if key not in self._sizes:
            weakref.finalize(storage, self._gone, key)
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)
