"""DeepSpeed ZeRO for the engine: its configuration, and access to the optimizer states it partitions.

DeepSpeed keeps fp32 master weights and AdamW moments in flat buffers, another class for each stage and dtype. Here
they are views under the keys of a layout over canonical tensors (`rlscale.reshard.zero`): a checkpoint written under
one TP, PP, DP and ZeRO stage is read under another by the same plans that move weights.

    for name, (layout, tensors) in states(engine).items():     # master, exp_avg, exp_avg_sq
        execute_into(plan(saved, layout, dtype=torch.float32), sources, tensors)
    set_optimizer_step(engine, step)
    after_load(engine)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.config.schema import OptimConfig
from rlscale.reshard.layout import Layout
from rlscale.reshard.zero import Fragment, zero_layout

if TYPE_CHECKING:
    from rlscale.train.engine import Engine

STATES = ("master", "exp_avg", "exp_avg_sq")


def deepspeed_config(stage: int, optim: OptimConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What `deepspeed.initialize` is told for ZeRO of this stage, AdamW, and weights of this dtype."""
    config: dict[str, Any] = {
        # Megatron's schedule runs the micro-batches; engine.step() is the boundary
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": optim.grad_clip,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": 20_000_000,
            "allgather_bucket_size": 20_000_000,
            "memory_efficient_linear": False,  # would replace torch's own function in the whole process
            # ZeRO-3, in elements: weights that stay whole (norms, biases), and how much is gathered ahead or kept
            "stage3_param_persistence_threshold": 10_000,
            "stage3_prefetch_bucket_size": 20_000_000,
            "stage3_max_live_parameters": 100_000_000,
            "stage3_max_reuse_distance": 100_000_000,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optim.lr,
                "betas": list(optim.betas),
                "eps": optim.eps,
                "weight_decay": optim.weight_decay,
                "torch_adam": True,
                "fused": True,
            },
        },
    }
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
        if stage == 1:  # or the fp32 sum over micro-batches is rounded to bf16 for its reduction
            config["communication_data_type"] = "fp32"
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


@dataclass(frozen=True)
class _Part:
    """A fragment of a local parameter and where its master values lie: from ``offset`` in a flat fp32 buffer."""

    fragment: Fragment
    flat: Tensor
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """[stop - start] the same elements of a buffer laid out as ``self.flat``."""
        return flat.detach()[self.offset : self.offset + self.fragment.stop - self.fragment.start]


def states(engine: Engine) -> dict[str, tuple[Layout, dict[str, Tensor]]]:
    """Master weights and AdamW moments of a training engine: their common layout over the canonical tensors, and this
    rank's fp32 tensors by its keys. Collective over the world.

    ``master`` are the fp32 values that the optimizer updates (fp32 weights included), ``exp_avg`` and ``exp_avg_sq``
    AdamW's moments, which are made (zero) if there was no step yet. The tensors are views of the live buffers: writing
    into them sets the state; call `after_load` when all are written. They are valid until states leave the device.
    Each element is held by one rank of a data-parallel group; slices that tensor-parallel ranks or the two ends of a
    pipeline (tied embedding) hold alike are in the layout once for each. Vocabulary padding is in no slice, and zero.
    """
    engine.reload()
    layout = engine.partitions
    out: dict[str, tuple[Layout, dict[str, Tensor]]] = {name: (layout, {}) for name in STATES}
    for part in _parts(engine):
        buffers = {"master": part.flat, **_adam_state(engine, part.flat)}
        for name in STATES:
            out[name][1].update(part.fragment.views(part.of(buffers[name])))
    return out


