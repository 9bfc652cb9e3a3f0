"""One vLLM engine as its leader sees it: started in processes of its own, driven from this process's event loop, ended.

The engine's processes must see neither the launcher's variables (vLLM would take the trainer's ranks for its own) nor
the trainer's cores; and everything they print goes to a file, whose last words are the reason when an engine does not
start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlscale.config.schema import Config
from rlscale.rollout.lifeline import Lifeline

if TYPE_CHECKING:
    from rlscale.cluster.device import Device

T = TypeVar("T")

LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "OMPI_", "PMI_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE",
                  "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
# temporary tensors are allocated and freed in every step: keep their pages (glibc; as in cluster.device)
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "2147483648", "MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_TOP_PAD_": "67108864",
          "MALLOC_ARENA_MAX": "1"}  # fmt: skip
CPU_BLOCK_SIZE = 32  # tokens; vLLM's 128 on CPU is longer than many a prompt, of which no prefix could then be shared
POLL_S = 0.5  # between looks at whether the engine's processes live
EXIT_TIMEOUT_S = 1.0  # for an engine to end by itself; nothing in it is worth waiting for


class EngineHost:
    """Hosts one engine of ``tensor_model_parallel_size`` workers; lives on the first rank of its rollout group."""

    def __init__(self, cfg: Config, device: Device, log: Path):
        self.cfg, self.device, self.log = cfg, device, log
        self.loop = asyncio.new_event_loop()
        self.engine: Any = None
        self.processes: list[Any] = []
        self.shared: set[Path] = set()  # what the engine's processes share in /dev/shm
        self.stalled = False  # it did not answer in time

    def start(self) -> None:
        """Start the engine's processes and generate two tokens.

        Raises:
            RuntimeError: the engine does not start, with the last reason that it gave; nothing of it is left running.
        """
        before = set(multiprocessing.active_children())
        self.log.parent.mkdir(parents=True, exist_ok=True)
        watchdog = threading.Timer(self.cfg.rollout.start_timeout_s, self._kill_children_since, (before,))
        watchdog.daemon = True
        watchdog.start()
        started = time.monotonic()
        try:
            self.loop.run_until_complete(self._create())
            self.processes = [p for p in multiprocessing.active_children() if p not in before]
            self.loop.run_until_complete(self._warm_up())
            self.shared = set().union(*map(_shared_files, self._family())) - _shared_files(os.getpid())
        except BaseException as error:
            limit = self.cfg.rollout.start_timeout_s
            late = time.monotonic() - started >= limit
            reason = f"not ready after rollout.start_timeout_s = {limit:g} s" if late else self._reason(error)
            self.processes = [p for p in multiprocessing.active_children() if p not in before]
            self.close()
            if not isinstance(error, Exception):  # a signal
                raise
            raise RuntimeError(
                f"rank {self.device.rank}: vLLM cannot start: {reason} (log: {self.log}; its settings are those of "
                "rollout, rollout.engine_args among them)"
            ) from error
        finally:
            watchdog.cancel()

    async def _create(self) -> None:
        with environment(self.cfg, self.device), redirected(self.log):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            config = AsyncEngineArgs(**engine_arguments(self.cfg, self.device)).create_engine_config()
            config.lifeline = Lifeline(os.getpid(), pinned_cores(self.cfg, self.device))
            self.engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # here errors are raised; the engine writes its own log

    async def _warm_up(self) -> None:
        """What fails only when tokens are generated (an unsupported head size) shall fail now."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        params = SamplingParams(temperature=1.0, max_tokens=2, logprobs=0, seed=0, detokenize=False, ignore_eos=True)
        async for _ in self.engine.generate(tokens_input([0, 0, 0]), params, request_id="warm-up"):
            pass
        await self.engine.reset_prefix_cache()
        await self.engine.collective_rpc("rlscale_unlink_shared_memory")

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
            if self.engine is None or self.engine.errored or not self._alive():
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

    @property
    def alive(self) -> bool:
        """Whether the engine can be called."""
        return self._alive() and not self.engine.errored and not self.stalled

    def close(self) -> None:
        """End the engine's processes; kill those that do not end by themselves. May be called again."""
        engine, self.engine = self.engine, None
        family = self._family()
        if engine is not None:
            with contextlib.suppress(Exception), redirected(self.log):
                engine.shutdown(timeout=EXIT_TIMEOUT_S)
        if not self.loop.is_closed():
            with contextlib.suppress(Exception):
                pending = asyncio.all_tasks(self.loop)
                for task in pending:
                    task.cancel()
                self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self.loop.close()
        _end(self.processes, family)
        for path in self.shared:  # left by processes that were killed
            path.unlink(missing_ok=True)
        self.processes, self.shared = [], set()

    def _alive(self) -> bool:
        return self.engine is not None and all(process.is_alive() for process in self.processes)

    def _check_alive(self) -> None:
        if not self._alive():
            raise ProcessLookupError("EngineCore: a process of the engine has ended")

    def _family(self) -> list[int]:
        return [member for process in self.processes for member in _family(process.pid)]

    def _kill_children_since(self, before: set[Any]) -> None:
        for process in set(multiprocessing.active_children()) - before:
            for pid in _family(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _reason(self, error: BaseException) -> str:
        """The last error in the engine's log; the exception itself where that says more than that an engine failed."""
        text = f"{type(error).__name__}: {error}".strip()
        if not re.search("Engine core initialization failed|EngineDeadError|EngineCore", text):
            return " ".join(text.split())
        with contextlib.suppress(OSError):
            found = last_error(self.log.read_text(errors="replace"))
            if found:
                return found
        return " ".join(text.split())


def last_error(log: str) -> str | None:
    """The last exception in a log that is not merely somebody's giving up because of another process's."""
    prefix = r"^(?:\([^)]*\)\s*)*(?:(?:ERROR|CRITICAL)\b[^\]]*\]\s*)?"  # (process) LEVEL date [file:line]
    pattern = re.compile(prefix + r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit): .+)$")
    errors = [match.group(1).strip() for line in log.splitlines() if (match := pattern.match(line.strip()))]
    own = [e for e in errors if not re.search(r"initialization failed|EngineDeadError|Engine core|WorkerProc", e)]
    return (own or errors or [None])[-1]


