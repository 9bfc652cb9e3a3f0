"""DeepSpeed ZeRO: everything that knows it, from its configuration to the optimizer states that it partitions.

DeepSpeed keeps fp32 master weights and AdamW moments in flat buffers, another class for each stage and dtype. Here
they are views under the keys of a layout over canonical tensors (`rlscale.reshard.zero_layout`): a checkpoint written
under one TP, PP, DP and ZeRO stage is read under another by the same plans that move weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.cluster.collective import gather
from rlscale.config.schema import OptimConfig
from rlscale.model.gpt import Stage
from rlscale.model.packing import PackedSequence
from rlscale.reshard.layout import Layout
from rlscale.reshard.zero_layout import Fragment, zero_layout

STATES = ("master", "exp_avg", "exp_avg_sq")


def deepspeed_config(stage: int, optim: OptimConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What `deepspeed.initialize` is told for ZeRO of this stage, AdamW, and weights of this dtype."""
    config: dict[str, Any] = {
        # Megatron's schedule runs the micro-batches; step() is the boundary
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
class Part:
    """A fragment of a local parameter and where its master values lie: from ``offset`` in a flat fp32 buffer."""

    fragment: Fragment
    flat: Tensor
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """[stop - start] the same elements of a buffer laid out as ``self.flat``."""
        return flat.detach()[self.offset : self.offset + self.fragment.stop - self.fragment.start]


class ShardedOptimizer:
    """AdamW over one model, its state (and under ZeRO-3 its weights) divided over the data-parallel ranks.

    Construction and the methods are collective over the world. Under ZeRO-3 construction partitions the weights of a
    fresh model, one after the other, before anything has written to them, so that a model which would not fit whole
    never exists whole. `initialize` follows when they are loaded.

    Args:
        role: name of the model in messages.
        stage: this rank's part of the model.
        parameters: its parameters by their keys in ``layout``.
        layout: of the whole parameters, without ZeRO.
    """

    def __init__(
        self,
        role: str,
        stage: Stage,
        parameters: Mapping[str, torch.nn.Parameter],
        layout: Layout,
        optim: OptimConfig,
        dtype: torch.dtype,
        zero_stage: int,
    ):
        self.role, self.stage, self.mesh, self.parameters, self.whole = role, stage, stage.mesh, parameters, layout
        self.optim, self.zero_stage = optim, zero_stage
        self.config = deepspeed_config(zero_stage, optim, dtype)
        self.deepspeed: Any = None  # its engine, from `initialize` on
        if self.partitions_weights:
            import deepspeed

            deepspeed.zero.Init(
                module=stage,
                data_parallel_group=self.mesh.dp_group,
                dtype=dtype,
                mpu=self.mesh.mpu(),
                config_dict_or_path=self.config,
            )

    def initialize(self) -> None:
        """Make the optimizer of the weights that the model has now."""
        import deepspeed

        tied = self._tied_weight()
        if tied is not None and not self.mesh.is_first_stage:
            tied.ds_pipe_replicated = True  # type: ignore[attr-defined]  # or it counts twice in the gradient norm
        self.deepspeed, *_ = deepspeed.initialize(
            model=self.stage, model_parameters=list(self.parameters.values()), mpu=self.mesh.mpu(), config=self.config
        )
        # DeepSpeed re-arms its post-backward work only in its engine's forward. In the cool-down of 1F1B two backwards
        # run with no forward between them, and without this what they accumulate is dropped: ZeRO-2 and bf16 then find
        # no gradient and raise; fp32 ZeRO-1 reads the parameters' own and is right.
        self.stage.on_backward = self._zero.clear_backward_seen_flag
        if self.partitions_weights and hasattr(self.stage, "head"):
            deepspeed.zero.register_external_parameter(self.stage.head, *self.stage.head.shared)
        self.release_gradients()

    @property
    def partitions_weights(self) -> bool:
        """Whether a rank holds only a part of the working weights: ZeRO-3."""
        return self.zero_stage == 3

    @property
    def _zero(self) -> Any:
        """DeepSpeed's ZeRO optimizer, which wraps `adamw`."""
        return self.deepspeed.optimizer

    @property
    def adamw(self) -> torch.optim.Optimizer:
        """AdamW of this rank's `masters`."""
        return self._zero.optimizer  # type: ignore[no-any-return]

    # ---- one update

    def forward(self, sequence: PackedSequence) -> Tensor:
        """The stage's output with DeepSpeed's hooks around it, as a forward pass before a backward needs it."""
        return self.deepspeed(sequence)  # type: ignore[no-any-return]

    def step(self, rate: float) -> float | None:
        """One update at learning rate ``rate`` from the gradients that the backward passes have accumulated.

        Returns:
            the global gradient norm before clipping; None where it is not finite on whichever rank: then DeepSpeed has
            changed nothing but dropped the gradients, everywhere.
        """
        for group in self._zero.param_groups:
            group["lr"] = rate
        self.reduce_tied()
        self.deepspeed.step()
        self.release_gradients()
        return None if self._zero.overflow else float(self.deepspeed.get_global_grad_norm() or 0.0)

    def reduce_tied(self) -> None:
        """Sum the gradient of a tied embedding over its two copies on the first and the last pipeline stage."""
        weight = self._tied_weight()
        if weight is None or self.mesh.dims.pp == 1:
            return
        for name in ("_hp_grad", "grad_accum", "grad"):  # where ZeRO-1 accumulates, by dtype setting
            grad = getattr(weight, name, None)
            if grad is not None:
                dist.all_reduce(grad, group=self.mesh.embd_group)
                return
        raise RuntimeError(f"{self.role}: no accumulated gradient found on the tied embedding")

    def _tied_weight(self) -> torch.nn.Parameter | None:
        """This rank's copy of a weight that is both embedding and output layer."""
        body, tied = self.stage.body, self.stage.spec.tied
        if tied and self.mesh.is_first_stage:
            return body.embedding.word_embeddings.weight  # type: ignore[no-any-return]
        return body.output_layer.weight if tied and self.mesh.is_last_stage else None

    def release_gradients(self) -> None:
        """Free every gradient buffer. Some of DeepSpeed's are made once and kept; they are emptied here and get their
        memory back from `restore_gradients`.
        """
        for parameter in self.parameters.values():
            parameter.grad = None
            if hasattr(parameter, "grad_accum"):
                parameter.grad_accum = None
        for flat in self.masters():
            flat.grad = None
        for buffer in (*self._gradient_sums(), *self._buckets()):
            buffer.untyped_storage().resize_(0)

    def restore_gradients(self) -> None:
        """Give DeepSpeed's own buffers their memory back, the sums zeroed, before the backward passes of a step."""
        for buffer in (*self._gradient_sums(), *self._buckets()):
            buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
        for buffer in self._gradient_sums():
            buffer.zero_()

    def _gradient_sums(self) -> list[Tensor]:
        """Sums of gradients that live as long as the optimizer: all of bf16 ZeRO-1, this rank's part of ZeRO-3."""
        flat = getattr(self._zero, "grad_partitions_flat_buffer", None)
        return [*getattr(self._zero, "fp32_groups_gradients_flat", []), *([] if flat is None else [flat])]

    def _buckets(self) -> list[Tensor]:
        """The buffers into which ZeRO-3 collects gradients on their way to other ranks."""
        buckets = [getattr(bucket, "buffer", None) for bucket in getattr(self._zero, "ipg_buckets", {}).values()]
        return [buffer for buffer in buckets if isinstance(buffer, Tensor)]

    # ---- what ZeRO partitions

    @cached_property
    def layout(self) -> Layout:
        """Which rank holds which slice of which canonical tensor, in which of the tensors of `states` (and of
        `weights`). Collective when it is first asked for.
        """
        if self.partitions_weights:
            held = [_stage3_fragment(key, parameter) for key, parameter in self.parameters.items()]
        else:
            held = [part.fragment for part in self.parts()]
        return zero_layout(self.whole, dict(enumerate(gather(held))))

    def weights(self) -> dict[str, Tensor]:
        """Under ZeRO-3 this rank's part of the working weights, as views with the keys of `layout`."""
        out: dict[str, Tensor] = {}
        for (key, parameter), part in zip(self.parameters.items(), self.local_parts(), strict=True):
            fragment = _stage3_fragment(key, parameter)
            out.update(fragment.views(part[: fragment.stop - fragment.start]))
        return out

    def local_parts(self) -> list[Tensor]:
        """Under ZeRO-3 this rank's part [n] of every working weight, padded, in the order of the model."""
        return [parameter.ds_tensor.data for parameter in self.parameters.values()]  # type: ignore[attr-defined]

    def states(self) -> dict[str, tuple[Layout, dict[str, Tensor]]]:
        """Master weights and AdamW moments by name: their common layout, and this rank's fp32 tensors by its keys.

        ``master`` are the fp32 values that the optimizer updates (fp32 weights included), ``exp_avg`` and
        ``exp_avg_sq`` AdamW's moments, made (zero) if there was no step yet. The tensors are views of the live buffers
        until states leave the device: writing into them sets the state; call `follow_masters` when all are written.
        Each element is held by one rank of a data-parallel group; slices that tensor-parallel ranks or the two ends of
        a pipeline (tied embedding) hold alike are in the layout once for each. Vocabulary padding is in no slice, and
        zero.
        """
        out: dict[str, tuple[Layout, dict[str, Tensor]]] = {name: (self.layout, {}) for name in STATES}
        for part in self.parts():
            buffers = {"master": part.flat, **self._adam_state(part.flat)}
            for name in STATES:
                out[name][1].update(part.fragment.views(part.of(buffers[name])))
        return out

    def follow_masters(self) -> None:
        """Make the working weights of every rank equal the master weights, rounded."""
        if not self.partitions_weights:
            self._zero.update_lp_params()
            return
        self.drop_gathered()  # it is out of date
        working, masters = self._zero.fp16_partitioned_groups_flat, self.masters()
        with torch.no_grad():
            for rounded, master in zip(working, masters, strict=True):
                rounded.copy_(master)
        if self._zero.persistent_parameters:  # small ones, which every rank keeps whole
            self._zero.persistent_parameters[0].all_gather(self._zero.persistent_parameters)

    def drop_gathered(self) -> None:
        """Free the whole weights that ZeRO-3 has gathered, and keeps because it expects to use them again soon."""
        if self.partitions_weights:
            self._zero.empty_partition_cache()

    @property
    def adam_step(self) -> int:
        """Updates that AdamW's bias correction has counted on this rank."""
        return max((int(self._adam_state(flat)["step"]) for flat in self.masters()), default=0)

    @adam_step.setter
    def adam_step(self, step: int) -> None:
        for flat in self.masters():
            self._adam_state(flat)["step"].fill_(step)

    def masters(self) -> list[Tensor]:
        """The flat fp32 buffers ``[n]`` of master weights that AdamW updates on this rank.

        Raises:
            TypeError: DeepSpeed uses an optimizer that is not known here.
        """
        # ZeRO-3; ZeRO-1 with bf16 weights; ZeRO-1 and 2
        for name in ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups"):
            if hasattr(self._zero, name):
                return list(getattr(self._zero, name))
        raise TypeError(f"{self.role}: no partitions of {type(self._zero).__name__} are known")

    def state_tensors(self) -> list[Tensor]:
        """fp32 masters and AdamW's moments; its count of steps, one number, stays where it can be read."""
        out: list[Tensor] = []
        for flat in self.masters():
            state = self.adamw.state[flat].values()
            out += [flat.data, *(value for value in state if isinstance(value, Tensor) and value.dim())]
        return out

    def _adam_state(self, flat: Tensor) -> dict[str, Tensor]:
        """AdamW's state of a flat buffer, made as AdamW itself does in its first step if there is none yet."""
        state = self.adamw.state[flat]
        if "exp_avg" not in state:
            moments = {name: torch.zeros_like(flat, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
            state.update(step=torch.zeros((), dtype=torch.float32, device=flat.device), **moments)
        return state

    def parts(self) -> Iterator[Part]:
        """The fragments that this rank holds of its parameters, in the order of the model."""
        flats = self.masters()
        if self.partitions_weights:
            keys = {id(parameter): key for key, parameter in self.parameters.items()}
            for flat, group in zip(flats, self._zero.fp16_groups, strict=True):
                offset = 0
                for parameter in group:
                    yield Part(_stage3_fragment(keys[id(parameter)], parameter), flat, offset)
                    offset += parameter.partition_numel()
            return
        for key, parameter in self.parameters.items():
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:  # it lies in other ranks' partitions
                continue
            local = mapping.lp_fragment_address
            fragment = Fragment(key, tuple(parameter.shape), local.start, local.start + local.numel)
            yield Part(fragment, flats[mapping.param_group_index], mapping.hp_fragment_address.start)


def _stage3_fragment(key: str, parameter: Any) -> Fragment:
    """This rank's part: equal parts of every parameter over the data-parallel group, the last ones padded or empty."""
    size = parameter.partition_numel()
    start = min(dist.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    return Fragment(key, tuple(parameter.ds_shape), start, min(start + size, parameter.ds_numel))
