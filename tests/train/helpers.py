"""Engines of tiny models for the tests of this folder, and losses for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlscale.config.schema import OptimConfig, ParallelConfig
from rlscale.testing.models import tiny_model
from tests.train.reference import OPTIM


def make_engine(
    folder: str,
    fields: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    role: str = "actor",
    *,
    optim: Mapping[str, Any] | None = OPTIM,
    total_steps: int = 1,
    **batching: Any,
) -> Any:
    """An engine of the model in ``folder`` on this rank; ``fields``: its layout; ``optim`` None: forward only."""
    from rlscale.cluster.device import init_distributed
    from rlscale.model.arch import ModelSpec
    from rlscale.train.engine import Batching, Engine

    spec = ModelSpec.from_hf(folder)
    return Engine(
        role,
        spec.as_critic() if role == "critic" else spec,
        folder,
        ParallelConfig(**fields),
        None if optim is None else OptimConfig(**optim),
        Batching(**({"max_tokens": 48} | batching)),
        init_distributed("cpu"),
        dtype=dtype,
        total_steps=total_steps,
    )


def small_engine(*args: Any, **kwargs: Any) -> Any:
    """`make_engine` of two layers of Qwen2."""
    return make_engine(tiny_model("qwen2", tied=False, layers=2), *args, **kwargs)


def squared_error(out: Any, micro: Any) -> Any:
    """The critic's loss, with the advantages as what it has to predict."""
    return ((out.values - micro.advantages).square() * micro.weights).sum(), {}
