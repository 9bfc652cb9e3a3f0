"""The program of every rank: reads and checks the configuration, joins the world, runs the task, says how it ended.

The configuration is checked before anything heavy is imported, so that a mistake costs seconds: every violation is
printed once, by the first rank, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
DESCRIPTION = "Start a run: deepspeed launchers/train.py --yaml FILE [section.key=value ...] [--dry-run]."
NOT_STARTED = "stopped by a signal before the first step; nothing was changed"
USAGE_ERROR, RUN_ERROR, INTERRUPTED = 2, 1, 130
LOST_CONTACT = re.compile("Connection closed by peer|Connection reset by peer|Failed to recv, got 0")
STOPPED = 75  # asked to stop, state saved: start it again (EX_TEMPFAIL of sysexits.h)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--yaml", required=True, metavar="FILE", help="configuration of the run")
    parser.add_argument(
        "--dry-run", action="store_true", help="check configuration, sizes and placement, print them, stop"
    )
    parser.add_argument("--world-size", type=int, help="ranks to plan a dry run for (default: those that were started)")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # set by the launcher
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the file")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str]) -> int:
    """Run what the arguments say, as one rank; the exit code."""
    started = time.monotonic()
    args = parse(argv)
    if args.world_size is not None and args.world_size < 1:
        return fail(f"--world-size {args.world_size} is not a number of ranks", 0, USAGE_ERROR)
    rank = int(os.environ.get("RANK", "0"))
    world = args.world_size if args.dry_run and args.world_size else int(os.environ.get("WORLD_SIZE", "1"))
    from rlscale.config import ConfigError
    from rlscale.loop.configure import configure, describe

    try:
        checked = configure(args.yaml, args.overrides, world)
    except ConfigError as error:
        return fail(str(error), rank, USAGE_ERROR)
    if args.dry_run:
        if rank == 0:
            print(describe(checked, world))
        return 0
    from rlscale.cluster.device import init_distributed, prepare_process
    from rlscale.cluster.process import guard_start
    from rlscale.config.schema import TASKS

    for number in (signal.SIGTERM, signal.SIGUSR1):  # until the run watches for them itself
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    end_guard = guard_start(f"error: rank {rank}: {NOT_STARTED}")
    backend = None
    try:
        trainer = checked.cfg.trainer
        prepare_process(checked.kind)
        if TASKS[checked.cfg.task].generates:
            from rlscale.rollout.program import start_early

            backend = start_early(checked.cfg, checked.kind)
        device = init_distributed(checked.kind, trainer.collective_timeout_s, trainer.deterministic)
        from rlscale.loop.driver import train

        stopped = train(checked, device, started, backend, end_guard)
    except ValueError as error:  # the user's data or model, named by the message
        return fail(str(error), rank, USAGE_ERROR)
    except KeyboardInterrupt:
        return fail("interrupted", rank, INTERRUPTED)
    except (SystemExit, Exception) as error:
        if (code := signalled(error)) is not None:
            return fail(NOT_STARTED, rank, code, every_rank=True)
        if LOST_CONTACT.search(str(error)):  # another rank has failed, and its message must come first
            time.sleep(3)
            return fail("lost contact with another rank, which ended first", rank, RUN_ERROR, every_rank=True)
        if not raised_here(error):
            traceback.print_exc()
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        return fail(text, rank, RUN_ERROR, every_rank=True)
    finally:
        if backend is not None:
            backend.close()
    return 0 if stopped is None else STOPPED


def signalled(error: BaseException) -> int | None:
    """The exit code where a signal's SystemExit is this error or what it came from; None for an error of its own.

    A library in whose call the signal arrives may raise an error of its own from it, as a class that is being made does
    (Python 3.11, ``__set_name__``).
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SystemExit):
            return cause.code if isinstance(cause.code, int) else RUN_ERROR
        cause = cause.__cause__ or cause.__context__
    return None


def raised_here(error: BaseException) -> bool:
    """Whether this project raised the error itself, with a message that needs no stack to be understood."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, RuntimeError) and Path(last).resolve().is_relative_to(PACKAGE)


def fail(message: str, rank: int, code: int, every_rank: bool = False) -> int:
    """Print what ended the run and return the exit code.

    The launcher ends all ranks as soon as one has failed. An error that all ranks found is printed by rank 0; the
    others wait so that its message appears first.
    """
    from rlscale.cluster.process import say

    if rank and not every_rank:
        time.sleep(5)
    say(f"error: rank {rank}: {message}" if rank or every_rank else f"error: {message}")
    return code
