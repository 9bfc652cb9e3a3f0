"""The program that generates, which is vLLM: nothing outside of its folder names it but this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlscale.cluster.device import launched_as
from rlscale.cluster.mesh import RolloutDims
from rlscale.config.schema import Config
from rlscale.rollout.vllm.limits import violations as violations  # what it cannot do with a model

if TYPE_CHECKING:
    from rlscale.cluster.device import Device
    from rlscale.rollout.backend import Backend


def new_backend(cfg: Config, device: Device) -> Backend:
    """An engine that has not started, for the leader of its group."""
    from rlscale.rollout.vllm.client import VllmBackend

    return VllmBackend(cfg, device)


def start_early(cfg: Config, kind: str) -> Backend | None:
    """Begin to start this rank's engine before it joins the others; None where it is no leader."""
    device = launched_as(kind)
    if not RolloutDims(cfg.rollout.tensor_model_parallel_size, device.world).is_leader(device.rank):
        return None
    backend = new_backend(cfg, device)
    backend.begin_start()
    return backend
