"""Where a rank stands: the arithmetic of parallel dimensions and the process groups that belong to it.

Every role (actor, critic, reference) has a mesh of its own, so that their layouts may differ inside one process;
nothing is kept in Megatron's global parallel state. Rank order is Megatron's default: tensor fastest, then Ulysses
sequence, data and pipeline slowest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

from rlscale.cluster.device import new_group
from rlscale.config.schema import ParallelConfig


class Coords(NamedTuple):
    tp: int
    sp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the tensor, Ulysses-sequence, data and pipeline dimensions; their product is the world size."""

    tp: int = 1
    sp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1  # experts: 1: each is split over TP; tp: whole ones are distributed over it (no dimension of its own)

    @classmethod
    def of(cls, parallel: ParallelConfig, world: int) -> ParallelDims:
        """The dimensions of a role in a world of ``world`` ranks; what TP, PP and SP leave is data-parallel."""
        tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        sp, ep = parallel.ulysses_sequence_parallel_size, parallel.expert_model_parallel_size
        assert world % (tp * pp * sp) == 0 and ep in (1, tp), "`rlscale.config.layouts` refuses such a layout"
        return cls(tp=tp, sp=sp, dp=world // (tp * pp * sp), pp=pp, ep=ep)

    @property
    def world(self) -> int:
        return self.tp * self.sp * self.dp * self.pp

    def coords(self, rank: int) -> Coords:
        """Place of a global rank along every dimension."""
        rank, tp = divmod(rank, self.tp)
        rank, sp = divmod(rank, self.sp)
        pp, dp = divmod(rank, self.dp)
        return Coords(tp, sp, dp, pp)

    def rank_of(self, tp: int = 0, sp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The global rank at a place; the inverse of `coords`."""
        return tp + self.tp * (sp + self.sp * (dp + self.dp * pp))

    def ranks_along(self, *varying: str, fixed: Coords) -> list[int]:
        """Ranks that differ from ``fixed`` along the named dimensions only, in rank order."""

        def on_line(at: Coords) -> bool:
            return all(d in varying or a == b for d, a, b in zip(Coords._fields, at, fixed, strict=True))

        return [rank for rank in range(self.world) if on_line(self.coords(rank))]


@dataclass(frozen=True)
class RolloutDims:
    """Rollout groups of ``tp`` consecutive ranks each: the first of a group, its leader, drives the group's engine, a
    replica, whose workers are on the devices of the group.
    """

    tp: int
    world: int

    @property
    def replicas(self) -> int:
        return self.world // self.tp

    def replica(self, rank: int) -> int:
        return rank // self.tp

    def worker(self, rank: int) -> int:
        return rank % self.tp

    def is_leader(self, rank: int) -> bool:
        return self.worker(rank) == 0


class Mesh:
    """The process groups of one layout, as seen from this rank. Construction is collective over the world."""

    def __init__(self, dims: ParallelDims):
        import torch.distributed as dist

        if dims.world != dist.get_world_size():
            raise ValueError(f"layout {dims} needs {dims.world} ranks, the world has {dist.get_world_size()}")
        self.dims = dims
        self.rank = dist.get_rank()
        self.coords = dims.coords(self.rank)
        self.tp_group = self._group("tp")
        self.sp_group = self._group("sp")
        self.pp_group = self._group("pp")
        self.mp_group = self._group("tp", "pp")
        self.dp_group = self._group("dp", "sp")  # ranks that hold equal parameters: what ZeRO partitions over
        self.embd_group = self._group("pp", ends=True)  # the two holders of a tied embedding

    def _group(self, *varying: str, ends: bool = False) -> Any:
        """This rank's group of the ranks that differ along these dimensions only; ``ends``: of the first and the last
        of them, None on a rank between.
        """
        lines = [tuple(self.dims.ranks_along(*varying, fixed=self.dims.coords(r))) for r in range(self.dims.world)]
        found = None
        for line in dict.fromkeys(lines):  # every rank creates every group, in the same order
            ranks = sorted({line[0], line[-1]}) if ends else list(line)
            group = new_group(ranks)
            if self.rank in ranks:
                found = group
        return found

    @property
    def is_first_stage(self) -> bool:
        return self.coords.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coords.pp == self.dims.pp - 1

    @cached_property
    def pg(self) -> Any:
        """The groups in the form in which Megatron-core takes them."""
        from megatron.core.process_groups_config import ProcessGroupCollection

        solo = self.sp_group if self.dims.sp == 1 else self._group()
        return ProcessGroupCollection(
            tp=self.tp_group,
            pp=self.pp_group,
            mp=self.mp_group,
            dp=self.dp_group,
            dp_cp=self.dp_group,
            # Megatron's own context parallelism stays off: Ulysses happens inside our core attention
            cp=solo,
            tp_cp=self.tp_group,
            ep=solo,
            expt_tp=self.tp_group,
            expt_dp=self.dp_group,
            tp_ep=self.tp_group,
            embd=self.embd_group,
            pos_embd=solo,
        )

    def mpu(self) -> type:
        """The groups in the form in which DeepSpeed takes them (`mpu` of deepspeed.initialize)."""
        import torch.distributed as dist

        tp, dp = self.tp_group, self.dp_group
        out: dict[str, Any] = {
            "get_data_parallel_group_ranks": lambda: dist.get_process_group_ranks(dp),
            "get_tensor_model_parallel_src_rank": lambda: dist.get_global_rank(tp, 0),
        }
        groups = {"model": self.mp_group, "data": dp, "tensor_model": tp, "pipeline_model": self.pp_group}
        for name, group in groups.items():
            out[f"get_{name}_parallel_group"] = lambda group=group: group
            out[f"get_{name}_parallel_world_size"] = partial(dist.get_world_size, group)
            out[f"get_{name}_parallel_rank"] = partial(dist.get_rank, group)
        # `initialize_sequence_parallel` is absent on purpose: DeepSpeed would ignore the rest of this object
        return type("Groups", (), {name: staticmethod(function) for name, function in out.items()})


@cache
def mesh_of(dims: ParallelDims) -> Mesh:
    """The mesh of these dimensions, made once per process; every rank must ask in the same order."""
    return Mesh(dims)
