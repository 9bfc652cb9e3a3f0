"""A configuration as tests read it: whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rlscale.config import Config, ConfigError, read


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """The configuration in ``path`` with the overrides applied. Raises ConfigError for all that is wrong."""
    config, found = read(path, overrides)
    if found:
        raise ConfigError([v.message for v in found])
    return config
