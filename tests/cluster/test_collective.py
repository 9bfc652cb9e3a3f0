"""An error on one rank is an error on all; what one rank learns, every rank knows."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from rlscale.cluster.collective import gather, on_each, on_first
from tests import worlds


def _message(call) -> str:
    try:
        return f"returned {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error} < {error.__cause__!r}"


def _fail_on(rank: int):
    if dist.get_rank() == rank:
        raise OSError(f"disk full on {rank}")
    return dist.get_rank()


def _everything():
    rank = dist.get_rank()
    acted = []
    return {
        "gather": gather(rank * 10),
        "both": _message(lambda: on_each(lambda: _fail_on(rank))),
        "each": _message(lambda: on_each(lambda: rank + 1)),
        "each fails": _message(lambda: on_each(lambda: _fail_on(1), raised=ValueError, describe=lambda e: f"<{e}>")),
        "first": _message(lambda: on_first(lambda: acted.append(rank) or "answer")),
        "acted": acted,
        "first fails": _message(lambda: on_first(lambda: _fail_on(0), catch=OSError, raised=ValueError)),
    }


def test_two_ranks():
    zero, one = worlds.run(2, _everything)
    for of_rank in (zero, one):
        assert of_rank["gather"] == [0, 10]
        assert of_rank["each"] == "returned [1, 2]"
        assert of_rank["first"] == "returned answer"
    assert (zero["acted"], one["acted"]) == ([0], [])
    assert zero["both"] == "RuntimeError: disk full on 0 < OSError('disk full on 0')"
    assert one["both"] == "RuntimeError: disk full on 0 < OSError('disk full on 1')"
    assert zero["each fails"] == "ValueError: <disk full on 1> < None"
    assert one["each fails"] == "ValueError: <disk full on 1> < OSError('disk full on 1')"
    assert zero["first fails"] == "ValueError: disk full on 0 < OSError('disk full on 0')"
    assert one["first fails"] == "ValueError: disk full on 0 < None"


def test_a_single_process_is_a_world_of_its_own():
    if dist.is_initialized():
        pytest.skip("this process has a process group")
    assert gather(3) == [3] == on_each(lambda: 3)
    assert on_first(lambda: 4) == 4
    with pytest.raises(ValueError, match="no"):
        on_each(lambda: int("no"), raised=ValueError)
