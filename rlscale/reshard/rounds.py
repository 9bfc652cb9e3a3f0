"""When each chunk travels: rounds in which no rank receives, nor sends, more than one bucket."""

from __future__ import annotations

import numpy as np

from rlscale.reshard.layout import Ints

AHEAD = 8  # while the sender of a receiver's next chunk is busy, one of this many chunks may be taken before it


def schedule(
    bounds: Ints, sizes: Ints, senders: Ints, shares: Ints, first: Ints, bucket_bytes: int
) -> tuple[Ints, int]:
    """Deal every receiver's chunks, nearly in their order, into rounds within the limits of receivers and senders.

    Ranks take turns, one chunk each, so that a sender wanted by several serves them side by side. Only a busy sender
    makes a receiver leave its order; if all comes from one sender, or goes to one receiver, the order is exact. A chunk
    that alone outgrows a bucket (by alignment) has a round for itself.

    Args:
        bounds: ``[receivers + 1]``: receiver ``i`` wants chunks ``bounds[i]`` to ``bounds[i + 1]``.
        sizes: ``[chunks]`` bytes in the receiver's bucket, at least the sum of the shares.
        senders, shares: for each chunk the ranks that send of it, and bytes in their staging buffers: those of chunk
            ``c`` are ``first[c]`` to ``first[c + 1]``.

    Returns:
        The round of every chunk, and the number of rounds.
    """
    nexts, ends = bounds[:-1].tolist(), bounds[1:].tolist()
    size_of, sender_of, share_of, first_of = sizes.tolist(), senders.tolist(), shares.tolist(), first.tolist()
    parts_of = [range(lo, hi) for lo, hi in zip(first_of, first_of[1:], strict=False)]
    out = [0] * len(size_of)
    idle = [0] * (max(sender_of, default=-1) + 1)
    passed: list[list[int]] = [[] for _ in ends]  # chunks that later ones were taken before
    waiting = [i for i, end in enumerate(ends) if nexts[i] < end]
    number = 0
    while waiting:
        filled, busy, turn = [0] * len(ends), idle.copy(), waiting
        while turn:
            again = []
            for i in turn:
                late, new = passed[i], nexts[i]
                for chunk in (*late, *range(new, min(ends[i], new + AHEAD - len(late)))):
                    into = filled[i] + size_of[chunk]
                    if into > bucket_bytes and filled[i]:
                        break  # no more in this round: smaller ones that would fit keep their place
                    parts = parts_of[chunk]
                    for p in parts:
                        load = busy[sender_of[p]]
                        if load and load + share_of[p] > bucket_bytes:
                            break
                    else:
                        filled[i] = into
                        for p in parts:
                            busy[sender_of[p]] += share_of[p]
                        out[chunk] = number
                        if chunk < new:
                            late.remove(chunk)
                        else:
                            late += range(new, chunk)
                            nexts[i] = chunk + 1
                        again.append(i)
                        break
            turn = again
        waiting = [i for i in waiting if nexts[i] < ends[i] or passed[i]]
        number += 1
    return np.array(out, np.int64), number
