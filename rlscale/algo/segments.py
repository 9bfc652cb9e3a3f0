"""Arithmetic on flat tokens cut into sequences by ``cu_seqlens``: sums, broadcasts and first-order recurrences.

A flat batch has ``T`` tokens of ``B`` sequences; sequence ``i`` is ``[cu_seqlens[i], cu_seqlens[i+1])``.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BLOCK = 32  # tokens per block of the blocked scan


def check_shapes(
    cu_seqlens: Tensor, *, per_token: dict[str, Tensor | None], per_sequence: dict[str, Tensor | None] | None = None
) -> None:
    """Every named tensor is 1-D with one entry per token (or per sequence); ``None`` is skipped.

    Raises:
        ValueError: names the tensor, its shape and the shape it should have.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens must be 1-D with at least one entry, got shape {tuple(cu_seqlens.shape)}")
    tokens, sequences = int(cu_seqlens[-1]), cu_seqlens.numel() - 1
    for named, size, of in ((per_token, tokens, "tokens"), (per_sequence or {}, sequences, "sequences")):
        for name, x in named.items():
            if x is not None and tuple(x.shape) != (size,):
                raise ValueError(f"{name} has shape {tuple(x.shape)}, but there are {size} {of} ([{size}] is needed)")


def check_alike(**named: Tensor | None) -> None:
    """All are 1-D of one length; ``None`` is skipped.

    Raises:
        ValueError: names the tensors and their shapes.
    """
    shapes = {name: tuple(x.shape) for name, x in named.items() if x is not None}
    if len({*shapes.values()}) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        found = ", ".join(f"{name} has shape {shape}" for name, shape in shapes.items())
        raise ValueError(f"inputs must be 1-D of one length, not of different shapes: {found}")


