"""A vLLM engine as its leader drives it (`rlscale.rollout.backend.Backend`): started in processes of its own, called
from this process's event loop, ended.

Everything its processes print goes to a file, whose last words are the reason when an engine does not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from rlscale.cluster.device import Device
from rlscale.config.schema import Config
from rlscale.rollout.backend import Output
from rlscale.rollout.ranks import RPC_TIMEOUT_S
from rlscale.rollout.sampling import Sampling
from rlscale.rollout.vllm.lifeline import Lifeline
from rlscale.rollout.vllm.processes import end, family, last_error, redirected, shared_files
from rlscale.rollout.vllm.settings import engine_arguments, environment, pinned_cores

T = TypeVar("T")

POLL_S = 0.5  # between looks at whether the engine's processes live
SPAWN_POLL_S = 0.01  # between looks at whether they have been started
ENGINE_MODULES = (
    "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor", "vllm.v1.worker.cpu_worker",
    "rlscale.rollout.vllm.worker",
)  # fmt: skip
EXIT_TIMEOUT_S = 1.0  # for an engine to end by itself; nothing in it is worth waiting for


class VllmBackend:
    """One engine of ``tensor_model_parallel_size`` workers; lives on the first rank of its rollout group."""

    def __init__(self, cfg: Config, device: Device):
        self.cfg, self.device = cfg, device
        self.log = Path(cfg.trainer.run_dir) / "engines" / f"rank_{device.rank}.log"  # what the engine prints
        self.loop = asyncio.new_event_loop()
        self.llm: Any = None
        self.before: set[Any] = set()  # children of this process that are not the engine's
        # set when the start has ended; a thread's own join() takes it for ended when a signal interrupts (bpo-45274)
        self.starting: threading.Event | None = None
        self.start_error: BaseException | None = None
        self.processes: list[Any] = []
        self.shared: set[Path] = set()  # what the engine's processes share in /dev/shm
        self.stalled = False  # it did not answer in time
        self.asleep: set[str] = set()  # what of its memory has been given back

    def begin_start(self) -> None:
        """On CPU, start the engine's processes; a thread waits for them. They inherit variables and standard output
        that this process has only until they exist, and the caller does nothing meanwhile.

        In a process without a process group yet, the engine is forked: it then has what this process has imported (vLLM
        and torch: most of the time of a start), and nothing of gloo's threads and sockets. Elsewhere it is spawned.

        On CUDA nothing happens yet: the engine takes the memory that the trainer's models give back when they are
        loaded, and vLLM changes this process's variables until its workers run.
        """
        if self.starting is not None:  # it has begun before
            return
        self.close()
        self.loop, self.start_error, self.stalled, self.asleep = asyncio.new_event_loop(), None, False, set()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.before = set(multiprocessing.active_children())
        if self.device.kind == "cpu":
            self.starting = threading.Event()
            with self._inherited():
                threading.Thread(target=self._start, name="engine start", daemon=True).start()
                try:
                    while not self.starting.is_set() and not self._started():
                        time.sleep(SPAWN_POLL_S)
                except BaseException:  # a signal
                    self.close()
                    raise

    def finish_start(self) -> None:
        """Wait until the engine has generated two tokens.

        Raises:
            RuntimeError: the engine does not start, with the last reason that it gave; nothing of it is left running.
        """
        if self.starting is None:
            with self._inherited():
                self._start()
        else:
            self.starting.wait()
            self.starting = None
        if (error := self.start_error) is None:
            return
        self.close()
        if not isinstance(error, Exception):  # a signal
            raise error
        raise RuntimeError(
            f"rank {self.device.rank}: vLLM cannot start: {error} (log: {self.log}; its settings are those of "
            "rollout, rollout.engine_args among them)"
        ) from error.__cause__

    def _start(self) -> None:
        """Start to end; what goes wrong is kept in ``start_error``, as its reason."""
        limit = self.cfg.rollout.start_timeout_s
        watchdog = threading.Timer(limit, self._kill)
        watchdog.daemon = True
        watchdog.start()
        started = time.monotonic()
        try:
            self.loop.run_until_complete(self._create())
            self.processes = self._started()
            self.loop.run_until_complete(self._unless_dead(self._warm_up()))
            mapped = set().union(*(shared_files(member.pid) for member in self._family()))
            self.shared = mapped - shared_files(os.getpid())
        except Exception as error:
            late = time.monotonic() - started >= limit
            reason = f"not ready after rollout.start_timeout_s = {limit:g} s" if late else self._reason(error)
            self.start_error = RuntimeError(reason)
            self.start_error.__cause__ = error
        except BaseException as error:
            self.start_error = error
        finally:
            watchdog.cancel()
            if self.starting is not None:
                self.starting.set()

    @contextlib.contextmanager
    def _inherited(self) -> Iterator[None]:
        with environment(self.cfg, self.device), redirected(self.log):
            yield
        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # here errors are raised; the engine writes its own log

    async def _create(self) -> None:
        import torch.distributed as dist
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        config = AsyncEngineArgs(**engine_arguments(self.cfg, self.device)).create_engine_config()
        lifeline = config.lifeline = Lifeline(os.getpid(), pinned_cores(self.cfg, self.device))
        one = self.device.kind == "cpu" and self.cfg.rollout.tensor_model_parallel_size == 1
        if forked := one and not dist.is_initialized():
            for module in ENGINE_MODULES:  # once here, not again in the engine
                importlib.import_module(module)
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM has just set it to spawn
        with lifeline.forks() if forked else contextlib.nullcontext():
            self.llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)

    async def _warm_up(self) -> None:
        """Generate two tokens, so that an error that only generation shows appears at start-up."""
        await self.generate("warm-up", [0, 0, 0], Sampling(n=1, max_tokens=2))
        await self.llm.reset_prefix_cache()
        await self.llm.collective_rpc("rlscale_unlink_shared_memory")

    def run(self, work: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        """Run ``work`` to its end.

        Raises:
            RuntimeError: the engine died, failed or took longer than ``timeout`` seconds; names this rank.
        """
        rank = f"rank {self.device.rank}"
        self.stalled = False
        try:
            self._check_alive()
            return self.loop.run_until_complete(asyncio.wait_for(self._unless_dead(work), timeout))
        except TimeoutError as error:
            self.stalled = True
            work.close()
            raise RuntimeError(f"{rank}: {what} took more than {timeout:g} s") from error
        except Exception as error:
            work.close()
            if not self.alive:
                reason = f"{self._reason(error)} (log: {self.log})"
                raise RuntimeError(f"{rank}: the vLLM engine died during {what}: {reason}") from error
            raise RuntimeError(f"{rank}: {what} failed: {type(error).__name__}: {error}") from error

    async def _unless_dead(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, which may never end when the engine dies: vLLM answers calls other than generation so."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
                self._check_alive()
            return task.result()
        finally:
            if task.cancel():  # let it clean up behind itself
                await asyncio.wait({task}, timeout=EXIT_TIMEOUT_S)

    async def generate(self, request: str, token_ids: Sequence[int], params: Sampling) -> Output:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        of_vllm = SamplingParams(
            temperature=params.temperature, top_p=params.top_p, top_k=max(params.top_k, 0),
            max_tokens=params.max_tokens, seed=params.seed, stop_token_ids=list(params.stop_token_ids),
            ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )  # fmt: skip
        async for answer in self.llm.generate(tokens_input(token_ids), of_vllm, request_id=request):
            output = answer.outputs[0]
        return Output(list(output.token_ids), list(output.logprobs.logprobs), output.finish_reason or "abort")

    async def pause(self) -> None:
        await self.llm.pause_generation(mode="keep", clear_cache=True)

    def waiting(self) -> int:
        # a request counts from when it is on its way to the engine, which reads its requests in their order
        return self.llm.get_num_unfinished_requests()

    async def resume(self) -> None:
        await self.llm.resume_generation()

    def targets(self) -> list[list[dict[str, Any]]]:
        return self._workers("targets")

    def connect(self, mailboxes: list[dict[str, Any]]) -> None:
        self._workers("connect", mailboxes)

    def begin_update(self, verify: bool) -> None:
        self._wake("weights")
        self._workers("begin_update", verify)

    def take(self, bucket: int) -> None:
        self._workers("take", bucket)

    def finish_update(self) -> None:
        self._workers("finish_update")
        self._wake("kv_cache")
        if not self._call("reset_prefix_cache"):
            raise RuntimeError("the prefix cache could not be reset")

    def checksums(self) -> list[dict[str, int]]:
        return self._workers("checksums")

    def sleep(self) -> None:
        self._call("sleep", 2)
        self.asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        self._wake("weights", "kv_cache")

    def _wake(self, *tags: str) -> None:
        if asleep := [tag for tag in tags if tag in self.asleep]:
            self._call("wake_up", asleep)
            self.asleep -= set(asleep)

    def _call(self, method: str, *args: Any, what: str = "") -> Any:
        return self.run(getattr(self.llm, method)(*args), RPC_TIMEOUT_S, what or method.replace("_", " "))

    def _workers(self, method: str, *args: Any) -> list[Any]:
        """What a method of `rlscale.rollout.vllm.worker.ShardWriter` returns on every worker."""
        what = f"{method.replace('_', ' ')} of the engine's workers"
        answers = self._call("collective_rpc", "rlscale_call", None, (method, *args), what=what)
        problems = [f"worker {k}: {problem}" for k, (_, problem) in enumerate(answers) if problem]
        if problems:
            raise RuntimeError(f"rank {self.device.rank}: {'; '.join(problems)}")
        return [result for result, _ in answers]

    @property
    def alive(self) -> bool:
        """Whether the engine can be called."""
        called = self.llm is not None and not self.llm.errored and not self.stalled
        return called and all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """End the engine's processes; kill those that do not end by themselves. May be called again."""
        while self.starting is not None:  # without its processes it fails
            self._kill()
            if self.starting.wait(SPAWN_POLL_S):
                self.starting, self.processes = None, self._started()
        llm, self.llm = self.llm, None
        members = self._family()
        if llm is not None:
            with contextlib.suppress(Exception), redirected(self.log):
                llm.shutdown(timeout=EXIT_TIMEOUT_S)
        if not self.loop.is_closed():
            with contextlib.suppress(Exception):
                pending = asyncio.all_tasks(self.loop)
                for task in pending:
                    task.cancel()
                self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self.loop.close()
        end(self.processes, members)
        for path in self.shared:  # left by processes that were killed
            path.unlink(missing_ok=True)
        self.processes, self.shared = [], set()

    def _check_alive(self) -> None:
        if not self.alive:
            raise ProcessLookupError("EngineCore: a process of the engine has ended")

    def _family(self) -> list[psutil.Process]:
        return [member for process in self.processes for member in family(process.pid)]

    def _started(self) -> list[Any]:
        """The engine's processes among the children of this one."""
        children = set(multiprocessing.active_children()) - self.before
        return [child for child in children if child.name.startswith("EngineCore")]

    def _kill(self) -> None:
        for process in self._started():
            for member in family(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()

    def _reason(self, error: BaseException) -> str:
        """The last error in the engine's log; the exception itself where that says more than that an engine failed."""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if re.search("Engine core initialization failed|EngineDeadError|EngineCore", text):
            with contextlib.suppress(OSError):
                return last_error(self.log.read_text(errors="replace")) or text
        return text
