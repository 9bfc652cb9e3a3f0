"""Drawing tokens on CPU with one random number per row.

Gumbel-max sampling needs noise for every token of the vocabulary, which on a CPU core costs about a tenth of a small
model's decoding step. Inverting the cumulative distribution needs one uniform number, the sums of blocks of
probabilities, and the running sum of the one block that it falls into.
"""

from __future__ import annotations

import torch

BLOCK = 256
BELOW_ONE = 1.0 - 1e-12  # keeps a product strictly inside a total in spite of rounding


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The token of each row in whose interval of the cumulative distribution the row's number falls.

    Args:
        probabilities: [B, V] float32, not negative; rows need not sum to one exactly. Tokens of probability 0 are never
            drawn.
        uniform: [B] float64 in [0, 1).

    Returns:
        [B] int64.
    """
    rows, vocabulary = probabilities.shape
    if vocabulary % BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, BLOCK - vocabulary % BLOCK))
    blocks = probabilities.view(rows, -1, BLOCK)
    sums = blocks.sum(-1).double()  # [B, V / BLOCK]
    edges = sums.cumsum(-1)
    target = uniform[:, None] * edges[:, -1:] * BELOW_ONE
    block = torch.searchsorted(edges, target, right=True)  # the first whose upper edge lies above the target
    lower = edges.gather(1, block) - sums.gather(1, block)
    share = ((target - lower) / sums.gather(1, block)).clamp_(0.0, 1.0)
    inner = blocks[torch.arange(rows), block[:, 0]].double().cumsum(-1)  # [B, BLOCK]
    within = torch.searchsorted(inner, share * inner[:, -1:] * BELOW_ONE, right=True)
    return (block * BLOCK + within)[:, 0]


def uniform_numbers(rows: int, generators: dict[int, torch.Generator]) -> torch.Tensor:
    """[B] float64 in [0, 1): from a row's own generator where it has one."""
    out = torch.rand(rows, dtype=torch.float64)
    for row, generator in generators.items():
        out[row] = torch.rand((), dtype=torch.float64, generator=generator)
    return out
