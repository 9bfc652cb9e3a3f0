"""How a run shows that it is alive: a display on a terminal, one plain line per step anywhere else. Rank 0 only."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

#: label, format and metric of what is shown: the first of the metrics that a run has (the KL to the reference need not
#: be computed in the update)
SHOWN = (
    ("reward", ".3f", "critic/score/mean"),
    ("kl", ".4f", "actor/ref_kl", "actor/reward_kl_penalty", "actor/ppo_kl"),
    ("entropy", ".3f", "actor/entropy"),
    ("length", ".1f", "response_length/mean"),
    ("tokens/s", ".0f", "perf/throughput"),
    ("s/step", ".1f", "timing_s/step"),
    ("SKIPPED", ".0f", "actor/skipped_steps"),  # shown where it is not zero
    ("SKIPPED by the critic", ".0f", "critic/skipped_steps"),
)


class Progress:
    """Shows step, the metrics of `SHOWN` and time left on rank 0, on ``stream`` (default: standard output).

    ``start``: steps already done (a resumed run).
    """

    def __init__(self, total_steps: int, start: int = 0, rank: int = 0, stream: IO[str] | None = None) -> None:
        self._total, self._done, self._active = total_steps, start, rank == 0
        self._stream = stream if stream is not None else sys.stdout
        self._durations: deque[float] = deque(maxlen=20)
        self._last = time.monotonic()
        self._live: Any = None
        if self._active and self._stream.isatty():
            self._open_display()

    def _open_display(self) -> None:
        """A bar with step, time left and phase; below it the numbers of the last step."""
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        step, phase = TextColumn("step"), TextColumn("{task.description}")
        self._bar = Bar(SpinnerColumn(), step, MofNCompleteColumn(), BarColumn(), phase)
        self._task = self._bar.add_task("starting", total=self._total, completed=self._done)
        self._numbers = Text()
        self._live = Live(Group(self._bar, self._numbers), console=Console(file=self._stream), refresh_per_second=4)
        self._live.start()

    def phase(self, name: str) -> None:
        """Show what the step is doing (terminal only)."""
        if self._live:
            left = f"left {duration(self.seconds_left())}  " if self._durations else ""
            self._bar.update(self._task, description=f"{left}{name}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the numbers of a finished step."""
        now = time.monotonic()
        self._durations.append(now - self._last)
        self._last, self._done = now, step
        if not self._active:
            return
        left = duration(self.seconds_left())
        if self._live:
            self._bar.update(self._task, completed=step, description=f"left {left}")
            self._numbers.plain = " " + "  ".join(f"{label} {value}" for label, value in shown(metrics))
        else:
            text = " | ".join(f"{label} {value}" for label, value in shown(metrics))
            self._write(f"step {step:>{len(str(self._total))}}/{self._total} | {text} | left {left}")

    def message(self, text: str) -> None:
        """A line of text, above the display if there is one."""
        if not self._active:
            return
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._write(text)

    def restart_clock(self) -> None:
        """Leave out what has passed since the last step (validation, saving) from the estimate of the time left."""
        self._last = time.monotonic()

    def seconds_left(self) -> float:
        """Remaining steps times the median time of the last ones; 0 before the first."""
        return (self._total - self._done) * statistics.median(self._durations) if self._durations else 0.0

    def close(self) -> None:
        """Take the display down; what was shown last stays on the screen."""
        if self._live:
            self._bar.update(self._task, description="")
            self._live.stop()
            self._live = None

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a reader that is gone (tee) must not end the run
            self._stream.write(text + "\n")
            self._stream.flush()


def shown(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, number) pairs of the metrics that the display shows."""
    out = []
    for label, form, *names in SHOWN:
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None and not (label.startswith("SKIPPED") and value == 0):
            out.append((label, format(value, form)))
    return out or [(name, f"{value:.4g}") for name, value in list(metrics.items())[:4]]  # of a task with other metrics


def duration(seconds: float) -> str:
    """Seconds as 0:42, 12:03 or 1:02:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"
