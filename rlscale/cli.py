"""The command `rlscale`: a run, and what a user does around it.

Each command is imported when it is asked for, so that its --help and its errors come at once. ``rlscale train`` runs
one rank; ``deepspeed launchers/train.py`` starts the same program on several.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

USAGE_ERROR = 2
COMMANDS = {
    "train": "train on one rank (several: deepspeed launchers/train.py)",
    "export": "make a Hugging Face folder of a checkpoint",
    "compare": "show the first training metric in which two runs differ",
    "plan": "show what a weight update moves between trainer and engines",
    "plot": "draw the pictures of a run",
    "keys": "print the keys of the configuration",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 where `compare` finds a difference, 2 for wrong input, and those
    of a run."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name not in COMMANDS:  # prints the help, or what is wrong, and exits
        parser = argparse.ArgumentParser(
            prog="rlscale", formatter_class=argparse.RawDescriptionHelpFormatter, usage="rlscale COMMAND [-h] ...",
            epilog="\n".join(["commands:", *(f"  {command:<10}{what}" for command, what in COMMANDS.items())]),
        )  # fmt: skip
        parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="what to do, see below")
        parser.parse_args([name])
    if name == "train":
        from rlscale.loop.launch import main as train

        status = train(rest)
        if argv is not None:
            return status
        sys.stdout.flush()
        # exit without cleanup: a failed rank must not wait for other ranks, all output is on disk, and tearing down
        # torch and vLLM takes seconds
        os._exit(status)
    args = parse(name, rest)
    try:
        status = int(import_module(f"rlscale.commands.{name}").run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR


def parse(name: str, argv: list[str]) -> argparse.Namespace:
    """The arguments of a command other than ``train``; wrong ones end the program with status 2."""
    command = import_module(f"rlscale.commands.{name}")
    parser = argparse.ArgumentParser(
        f"rlscale {name}", description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_arguments(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
