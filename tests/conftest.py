"""What every test session shares: stacks of a test that hangs, the pool of worlds, a check that nothing is left.

A session marks itself in the environment. Processes inherit the mark, so that a process which outlives the session is
found wherever it was started; files in /dev/shm are compared with those before the first test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
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


def pytest_configure(config: pytest.Config) -> None:
    os.environ[leftovers.SESSION_MARK] = uuid.uuid4().hex
    config.stash[_shm_before] = leftovers.shm_files()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test has one tier: ``program`` by its folder, ``world`` where its module starts worlds, else ``unit``."""
    for item in items:
        module = getattr(item, "module", None)
        if item.path.parent.name in PROGRAMS:
            tier = "program"
        elif "world" in getattr(item, "fixturenames", ()) or worlds in vars(module or object()).values():
            tier = "world"
        else:
            tier = "unit"
        item.add_marker(tier)


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
        lambda: leftovers.left(leftovers.session_mark(), config.stash[_shm_before]), LEFTOVERS_WITHIN
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
