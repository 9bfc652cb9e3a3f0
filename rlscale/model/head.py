"""Log-prob and entropy of given tokens straight from hidden states: the output layer, in chunks, over the TP group.

A vocabulary of 150,000 makes the logits of a long batch the largest tensor of a training step, although the loss
needs one number per token. Here at most ``chunk`` tokens of logits exist at a time: the forward pass keeps a few
numbers per token, and the backward pass computes each chunk's logits again. The chunk that the forward pass sees last
is not computed twice: backward starts with it, so it is kept as unnormalised probabilities in the working dtype (a
batch of one chunk costs three matrix products, not four).

Matrix products are in the input's dtype. The softmax is in float32, a few rows at a time so that they stay in the
cache. Its gradient needs no pass over the logits' full size: with ``e = exp(z - max)``, ``s = sum e`` and upstream
gradient ``g``, ``d(g log p_y)/dz = (g / s) (s [y] - e)``, and the factor ``g / s`` of a row moves to the small side
of both products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CACHE_BYTES = 2 << 20  # float32 rows of the softmax worked on at a time on the CPU
_PIECE = 256  # tokens per matrix product in forward on the CPU
_COLUMNS = 16384  # columns of the weight gradient added at a time


@dataclass(frozen=True)
class _Spec:
    """What is constant over the chunks of one call."""

    temperature: float
    chunk: int
    group: dist.ProcessGroup | None
    with_entropy: bool
    entropy_grad: bool
    needs_grad: bool


def vocab_parallel_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_real: int | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(hidden weight^T / temperature)`` at the targets, and the entropy of that distribution.

    Over a TP group it acts as a column-parallel linear layer with replicated input: ``hidden`` and ``targets`` are
    the same on every rank, ``weight`` is the rank's slice, the results are the same on every rank, and the gradient
    of ``hidden`` is all-reduced. (With sequence parallelism gather the hidden states first, without another reduction
    in backward.)

    Args:
        hidden: ``[t, h]``; weight: ``[v_local, h]`` of the same dtype; targets: ``[t]`` int64 global token ids.
        chunk: tokens whose logits exist at one time.
        vocab_start: first token id of this rank's slice; vocab_real: vocabulary without padding (columns from there
            on are excluded from the softmax and get no gradient); ``None``: no padding.
        with_entropy: return the entropy; entropy_grad: with its gradient.

    Returns:
        log-probs ``[t]`` and entropies ``[t]`` (or ``None``), float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes or dtypes that disagree, ``temperature <= 0``, ``chunk < 1``.
    """
    flat = hidden.dim() == weight.dim() == 2
    if not flat or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} "
            "must be [t, h], [v, h] and [t]"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: they must have one dtype")
    if not temperature > 0 or chunk < 1:
        raise ValueError(f"temperature must be above 0 and chunk at least 1, got {temperature} and {chunk}")
    group = tp_group if tp_group is not None and dist.get_world_size(tp_group) > 1 else None
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    spec = _Spec(temperature, chunk, group, with_entropy or entropy_grad, entropy_grad, needs_grad)
    columns = weight.shape[0] if vocab_real is None else min(max(vocab_real - vocab_start, 0), weight.shape[0])
    local = targets - vocab_start
    held = (local >= 0) & (local < columns)
    weight = weight if columns == weight.shape[0] else weight[:columns]
    logprob, entropy = _Head.apply(hidden, weight, torch.where(held, local, 0), held, spec)
    return logprob, (entropy if spec.with_entropy else None)


