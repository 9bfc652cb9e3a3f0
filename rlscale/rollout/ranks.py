"""The ranks of a run by their part in the rollout: leaders act on their engines, all ranks learn how it went."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from rlscale.cluster.collective import gather
from rlscale.cluster.mesh import RolloutDims
from rlscale.config.schema import RolloutConfig
from rlscale.rollout.backend import Backend

if TYPE_CHECKING:
    from rlscale.cluster.device import Device

T = TypeVar("T")

RPC_TIMEOUT_S = 300.0  # for calls to the engine other than generation
_instances = itertools.count()


class EngineError(RuntimeError):
    """What the leaders did with their engines failed on some of them; raised on every rank."""


class RolloutRanks:
    """This rank among the rollout groups (`RolloutDims`).

    Attributes:
        backend: the engine of a leader's group; None on other ranks.
        counter: an atomic counter that all ranks share.
    """

    def __init__(self, cfg: RolloutConfig, device: Device, dims: RolloutDims, backend: Backend | None):
        self.rank, self.dims, self.backend = device.rank, dims, backend
        self.control: dist.ProcessGroup | None = None
        self.group: dist.ProcessGroup | None = None
        store: dist.Store = dist.HashStore()
        if dist.is_initialized():
            # groups over CPU, for waiting and short messages: NCCL would keep devices and cores busy while it waits
            limit = timedelta(seconds=max(cfg.request_timeout_s, cfg.start_timeout_s) + RPC_TIMEOUT_S)
            self.control = dist.new_group(backend="gloo", timeout=limit)
            if self.dims.tp > 1:
                self.group, _ = dist.new_subgroups(self.dims.tp, backend="gloo", timeout=limit)
            store = dist.distributed_c10d._get_default_store()
        self.counter = dist.PrefixStore(f"rlscale/rollout{next(_instances)}", store)

    def barrier(self) -> None:
        """Wait for the other ranks of this rollout group."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def attempt(self, errors: list[Exception], step: Callable[[Backend], T]) -> T | None:
        """A leader's step of several; after an error the rest is left out, while the ranks finish their exchange."""
        if self.backend is not None and not errors:
            try:
                return step(self.backend)
            except Exception as error:
                errors.append(error)
        return None

    def together(self, work: Callable[[Backend], T], what: str) -> T | None:
        """Let the leaders work and all ranks wait for them; raises EngineError on all ranks where one has failed."""
        errors: list[Exception] = []
        result = self.attempt(errors, work)
        self.raise_together(errors, what)
        return result

    def raise_together(self, errors: list[Exception], what: str) -> None:
        """Raise EngineError on every rank where one of them has errors; the first of a rank counts. Collective."""
        for text in gather(str(errors[0]) if errors else None, self.control):
            if text is not None:
                cause = errors[0] if errors else None
                raise EngineError(text if "rank " in text else f"{what} failed: {text}") from cause
