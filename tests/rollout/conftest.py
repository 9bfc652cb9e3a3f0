"""The run folder of the shared engines, which end with the last test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import worlds
from tests.rollout import helpers


@pytest.fixture(scope="package")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield str(tmp_path_factory.mktemp("run"))
    if worlds.started(2):
        worlds.run(2, helpers.close_all)
