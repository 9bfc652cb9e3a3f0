"""The checksum: the same however the bytes come, another one after any damage that disks and networks do."""

from __future__ import annotations

import os
import random

import pytest

from rlscale.checkpoint.checksum import BLOCK, Checksum

SIZES = [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 3]


def checksum(data: memoryview | bytes) -> int:
    out = Checksum()
    out.update(data)
    return out.value()


@pytest.mark.parametrize("size", SIZES)
def test_pieces_do_not_matter(size: int) -> None:
    data = memoryview(os.urandom(size))
    for seed in range(20):
        draw, out, at = random.Random(seed), Checksum(), 0
        while at < size:
            length = draw.choice([1, 3, 100, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
            out.update(data[at : at + length])
            at += length
        assert out.value() == checksum(data)


@pytest.mark.parametrize("size", SIZES[1:])
def test_damage_changes_it(size: int) -> None:
    data, draw = os.urandom(size), random.Random(size)
    right = checksum(data)
    for _ in range(300):
        place, bit = draw.randrange(size), draw.randrange(8)
        assert checksum(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]) != right
    assert checksum(data[:-1]) != right != checksum(data + b"\0")
    if size >= 2 * BLOCK:
        blocks = [data[i : i + BLOCK] for i in range(0, size, BLOCK)]
        assert checksum(b"".join([blocks[1], blocks[0], *blocks[2:]])) != right
        assert checksum(b"".join([blocks[0], bytes(BLOCK), *blocks[2:]])) != right
        assert checksum(b"".join([blocks[0], blocks[0], *blocks[2:]])) != right
        assert checksum(b"".join([blocks[0], *blocks[2:]])) != right