class _Head(torch.autograd.Function):
    """``local``: target columns of this rank, ``held``: whether it holds the target."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, local: Tensor, held: Tensor, spec: _Spec
    ) -> tuple[Tensor, Tensor]:
        tokens, columns = hidden.shape[0], weight.shape[0]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprob = torch.empty(tokens, dtype=wide, device=hidden.device)
        entropy = torch.empty(tokens if spec.with_entropy else 0, dtype=wide, device=hidden.device)
        stats = torch.empty(2, tokens, dtype=wide, device=hidden.device)
        keep_from = max(tokens - 1, 0) // spec.chunk * spec.chunk if spec.needs_grad else tokens
        kept = hidden.new_empty(tokens - keep_from, columns)
        buffer = hidden.new_empty(min(_piece(hidden, spec), keep_from), columns)
        for rows in _pieces(tokens, hidden, spec):
            keep = rows.start >= keep_from
            z = kept[rows.start - keep_from : rows.stop - keep_from] if keep else buffer[: rows.stop - rows.start]
            torch.mm(hidden[rows], weight.t(), out=z)
            overwrite = keep and not spec.entropy_grad
            peak, total, target, information = _softmax_stats(z, local[rows], held[rows], spec, overwrite)
            logprob[rows] = target - total.log()
            stats[0, rows], stats[1, rows] = peak, total
            if information is not None:
                entropy[rows] = information
        ctx.spec, ctx.kept = spec, kept
        ctx.save_for_backward(hidden, weight, local, held, stats, logprob, entropy)
        if not spec.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(
        ctx: Any, g_logprob: Tensor, g_entropy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, local, held, stats, logprob, entropy = ctx.saved_tensors
        spec: _Spec = ctx.spec
        want_h, want_w = ctx.needs_input_grad[:2]
        grad_h = torch.empty_like(hidden) if want_h else None
        grad_w: Tensor | None = None
        starts = range(0, hidden.shape[0], spec.chunk)
        kept, ctx.kept, z = ctx.kept, None, None
        for start in reversed(starts):
            rows = slice(start, min(start + spec.chunk, hidden.shape[0]))
            if kept is not None:
                z, kept, fresh = kept, None, False
            else:
                if z is not None and z.shape[0] < rows.stop - rows.start:
                    z = None  # give it up before a larger one is made
                z, fresh = _logits(hidden[rows], weight, z), True
            g = g_logprob[rows]
            if spec.entropy_grad:
                scale = torch.full_like(g, -1.0 / spec.temperature)
                values = stats[:, rows], entropy[rows], g, g_entropy[rows], logprob[rows]
                at_targets = _entropy_gradient(z, *values, spec.temperature)
            else:
                if fresh:
                    _exponentiate(z, stats[0, rows], spec.temperature)
                scale = -g / (stats[1, rows] * spec.temperature)
                at_targets = stats[1, rows] * torch.expm1(logprob[rows])
            _set_targets(z, local[rows], held[rows], at_targets)
            if grad_h is not None:
                torch.mm(z, weight, out=grad_h[rows])
                grad_h[rows] *= scale.unsqueeze(1).to(z.dtype)
            if want_w:
                grad_w = _add_outer(grad_w, z, (hidden[rows] * scale.unsqueeze(1)).to(z.dtype), single=len(starts) == 1)
        if grad_h is not None and spec.group is not None:
            dist.all_reduce(grad_h, group=spec.group)
        z = None  # before the sum is rounded to the working dtype
        if want_w:
            grad_w = torch.zeros_like(weight) if grad_w is None else grad_w.to(weight.dtype)
        return grad_h, grad_w, None, None, None


def _add_outer(total: Tensor | None, z: Tensor, hidden: Tensor, single: bool) -> Tensor:
    """``total + z^T hidden`` ``[v, h]``, summed over chunks in float32 by blocks of columns; one chunk: in its own
    dtype.
    """
    if single:
        return z.t() @ hidden
    if total is None:
        total = torch.zeros(
            z.shape[1], hidden.shape[1], device=z.device, dtype=torch.promote_types(z.dtype, torch.float32)
        )
    for c in range(0, z.shape[1], _COLUMNS):
        block = slice(c, c + _COLUMNS)
        if total.dtype == z.dtype:
            total[block].addmm_(z[:, block].t(), hidden)
        else:
            total[block] += z[:, block].t() @ hidden
    return total


def _logits(hidden: Tensor, weight: Tensor, buffer: Tensor | None) -> Tensor:
    """``hidden weight^T`` ``[c, v]``, in ``buffer`` if there is one."""
    return hidden @ weight.t() if buffer is None else torch.mm(hidden, weight.t(), out=buffer[: hidden.shape[0]])


def _piece(hidden: Tensor, spec: _Spec) -> int:
    """Tokens whose logits are made at one time in forward: a cache's worth on the CPU."""
    return min(spec.chunk, _PIECE) if hidden.device.type == "cpu" else spec.chunk


def _pieces(tokens: int, hidden: Tensor, spec: _Spec) -> list[slice]:
    """``[0, tokens)`` in pieces, none of them across the boundary of two chunks."""
    step = _piece(hidden, spec)
    chunks = [(at, min(at + spec.chunk, tokens)) for at in range(0, tokens, spec.chunk)]
    return [slice(at, min(at + step, stop)) for start, stop in chunks for at in range(start, stop, step)]


