"""Draw the pictures of finished or running runs from their metrics.jsonl into their folders plots/.

    rlscale plot runs/quickstart

The paths of the pictures are printed.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="run folder")


def run(args: argparse.Namespace) -> int:
    from rlscale.observe.plots import draw

    for folder in args.runs:
        for file in draw(folder):
            print(file)
    return 0
