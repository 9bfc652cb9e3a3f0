"""Megatron-core on a machine without CUDA.

Upstream has no CPU path: a few of its modules ask for ``torch.cuda.current_device()`` or ``device="cuda"``. `enable`
gives exactly those modules a proxy of ``torch`` whose answers are the CPU, and a random-state tracker over the CPU
generator. The rest of the process sees the ordinary ``torch``. With CUDA present it does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

CPU = torch.device("cpu")
MODULES = (
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.utils",
    "megatron.core.utils",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
)
FACTORIES = ("zeros", "ones", "empty", "tensor", "arange", "full", "rand", "randn")
_enabled = False


class _Cuda(types.ModuleType):
    """``torch.cuda`` as those modules should see it: the current device is the CPU and nothing needs waiting for."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")

    def current_device(self) -> torch.device:
        return CPU

    def is_available(self) -> bool:
        return False

    def synchronize(self, *_: Any) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def current_stream(self, *_: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return wrapped


class _Torch(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("torch")
        self.__dict__["cuda"] = _Cuda()
        for name in FACTORIES:
            self.__dict__[name] = _on_cpu(getattr(torch, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class CPURandomStates:
    """Named random states over the CPU generator, with the interface of Megatron's CUDA tracker."""

    def __init__(self) -> None:
        self.reset()

    def is_initialized(self) -> bool:
        return self._initialized

    def reset(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._initialized = False

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self._states, self._initialized = dict(states), True

    def add(self, name: str, seed: int) -> None:
        if name in self._states:
            raise ValueError(f"random state {name} exists already")
        self._states[name] = torch.Generator().manual_seed(seed).get_state()
        self._initialized = True

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(before)


def enable() -> None:
    """Make Megatron-core usable on this machine; call before building a model, as often as you like."""
    global _enabled
    if _enabled or torch.cuda.is_available():
        return
    from megatron.core import jit

    jit.disable_jit_fuser()  # before the modules that decorate with it: torch.compile of tiny functions costs minutes
    for name in MODULES:
        importlib.import_module(name).__dict__["torch"] = _Torch()
    from megatron.core.tensor_parallel import random

    random._CUDA_RNG_STATE_TRACKER = CPURandomStates()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    # activation recomputation saves and restores the CUDA state around each layer; the CPU state is saved by torch
    # itself
    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(1)
    random._set_cuda_rng_state = lambda *_, **__: None
    _enabled = True


def seed_model_parallel(seed: int, tp_rank: int, pp_rank: int) -> None:
    """Seed the named random states: equal over replicas, different over tensor- and pipeline-parallel ranks."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("data-parallel-rng", seed)
    tracker.add("model-parallel-rng", seed + 2718 + tp_rank + 100 * pp_rank)
    tracker.add("expert-parallel-rng", seed + 1024 + tp_rank + 100 * pp_rank)
