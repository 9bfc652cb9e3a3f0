"""What a run shows and leaves behind: timers, writers, the progress display, plots and the summary."""

from rlscale.observe.plots import draw
from rlscale.observe.progress import Progress
from rlscale.observe.summary import print_summary, summarize
from rlscale.observe.timers import Timers
from rlscale.observe.writers import RunWriter, read_metrics

__all__ = ["Progress", "RunWriter", "Timers", "draw", "print_summary", "read_metrics", "summarize"]
