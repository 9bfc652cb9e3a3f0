"""The pictures of README and docs, as SVG in docs/pictures.

    python tools/draw_pictures.py                       # all but the reward curve
    python tools/draw_pictures.py --run runs/quickstart # and the reward curve of that run

The packed row and the plan of a weight update are drawn from what the project's own code makes; the reward curve from
the metrics of a run. Each picture has a light background of its own, so that it reads on a dark page too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
INK, GREY, LINE, PAPER = "#1f2933", "#52606d", "#9aa5b1", "#ffffff"
BLUE, GREEN, AMBER, RED, VIOLET = "#d6e6f5", "#d8f0dd", "#fdebc8", "#f9d9d5", "#e6dcf5"
STRONG_BLUE, STRONG_GREEN, STRONG_AMBER, STRONG_VIOLET = "#2a6f97", "#3a8f5c", "#c98a1b", "#7a55b5"


class Picture:
    """Shapes in the order in which they are drawn; sizes in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self.shapes: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, line: str = LINE, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5" fill="{fill}" stroke="{line}"{dash}/>'
        )

    def cell(self, x: float, y: float, w: float, h: float, fill: str) -> None:
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{PAPER}" stroke-width="1"/>'
        )

    def text(
        self, x: float, y: float, text: str, size: int = 14, anchor: str = "middle", bold: bool = False, fill: str = INK
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}>'
            f"{escape(text)}</text>"
        )

    def path(self, d: str, line: str = GREY, width: float = 1.5, opacity: float = 1.0, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.shapes.append(
            f'<path d="{d}" fill="none" stroke="{line}" stroke-width="{width:g}" stroke-opacity="{opacity:g}"{dash}/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, line: str = GREY) -> None:
        """A straight line, horizontal or vertical, with a head at its end."""
        self.path(f"M {x1:g} {y1:g} L {x2:g} {y2:g}", line)
        dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        points = [(x2, y2), (x2 - 9 * dx + 5 * dy, y2 - 9 * dy + 5 * dx), (x2 - 9 * dx - 5 * dy, y2 - 9 * dy - 5 * dx)]
        self.shapes.append(f'<polygon points="{" ".join(f"{x:g},{y:g}" for x, y in points)}" fill="{line}"/>')

    def save(self, name: str) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="Helvetica, Arial, sans-serif">\n<title>{escape(self.title)}</title>\n'
            f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{PAPER}"/>\n'
        )
        (FOLDER / name).write_text(head + "\n".join(self.shapes) + "\n</svg>\n", encoding="utf-8")


def processes() -> None:
    """Four devices, two engines of two workers."""
    p = Picture(960, 520, "Processes on devices")
    p.box(20, 16, 920, 36, AMBER)
    p.text(480, 39, "deepspeed starts the same program on every device: one trainer process each", 15)
    for rank in range(4):
        x = 20 + 235 * rank
        p.arrow(x + 107, 52, x + 107, 76)
        p.box(x, 78, 215, 330, "#f5f7fa")
        p.text(x + 107, 100, f"device {rank}", 14, bold=True)
        p.box(x + 12, 112, 191, 150, BLUE)
        p.text(x + 107, 133, f"trainer rank {rank}" + (" (leader)" if rank % 2 == 0 else ""), 14)
        for i, part in enumerate(("actor shard", "reference shard", "critic shard")):
            p.box(x + 28, 144 + 37 * i, 159, 29, PAPER)
            p.text(x + 107, 163 + 37 * i, part, 13)
        p.arrow(x + 107, 262, x + 107, 300, STRONG_BLUE)
        p.text(x + 117, 286, "weight slices", 12, "start", fill=STRONG_BLUE)
        p.box(x + 12, 326, 191, 62, GREEN)
        p.text(x + 107, 352, f"vLLM worker {rank % 2}", 14)
        p.text(x + 107, 372, f"engine {rank // 2}", 12, fill=GREY)
    for engine in range(2):
        x = 20 + 470 * engine
        p.box(x + 5, 303, 440, 92, "none", STRONG_GREEN, dashed=True)
        p.text(x + 18, 320, f"engine {engine}, TP 2, hosted by rank {2 * engine}", 12, "start", fill=STRONG_GREEN)
        p.arrow(x + 107, 408, x + 107, 442)
        p.text(x + 118, 430, "finished responses, scores back", 12, "start", fill=GREY)
        p.box(x, 444, 450, 56, VIOLET)
        p.text(x + 225, 468, f"scorer processes of leader {2 * engine}", 14)
        p.text(x + 225, 487, "one response at a time each, with a time-out", 12, fill=GREY)
    p.save("processes.svg")


def step() -> None:
    """The data of one step, with the shapes of what moves."""
    parts = (
        ("prompts", "G prompts, the same list on every rank", AMBER),
        ("rollout", "one vLLM engine per rollout group", GREEN),
        ("exchange", "every rank receives all responses", AMBER),
        ("batch", "one flat row: tokens [T], cu_seqlens [B+1], prompts once", BLUE),
        ("log-probs, values", "old and reference log-probs, values: [T] each", BLUE),
        ("advantages, weights", "[T] each, from counts of the whole batch", BLUE),
        ("update", "Megatron's schedule runs, DeepSpeed ZeRO steps", BLUE),
        ("weight update", "each worker receives the slices that it lacks", GREEN),
    )
    between = (
        "leaders claim groups of prompts from a counter",
        "token ids and log-probs; each response is scored as soon as it is finished",
        "a few integers per token",
        "the work is divided over the ranks, results reach every rank",
        "where the algorithm needs them",
        "mini-batches, cut by a token budget and balanced over the ranks",
        "a plan between two layouts, bounded buckets",
        "",
    )
    p = Picture(960, 84 * len(parts), "The data of one step")
    for i, ((name, what, fill), then) in enumerate(zip(parts, between, strict=True)):
        y = 20 + 84 * i
        p.box(120, y, 640, 46, fill)
        p.text(140, y + 29, name, 15, "start", bold=True)
        p.text(330, y + 29, what, 14, "start")
        if then:
            p.arrow(225, y + 46, 225, y + 82)
            p.text(245, y + 69, then, 13, "start", fill=GREY)
    bottom = 20 + 84 * (len(parts) - 1) + 23
    p.path(f"M 760 {bottom} L 850 {bottom} L 850 43 L 772 43")
    p.arrow(790, 43, 762, 43)
    p.text(862, (bottom + 43) / 2, "next step", 14, "start", fill=GREY)
    p.save("step.svg")


def packed_row() -> None:
    """Two prompts with their responses as `rlscale.model.packing` packs them, and who attends to whom."""
    import torch

    from rlscale.batch.types import Trajectory, pack
    from rlscale.model.packing import pack_sequence

    lengths = ((5, (4, 3, 5)), (3, (4, 3)))
    batch = pack([
        Trajectory(g, i, list(range(prompt)), list(range(n)), [1] * n, [0.0] * n)
        for g, (prompt, responses) in enumerate(lengths) for i, n in enumerate(responses)
    ])  # fmt: skip
    packed = pack_sequence(batch, torch.arange(batch.num_samples), share_prefix=True)
    alone = pack_sequence(batch, torch.arange(batch.num_samples), share_prefix=False)
    kind: list[tuple[int, int]] = []  # of each token: block, and -1 (prompt) or number of the response
    for number, block in enumerate(packed.blocks):
        kind += [(number, -1)] * block.prompt
        for i, (_, count) in enumerate(block.segments):
            kind += [(number, i)] * count
    shades = {-1: STRONG_BLUE, 0: STRONG_GREEN, 1: STRONG_AMBER, 2: STRONG_VIOLET}
    size, left, top = 20, 190, 96
    p = Picture(960, top + 40 + size * len(kind) + 30, "A packed sequence with its attention mask")
    title = (
        "Two prompts with three and two responses in a packed sequence. A response attends to its prompt and to itself."
    )
    p.text(24, 36, title, 15, "start")
    count = f"{packed.length} tokens with shared prompts, {alone.length} if every response brings its own; "
    p.text(24, 60, count + "the last token of a response predicts nothing and is left out.", 13, "start", fill=GREY)
    for j, (_, part) in enumerate(kind):
        p.cell(left + size * j, top, size, size, shades[part])
    p.text(left - 12, top + 15, "the row", 13, "end")
    for i, (block, part) in enumerate(kind):
        y = top + 34 + size * i
        p.cell(left - size - 4, y, size, size, shades[part])
        for j, (other, theirs) in enumerate(kind):
            sees = j <= i and block == other and theirs in (-1, part)
            p.cell(left + size * j, y, size, size, shades[theirs] if sees else "#e8ecf1")
    p.text(left - size - 14, top + 50, "attends to", 13, "end", fill=GREY)
    x, y = left + size * len(kind) + 30, top + 50
    for part, name in ((-1, "prompt"), (0, "first response"), (1, "second response"), (2, "third response")):
        p.cell(x, y - 14, 18, 18, shades[part])
        p.text(x + 28, y, name, 14, "start")
        y += 28
    p.cell(x, y - 14, 18, 18, "#e8ecf1")
    p.text(x + 28, y, "not attended to", 14, "start")
    p.save("packed_row.svg")


def resharding() -> None:
    """The plan that takes an 8B Llama from Megatron TP 2 x PP 2 to two vLLM engines of TP 2, on four devices."""
    import numpy as np
    import torch

    from rlscale.cluster.mesh import ParallelDims
    from rlscale.model.arch import ModelSpec
    from rlscale.reshard.layout import volume, whole
    from rlscale.reshard.megatron import megatron_layout
    from rlscale.reshard.plan import plan
    from rlscale.reshard.vllm import vllm_layout

    spec = ModelSpec(
        architecture="LlamaForCausalLM", num_layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128,
        vocab=128256, norm_eps=1e-5, inv_freq=(1.0,),
    )  # fmt: skip
    dims = ParallelDims(tp=2, pp=2)
    source, destination = megatron_layout(spec, dims), vllm_layout(spec, tp=2, replicas=2)
    traffic = plan(source, destination, dtype=torch.bfloat16, ranks_per_node=4)
    sent = np.zeros((4, 4))
    np.add.at(sent, (traffic.sender, traffic.copies.receiver), traffic.copies.nbytes)
    sent /= 1e9
    model = sum(volume(whole(shape)) for shape in source.shapes.values()) * 2 / 1e9
    p = Picture(960, 500, "The plan of a weight update")
    title = "Llama-8B in bf16, from Megatron (TP 2, PP 2) to two vLLM engines (TP 2) on the same four devices"
    p.text(24, 34, title, 15, "start")
    p.text(130, 66, "trainer ranks hold", 13, fill=GREY)
    p.text(830, 66, "engine workers need", 13, fill=GREY)
    for rank in range(4):
        y, at = 80 + 90 * rank, dims.coords(rank)
        _part(p, 40, y, at.tp, (at.pp,), STRONG_BLUE)
        p.text(180, y + 40, f"rank {rank}", 13)
        _part(p, 830, y, rank % 2, (0, 1), STRONG_GREEN)
        p.text(780, y + 34, f"engine {rank // 2}", 13)
        p.text(780, y + 51, f"worker {rank % 2}", 13)
        for receiver in range(4):
            amount = sent[rank, receiver]
            if amount > 0.001:
                target, stays = 80 + 90 * receiver + 36, receiver == rank
                d = f"M 220 {y + 36} C 420 {y + 36} 540 {target} 740 {target}"
                p.path(d, LINE if stays else STRONG_BLUE, 4 * amount, 0.6 if stays else 0.45)
    received = sum(traffic.received.values()) / 1e9
    gathered = sum(model - sum(volume(piece.index) for piece in source.of_rank(r)) * 2 / 1e9 for r in range(4))
    legend = "Blue: moved between ranks. Grey: already on the device. A line is as wide as its bytes."
    p.text(24, 458, legend, 13, "start", fill=GREY)
    total = f"The plan moves {received:.1f} GB in total; gathering whole tensors on every rank would move "
    p.text(24, 480, f"{total}{gathered:.1f} GB. The model has {model:.1f} GB.", 13, "start")
    p.save("resharding.svg")


def _part(p: Picture, x: float, y: float, tp: int, stages: Sequence[int], fill: str) -> None:
    """The model as a box of two stages (rows) and two tensor-parallel halves (columns), with what is held filled in."""
    for stage in range(2):
        for half in range(2):
            held = stage in stages and half == tp
            p.cell(x + 45 * half, y + 36 * stage, 45, 36, fill if held else "#e8ecf1")


def reward(run: Path) -> None:
    """Mean reward of each step of a run, with a mean of five steps."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(r["step"], r["critic/score/mean"]) for r in records if "critic/score/mean" in r]
    if not points:
        raise ValueError(f"{run}/metrics.jsonl has no step with critic/score/mean")
    p = Picture(760, 360, "Reward of a run")
    left, right, top, bottom = 70, 730, 50, 300
    last = points[-1][0]

    def at(step: float, value: float) -> str:
        return f"{left + (right - left) * step / last:.1f} {bottom - (bottom - top) * value:.1f}"

    for tick in range(0, 5):
        value = tick / 4
        y = bottom - (bottom - top) * value
        p.path(f"M {left} {y:g} L {right} {y:g}", "#e4e7eb", 1)
        p.text(left - 10, y + 5, f"{value:g}", 13, "end", fill=GREY)
    for step in range(0, last + 1, max(1, last // 8)):
        p.text(left + (right - left) * step / last, bottom + 22, str(step), 13, fill=GREY)
    smooth = [(s, sum(v for _, v in points[max(0, i - 4) : i + 1]) / min(i + 1, 5)) for i, (s, _) in enumerate(points)]
    for series, line, width in ((points, "#a9cce3", 1.5), (smooth, "#c8553d", 2.5)):
        p.path("M " + " L ".join(at(*point) for point in series), line, width)
    p.text(left, 30, f"Mean reward per step, {len(points)} steps", 15, "start")
    p.path(f"M {right - 300} 26 L {right - 270} 26", "#a9cce3", 1.5)
    p.text(right - 262, 31, "each step", 13, "start", fill=GREY)
    p.path(f"M {right - 170} 26 L {right - 140} 26", "#c8553d", 2.5)
    p.text(right - 132, 31, "mean of five steps", 13, "start", fill=GREY)
    p.text((left + right) / 2, bottom + 46, "step", 13, fill=GREY)
    p.save("reward.svg")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="RUN_DIR", help="run folder whose rewards are drawn")
    args = parser.parse_args(argv)
    for draw in (processes, step, packed_row, resharding):
        draw()
    if args.run is not None:
        reward(args.run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
