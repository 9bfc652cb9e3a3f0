"""Start a run: ``deepspeed launchers/train.py --yaml FILE [section.key=value ...] [--dry-run]``.

The same program runs on every rank; it is `rlscale.loop.launch.main`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

from rlscale.loop.launch import main

if __name__ == "__main__":
    status = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # exit without cleanup: a failed rank must not wait for other ranks, all output is on disk, and tearing down torch
    # and vLLM takes seconds
    os._exit(status)