def partition_layout(engine: Engine, model: Layout) -> Layout:
    """Layout of every rank's fragments; ``model`` is that of the whole parameters. Collective over the world."""
    if engine.parallel.zero_stage == 3:
        mine = [_stage3_fragment(key, parameter) for key, parameter in engine.parameters().items()]
    else:
        mine = [part.fragment for part in _parts(engine)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return zero_layout(model, dict(enumerate(everyone)))


def after_load(engine: Engine) -> None:
    """Make the working weights of every rank follow the master weights. Collective over each data-parallel group."""
    engine.reload()
    optimizer = _optimizer(engine)
    if engine.parallel.zero_stage < 3:
        optimizer.update_lp_params()
        return
    optimizer.empty_partition_cache()  # what is gathered now is out of date
    with torch.no_grad():
        for working, master in zip(
            optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            working.copy_(master)
    if optimizer.persistent_parameters:  # small ones, which every rank keeps whole
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def optimizer_step(engine: Engine) -> int:
    """Updates that AdamW's bias correction has counted on this rank."""
    return max((int(_adam_state(engine, flat)["step"]) for flat in masters(engine)), default=0)


def set_optimizer_step(engine: Engine, step: int) -> None:
    """Set the number of updates that AdamW's bias correction counts."""
    for flat in masters(engine):
        _adam_state(engine, flat)["step"].fill_(step)


def _optimizer(engine: Engine) -> Any:
    assert engine.engine is not None, f"{engine.role} was built without an optimizer"
    return engine.engine.optimizer


def masters(engine: Engine) -> list[Tensor]:
    """The flat fp32 buffers of master weights that AdamW updates on this rank."""
    optimizer = _optimizer(engine)
    # ZeRO-3; ZeRO-1 with bf16 weights; ZeRO-1 and 2
    for name in ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    raise TypeError(f"{engine.role}: no partitions of {type(optimizer).__name__} are known")


def _adam_state(engine: Engine, flat: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a flat buffer, made as AdamW itself does in its first step if there is none yet."""
    state = _optimizer(engine).optimizer.state[flat]
    if "exp_avg" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
        state["exp_avg"] = torch.zeros_like(flat, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(flat, requires_grad=False)
    return state


def _parts(engine: Engine) -> Iterator[_Part]:
    """The fragments that this rank holds of its parameters, in the order of the model."""
    flats = masters(engine)
    if engine.parallel.zero_stage == 3:
        yield from _stage3_parts(engine, flats)
        return
    for key, parameter in engine.parameters().items():
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:  # it lies in other ranks' partitions
            continue
        local = mapping.lp_fragment_address
        fragment = Fragment(key, tuple(parameter.shape), local.start, local.start + local.numel)
        yield _Part(fragment, flats[mapping.param_group_index], mapping.hp_fragment_address.start)


def _stage3_parts(engine: Engine, flats: list[Tensor]) -> Iterator[_Part]:
    keys = {id(parameter): key for key, parameter in engine.parameters().items()}
    for flat, group in zip(flats, _optimizer(engine).fp16_groups, strict=True):
        offset = 0
        for parameter in group:
            yield _Part(_stage3_fragment(keys[id(parameter)], parameter), flat, offset)
            offset += parameter.partition_numel()


def _stage3_fragment(key: str, parameter: Any) -> Fragment:
    """This rank's part: equal parts of every parameter over the data-parallel group, the last ones padded or empty."""
    size = parameter.partition_numel()
    start = min(dist.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    return Fragment(key, tuple(parameter.ds_shape), start, min(start + size, parameter.ds_numel))


def partition_weights(engine: Engine) -> None:
    """Partition the uninitialised weights of a fresh model for ZeRO-3, one after the other. Collective.

    Until they are loaded nothing has written to them, so that a model which would not fit whole never exists whole.
    """
    import deepspeed

    assert engine.optim is not None
    deepspeed.zero.Init(
        module=engine.stage,
        data_parallel_group=engine.mesh.dp_group,
        dtype=engine.dtype,
        mpu=engine.mesh.mpu(),
        config_dict_or_path=deepspeed_config(3, engine.optim, engine.dtype),
    )


def partitioned_weights(engine: Engine) -> dict[str, Tensor]:
    """Under ZeRO-3 this rank's part of the working weights, as views with the keys of `partition_layout`."""
    out: dict[str, Tensor] = {}
    for key, parameter in engine.parameters().items():
        fragment = _stage3_fragment(key, parameter)
        values: Tensor = parameter.ds_tensor.data  # type: ignore[attr-defined]
        out.update(fragment.views(values[: fragment.stop - fragment.start]))
    return out