def engine_arguments(cfg: Config, device: Device) -> dict[str, Any]:
    """Arguments of vLLM's engine; ``rollout.engine_args`` come last."""
    r, kind = cfg.rollout, device.kind
    arguments: dict[str, Any] = {
        "model": cfg.model.path,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "dtype": r.dtype or cfg.model.dtype,
        "seed": cfg.trainer.seed,
        "tensor_parallel_size": r.tensor_model_parallel_size,
        "max_model_len": cfg.data.max_prompt_length + cfg.data.max_response_length,
        "max_num_seqs": r.max_num_seqs,
        "max_num_batched_tokens": r.max_num_batched_tokens,
        "enforce_eager": r.enforce_eager,
        "enable_prefix_caching": r.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from, as the trainer's are
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "weight_transfer_config": {"backend": "rlscale"},
        "worker_extension_cls": "rlscale.rollout.worker.WorkerExtension",
        "distributed_executor_backend": "uni" if r.tensor_model_parallel_size == 1 else "mp",
    }
    if kind == "cpu":
        arguments |= {"kv_cache_memory_bytes": int(r.kv_cache_memory_gb * 2**30), "block_size": CPU_BLOCK_SIZE}
    else:
        arguments |= {"gpu_memory_utilization": r.gpu_memory_utilization, "enable_sleep_mode": True}
    return arguments | r.engine_args


def pinned_cores(cfg: Config, device: Device) -> tuple[int, ...]:
    """This replica's share of the cores that this process may use; none on CUDA.

    A machine's replicas divide its cores among themselves, in the order of their ranks.
    """
    if device.kind != "cpu":
        return ()
    cores = sorted(os.sched_getaffinity(0))
    tp = cfg.rollout.tensor_model_parallel_size
    replicas = max(1, device.local_world // tp)
    replica = device.local_rank // tp
    mine = cores[replica * len(cores) // replicas : (replica + 1) * len(cores) // replicas]
    return tuple(mine or [cores[replica % len(cores)]])


@contextlib.contextmanager
def environment(cfg: Config, device: Device) -> Iterator[None]:
    """The variables that the engine's processes inherit; this process has its own again afterwards."""
    saved = dict(os.environ)
    for name in list(os.environ):
        if name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES):
            del os.environ[name]
    tp = cfg.rollout.tensor_model_parallel_size
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(cfg.rollout.start_timeout_s) + 1)
    if device.kind == "cpu":
        cores = pinned_cores(cfg, device)
        os.environ.update(MALLOC)
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(cores) // tp))
        # a single worker lives in the engine's process, where `Lifeline` binds it; several are bound by vLLM
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if tp == 1 else "1"
        shares = [cores[i * len(cores) // tp : (i + 1) * len(cores) // tp] for i in range(tp)]
        bound = "|".join(",".join(map(str, share)) for share in shares)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = bound if all(shares) else "nobind"
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(i) for i in range(device.local_world)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[device.local_rank : device.local_rank + tp])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


@contextlib.contextmanager
def redirected(log: Path) -> Iterator[None]:
    """Standard output and error, of this process and of what it starts, go to the end of a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(saved, start=1):
            os.dup2(copy, number)
            os.close(copy)
        os.close(target)


def _family(pid: int | None) -> list[int]:
    """A process and all its descendants."""
    import psutil

    try:
        process = psutil.Process(pid)
        return [process.pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _shared_files(pid: int) -> set[Path]:
    """Semaphores and message queues of Python's multiprocessing that a process has mapped.

    Files are told by their inode: a semaphore's mapping carries the name under which it was made, not its final one.
    """
    try:
        mapped = set(re.findall(r" (\d+) +/dev/shm/", Path(f"/proc/{pid}/maps").read_text()))
    except OSError:
        return set()
    out = set()
    for path in [*Path("/dev/shm").glob("sem.mp-*"), *Path("/dev/shm").glob("psm_*")]:
        with contextlib.suppress(FileNotFoundError):
            if str(path.stat().st_ino) in mapped:
                out.add(path)
    return out


def _end(processes: list[Any], family: list[int]) -> None:
    """Wait for processes that are ending; kill what is still there."""
    import psutil

    for process in processes:
        process.join(timeout=1.0)
    members = []
    for pid in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            members.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(members, timeout=2.0)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=2.0)
    for process in processes:
        process.join(timeout=1.0)
