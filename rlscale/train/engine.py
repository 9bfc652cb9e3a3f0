"""A Megatron model, trained or run forward only: the one engine of actor, critic, reference and reward model.

The engine takes *global* batches (identical on every rank) and divides the work: micro-batches by token budget over
data-parallel ranks, each run through Megatron's schedule over this rank's pipeline. Forward-only passes return the
global result on every rank. A training step's loss is a weighted sum whose weights come from global counts, so that any
division gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.batch.microbatch import plan_micro_batches
from rlscale.batch.types import LossFn, ModelOut, PackedBatch
from rlscale.cluster import megatron_cpu
from rlscale.cluster.collective import gather
from rlscale.cluster.device import Device
from rlscale.cluster.mesh import ParallelDims, mesh_of
from rlscale.config.layouts import refusals
from rlscale.config.paths import resolve_folder
from rlscale.config.schema import OptimConfig, ParallelConfig
from rlscale.model.arch import ModelSpec
from rlscale.model.gpt import Stage
from rlscale.model.megatron_config import build_config
from rlscale.model.packing import PackedSequence, pack_sequence
from rlscale.reshard.canonical import VALUE_HEAD
from rlscale.reshard.hf_load import load_pieces
from rlscale.reshard.layout import Layout
from rlscale.reshard.megatron import megatron_layout
from rlscale.reshard.transport import region
from rlscale.train.offload import HostCopies, make_resizable, storages
from rlscale.train.schedule import learning_rate
from rlscale.train.zero import ShardedOptimizer

KINDS = ("parameters", "optimizer")  # what can leave the device


@dataclass(frozen=True)
class Batching:
    """How an engine cuts a batch into micro-batches; sizes are per data-parallel rank."""

    max_tokens: int | None = 4096  # model tokens per micro-batch and Ulysses rank; None: cut by max_sequences
    max_sequences: int | None = None
    share_prefix: bool = True
    recompute: bool = False
    head_chunk: int = 1024


class Engine:
    """One model of a run on this rank. Construction and every method are collective over the world.

    Args:
        role: name in messages (actor, critic, reference).
        spec: shapes of the model.
        path: Hugging Face folder or hub name with the weights.
        parallel: layout; ``optim`` None builds a model that only runs forward.
        total_steps: optimizer steps of the run, for the learning-rate schedule.

    Raises:
        ValueError: the layout does not fit the model or the world, or the folder's tensors do not fit the model.
    """

    def __init__(
        self,
        role: str,
        spec: ModelSpec,
        path: str,
        parallel: ParallelConfig,
        optim: OptimConfig | None,
        batching: Batching,
        device: Device,
        *,
        dtype: torch.dtype,
        temperature: float = 1.0,
        total_steps: int = 1,
        seed: int = 0,
    ):
        self.role, self.spec, self.parallel, self.optim, self.batching = role, spec, parallel, optim, batching
        self.device, self.dtype, self.total_steps = device, dtype, total_steps
        refused = refusals(role, parallel, device.world, spec)
        if refused:
            raise ValueError("; ".join(r.message for r in refused))
        dims = ParallelDims.of(parallel, device.world)
        self.mesh = mesh_of(dims)
        #: which rank's parameters have which slice of which canonical tensor, by their keys in `parameters`
        self.model_layout = megatron_layout(spec, dims)
        self.host = HostCopies(device)
        self.steps = self.skipped_in_a_row = 0  # optimizer steps taken
        config = build_config(
            spec, self.mesh, dtype=dtype, sequence_parallel=parallel.sequence_parallel, recompute=batching.recompute
        )
        megatron_cpu.seed_model_parallel(seed, self.mesh.coords.tp, self.mesh.coords.pp)
        self.stage = Stage(spec, self.mesh, config, temperature=temperature, head_chunk=batching.head_chunk)
        self.optimizer: ShardedOptimizer | None = None
        if optim is not None:
            model = self.stage, self.parameters(), self.model_layout
            self.optimizer = ShardedOptimizer(role, *model, optim, dtype, parallel.zero_stage)
        #: the optimizer if it holds the weights too, each rank its part: ZeRO-3
        self._partitioned = self.optimizer if parallel.zero_stage == 3 else None
        self.stage.to(device.torch_device)
        self._load(path, seed)
        if self.optimizer is None:
            self.stage.requires_grad_(False)
        else:
            self.optimizer.initialize()

    # ---- construction

    @property
    def layout(self) -> Layout:
        """Which rank holds which slice of which canonical tensor, in which of `tensors`. Under ZeRO-3 collective over
        the world when it is first asked for.
        """
        return self._partitioned.layout if self._partitioned else self.model_layout

    def tensors(self) -> dict[str, Tensor]:
        """What this rank holds of its parameters in the working dtype, by keys of `layout`: under ZeRO-3 its part."""
        self.reload("parameters")
        if self._partitioned:
            return self._partitioned.weights()
        return {key: parameter.data for key, parameter in self.parameters().items()}

    @property
    def trained(self) -> ShardedOptimizer:
        """The optimizer; RuntimeError for a model that was built without one."""
        if self.optimizer is None:
            raise RuntimeError(f"{self.role} was built without an optimizer")
        return self.optimizer

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by their keys in `model_layout`; under ZeRO-3 they are empty between passes."""
        return {name.removeprefix("body."): p for name, p in self.stage.named_parameters()}

    def _load(self, path: str, seed: int) -> None:
        """Read this rank's slices of the folder; a value head that it lacks is drawn anew, small, from ``seed``."""
        tensors, shapes, pieces = self.tensors(), self.layout.shapes, self.layout.of_rank(self.device.rank)
        held = {piece.key for piece in pieces}
        for key in tensors.keys() - held:
            tensors[key].zero_()  # a part that is nothing but vocabulary padding
        destinations = {key: tensors[key] for key in held}
        absent = load_pieces(resolve_folder(path), pieces, destinations, shapes=shapes, optional={VALUE_HEAD})
        if absent:
            head = torch.empty(shapes[VALUE_HEAD])
            head.normal_(std=1 / (self.spec.hidden + 1), generator=torch.Generator().manual_seed(seed))
            for piece in pieces:
                if piece.name == VALUE_HEAD:
                    region(tensors[piece.key], piece).copy_(head[tuple(slice(lo, hi) for lo, hi in piece.index)])

    # ---- running micro-batches

    def _plan(self, batch: PackedBatch, beyond: int = 0) -> list[PackedSequence]:
        """This rank's micro-batches; ``beyond``: tokens of a sequence that count and do not enter the model."""
        dims, budget = self.mesh.dims, self.batching.max_tokens
        window = self.spec.sliding_window
        if window is not None and batch.num_samples:
            longest = int((batch.prompt_lengths[batch.group] + batch.response_lengths).max())
            if longest > window:
                raise ValueError(
                    f"{self.role}: a sample has {longest} tokens, and the model attends to a window of {window}, "
                    "which is not supported where a sample exceeds it"
                )
        try:
            plans = plan_micro_batches(
                batch,
                dims.dp,
                max_tokens=None if budget is None else (budget + beyond) * dims.sp,  # divided over the Ulysses ranks
                max_sequences=self.batching.max_sequences,
                share_prefix=self.batching.share_prefix,
            )
        except ValueError as error:  # every rank sees the same batch, so that all of them end here
            owner = "critic" if self.role == "critic" else "actor"  # a reference is cut as the actor is
            raise ValueError(f"{owner}.ppo_max_token_len_per_gpu is {budget}: {error}") from error
        chosen = plans[self.mesh.coords.dp] or [torch.zeros(0, dtype=torch.int64)]
        multiple = dims.sp * (dims.tp if self.parallel.sequence_parallel else 1)
        return [pack_sequence(batch, s, share_prefix=self.batching.share_prefix, multiple=multiple) for s in chosen]

    def _run(self, sequences: list[PackedSequence], consume: Callable[..., Any], forward_only: bool) -> list[Any]:
        """Drive micro-batches through Megatron's schedule; ``consume(sequence, out, **kw)`` sees each output of the
        last stage. Returns what it returned beside losses.
        """
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        forward = self.stage if forward_only or self.optimizer is None else self.optimizer.forward

        def forward_step(source: Iterator[PackedSequence], _model: Any) -> tuple[Tensor, Callable[..., Any]]:
            sequence = next(source)
            return forward(sequence.to(self.device.torch_device)), partial(consume, sequence)

        common = dict(
            forward_step_func=forward_step,
            data_iterator=iter(sequences),
            model=self.stage,
            num_microbatches=len(sequences),
            seq_length=sequences[0].length // self.mesh.dims.sp,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            pg_collection=self.mesh.pg,
        )
        if self.mesh.dims.pp == 1:
            return schedules.forward_backward_no_pipelining(**common)
        communicator = P2PCommunicator(self.mesh.pp_group, self.stage.config)
        return schedules.forward_backward_pipelining_without_interleaving(p2p_communicator=communicator, **common)

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank is the one of its replica whose outputs count: the others hold copies, or none."""
        return self.mesh.is_last_stage and self.mesh.coords.tp == 0 and self.mesh.coords.sp == 0

    def _forward(self, batch: PackedBatch, outputs: int, beyond: int = 0) -> Tensor:
        """[outputs, T] fp32, equal on every rank: each token comes from the one rank that computed it."""
        self.reload("parameters")
        result = torch.zeros(outputs, batch.tokens.numel())

        def consume(sequence: PackedSequence, out: Tensor, non_loss_data: bool = True) -> None:
            if self.is_output_rank:
                result[:, batch.token_index(sequence.samples)] = out.float().cpu()

        self.stage.eval()
        with torch.no_grad():
            self._run(self._plan(batch, beyond), consume, forward_only=True)
        if self.optimizer is not None:
            self.optimizer.drop_gathered()
        on_device = result.to(self.device.torch_device)
        dist.all_reduce(on_device)
        return on_device.cpu()

    # ---- what the loop calls

    def logprobs(self, batch: PackedBatch, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the response tokens at the sampling temperature, and the entropy if asked for: [T] fp32 each."""
        self.stage.with_entropy, self.stage.entropy_grad = entropy, False
        out = self._forward(batch, 2 if entropy else 1)
        return out[0], out[1] if entropy else None

    def values(self, batch: PackedBatch) -> Tensor:
        """[T] fp32: value of the state in which each response token was chosen."""
        return self._forward(batch, 1)[0]

    def scores(self, batch: PackedBatch) -> Tensor:
        """[B] fp32: the scalar of a reward model at the last token of each sequence, prompt and response."""
        assert self.spec.value_head, f"{self.role} has no scalar head"
        longer = batch.with_one_more_token()  # the value "in which it is chosen" is that of the last token before it
        values = self._forward(longer, 1, beyond=1)[0]
        return values[longer.cu_seqlens[1:] - 1]

    def update(
        self, batch: PackedBatch, loss_fn: LossFn, *, entropy: bool = False, entropy_grad: bool = False
    ) -> dict[str, float]:
        """One optimizer step on a global mini-batch; ``entropy``: in the output, ``entropy_grad``: and in the graph.

        ``loss_fn(out, micro_batch)`` returns the micro-batch's share of the loss (a sum weighted by ``batch.weights``,
        so that shares add up) and sums to be logged. Returns those sums over the whole mini-batch, ``grad_norm``
        (before clipping) and ``lr``. Where the loss or the gradient norm is not finite, on whichever rank, every rank
        leaves weights and optimizer state as they are, and only ``skipped`` (1) and ``lr`` are returned.

        Raises:
            RuntimeError: on every rank, when ``optim.max_skipped_steps`` steps in a row have been skipped.
        """
        optimizer, sequences = self.trained, self._plan(batch)
        self.reload()
        optimizer.restore_gradients()
        scale = self._loss_scale(len(sequences))
        self.stage.with_entropy, self.stage.entropy_grad = entropy, entropy_grad

        def consume(sequence: PackedSequence, out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            micro = batch.select(sequence.samples).to(out.device)
            loss, sums = loss_fn(self._out(out), micro)
            logged = {name: value.detach() for name, value in sums.items()}
            if sequence.samples.numel() == 0:
                # the graph still reaches every parameter, so that collectives in the backward match over ranks
                loss = out.sum() * 0
            # a loss that is not finite must make the gradient so, which is what all ranks are asked about in the step
            return loss * (scale + 0 * loss.detach()), {"loss": loss.detach().clone(), **logged}

        self.stage.train()
        rate = learning_rate(optimizer.optim, self.steps, self.total_steps)
        records = self._run(sequences, consume, forward_only=False)
        norm = optimizer.step(rate)
        sums = _add(gather(_add(records if self.is_output_rank else [])))
        if norm is None:
            self._count_skipped(optimizer.optim.max_skipped_steps, sums["loss"])
            return {"skipped": 1.0, "lr": rate}
        self.steps += 1
        self.skipped_in_a_row = 0
        return {**sums, "grad_norm": norm, "lr": rate}

    def state(self) -> dict[str, tuple[Layout, dict[str, Tensor]]]:
        """fp32 masters and moments, as `ShardedOptimizer.states` describes them: live buffers, on the device."""
        self.reload()
        return self.trained.states()

    def counters(self) -> dict[str, int]:
        """What belongs to `state` and is no tensor."""
        adam_step = self.trained.adam_step
        return {"steps": self.steps, "adam_step": adam_step, "skipped_in_a_row": self.skipped_in_a_row}

    def load_state(self, read: Callable[[str, Layout, dict[str, Tensor]], object], counters: Mapping[str, int]) -> None:
        """Continue from a saved state: ``read(name, layout, buffers)`` fills the buffers of each part of `state`, by
        keys of the layout; the working weights follow.
        """
        for name, (layout, buffers) in self.state().items():
            read(name, layout, buffers)
        self.trained.adam_step = counters["adam_step"]
        self.steps, self.skipped_in_a_row = counters["steps"], counters["skipped_in_a_row"]
        self.trained.follow_masters()

    def offload(self, *kinds: str) -> None:
        """Move some of `KINDS` (default: all) to the host: working parameters; fp32 masters and moments.

        Whatever needs them brings them back by itself, bit for bit the same: a pass the parameters, an update both.
        """
        if self.optimizer is not None:
            self.optimizer.drop_gathered()
        make_resizable(self.stage.parameters())
        for kind in kinds or KINDS:
            self.host.offload(kind, self.tensors_of(kind))

    def reload(self, *kinds: str) -> None:
        """Bring back to the device what is away."""
        for kind in kinds or KINDS:
            self.host.reload(kind)

    def release_device(self, *, parameters: bool = True) -> None:
        """Leave the device to others, as far as ``parallel.{param,optimizer}_offload`` ask for it."""
        if self.parallel.param_offload and parameters:
            self.offload("parameters")
        if self.parallel.optimizer_offload:
            self.offload("optimizer")

    def tensors_of(self, kind: str) -> list[Tensor]:
        """This rank's tensors of one of `KINDS`. Masters that *are* working parameters (ZeRO-3 in fp32) are such."""
        working = [p.data for p in self.stage.parameters()]
        if self._partitioned:
            working += self._partitioned.local_parts()
        if kind == "parameters" or self.optimizer is None:
            return working if kind == "parameters" else []
        known = {storage._cdata for storage in storages(working)}
        return [t for t in self.optimizer.state_tensors() if t.untyped_storage()._cdata not in known]

    def _count_skipped(self, limit: int, loss: float) -> None:
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= limit:
            raise RuntimeError(
                f"{self.role}: {self.skipped_in_a_row} optimizer step(s) in a row were skipped because the loss or the "
                f"gradient norm was not finite (last loss {loss:g}, after {self.steps} successful steps), the limit "
                f"that {self.role}.optim.max_skipped_steps sets; a smaller learning rate or grad_clip may help, and "
                "NaN in rewards or log-probs shows in rollouts/"
            )

    def _loss_scale(self, micro_batches: int) -> int:
        """Undoes the means that Megatron takes over micro-batches and DeepSpeed over ranks with equal parameters:
        data-parallel and Ulysses ranks, whose gradients (of their samples, of their tokens) have to add up.
        """
        return micro_batches * self.mesh.dims.dp * self.mesh.dims.sp

    def _out(self, out: Tensor) -> ModelOut:
        if self.spec.value_head:
            return ModelOut(values=out[0])
        return ModelOut(logprobs=out[0], entropy=out[1] if out.shape[0] > 1 else None)


def _add(shares: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Sums by name."""
    total: dict[str, float] = {}
    for share in shares:
        for name, value in share.items():
            total[name] = total.get(name, 0.0) + float(value)
    return total
