"""Run the algorithm library on golden numeric cases: python tools/oracle.py FILE.json... (see `tests.algo.golden`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

from tests.algo.golden import main

if __name__ == "__main__":
    sys.exit(main())
