"""What every rank learns from every other: values, and errors. An error on one rank is an error on all.

A rank that raised alone would leave the others waiting in the next collective operation. So each rank acts, all tell
each other what came of it, and either every rank goes on or every rank raises. A single process without a process
group is a world of its own. All functions here are collective over ``group`` (None: the world).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def gather(value: T, group: Any = None) -> list[T]:
    """Every rank's value (picklable), on every rank, in the order of ranks."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def raise_on_all(
    errors: Sequence[Exception], group: Any = None, *, raised: Callable[[str], Exception] = RuntimeError,
    describe: Callable[[Exception], str] = str,
) -> None:  # fmt: skip
    """Raise on every rank if any rank has an error.

    Args:
        errors: of this rank; empty where all is well.
        raised: makes the exception from the text of the first error (of the lowest rank that has one): a type, or a
            function that adds what failed. On a rank with an error of its own that error is its cause.
        describe: the text of an error.
    """
    texts = [text for of_rank in gather([describe(error) for error in errors], group) for text in of_rank]
    if texts:
        raise raised(texts[0]) from (errors[0] if errors else None)


def on_each(
    action: Callable[[], T], group: Any = None, *, catch: type[Exception] | tuple[type[Exception], ...] = Exception,
    raised: Callable[[str], Exception] = RuntimeError, describe: Callable[[Exception], str] = str,
) -> list[T]:  # fmt: skip
    """Every rank acts; every rank has all results (picklable), or raises as `raise_on_all` does.

    Args:
        catch: errors that are told to the others; any other is raised on its rank alone, as a fault of the program.
    """
    result: Any = None
    errors: list[Exception] = []
    try:
        result = action()
    except catch as error:
        errors.append(error)
    everyone = gather((result, [describe(error) for error in errors]), group)
    texts = [text for _, of_rank in everyone for text in of_rank]
    if texts:
        raise raised(texts[0]) from (errors[0] if errors else None)
    return [result for result, _ in everyone]


def on_first(
    action: Callable[[], T], group: Any = None, *, first: int = 0,
    catch: type[Exception] | tuple[type[Exception], ...] = Exception,
    raised: Callable[[str], Exception] = RuntimeError, describe: Callable[[Exception], str] = str,
) -> T:  # fmt: skip
    """What the action returns on one rank of the group (its first, or rank ``first`` of it), on every rank.

    Its error is raised on every rank; see `on_each` for the arguments. The action runs on that rank only.
    """
    import torch.distributed as dist

    def act() -> T | None:
        return action() if not dist.is_initialized() or dist.get_rank(group) == first else None

    results = on_each(act, group, catch=catch, raised=raised, describe=describe)
    return results[first if dist.is_initialized() else 0]  # type: ignore[return-value]
