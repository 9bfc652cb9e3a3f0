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


class _Proxy(types.ModuleType):
    """A module in which some names stand for something else."""

    def __init__(self, module: types.ModuleType, **instead: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(instead, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return wrapped


def _torch() -> types.ModuleType:
    """``torch`` as those modules should see it: the current device is the CPU, and nothing needs waiting for."""
    waits = dict.fromkeys(("synchronize", "empty_cache", "current_stream"), lambda *_: None)
    cuda = _Proxy(torch.cuda, current_device=lambda: CPU, is_available=lambda: False, **waits)
    return _Proxy(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in FACTORIES})


def _random_states() -> Any:
    """Megatron's named random states, over the CPU generator."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    class CPURandomStates(CudaRNGStatesTracker):  # type: ignore[misc]
        def add(self, name: str, seed: int) -> None:
            if name in self.states_:
                raise ValueError(f"random state {name} exists already")
            self.set_states({**self.states_, name: torch.Generator().manual_seed(seed).get_state()})

        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            before = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(before)

    return CPURandomStates()


@contextlib.contextmanager
def _without_compilation() -> Iterator[None]:
    """Megatron's fused functions stay as they are written where they are defined within.

    Megatron compiles them with torch.compile, anew for each length of a micro-batch: seconds each on a CPU, and numbers
    that depend on which lengths came before. And a compiler that is killed leaves half a library in torch's cache, on
    which every later run of this machine would fail. ``megatron.core.jit.disable_jit_fuser`` comes too late: importing
    its package has defined them.
    """
    compile_function = torch.compile
    torch.compile = lambda model=None, **_: model if model else lambda function: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_function


def enable() -> None:
    """Make Megatron-core usable on this machine; call before building a model, as often as you like."""
    global _enabled
    if _enabled or torch.cuda.is_available():
        return
    with _without_compilation():
        import megatron.core  # noqa: F401
    for name in MODULES:
        importlib.import_module(name).__dict__["torch"] = _torch()
    from megatron.core.tensor_parallel import random

    random._CUDA_RNG_STATE_TRACKER = _random_states()
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
