"""The configuration of a run: `schema` says what there is, `load` reads it, `validate` finds contradictions.

Imports nothing but PyYAML and the standard library, so that a faulty file is refused in well under a second.
"""

from rlscale.config.load import ConfigError, read, save, to_dict
from rlscale.config.schema import Config, Violation
from rlscale.config.validate import find_violations

__all__ = ["Config", "ConfigError", "Violation", "find_violations", "read", "save", "to_dict"]
