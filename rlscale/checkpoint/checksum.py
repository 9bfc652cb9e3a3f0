"""The checksum of a checkpoint's files: as fast as memory, so that saving costs what writing costs.

A file is taken in blocks of 8 KiB. Of each block the 64-bit little-endian words are added modulo 2**64, and the CRC-32
of these sums, followed by the bytes of the last, incomplete block, is the checksum. It changes with every single word
(a flipped bit, a byte) and with blocks that are zeroed, lost, repeated or moved; changes of several words that cancel
out within one block it does not see. It is there to find damage, not to withstand a forger. One core takes 23 GB/s (of
the CRC-32 of all bytes: 4).
"""

from __future__ import annotations

import zlib

import numpy as np

BLOCK = 8192  # bytes
WORD = np.dtype("<u8")


class Checksum:
    """Computes the checksum of bytes that come in pieces of any length."""

    def __init__(self) -> None:
        self.crc = 0
        self.incomplete = bytearray()  # the last block so far

    def update(self, data: memoryview | bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        if self.incomplete:
            missing = BLOCK - len(self.incomplete)
            self.incomplete += view[:missing]
            view = view[missing:]
            if len(self.incomplete) < BLOCK:
                return
            self._blocks(memoryview(self.incomplete))
            self.incomplete = bytearray()
        whole = len(view) - len(view) % BLOCK
        if whole:
            self._blocks(view[:whole])
        self.incomplete += view[whole:]

    def _blocks(self, view: memoryview) -> None:
        words = np.frombuffer(view, dtype=WORD).reshape(-1, BLOCK // WORD.itemsize)
        self.crc = zlib.crc32(np.add.reduce(words, axis=1).astype(WORD, copy=False).tobytes(), self.crc)

    def value(self) -> int:
        """The checksum of all bytes so far, 32 bits."""
        return zlib.crc32(self.incomplete, self.crc)
