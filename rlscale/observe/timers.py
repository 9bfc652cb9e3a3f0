"""Wall-clock time of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: phases that a step times, in its order: keys ``timing_s/<phase>`` of the metrics
PHASES = ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "sync")


class Timers:
    """Adds up seconds by phase; phases may nest and repeat.

    ``synchronize`` is called before each reading of the clock, so that work queued on a device is counted where it was
    started; ``on_phase`` with the name of each phase as it begins, e.g. to show it.
    """

    def __init__(
        self, synchronize: Callable[[], None] = lambda: None, on_phase: Callable[[str], None] = lambda _: None
    ) -> None:
        self._synchronize, self._on_phase = synchronize, on_phase
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a ``with`` block as ``phase``, also when it raises."""
        self._on_phase(phase)
        begin = self._now()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + (self._now() - begin)

    def take(self) -> dict[str, float]:
        """``timing_s/<phase>`` of everything since the last call, and start anew."""
        taken = {f"timing_s/{phase}": seconds for phase, seconds in self._seconds.items()}
        self._seconds = {}
        return taken

    def _now(self) -> float:
        self._synchronize()
        return time.perf_counter()
