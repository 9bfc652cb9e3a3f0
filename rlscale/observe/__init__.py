"""What a run shows and leaves behind: metrics, timers, writers, the progress display, plots and the summary."""

from rlscale.observe.metrics import Metrics, batch_metrics, validation_metrics
from rlscale.observe.plots import draw
from rlscale.observe.progress import Progress
from rlscale.observe.summary import print_summary, summarize
from rlscale.observe.timers import Timers
from rlscale.observe.writers import RunWriter, read_metrics

__all__ = [
    "Metrics",
    "Progress",
    "RunWriter",
    "Timers",
    "batch_metrics",
    "draw",
    "print_summary",
    "read_metrics",
    "summarize",
    "validation_metrics",
]
