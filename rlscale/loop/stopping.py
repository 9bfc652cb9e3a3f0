"""How a run ends before its last step: signals, a limit of time, and what every rank was doing when one stalls.

A signal may reach any rank, in any phase, while its main thread waits in a collective that Python cannot interrupt. So
a thread of each rank takes signals from a pipe, passes the request on through the store that the ranks share, and ends
the process when the grace period is over. The ranks themselves stop at a point where all of them are:
`Watch.raise_if_stopped`.

Launchers echo: DeepSpeed's answers Ctrl-C with a SIGTERM to the ranks that had the SIGINT already, one rank after the
other. Only the same signal again, some time after the first, means "at once".
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from rlscale.cluster import device, process

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ECHO_S = 1.5  # the same signal within this time is the same request
POLL_S = 0.5
LIMIT = "trainer.max_time"
_instances = itertools.count()  # alike on all ranks, as construction is collective
FIRST_WORD_S = 8.0  # time for a failed rank to print its message (up to 5 s later) before the other ranks exit
STALLED = re.compile(r"[Tt]imed? ?out|wait timeout")


class Stopped(Exception):
    """The run was asked to stop; raised on every rank at the same point."""


class Watch:
    """Watches over one rank of a run. Construction is collective over the world.

    Args:
        grace_s: seconds from a signal to the end of the process, whatever it does then.
        max_time_s: seconds after which rank 0 asks the run to stop; None: no limit.
        since: `time.monotonic` from which that is counted.
    """

    def __init__(self, *, grace_s: float, max_time_s: float | None = None, since: float | None = None):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.grace_s, self.max_time_s = grace_s, max_time_s
        self.since = time.monotonic() if since is None else since
        self.control = device.new_group(backend="gloo")
        # a connection of its own: the main thread may hold the other one while it waits
        store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"rlscale/watch{next(_instances)}", store.clone())  # type: ignore[attr-defined]
        self.reason: str | None = None  # why the run should stop, as far as this rank knows; others may not yet
        self._deadline: tuple[float, int] | None = None  # and when this process ends at the latest, with which code
        self._first: dict[int, float] = {}
        self._closed = threading.Event()
        self._handlers: dict[int, Any] = {}
        self._pipe = (-1, -1)
        self._phase = ("", time.time())
        self._failing = self._state_saved = False

    def start(self) -> None:
        """Take signals from now on; call on the main thread."""
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        # a handler of Python's own must exist for the number to be written to the pipe; it has nothing to do
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        process.follow_launcher(self._launcher_ended)
        threading.Thread(target=self._follow, daemon=True, name="watch").start()

    def close(self) -> None:
        """Back to the signals' former handlers; a run that has saved its state needs none any more."""
        self._closed.set()
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_IGN if self._state_saved else handler)
        if self._pipe[0] >= 0:
            signal.set_wakeup_fd(-1)
        self._handlers = {}

    def state_saved(self) -> None:
        """The state is saved: a launcher that sends its signal once more does not cut short what is left to do."""
        self._state_saved = True

    def request(self, reason: str, code: int | None = None) -> None:
        """Ask the whole run to stop; with ``code`` this process ends with it when the grace period is over."""
        if self.reason is None:
            self.reason = reason
            with contextlib.suppress(Exception):  # rank 0, which holds the store, may be gone
                self.store.set("stop", json.dumps({"reason": reason, "code": code}))
        if code is not None and self._deadline is None:
            self._deadline = (time.monotonic() + self.grace_s, code)

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` on every rank if any of them was asked to stop. Collective."""
        flag = torch.tensor([int(self.reason is not None)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.control)
        if not flag.item():
            return
        deadline = time.monotonic() + 5
        while self.reason is None and time.monotonic() < deadline:  # the request is on its way through the store
            self._look()
            time.sleep(0.05)
        raise Stopped(self.reason or "another rank was asked to stop")

    def phase(self, name: str) -> None:
        """Tell the others what this rank is about to do."""
        self._phase = (name, time.time())
        with contextlib.suppress(Exception):
            self.store.set(f"where/{self.rank}", json.dumps(self._phase))

    def failed(self, error: Exception) -> int | None:
        """Tell the others that this rank ends with an error, so that none of them waits for it.

        To an error that says that a collective has stalled, what every rank is doing is added as a note.

        Returns:
            The rank that has failed before this one, where there is one: this error follows from that, most likely.
        """
        if STALLED.search(str(error)):
            error.add_note(f"what the ranks are doing:\n{self.report()}")
        self._failing = True
        with contextlib.suppress(Exception):
            first = int(self.store.compare_set("failed", "", str(self.rank)))
            return None if first == self.rank else first
        return None

    def report(self) -> str:
        """What every rank was doing and for how long, one per line: for the message about a stalled collective."""
        lines = []
        for rank in range(self.world):
            try:
                key = f"where/{rank}"
                known = self._phase if rank == self.rank else None
                if known is None and self.store.check([key]):
                    known = json.loads(self.store.get(key))
                text = f"in {known[0]} for {time.time() - known[1]:.0f} s" if known else "unknown"
            except Exception:
                text = "unknown (the store of rank 0 is gone)"
            lines.append(f"  rank {rank}: {text}")
        return "\n".join(lines)

    # ---- the threads

    def _launcher_ended(self) -> None:
        if self._closed.is_set():
            process.exit_with_launcher()
        process.say(process.LAUNCHER_EXITED)
        self.request("the launcher has exited", 128 + signal.SIGTERM)

    def _follow(self) -> None:
        while not self._closed.is_set():
            ready, _, _ = select.select([self._pipe[0]], [], [], POLL_S)
            for number in os.read(self._pipe[0], 64) if ready else b"":
                if number in SIGNALS:
                    self._take(number)
            if self.reason is None:
                with contextlib.suppress(Exception):
                    self._look()
            limit = self.max_time_s
            if self.rank == 0 and limit is not None and time.monotonic() - self.since > limit:
                self.request(f"{LIMIT} of {limit:g} s has elapsed")
            with contextlib.suppress(Exception):
                self._leave_the_failed()
            if self._deadline is not None and time.monotonic() > self._deadline[0]:
                late = f"has not finished {self.grace_s:g} s after the stop request (trainer.stop_grace_s)"
                self._end(late, self._deadline[1])

    def _take(self, number: int) -> None:
        now = time.monotonic()
        first = self._first.setdefault(number, now)
        name, code = signal.Signals(number).name, 128 + number
        if now - first > ECHO_S and not self._state_saved:
            self._end(f"received {name} a second time", code)
        self.request(f"{name} on rank {self.rank}", code)

    def _look(self) -> None:
        """Take over another rank's request."""
        if self.store.check(["stop"]):
            asked = json.loads(self.store.get("stop"))
            self.request(asked["reason"], asked["code"])

    def _leave_the_failed(self) -> None:
        """End soon after another rank has failed: its message comes first, and it will never answer again."""
        if self._failing or not self.store.check(["failed"]):
            return
        rank = self.store.get("failed").decode()
        time.sleep(FIRST_WORD_S)
        self._end(f"rank {rank} has failed", 1)

    def _end(self, why: str, code: int) -> None:
        if self._closed.is_set():
            return
        process.say(f"error: rank {self.rank}: {why}; this rank exits; the last checkpoint stays valid")
        os._exit(code)
