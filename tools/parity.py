"""Does the engine equal one process with transformers and AdamW? Runs `rlscale.testing.parity.run`.

    deepspeed --num_gpus 4 tools/parity.py --tp 2 --sp --zero 2
    python tools/parity.py --all

The second form runs every layout of the support matrix.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

from rlscale.testing.parity.run import program

if __name__ == "__main__":
    program()
