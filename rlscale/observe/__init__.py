"""What a run shows and leaves behind: timers, writers, the progress display, plots and the summary."""
