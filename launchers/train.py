"""Start a run: ``deepspeed launchers/train.py --yaml FILE [section.key=value ...] [--dry-run]``.

The same program runs on every rank; it is `rlscale.loop.launch.main`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

from rlscale.cluster.process import leave
from rlscale.loop.launch import main

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
