"""What every test session shares: stacks of a test that hangs, the pool of worlds, a check that nothing is left.

A session marks itself in the environment. Processes inherit the mark, so that a process which outlives the session is
found wherever it was started; files in /dev/shm are compared with those before the first test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import sys
import uuid
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from rlscale.testing import models
from tests import leftovers, worlds

TIERS = ("unit", "world", "program")
PROGRAMS = ("e2e", "rollout", "tools")  # folders whose tests start programs or engines
STACKS_AFTER = 240.0  # seconds after which a test's stacks are printed (it goes on; pytest-timeout ends it)
LEFTOVERS_WITHIN = 5.0  # seconds that processes and shared memory have to go away at the end

_shm_before = pytest.StashKey[set[str]]()
_leftovers = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., str]:
    """`rlscale.testing.models.tiny_model`, as a fixture."""
    return models.tiny_model


@pytest.fixture
def world() -> Callable[..., list[object]]:
    """`tests.worlds.run`, as a fixture."""
    return worlds.run


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlscale")
    group.addoption("--exhaustive", action="store_true", help="also run the tests marked exhaustive")
    group.addoption("--kills", type=int, default=20, metavar="N", help="times that the run of -k killed is killed")
    group.addoption("--kill-seed", type=int, default=20, metavar="SEED", help="seed that draws the moments of kills")
    group.addoption("--random-order", metavar="SEED", help="shuffle the folders, their modules and the tests in them")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[leftovers.SESSION_MARK] = uuid.uuid4().hex
    config.stash[_shm_before] = leftovers.shm_files()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with its tier, leave the exhaustive ones out unless they are asked for, and set the order."""
    for item in items:
        if not any(item.get_closest_marker(name) for name in TIERS):
            item.add_marker(tier(item))
    if not config.getoption("--exhaustive") and "exhaustive" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    seed = config.getoption("--random-order")
    if seed is None:  # a test that ends worlds makes every test after it start its own again
        items.sort(key=lambda item: item.get_closest_marker("ends_worlds") is not None)
    else:
        shuffle(items, seed)


def tier(item: pytest.Item) -> str:
    """``program`` by the test's folder, ``world`` where its module starts worlds, else ``unit``."""
    if item.path.parent.name in PROGRAMS:
        return "program"
    starts_worlds = worlds in vars(getattr(item, "module", None) or object()).values()
    return "world" if starts_worlds or "world" in getattr(item, "fixturenames", ()) else "unit"


def shuffle(items: list[pytest.Item], seed: str) -> None:
    """Sort into an order drawn from the seed; a folder's tests, and a module's, stay together with their fixtures."""

    def place(*names: object) -> float:
        return random.Random("/".join(map(str, (seed, *names)))).random()

    def order(item: pytest.Item) -> tuple[float, ...]:
        return place(item.path.parent), place(item.path), place(item.nodeid)

    items.sort(key=order)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback_later(STACKS_AFTER, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    worlds.close()
    config = session.config
    left = leftovers.still_left(
        lambda: leftovers.left(leftovers.session_mark(), config.stash[_shm_before]), LEFTOVERS_WITHIN * worlds.busy()
    )
    config.stash[_leftovers] = left
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left = config.stash.get(_leftovers, [])
    if left:
        terminalreporter.section("left behind by this session", red=True, bold=True)
        for line in left:
            terminalreporter.line(line)