def weighted_sum(name: str, x: Tensor, mask: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """``sum_t w_t x_t`` over the tokens that count, and metric sums: ``x`` as ``name``, and its denominator ``tokens``.

    All ``[t]``; NaN at masked positions changes nothing.

    Raises:
        ValueError: shapes that disagree.
    """
    check_alike(**{name: x, "mask": mask, "weights": weights})
    valid = mask > 0
    x = torch.where(valid, x, 0.0)
    return (x * torch.where(valid, weights, 0.0)).sum(), {name: x.detach().sum(), "tokens": valid.sum()}


def segment_sum(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum over each sequence. ``x``: ``[T]`` -> ``[B]``; 0 for an empty sequence. Differentiable."""
    if x.numel() == 0:
        return x.new_zeros(cu_seqlens.numel() - 1) + x.sum()  # still a part of the graph
    return torch.segment_reduce(x, "sum", offsets=cu_seqlens)


def sequence_sums(x: Tensor, valid: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum over the valid tokens of each sequence in float64, without gradient. ``x``, ``valid``: ``[T]`` -> ``[B]``.

    numpy is several times faster on the CPU. Where most values are 0, as rewards are, only the others are looked at.
    """
    if x.device.type != "cpu" or x.numel() == 0:
        return segment_sum(torch.where(valid, x.detach().double(), 0.0), cu_seqlens)
    values, chosen, cu = x.detach().numpy(), valid.numpy(), cu_seqlens.numpy()
    hit = values != 0
    hit &= chosen
    if np.count_nonzero(hit) * 16 <= hit.size:
        at = np.flatnonzero(hit)
        sums = np.bincount(np.searchsorted(cu, at, side="right") - 1, values[at], cu.size - 1)
        return torch.from_numpy(sums.astype(np.float64, copy=False))  # integers where nothing was hit
    filled = cu[1:] > cu[:-1]
    out = np.zeros(filled.size)
    out[filled] = np.add.reduceat(np.where(chosen, values, 0), cu[:-1][filled], dtype=np.float64)
    return torch.from_numpy(out)


def sequence_counts(valid: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Valid tokens of each sequence. ``[T]`` bool -> ``[B]`` float64."""
    if valid.device.type != "cpu" or valid.numel() == 0:
        return segment_sum(valid.double(), cu_seqlens)
    filled = cu_seqlens.diff().numpy() > 0
    out = np.zeros(filled.size)
    out[filled] = np.add.reduceat(valid.numpy().view(np.uint8), cu_seqlens[:-1].numpy()[filled], dtype=np.int64)
    return torch.from_numpy(out)


def any_valid(valid: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Which sequences have a valid token (10 times faster than a count). ``[T]`` bool -> ``[B]`` bool."""
    if valid.device.type != "cpu" or valid.numel() == 0:
        return segment_sum(valid.double(), cu_seqlens) > 0
    out = cu_seqlens.diff().numpy() > 0
    out[out] = np.logical_or.reduceat(valid.numpy(), cu_seqlens[:-1].numpy()[out])
    return torch.from_numpy(out)


def keep_valid(x: Tensor, valid: Tensor) -> Tensor:
    """``x`` (finite, overwritten) with 0 where ``valid`` is false. ``[T]`` -> ``[T]``."""
    if x.device.type == "cpu":
        np.multiply(x.numpy(), valid.numpy(), out=x.numpy())
        return x
    return x.mul_(valid)


def positive(mask: Tensor) -> Tensor:
    """``mask > 0``; numpy's comparison is several times faster than torch's on the CPU. ``[T]`` -> ``[T]`` bool."""
    return torch.from_numpy(mask.detach().numpy() > 0) if mask.device.type == "cpu" else mask > 0


def spread(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """At each token the value of its sequence. ``[B]`` -> ``[T]``."""
    if x.device.type == "cpu" and not x.requires_grad:
        return torch.from_numpy(np.repeat(x.numpy(), cu_seqlens.diff().numpy()))
    return torch.repeat_interleave(x, cu_seqlens.diff(), output_size=int(cu_seqlens[-1]))


def compress(valid: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the valid tokens ``[N]`` and the ``cu_seqlens`` ``[B+1]`` of the stream that holds them alone."""
    count = torch.zeros(valid.numel() + 1, dtype=torch.int64, device=valid.device)
    torch.cumsum(valid, 0, out=count[1:])
    return valid.nonzero().squeeze(1), count[cu_seqlens]


def reverse_scan(x: Tensor, decay: float, cu_seqlens: Tensor) -> Tensor:
    """``y_t = x_t + decay * y_{t+1}`` within each sequence (0 beyond its end). ``x``: ``[T]`` -> ``[T]``."""
    if decay == 0.0:
        return x.clone()
    coefficient = torch.full_like(x, decay)
    coefficient[cu_seqlens[1:][cu_seqlens.diff() > 0] - 1] = 0.0
    return _scan(coefficient.flip(0), x.flip(0)).flip(0)


def cumulative(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Running sum within each sequence, this token included. ``[T]`` -> ``[T]``."""
    coefficient = torch.ones_like(x)
    coefficient[cu_seqlens[:-1][cu_seqlens.diff() > 0]] = 0.0
    return _scan(coefficient, x)


def _scan(c: Tensor, x: Tensor) -> Tensor:
    """``y_t = x_t + c_t y_{t-1}``, ``y_{-1} = 0``. ``[n]`` -> ``[n]``.

    The stream is cut into blocks of 32 tokens that are scanned side by side; the carries between blocks are the same
    recurrence, 32 times shorter: a few passes over memory.
    """
    n = x.numel()
    if n <= _BLOCK:
        y = x.tolist()
        for t, k in enumerate(c.tolist()[1:], 1):
            y[t] += k * y[t - 1]
        return torch.tensor(y, dtype=x.dtype, device=x.device)
    blocks = -(-n // _BLOCK)
    pad = blocks * _BLOCK - n
    ys = torch.nn.functional.pad(x, (0, pad)).view(blocks, _BLOCK).t().contiguous()
    cs = torch.nn.functional.pad(c, (0, pad)).view(blocks, _BLOCK).t().contiguous()
    for j in range(1, _BLOCK):  # afterwards: ys = scan inside the block, cs = product of the coefficients up to here
        ys[j].addcmul_(cs[j], ys[j - 1])
        cs[j].mul_(cs[j - 1])
    carry = torch.zeros_like(ys[-1])
    carry[1:] = _scan(cs[-1], ys[-1])[:-1]
    ys.addcmul_(cs, carry)
    return ys.t().reshape(-1)[:n]


def whiten(x: Tensor, valid: Tensor, eps: float = 1e-8) -> Tensor:
    """Mean 0 and (unbiased) variance 1 over the valid tokens, 0 at the others.

    One valid token, none, or equal values give exactly 0: the values are shifted by their minimum before the mean is
    taken, so that a constant leaves no rounding residue to be divided by a tiny deviation. ``x``: ``[T]`` -> ``[T]``.
    """
    chosen = x[valid]
    out = torch.zeros_like(x)
    if chosen.numel() < 2:
        return out
    chosen = chosen - chosen.min()
    chosen = chosen - chosen.mean()
    out[valid] = chosen * torch.rsqrt(chosen.square().sum() / (chosen.numel() - 1) + eps)
    return out
