"""A function that the user names by where it is: ``module:function`` or ``path/file.py:function``.

Rewards, advantage estimators and policy losses are named so. A relative path starts at the folder in which the run was
started; every process imports the file itself, so on several hosts each must see the same one.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def problem(key: str, target: str) -> str | None:
    """What is wrong with the form of a target or with its file, without importing it; ``None``: nothing."""
    where, _, function = target.rpartition(":")
    is_file = where.endswith(".py")
    named = is_file or re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", where) is not None
    if not named or not function.isidentifier():
        return f"{key}: {target!r} is not of the form module:function or path/file.py:function"
    if is_file and not Path(where).expanduser().is_file():
        return f"{key}: no such file: {where}"
    return None


def absolute(target: str) -> str:
    """The target with the path of its file, if it names one, made absolute."""
    where, _, function = target.rpartition(":")
    return f"{Path(where).expanduser().resolve()}:{function}" if where.endswith(".py") else target


def load_function(key: str, target: str) -> Callable[..., Any]:
    """The function of an `absolute` target. Imports the user's module; ``key`` names the target in messages.

    Raises:
        ValueError: the file or module is missing or fails to import, or has no such function.
    """
    name, _, function = target.rpartition(":")
    try:
        module = _load_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except FileNotFoundError as error:
        raise ValueError(f"{key} {target}: no file {error.filename or name}") from error
    except ModuleNotFoundError as error:
        raise ValueError(f"{key} {target}: no module named {error.name!r}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{key} {target}: importing it raises {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"{key} {target}: {name} has no function {function!r}")
    return found


def _load_file(path: Path) -> ModuleType:
    name = f"{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:  # an estimator and a loss of one file share its module
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
