"""Generation and weight updates as all ranks of a run see them: `Rollout`.

Ranks form rollout groups of ``tensor_model_parallel_size`` consecutive ranks. The first of a group, its leader, hosts
an engine whose worker k runs on the device of rank leader + k. Leaders claim the prompts of a step from a common
counter, so that a slow engine holds nobody back, and all responses to one prompt come from one engine, which then
computes the prompt once. The other ranks wait, without using their core.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlscale.batch.types import Trajectory
from rlscale.cluster.device import say
from rlscale.config.schema import Config
from rlscale.reshard import verify
from rlscale.reshard.layout import Layout
from rlscale.rollout.host import EngineHost
from rlscale.rollout.sampling import Claims, Counter, FixedShare, LocalCounter, Sampling, sample_seed
from rlscale.rollout.weights import Buckets, Destination, gather

if TYPE_CHECKING:
    from rlscale.cluster.device import Device
    from rlscale.data.dataset import Prompt
    from rlscale.reward.pool import RewardPool

RPC_TIMEOUT_S = 300.0  # for calls to the engine other than generation
POLL_S = 0.5  # between looks at whether generation should be broken off
Weights = tuple[Layout, Mapping[str, torch.Tensor]]
Missing = list[tuple[int, list[int]]]  # prompts by their place in the step, each with the numbers of samples it lacks
_instances = itertools.count()


class EngineError(RuntimeError):
    """What the leaders did with their engines failed on some of them; raised on every rank."""


class Rollout:
    """All methods but `close` are collective over the world.

    Args:
        device: this process; a world of one needs no process group.
        run_dir: the engines' output goes to ``engines/rank_*.log`` in it.
        eos_ids: tokens that end a response; the one that did is its last token.
        tokenizer: decodes responses; without one, and without a pool, their texts are empty.
    """

    def __init__(
        self,
        cfg: Config,
        device: Device,
        run_dir: str | Path,
        eos_ids: list[int],
        tokenizer: Any = None,
        *,
        weights: Callable[[], Weights] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ):
        self.cfg, self.device, self.eos_ids, self.tokenizer = cfg, device, list(eos_ids), tokenizer
        self.tp = cfg.rollout.tensor_model_parallel_size
        self.is_leader = device.rank % self.tp == 0
        self.replicas = device.world // self.tp
        self.log = Path(run_dir) / "engines" / f"rank_{device.rank}.log"
        self.host = EngineHost(cfg, device, self.log) if self.is_leader else None
        self.name = f"rollout{next(_instances)}"
        self.calls = 0
        self.asleep = self.stale = self.verified = False
        self.destination: Destination | None = None
        self.buckets: Buckets | None = None
        self.source: Layout | None = None
        self.updated = False  # the engines have other weights than those of ``model.path``
        self.weights = weights  # those of the last update, for an engine that is replaced
        self.restarts = self.resampled = 0  # engines replaced in this run, and samples that were lost with them
        self.interrupted = interrupted or (lambda: False)  # whether generation should be broken off
        self.control: dist.ProcessGroup | None = None
        self.group: dist.ProcessGroup | None = None
        self.counter: Counter = LocalCounter()
        if dist.is_initialized():
            self._make_groups()
        atexit.register(_close, weakref.ref(self))

    def _make_groups(self) -> None:
        """Groups over CPU for waiting and short messages: NCCL would keep devices and cores busy while it waits."""
        r = self.cfg.rollout
        limit = timedelta(seconds=max(r.request_timeout_s, r.start_timeout_s) + RPC_TIMEOUT_S)
        self.control = dist.new_group(backend="gloo", timeout=limit)
        if self.tp > 1:
            for leader in range(0, self.device.world, self.tp):
                group = dist.new_group(list(range(leader, leader + self.tp)), backend="gloo", timeout=limit)
                if leader <= self.device.rank < leader + self.tp:
                    self.group = group
        store = dist.distributed_c10d._get_default_store()
        self.counter = dist.PrefixStore(f"rlscale/{self.name}", store)

    def start(self) -> None:
        """Start every engine and learn what slices its workers need.

        Raises:
            RuntimeError: on every rank, when an engine cannot start.
        """
        self._together(self._begin, "start")
        self._describe()

    def restart(self) -> None:
        """Start new engines in the place of those that have died; all need `sync` before they generate again.

        Raises:
            RuntimeError: on every rank, when an engine cannot start.
        """
        self.restarts += 1
        self.stale, self.verified, self.source, self.buckets = True, False, None, None
        self._together(self._begin, "restart")
        self.asleep = False
        self._describe()

    def _begin(self) -> None:
        assert self.host is not None
        if self.host.alive:
            if self.asleep:  # all are to be in the same state
                self._engine_call("wake_up")
            return
        self.host.close()
        self.host = EngineHost(self.cfg, self.device, self.log)
        self.host.start()

    def _describe(self) -> None:
        described: list[list[dict[str, Any]]] = []
        self._together(lambda: described.extend(self._rpc("rlscale_targets")), "asking the engine's workers")
        by_rank = [targets for of_leader in gather(described, self.control) for targets in of_leader]
        self.destination = Destination(by_rank)

    def generate(
        self,
        prompts: list[Prompt],
        sampling: Sampling,
        pool: RewardPool | None = None,
    ) -> list[Trajectory]:
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
        if self.stale or self.asleep:
            raise RuntimeError("the engines have no valid weights (asleep, or an update failed): sync them first")
        mine: list[Trajectory] = []
        missing: Missing = [(index, list(range(sampling.n))) for index in range(len(prompts))]
        while missing:
            self.calls += 1
            claims = self._claims(len(missing))

            def work(missing: Missing = missing, claims: Claims | FixedShare = claims) -> None:
                assert self.host is not None
                serve = self._serve(prompts, missing, sampling, pool, claims, mine)
                self.host.run(serve, self.cfg.rollout.request_timeout_s, "generation")

            try:
                self._together(work, "generation")
                break
            except EngineError as error:
                if not self._replace_lost(error):
                    break
                if self.updated:
                    assert self.weights is not None
                    self.sync(*self.weights())
                self.stale = False
            missing = self._still_missing(missing, mine)
        return sorted(mine, key=lambda t: (t.prompt_index, t.sample_index))

    def _claims(self, total: int) -> Claims | FixedShare:
        if self.cfg.trainer.deterministic:
            return FixedShare(self.device.rank // self.tp, self.replicas, total)
        return Claims(self.counter, f"claims{self.calls}", total)

    def _still_missing(self, missing: Missing, mine: list[Trajectory]) -> Missing:
        """What no rank has finished, the same list on all of them."""
        shares = gather([(t.prompt_index, t.sample_index) for t in mine], self.control)
        done = {key for share in shares for key in share}
        rest = [(index, [i for i in numbers if (index, i) not in done]) for index, numbers in missing]
        self.resampled += sum(len(numbers) for _, numbers in rest)
        return [(index, numbers) for index, numbers in rest if numbers]

    async def _serve(
        self,
        prompts: list[Prompt],
        missing: Missing,
        sampling: Sampling,
        pool: RewardPool | None,
        claims: Claims | FixedShare,
        finished: list[Trajectory],
    ) -> None:
        """Claim prompts and sample them until none is left; responses that are complete (and scored) are ``finished``.

        A replica holds at most its even share of the prompts at a time, and of these as many samples as the engine
        decodes at once, with one prompt more in the engine's queue so that a free place is taken without a turn through
        this process. With ``trainer.deterministic`` it gets its share before it begins.
        """
        r, n = self.cfg.rollout, sampling.n
        room = max(n, min(r.max_num_seqs + n, -(-len(missing) // self.replicas) * n))
        running: set[asyncio.Task[Trajectory]] = set()
        scoring: list[asyncio.Task[None]] = []

        def begin(count: int) -> set[asyncio.Task[Trajectory]]:
            return {
                asyncio.create_task(self._sample(prompts[index], index, i, sampling))
                for index, numbers in (missing[claimed] for claimed in claims.take(count))
                for i in numbers
            }

        async def complete(trajectory: Trajectory) -> None:
            if pool is not None:
                await _score(pool, prompts[trajectory.prompt_index], trajectory)
            finished.append(trajectory)

        try:
            if self.cfg.trainer.deterministic:
                running = await self._all_at_once(begin, len(missing))
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

    async def _all_at_once(
        self, begin: Callable[[int], set[asyncio.Task[Trajectory]]], count: int
    ) -> set[asyncio.Task[Trajectory]]:
        """Begin with an engine that starts when it has everything, and has nothing cached.

        What it decodes together then follows from the requests alone, and with it the last bits of their log-probs.
        """
        assert self.host is not None
        engine = self.host.engine
        await engine.pause_generation(mode="keep", clear_cache=True)
        tasks = begin(count)
        # a request counts from when it is on its way to the engine, which reads its requests in their order
        while engine.get_num_unfinished_requests() < len(tasks) and not any(task.done() for task in tasks):
            await asyncio.sleep(0)
        await engine.resume_generation()
        return tasks

    async def _sample(self, prompt: Prompt, index: int, number: int, sampling: Sampling) -> Trajectory:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        assert self.host is not None
        params = SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=max(sampling.top_k, 0),
            max_tokens=sampling.max_tokens, seed=sample_seed(sampling.seed, index, number), stop_token_ids=self.eos_ids,
            ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )  # fmt: skip
        request = f"{self.calls}-{index}-{number}"
        async for answer in self.host.engine.generate(tokens_input(prompt.token_ids), params, request_id=request):
            output = answer.outputs[0]
        ids = list(output.token_ids)
        return Trajectory(
            prompt_index=index, sample_index=number, prompt_ids=prompt.token_ids, response_ids=ids,
            response_mask=[1] * len(ids), rollout_logprobs=list(output.logprobs.logprobs),
            finish_reason=output.finish_reason or "abort", prompt_text=prompt.text, response_text=self._decode(ids),
            data_source=prompt.data_source,
        )  # fmt: skip

    def _decode(self, ids: list[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=True)

    def sync(self, source: Layout, tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Hand the trainer's weights to the engines, and forget what they have cached under the old ones.

        Engines that died since the last update, or die in this one, are started again and take a whole update, up to
        ``rollout.engine_restarts`` times in a run.

        Args:
            source: layout of the trainer's weights over all ranks.
            tensors: this rank's buffers by key, as in the layout.

        Returns:
            ``rollout/sync_bytes`` that this rank's worker took over, ``rollout/sync_s``.

        Raises:
            ValueError: the source lacks a tensor that an engine needs, or has it in another shape.
            RuntimeError: on every rank, when a worker did not take everything, holds something else than the trainer
                (``rollout.sync_verify``), or has died; `generate` then refuses to run.
        """
        if self.weights is None:
            self.weights = lambda: (source, tensors)
        self.updated = True
        started = time.perf_counter()
        while True:
            try:
                self._sync(source, tensors)
                return self._sync_metrics(started)
            except EngineError as error:
                if not self._replace_lost(error):
                    return self._sync_metrics(started)  # the step's record is to be that of any other run

    def _replace_lost(self, error: EngineError) -> bool:
        """Start new engines in the place of those that were lost, unless generation is to be broken off (a launcher
        that ends a run ends the engines, too); says whether. Collective.

        Raises:
            EngineError: ``error``, where no engine was lost or ``rollout.engine_restarts`` is used up.
        """
        lost = self.host is not None and not self.host.alive
        leaders = gather((lost, self.interrupted()), self.control)
        if any(interrupted for _, interrupted in leaders):
            return False
        if not any(lost for lost, _ in leaders) or self.restarts >= self.cfg.rollout.engine_restarts:
            raise error
        if self.device.rank == 0:
            say(f"warning: {error}; starting a new engine")
        self.restart()
        return True

    def _sync_metrics(self, started: float) -> dict[str, float]:
        assert self.buckets is not None
        plan = self.buckets.plan
        taken = plan.received.get(self.device.rank, 0) + plan.local.get(self.device.rank, 0)
        return {"rollout/sync_bytes": float(taken), "rollout/sync_s": time.perf_counter() - started}

    def _sync(self, source: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        self._prepare(source)
        assert self.buckets is not None
        self.stale = True
        how = self.cfg.rollout.sync_verify
        checked = how == "always" or (how == "first" and not self.verified)
        errors: list[Exception] = []
        self._attempt(errors, self._open_update, checked)
        for bucket in self.buckets.fill(tensors):
            self._group_barrier()
            if self._needed(bucket.number):
                self._attempt(errors, self._take_bucket, bucket.number)
            self._group_barrier()
        self._attempt(errors, self._close_update)
        self._raise_together(errors, "the weight update")
        self.asleep = False
        if checked:
            self._compare(tensors)
        self.stale = False

    def _prepare(self, source: Layout) -> None:
        """Plan, and give the workers their buckets' addresses; once for a layout."""
        if source is self.source or (self.source is not None and source == self.source):
            return
        assert self.destination is not None, "start() comes first"
        bucket = self.cfg.rollout.sync_bucket_mb * 2**20
        plan = self.destination.plan(source, bucket, ranks_per_node=self.device.local_world)
        self.buckets = Buckets(plan, self.device.rank, self.device.torch_device)
        mailboxes = gather(self.buckets.mailbox(), self.control)
        workers = mailboxes[self.device.rank : self.device.rank + self.tp]

        def connect() -> None:
            from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

            self._engine_call("init_weight_transfer_engine", WeightTransferInitRequest(init_info={"workers": workers}))
            self._check_workers()

        self._together(connect, "connecting the engine's workers")
        self.buckets.mapped()
        self.source = source

    def _open_update(self, checked: bool) -> None:
        if self.asleep:
            self._engine_call("wake_up", ["weights"])
        self._rpc("rlscale_verify", checked)
        self._engine_call("start_weight_update")

    def _take_bucket(self, number: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._engine_call("update_weights", WeightTransferUpdateRequest(update_info={"number": number}))

    def _close_update(self) -> None:
        self._engine_call("finish_weight_update")
        self._check_workers()
        if self.asleep:
            self._engine_call("wake_up", ["kv_cache"])
        if not self._engine_call("reset_prefix_cache"):
            raise RuntimeError("the prefix cache could not be reset")

    def _compare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise RuntimeError on every rank where what a worker holds is not what the trainer has."""
        assert self.buckets is not None
        held: list[dict[str, int]] = []
        self._together(lambda: held.extend(self._rpc("rlscale_checksums")), "asking for checksums")
        sent = verify.add(gather(verify.expected(self.buckets.plan, self.device.rank, tensors), self.control))
        errors: list[Exception] = []
        for worker, of_worker in enumerate(held):
            rank = self.device.rank + worker
            names = verify.differences({name: n for (receiver, name), n in sent.items() if receiver == rank}, of_worker)
            if names:
                listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                errors.append(RuntimeError(
                    f"rank {rank}: after the weight update the engine holds other weights than the trainer: "
                    f"{len(names)} tensor(s) differ: {listed}"
                ))  # fmt: skip
        self._raise_together(errors, "the weight update")
        self.verified = True

    def _check_workers(self) -> None:
        answers = self._rpc("rlscale_update_problem")
        problems = [f"worker {k}: {problem}" for k, problem in enumerate(answers) if problem]
        if problems:
            raise RuntimeError(f"rank {self.device.rank}: {'; '.join(problems)}")

    def _needed(self, number: int) -> bool:
        assert self.buckets is not None
        return any(self.buckets.plan.bucket(self.device.rank + k, number) for k in range(self.tp))

    def _attempt(self, errors: list[Exception], step: Any, *args: Any) -> None:
        """A leader's step of an update; after an error the rest is left out, while the ranks finish their exchange."""
        if self.host is None or errors:
            return
        try:
            step(*args)
        except Exception as error:
            errors.append(error)

    def sleep(self) -> None:
        """Give the engines' device memory to the trainer until the next `sync` (or `wake`).

        On CUDA the weights are dropped too. On CPU nothing happens: vLLM has no sleep mode there, memory is shared
        anyway, and to fault the cache's pages in again would cost more than they are worth.
        """
        if self.device.kind == "cuda" and not self.asleep:
            self._together(lambda: self._engine_call("sleep", 2), "sleep")
            self.asleep = True

    def wake(self) -> None:
        """Take the device memory back. Dropped weights only come back with `sync`, which wakes by itself."""
        if self.asleep:
            self._together(lambda: self._engine_call("wake_up"), "wake-up")
            self.asleep, self.stale = False, True

    def close(self) -> None:
        """End this rank's engine and its processes. Not collective; safe after errors and when called again."""
        if self.host is not None:
            self.host.close()
        self.buckets = None

    def _engine_call(self, method: str, *args: Any) -> Any:
        assert self.host is not None
        call = getattr(self.host.engine, method)
        return self.host.run(call(*args), RPC_TIMEOUT_S, method.replace("_", " "))

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `rlscale.rollout.worker.WorkerExtension` on every worker of this leader's engine."""
        return self._engine_call("collective_rpc", method, None, args)

    def _group_barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)

    def _together(self, work: Any, what: str) -> None:
        """Let the leaders work and all ranks wait for them; an error on one rank is an error on all."""
        errors: list[Exception] = []
        if self.host is not None:
            try:
                work()
            except Exception as error:
                errors.append(error)
        self._raise_together(errors, what)

    def _raise_together(self, errors: list[Exception], what: str) -> None:
        everyone = [message for of_rank in gather([str(e) for e in errors], self.control) for message in of_rank]
        if everyone:
            text = str(errors[0]) if errors else everyone[0]
            cause = errors[0] if errors else None
            raise EngineError(text if "rank " in text else f"{what} failed: {text}") from cause


async def _score(pool: RewardPool, prompt: Prompt, trajectory: Trajectory) -> None:
    score = await pool.score(prompt, trajectory.response_text)
    trajectory.reward, trajectory.reward_failed = score.value, score.failed
    trajectory.reward_error, trajectory.extra = score.error, dict(score.extra)


def _close(reference: weakref.ref[Rollout]) -> None:
    rollout = reference()
    if rollout is not None:
        rollout.close()
