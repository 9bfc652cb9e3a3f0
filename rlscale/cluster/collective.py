"""What every rank learns from every other: values, and errors. An error on one rank is an error on all.

A rank that raised alone would leave the others waiting in the next collective operation. A single process without a
process group is a world of its own. All functions are collective over ``group`` (None: the world). Their arguments:

    catch: errors of an action that are told to the others; any other is a fault of the program, raised on its rank.
    describe: what the others are told of an error (picklable).
    raised: makes the exception of every rank from the description of the first error, that of the lowest rank with one.
        On a rank with an error of its own, that error is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
Describe = Callable[[Exception], Any]
Raised = Callable[[Any], Exception]
Catch = type[Exception] | tuple[type[Exception], ...]


def gather(value: T, group: Any = None) -> list[T]:
    """Every rank's value (picklable), on every rank, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def raise_on_all(
    errors: Sequence[Exception], group: Any = None, *, raised: Raised = RuntimeError, describe: Describe = str
) -> None:
    """Raise on every rank if any rank has errors; only the first of a rank counts."""
    _raise_first(gather([describe(error) for error in errors[:1]], group), errors, raised)


def on_each(
    action: Callable[[], T], group: Any = None, *, catch: Catch = Exception, raised: Raised = RuntimeError,
    describe: Describe = str,
) -> list[T]:  # fmt: skip
    """Every rank acts; every rank has all results (picklable), or raises."""
    result: Any = None
    errors: list[Exception] = []
    try:
        result = action()
    except catch as error:
        errors.append(error)
    everyone = gather((result, [describe(error) for error in errors]), group)
    _raise_first([told for _, told in everyone], errors, raised)
    return [result for result, _ in everyone]


def on_first(
    action: Callable[[], T], group: Any = None, *, first: int = 0, catch: Catch = Exception,
    raised: Raised = RuntimeError, describe: Describe = str,
) -> T:  # fmt: skip
    """What the action returns on one rank (``first`` of the group), on every rank; it runs on that rank only."""
    here = not dist.is_initialized() or dist.get_rank(group) == first
    results = on_each(lambda: action() if here else None, group, catch=catch, raised=raised, describe=describe)
    return results[first if dist.is_initialized() else 0]  # type: ignore[return-value]


def _raise_first(told: list[list[Any]], errors: Sequence[Exception], raised: Raised) -> None:
    for description in (description for of_rank in told for description in of_rank):
        raise raised(description) from (errors[0] if errors else None)
