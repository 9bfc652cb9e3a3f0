"""The pictures of a run, drawn from its metrics.jsonl: `rlscale plot RUN_DIR`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlscale.observe.timers import PHASES
from rlscale.observe.writers import read_metrics

Records = list[dict[str, Any]]
VALIDATION = "Held-out prompts"
LINE, BAND, SMOOTH = "#2a6f97", "#a9cce3", "#c8553d"


@dataclass(frozen=True)
class Panel:
    """One picture: the metrics it draws (label, name) and how it is labelled."""

    file: str
    title: str
    ylabel: str
    series: tuple[tuple[str, str], ...]
    spread: str | None = None  # prefix of a distribution: mean with the range from min to max
    smooth: bool = False  # add a running mean
    from_zero: bool = False


PANELS = (
    Panel("reward", "Reward", "mean reward of a response", (("training", "critic/score/mean"),), smooth=True),
    Panel("kl_reference", "KL to the reference policy", "nats per token",
          (("k3, in the update", "actor/ref_kl"), ("in the reward", "actor/reward_kl_penalty"))),
    Panel("kl_old", "KL to the policy that sampled", "nats per token", (("", "actor/ppo_kl"),)),
    Panel("clip_fraction", "Clipped tokens", "share of tokens",
          (("ratio", "actor/pg_clipfrac"), ("dual clip", "actor/pg_clipfrac_lower"), ("value", "critic/vf_clipfrac")),
          from_zero=True),
    Panel("entropy", "Entropy of the policy", "nats per token", (("", "actor/entropy"),), from_zero=True),
    Panel("deviation", "Deviation of advantages and rewards", "standard deviation",
          (("advantages", "critic/advantages/std"), ("rewards", "critic/score/std"),
           ("rewards within a group", "group/reward_std"),
           ("share of groups without contrast", "group/zero_std_frac")), from_zero=True),
    Panel("lengths", "Lengths", "tokens", (("response", "response_length/mean"), ("prompt", "prompt_length/mean")),
          spread="response_length", from_zero=True),
    Panel("gradient", "Gradient norm", "norm before clipping",
          (("actor", "actor/grad_norm"), ("critic", "critic/grad_norm")), from_zero=True),
    Panel("loss", "Losses", "weighted sum over tokens", (("policy", "actor/pg_loss"), ("value", "critic/vf_loss"))),
    Panel("logprob_difference", "Trainer against engine", "absolute difference of log-probs",
          (("mean", "rollout/logprob_diff_mean"), ("max", "rollout/logprob_diff_max")), from_zero=True),
)  # fmt: skip


def draw(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Draw plots/*.png of a run folder; a picture whose metrics the run doesn't have is left out. The files drawn.

    Raises:
        ValueError: the folder has no readable metrics.jsonl.
    """
    records = read_metrics(run_dir)
    training = [r for r in records if r["step"] > 0]
    folder = Path(run_dir) / "plots"
    folder.mkdir(exist_ok=True)
    drawn = [
        _save(folder / f"{p.file}.png", p.title, p.ylabel, partial(_panel, panel=p, records=training))
        for p in PANELS
        if any(name in r for _, name in p.series for r in training)
    ]
    sources = sorted({k for r in records for k in r if k.startswith("val/") and "@" in k})
    if sources:
        fill = partial(_validation, names=sources, records=records)
        drawn.append(_save(folder / "validation.png", VALIDATION, "reward", fill))
    phases = [p for p in PHASES if any(f"timing_s/{p}" in r for r in training)]
    if phases:
        fill = partial(_time, phases=phases, records=training)
        drawn.append(_save(folder / "time_by_phase.png", "Time of a step by phase", "seconds", fill))
    return drawn


def _save(path: Path, title: str, ylabel: str, fill: Callable[[Any], None]) -> Path:
    """Draw one picture into a file, without pyplot: no global state, no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    fill(axes)
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1 or title == VALIDATION:  # below the axes, where it hides no data
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False, fontsize=9)
    figure.savefig(path)
    return path


def _points(records: Records, name: str) -> tuple[list[int], list[float]]:
    pairs = [(r["step"], r[name]) for r in records if name in r]
    return [s for s, _ in pairs], [v for _, v in pairs]


def _line(axes: Any, steps: Sequence[int], values: Sequence[float], **style: Any) -> None:
    """A line; few points are marked, so that a single one can be seen."""
    style.setdefault("marker", "o" if len(steps) <= 12 else None)
    axes.plot(steps, values, markersize=4, linewidth=1.6, **style)


def _panel(axes: Any, panel: Panel, records: Records) -> None:
    present = [(label, name) for label, name in panel.series if any(name in r for r in records)]
    if panel.spread:
        steps, low = _points(records, f"{panel.spread}/min")
        high, label = _points(records, f"{panel.spread}/max")[1], f"{present[0][0]}, shortest to longest"
        axes.fill_between(steps, low, high, color=BAND, alpha=0.5, linewidth=0, label=label)
    for i, (label, name) in enumerate(present):
        steps, values = _points(records, name)
        faint = panel.smooth and len(values) >= 5
        _line(axes, steps, values, color=LINE if i == 0 else f"C{i}", alpha=0.45 if faint else 1.0, label=label or None)
        if faint:
            mean = [sum(values[max(0, j - 4) : j + 1]) / len(values[max(0, j - 4) : j + 1]) for j in range(len(values))]
            axes.plot(steps, mean, color=SMOOTH, linewidth=2.2, label="mean of the last 5 steps")
    if panel.from_zero:
        negative = any(r.get(name, 0.0) < 0 for r in records for _, name in present)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if negative else 0.0)


def _validation(axes: Any, names: list[str], records: Records) -> None:
    for name in names:
        _line(axes, *_points(records, name), marker="o", label=name.removeprefix("val/"))


def _time(axes: Any, phases: list[str], records: Records) -> None:
    """Stacked areas of the phases and, above them, what no phase accounts for."""
    from matplotlib import colormaps

    steps = [r["step"] for r in records]
    layers = [[r.get(f"timing_s/{p}", 0.0) for r in records] for p in phases]
    labels = list(phases)
    rest = [max(0.0, r.get("timing_s/step", 0.0) - sum(layer[i] for layer in layers)) for i, r in enumerate(records)]
    if sum(rest) > 0.01 * sum(map(sum, layers)):
        layers.append(rest)
        labels.append("other")
    colours = [*(colormaps["tab20"](i) for i in range(len(phases))), "0.8"]
    if len(steps) == 1:  # an area needs two points
        steps, layers = [steps[0] - 0.4, steps[0] + 0.4], [layer * 2 for layer in layers]
    axes.stackplot(steps, *layers, labels=labels, colors=colours[: len(layers)], linewidth=0)
    axes.set_ylim(bottom=0.0)
    axes.margins(x=0)
