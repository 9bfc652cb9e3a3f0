"""The process: when it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

WAITS_IN_C = """
import signal, sys
from datetime import timedelta
import torch.distributed as dist
from rlscale.cluster.process import end_after_signal
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
end_after_signal("error: it waited", within_s=0.5)
print("ready", flush=True)
dist.TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=timedelta(seconds=120), wait_for_workers=True)
"""


def test_a_signal_ends_a_process_that_waits_for_ranks_in_c() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITS_IN_C], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM and "error: it waited" in errors
