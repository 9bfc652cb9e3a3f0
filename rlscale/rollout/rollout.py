"""Generation and weight updates as all ranks of a run see them: `Rollout`.

The leaders of the rollout groups (`rlscale.rollout.ranks`) claim the prompts of a step from a common counter, so that a
slow engine does not delay the others, and all responses to one prompt come from one engine, which then computes the
prompt once. The other ranks wait, without using their core.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rlscale.batch.types import Trajectory
from rlscale.cluster.collective import gather
from rlscale.cluster.mesh import RolloutDims
from rlscale.cluster.process import say
from rlscale.config.schema import Config
from rlscale.reshard.layout import Layout
from rlscale.rollout.backend import Backend, Output
from rlscale.rollout.program import new_backend
from rlscale.rollout.ranks import EngineError, RolloutRanks
from rlscale.rollout.sampling import Claims, Sampling, sample_seed
from rlscale.rollout.trajectory import Sampler, sample_trajectory
from rlscale.rollout.weight_sync import WeightSync

if TYPE_CHECKING:
    from rlscale.cluster.device import Device
    from rlscale.data.dataset import Prompt
    from rlscale.reward.pool import RewardPool

POLL_S = 0.5  # between looks at whether generation should be broken off
# what gives the trainer's weights: their layout over all ranks, and this rank's buffers by key, as in the layout
Weights = Callable[[], tuple[Layout, Mapping[str, torch.Tensor]]]
Sample = asyncio.Task[Trajectory]
Missing = list[tuple[int, list[int]]]  # prompts by their place in the step, each with the numbers of samples it lacks


class Rollout:
    """All methods but `close` are collective over the world.

    Args:
        device: this process; a world of one needs no process group.
        eos_ids: tokens that end a response; the one that did is its last token.
        tokenizer: decodes responses; without one, and without a pool, their texts are empty.
        interrupted: whether generation should be broken off.
        sample: samples one trajectory.
        backend: a leader's engine, whose start may have begun; None: a new one.

    Attributes:
        weights: of the last `sync`; None: the engines have those of ``model.path``.
        restarts, resampled: engines replaced in this run, and samples that were lost with them.
    """

    def __init__(
        self,
        cfg: Config,
        device: Device,
        eos_ids: list[int],
        tokenizer: Any = None,
        *,
        interrupted: Callable[[], bool] | None = None,
        sample: Sampler = sample_trajectory,
        backend: Backend | None = None,
    ):
        self.cfg, self.device, self.eos_ids, self.tokenizer = cfg, device, tuple(eos_ids), tokenizer
        self.interrupted, self.sample = interrupted or (lambda: False), sample
        dims = RolloutDims(cfg.rollout.tensor_model_parallel_size, device.world)
        self.is_leader = dims.is_leader(device.rank)
        self.backend = (backend or new_backend(cfg, device)) if self.is_leader else None
        self.ranks = RolloutRanks(cfg.rollout, device, dims, self.backend)
        self.weight_sync = WeightSync(cfg.rollout, device, self.ranks)
        self.asleep = False
        self.weights: Weights | None = None
        self.calls = self.restarts = self.resampled = 0

    def start(self) -> None:
        """Start every engine that has not begun to, wait for all, and learn what slices their workers need.

        Raises:
            RuntimeError: on every rank, when an engine cannot start.
        """
        atexit.register(self.close)
        self.ranks.together(_start, "start")
        self.weight_sync.describe()

    def generate(self, prompts: list[Prompt], sampling: Sampling, pool: RewardPool | None = None) -> list[Trajectory]:
        """Sample ``sampling.n`` responses to every prompt of the step's global list.

        With a pool each response is scored as soon as it is complete, while others are still being generated. An engine
        that dies or stalls is replaced (``rollout.engine_restarts`` times in a run), gets the weights of the last
        update, and what it had not finished is sampled again, with the same seeds. A leader on which `interrupted` is
        true breaks off and returns what is complete.

        Returns:
            This leader's share, in the order of prompts and samples; nothing on other ranks.

        Raises:
            RuntimeError: on every rank, when an engine dies or takes longer than ``rollout.request_timeout_s`` once too
                often, and after an update of the weights that failed.
        """
        if self.weight_sync.stale or self.asleep:
            raise RuntimeError("the engines have no valid weights (asleep, or an update failed): sync them first")
        sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids or self.eos_ids)
        finished: list[Trajectory] = []
        missing: Missing = [(index, list(range(sampling.n))) for index in range(len(prompts))]
        while missing:
            try:
                self._sample_all(prompts, missing, sampling, pool, finished)
                break
            except EngineError as error:
                if not self._replace_lost(error):
                    break
                if self.weights is not None:
                    self.sync(self.weights)
                self.weight_sync.stale = False
            missing = self._still_missing(missing, finished)
        return sorted(finished, key=lambda t: (t.prompt_index, t.sample_index))

    def _sample_all(
        self, prompts: list[Prompt], missing: Missing, sampling: Sampling, pool: RewardPool | None,
        finished: list[Trajectory],
    ) -> None:  # fmt: skip
        self.calls += 1
        claims, limit = self._claims(len(missing)), self.cfg.rollout.request_timeout_s

        def work(backend: Backend) -> None:
            backend.run(self._serve(backend, prompts, missing, sampling, pool, claims, finished), limit, "generation")

        self.ranks.together(work, "generation")

    def _claims(self, total: int) -> Claims:
        """With ``trainer.deterministic`` this replica's fixed share: who takes what must not depend on who is quick."""
        ranks, key = self.ranks, f"claims{self.calls}"
        if self.cfg.trainer.deterministic:
            share = range(ranks.dims.replica(ranks.rank), total, ranks.dims.replicas)
            return Claims(ranks.counter, f"{key}/{ranks.rank}", share)
        return Claims(ranks.counter, key, range(total))

    def _still_missing(self, missing: Missing, finished: list[Trajectory]) -> Missing:
        """What no rank has finished, the same list on all of them."""
        shares = gather([(t.prompt_index, t.sample_index) for t in finished], self.ranks.control)
        done = {key for share in shares for key in share}
        rest = [(index, [i for i in numbers if (index, i) not in done]) for index, numbers in missing]
        self.resampled += sum(len(numbers) for _, numbers in rest)
        return [(index, numbers) for index, numbers in rest if numbers]

    async def _serve(
        self, backend: Backend, prompts: list[Prompt], missing: Missing, sampling: Sampling, pool: RewardPool | None,
        claims: Claims, finished: list[Trajectory],
    ) -> None:  # fmt: skip
        """Claim prompts and sample them until none is left; responses that are complete (and scored) are ``finished``.

        A replica holds at most its even share of the prompts at a time, and of these as many samples as the engine
        decodes at once, with one prompt more in the engine's queue so that a free place is taken without a turn through
        this process. With ``trainer.deterministic`` it gets its share before it begins.
        """
        r, n = self.cfg.rollout, sampling.n
        room = max(n, min(r.max_num_seqs + n, -(-len(missing) // self.ranks.dims.replicas) * n))
        running: set[Sample] = set()
        scoring: list[asyncio.Task[None]] = []

        def begin(count: int) -> set[Sample]:
            return {
                asyncio.create_task(self._sample(backend, prompts[index], index, i, sampling))
                for index, numbers in (missing[claimed] for claimed in claims.take(count))
                for i in numbers
            }

        async def complete(trajectory: Trajectory) -> None:
            if pool is not None:
                score = await pool.score(prompts[trajectory.prompt_index], trajectory.response_text)
                trajectory.reward, trajectory.reward_failed = score.value, score.failed
                trajectory.reward_error, trajectory.extra = score.error, dict(score.extra)
            finished.append(trajectory)

        try:
            if self.cfg.trainer.deterministic:
                running = await _all_at_once(backend, begin, len(missing))
            while not self.interrupted():
                while len(running) + n <= room and not claims.exhausted:
                    running |= begin(max(1, min(r.prefetch_groups, (room - len(running)) // n)))
                if not running:
                    break
                done, running = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                failed = [error for task in done if (error := task.exception())]
                scoring += [asyncio.create_task(complete(t.result())) for t in done if not t.exception()]
                if failed:
                    raise failed[0]
            if not self.interrupted():
                await asyncio.gather(*scoring)
        except Exception:
            await asyncio.gather(*scoring, return_exceptions=True)  # what is complete need not be sampled again
            raise
        finally:
            for unfinished in [*running, *scoring]:
                unfinished.cancel()
            await asyncio.gather(*running, *scoring, return_exceptions=True)

    async def _sample(
        self, backend: Backend, prompt: Prompt, index: int, number: int, sampling: Sampling
    ) -> Trajectory:
        asked = itertools.count()

        async def generate(token_ids: Sequence[int], params: Sampling) -> Output:
            return await backend.generate(f"{self.calls}-{index}-{number}-{next(asked)}", token_ids, params)

        trajectory = await self.sample(prompt, sampling, sample_seed(sampling.seed, index, number), generate)
        trajectory.prompt_index, trajectory.sample_index = index, number
        if self.tokenizer is not None:
            trajectory.response_text = self.tokenizer.decode(trajectory.response_ids, skip_special_tokens=True)
        return trajectory

    def sync(self, weights: Weights) -> dict[str, float]:
        """Hand the trainer's weights to the engines, and forget what they have cached under the old ones.

        Engines that died since the last update, or die in this one, are started again and take a whole update, up to
        ``rollout.engine_restarts`` times in a run.

        Args:
            weights: the trainer's; asked again for an engine that is replaced later.

        Returns:
            ``rollout/sync_bytes`` that this rank's worker took over, ``rollout/sync_s``.

        Raises:
            ValueError: the source lacks a tensor that an engine needs, or has it in another shape.
            RuntimeError: on every rank, when a worker did not take everything, holds something else than the trainer
                (``rollout.sync_verify``), or has died; `generate` then refuses to run.
        """
        self.weights, started = weights, time.perf_counter()
        source, tensors = weights()
        while True:
            try:
                self.weight_sync.update(source, tensors)
                self.asleep = False
                break
            except EngineError as error:
                if not self._replace_lost(error):
                    break  # return normally: the interrupted step is recorded like any other
        taken = float(self.weight_sync.bytes_taken)
        return {"rollout/sync_bytes": taken, "rollout/sync_s": time.perf_counter() - started}

    def _replace_lost(self, error: EngineError) -> bool:
        """Start new engines in the place of those that were lost, unless generation is to be broken off (a launcher
        that ends a run ends the engines, too); says whether. All need `sync` before they generate again. Collective.

        Raises:
            EngineError: ``error``, where no engine was lost or ``rollout.engine_restarts`` is used up; a new one, when
                an engine cannot start.
        """
        lost = self.backend is not None and not self.backend.alive
        leaders = gather((lost, self.interrupted()), self.ranks.control)
        if any(interrupted for _, interrupted in leaders):
            return False
        if not any(lost for lost, _ in leaders) or self.restarts >= self.cfg.rollout.engine_restarts:
            raise error
        if self.device.rank == 0:
            say(f"warning: {error}; starting a new engine")
        self.restarts += 1
        self.weight_sync.forget()
        self.ranks.together(_revive, "restart")
        self.asleep = False
        self.weight_sync.describe()
        return True

    def state_dict(self) -> dict[str, int]:
        """Counts of a run that go on when it resumes."""
        return {"restarts": self.restarts, "resampled": self.resampled}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.restarts, self.resampled = state["restarts"], state.get("resampled", 0)

    def sleep(self) -> None:
        """Give the engines' device memory to the trainer until the next `sync`.

        On CUDA the weights are dropped too. On CPU nothing happens: vLLM has no sleep mode there, memory is shared
        anyway, and to fault the cache's pages in again would cost more than they are worth.
        """
        if self.device.kind == "cuda" and not self.asleep:
            self.ranks.together(lambda backend: backend.sleep(), "sleep")
            self.asleep = True

    def close(self) -> None:
        """End this rank's engine and its processes. Not collective; safe after errors and when called again."""
        atexit.unregister(self.close)
        if self.backend is not None:
            self.backend.close()
        self.weight_sync.source = self.weight_sync.transfer = None


def _start(backend: Backend) -> None:
    backend.begin_start()
    backend.finish_start()


def _revive(backend: Backend) -> None:
    if backend.alive:
        backend.wake()  # all engines must be in the same state
    else:
        _start(backend)


async def _all_at_once(backend: Backend, begin: Callable[[int], set[Sample]], count: int) -> set[Sample]:
    """Begin with an engine that starts when it has everything, and has nothing cached.

    What it decodes together then follows from the requests alone, and with it the last bits of their log-probs.
    """
    await backend.pause()
    tasks = begin(count)
    while backend.waiting() < len(tasks) and not any(task.done() for task in tasks):
        await asyncio.sleep(0)
    await backend.resume()
    return tasks
