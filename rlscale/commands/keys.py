"""Every key of the configuration with its default, unit and bounds.

    rlscale keys > reference.yaml       # as a configuration file
    rlscale keys actor.optim            # the keys that begin so, one per line: key, default, meaning

A prefix is the beginning of a key, such as a section of the configuration.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", nargs="?", default="", metavar="PREFIX", help="print only keys that begin with it")


def run(args: argparse.Namespace) -> int:
    from rlscale.config.reference import reference, table

    if not args.prefix:
        print(reference(), end="")
        return 0
    rows = table(args.prefix)
    if not rows:
        raise ValueError(f"no key begins with {args.prefix!r}")
    for key, default, meaning in rows:
        print(f"{key}: {default}  # {meaning}")
    return 0
