"""The process: when it ends."""

from __future__ import annotations

import signal
import subprocess
import sys

# the second lock of a mutex waits for ever in C, and a signal does not interrupt it, as in a store that waits for ranks
WAITS_IN_C = """
import ctypes, signal
from rlscale.cluster.process import end_after_signal
signal.signal(signal.SIGTERM, lambda *_: None)
end_after_signal("error: it waited", within_s=0.5)
mutex = ctypes.create_string_buffer(128)
lock = ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
print("ready", flush=True)
lock(mutex)
"""


def test_a_signal_ends_a_process_that_waits_for_ranks_in_c() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITS_IN_C], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM and "error: it waited" in errors
