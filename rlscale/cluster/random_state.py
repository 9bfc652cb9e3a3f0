"""The random states of one rank as plain values."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """The random states of this rank: Python, NumPy, torch, CUDA and Megatron's named ones."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    name, keys, *rest = np.random.get_state()
    out = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": _pack(torch.get_rng_state()),
        "megatron": {key: _pack(state) for key, state in get_cuda_rng_tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        out["cuda"] = _pack(torch.cuda.get_rng_state())
    return out


def set_random_states(states: Mapping[str, Any]) -> None:
    """The inverse of `random_states`; Megatron's names that this rank does not know are left out."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(_unpack(states["torch"]))
    tracker = get_cuda_rng_tracker()
    known = tracker.get_states()
    tracker.set_states(known | {key: _unpack(state) for key, state in states["megatron"].items() if key in known})
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_unpack(states["cuda"]))


def _pack(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