def _tiles(z: Tensor, rooms: int, dtype: torch.dtype) -> Iterator[tuple[slice, list[Tensor]]]:
    """Rows worked on together (a cache's worth on the CPU, all of them on an accelerator), each time with ``rooms``
    scratch tensors of their shape.
    """
    step = max(1, _CACHE_BYTES // (4 * max(z.shape[1], 1))) if z.device.type == "cpu" else max(z.shape[0], 1)
    scratch = [torch.empty(min(step, z.shape[0]), z.shape[1], dtype=dtype, device=z.device) for _ in range(rooms)]
    for start in range(0, z.shape[0], step):
        rows = slice(start, min(start + step, z.shape[0]))
        yield rows, [room[: rows.stop - rows.start] for room in scratch]


def _softmax_stats(
    z: Tensor, local: Tensor, held: Tensor, spec: _Spec, overwrite: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Over all ranks, of the scaled logits ``z`` ``[c, v]``, each ``[c]``: max z, sum exp(z - max), z_y - max and the
    entropy. ``overwrite``: leave ``exp(z - max)`` in their place.
    """
    wide = torch.float64 if z.dtype == torch.float64 else torch.float32
    inverse = 1.0 / spec.temperature
    peak = z.amax(-1).to(wide) if z.shape[1] else torch.full((z.shape[0],), -math.inf, dtype=wide, device=z.device)
    if spec.group is not None:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=spec.group)
    sums = torch.zeros(3 if spec.with_entropy else 2, z.shape[0], dtype=wide, device=z.device)
    if z.shape[1]:
        at = z.gather(1, local.unsqueeze(1)).squeeze(1).to(wide)
        sums[1] = torch.where(held, (at - peak) * inverse, 0.0)
        for rows, (x, *more) in _tiles(z, 2 if spec.with_entropy else 1, wide):
            x.copy_(z[rows]).sub_(peak[rows].unsqueeze(1))
            if inverse != 1.0:
                x.mul_(inverse)
            e = torch.exp(x, out=more[0] if more else x)
            if more:
                torch.sum(x.mul_(e), -1, out=sums[2, rows])
            torch.sum(e, -1, out=sums[0, rows])
            if overwrite:
                z[rows] = e
    if spec.group is not None:
        dist.all_reduce(sums, group=spec.group)
    entropy = sums[0].log() - sums[2] / sums[0] if spec.with_entropy else None
    return peak, sums[0], sums[1], entropy


def _exponentiate(z: Tensor, peak: Tensor, temperature: float) -> None:
    """``z <- exp((z - peak) / temperature)`` in place."""
    rooms = 0 if z.dtype in (torch.float32, torch.float64) else 1
    for rows, room in _tiles(z, rooms, torch.float32):
        x = room[0].copy_(z[rows]) if room else z[rows]
        x.sub_(peak[rows].unsqueeze(1))
        if temperature != 1.0:
            x.mul_(1.0 / temperature)
        x.exp_()
        if room:
            z[rows] = x


def _set_targets(e: Tensor, local: Tensor, held: Tensor, value: Tensor) -> None:
    """Put ``e_y - s = s (p_y - 1)`` at the targets of this rank, from exact float32 numbers: no cancellation for
    ``p_y`` near 1.
    """
    if e.shape[1]:
        at = held.nonzero().squeeze(1)
        e[at, local[at]] = value[at].to(e.dtype)


def _entropy_gradient(
    z: Tensor, stats: Tensor, entropy: Tensor, g: Tensor, g_entropy: Tensor, logprob: Tensor, temperature: float
) -> Tensor:
    """``z <- g (p - [y]) + g_entropy p (log p + H)`` in place: minus the gradient of both outputs w.r.t. the scaled
    logits, except at the targets, whose values are returned.
    """
    peak, total = stats
    log_total = total.log()
    for rows, (x, p) in _tiles(z, 2, total.dtype):
        x.copy_(z[rows]).sub_(peak[rows].unsqueeze(1)).mul_(1.0 / temperature).sub_(log_total[rows].unsqueeze(1))
        torch.exp(x, out=p)
        x.add_(entropy[rows].unsqueeze(1)).mul_(g_entropy[rows].unsqueeze(1)).add_(g[rows].unsqueeze(1)).mul_(p)
        z[rows] = x
    p_y = logprob.exp()
    return g * torch.expm1(logprob) + g_entropy * p_y * (logprob + entropy)
