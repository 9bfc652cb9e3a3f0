"""What every rank learns from every other: values, and errors. An error on one rank is an error on all.

A rank that raised alone would leave the others waiting in the next collective operation. A single process without a
process group is a world of its own. All functions are collective over ``group`` (None: the world). Their arguments:

    catch: errors of an action that are told to the others; any other is a fault of the program, raised on its rank.
    describe: what the others are told of an error (picklable).
    raised: makes the exception of every rank from the description of the first error, that of the lowest rank with one.
        On a rank with an error of its own, that error is the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather(value: T, group: Any = None) -> list[T]:
    """Every rank's value (picklable), on every rank, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def on_each(
    action: Callable[[], T],
    group: Any = None,
    *,
    catch: type[Exception] | tuple[type[Exception], ...] = Exception,
    raised: Callable[[Any], Exception] = RuntimeError,
    describe: Callable[[Exception], Any] = str,
) -> list[T]:
    """Every rank acts; every rank has all results (picklable), or raises."""
    result: Any = None
    cause: Exception | None = None
    try:
        result = action()
    except catch as error:
        cause = error
    everyone = gather((result, cause is not None, describe(cause) if cause else None), group)
    for _, failed, description in everyone:
        if failed:
            raise raised(description) from cause
    return [result for result, *_ in everyone]


def on_first(action: Callable[[], T], group: Any = None, **how: Any) -> T:
    """What the action returns on the first rank, on every rank; it runs on that rank only. ``how``: as `on_each`."""
    acts = not dist.is_initialized() or dist.get_rank(group) == 0
    return on_each(lambda: action() if acts else None, group, **how)[0]  # type: ignore[return-value]
