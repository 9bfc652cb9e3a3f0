"""What a run asks of the program that generates: a `Backend`, as the leader of one rollout group sees its engine.

`Rollout` and `WeightSync` know nothing else of it: another program takes a folder beside ``vllm/`` and its place in
`rlscale.rollout.program`. Every method that fails raises RuntimeError with this rank in its message, unless it says
otherwise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rlscale.rollout.sampling import Sampling

T = TypeVar("T")


@dataclass
class Output:
    """The answer to one request: ``token_ids`` with ``logprobs`` under the distribution that each was drawn from, and
    ``finish_reason`` (stop, length, abort). A token that stops generation is the last of them.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


# one request of an agent or of a plain sample: (token ids so far, parameters with the seed of this request) -> answer
Generate = Callable[[Sequence[int], Sampling], Awaitable[Output]]


class Backend(Protocol):
    """One engine of ``rollout.tensor_model_parallel_size`` workers, worker k on the device of rank leader + k."""

    @property
    def alive(self) -> bool:
        """Whether the engine can be called; false before it has started, after it has died or stopped answering."""

    def begin_start(self) -> None:
        """Begin to start the engine, in place of one that has died; returns before it is ready.

        What the engine's processes inherit must not change this process once this returns. Where the engine's memory
        is free only at `finish_start`, everything is left to that.
        """

    def finish_start(self) -> None:
        """Wait until the engine has generated something; if it cannot start, says why and leaves nothing running."""

    def run(self, work: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        """Run ``work``, which awaits `generate`, to its end; raises when the engine dies in it, when ``timeout``
        seconds have passed, or when the work fails.
        """

    async def generate(self, request: str, token_ids: Sequence[int], params: Sampling) -> Output:
        """One response to ``token_ids``; ``request`` is a name that no other request has. Inside `run` only."""

    async def pause(self) -> None:
        """Take requests without beginning them, and forget what is cached. Inside `run` only."""

    def waiting(self) -> int:
        """Requests that have been taken and not answered."""

    async def resume(self) -> None:
        """Begin the requests that have come since `pause`."""

    def targets(self) -> list[list[dict[str, Any]]]:
        """By worker, the slices of canonical tensors that it needs, as `reshard.layout.rank_pieces_from_dicts` reads
        them, each with its ``dtype`` and the ``shape`` of the whole tensor.
        """

    def connect(self, mailboxes: list[dict[str, Any]]) -> None:
        """Tell each worker where its buckets lie (``buffers``, mapped when this returns) and what will be in them.

        ``rounds`` of a mailbox holds, for each number of a bucket, (key, name, at, shape, offset, nbytes, dtype) of
        every part.
        """

    def begin_update(self, verify: bool) -> None:
        """Make room for weights; with ``verify`` the workers sum up what they take over for `checksums`."""

    def take(self, bucket: int) -> None:
        """Let every worker copy what lies in the bucket of this number; it may be filled anew afterwards."""

    def finish_update(self) -> None:
        """Raise if a worker lacks anything; be awake, with the new weights and nothing cached under the old ones."""

    def checksums(self) -> list[dict[str, int]]:
        """By worker, `reshard.verify`'s checksums of its part of each tensor of the last verified update."""

    def sleep(self) -> None:
        """Give all device memory back, the weights' too."""

    def wake(self) -> None:
        """Take the device memory back if it was given; the weights then need an update."""

    def close(self) -> None:
        """End the engine and all its processes, also one that is starting. May be called again; raises nothing."""
