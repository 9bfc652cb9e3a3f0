"""The accelerator of this process and its world: CPU over gloo or CUDA over NCCL, behind one object."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

_timeout: timedelta | None = None  # of collectives
# glibc's mallopt(3) parameters
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8


@dataclass(frozen=True)
class Device:
    kind: str  # cpu | cuda
    rank: int
    local_rank: int
    world: int
    local_world: int

    @property
    def torch_device(self) -> Any:
        import torch

        return torch.device("cuda", self.local_rank) if self.kind == "cuda" else torch.device("cpu")

    @property
    def backend(self) -> str:
        return "nccl" if self.kind == "cuda" else "gloo"

    def synchronize(self) -> None:
        """Wait for queued work, so that a timer around it means something."""
        if self.kind == "cuda":
            import torch

            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        if self.kind == "cuda":
            import torch

            torch.cuda.empty_cache()


def tune_malloc() -> bool:
    """Keep freed memory in the process (glibc only; True if it was done).

    Training allocates and frees the same tensors every step. By default glibc maps each of them afresh, and the page
    faults take a good part of the step on a CPU. The few largest (flat gradients, an embedding's gradient) are still
    mapped and given back, because holes of their size would stay in the heap for good.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    except (OSError, AttributeError):
        return False
    wanted = ((M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20), (M_ARENA_MAX, 1))
    return min(libc.mallopt(*pair) for pair in wanted) == 1


def prepare_process(kind: str) -> None:
    """Settings that must be in place before torch and DeepSpeed are imported."""
    cores = len(os.sched_getaffinity(0))
    # more threads than cores on a machine are many times slower than too few
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // local_world())))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if kind == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        tune_malloc()


def detect(wanted: str) -> str:
    """cpu or cuda for trainer.device. Raises ValueError when cuda is asked for and there is none."""
    if wanted == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise ValueError("trainer.device: cuda was asked for, but torch sees no CUDA device")
    return "cpu"


def be_deterministic() -> None:
    """Let torch, cuBLAS and NCCL add in the same order each time; call before CUDA is used.

    An operation that has no such kernel raises a RuntimeError that names it. vLLM's processes inherit the variables.
    Source: torch, "Reproducibility"; NVIDIA, "cuBLAS: results reproducibility" (workspaces of fixed size) and NCCL's
    environment variables (NVLink SHARP adds in the switch, in the order of arrival).
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "^NVLS")
    import torch

    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def init_distributed(wanted: str = "auto", timeout_s: float = 1800.0, deterministic: bool = False) -> Device:
    """Join the world that the launcher describes in RANK, WORLD_SIZE, LOCAL_RANK; alone without them.

    Args:
        wanted: auto, cpu or cuda.
        timeout_s: of collectives.
        deterministic: see `be_deterministic`.

    Raises:
        ValueError: trainer.device asks for CUDA and there is none, or the master's port is in use.
    """
    global _timeout
    _timeout = timedelta(seconds=timeout_s)
    kind = detect(wanted)
    prepare_process(kind)
    if deterministic:
        be_deterministic()
    import torch
    import torch.distributed as dist

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())
    rank, world, local = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if kind == "cpu":
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        torch.cuda.set_device(local)
    quiet_libraries()
    import deepspeed

    # its shared-memory collective compiles for most of a minute and leaves a file a rank behind in /dev/shm for ever
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        try:
            deepspeed.init_distributed(
                dist_backend="nccl" if kind == "cuda" else "gloo",
                timeout=_timeout,
                verbose=False,
                auto_mpi_discovery=False,
            )
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise ValueError(
                f"port {os.environ['MASTER_PORT']} of this machine is in use, by another run perhaps; choose one with "
                "deepspeed --master_port N"
            ) from error
    elif not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False, auto_mpi_discovery=False)
    return Device(kind=kind, rank=rank, local_rank=local, world=world, local_world=local_world())


def new_group(ranks: list[int] | None = None, backend: str | None = None) -> Any:
    """`torch.distributed.new_group` with the time limit of `init_distributed`, which it would not take over."""
    import torch.distributed as dist

    return dist.new_group(ranks, backend=backend, timeout=_timeout)


def quiet_libraries() -> None:
    """Keep DeepSpeed's and Megatron's notes about themselves off the screen; errors and our own warnings stay."""
    for module in ("megatron", "deepspeed", "torch.distributed"):
        warnings.filterwarnings("ignore", module=module.replace(".", r"\."))
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    bf16: Any = importlib.import_module("deepspeed.runtime.bf16_optimizer")
    bf16.see_memory_usage = lambda *_, **__: None  # prints at every construction, whatever the level


def say(text: str) -> None:
    """Print a line on standard error; a reader that has ended (``| tee``) is no reason for the run to fail."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def leave() -> None:
    """End this process at once, as after a SIGTERM."""
    os._exit(143)


#: what to do when the launcher has ended
on_launcher_end: Callable[[], None] = leave


def follow_launcher(interval_s: float = 1.0) -> None:
    """End this process when DeepSpeed's runner is gone (or whatever `on_launcher_end` says by then).

    The runner starts a launcher, which starts the ranks. A SIGTERM (scheduler, ``timeout``) ends only the runner, and
    the launcher with all its ranks would train on unseen.
    """
    launcher = os.getppid()
    if "deepspeed.launcher.launch" not in _process(launcher, "cmdline"):
        return
    runner = _parent(launcher)

    def watch() -> None:
        while os.getppid() == launcher and _parent(launcher) == runner:
            time.sleep(interval_s)
        say("warning: the launcher has ended; so will this rank")
        on_launcher_end()

    threading.Thread(target=watch, daemon=True, name="follow-launcher").start()


def _process(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _parent(pid: int) -> str:
    """Parent of a process, as /proc shows it; empty when the process is gone."""
    fields = _process(pid, "stat").rpartition(")")[2].split()
    return fields[1] if fields else ""


def local_world() -> int:
    """Ranks on this machine, as torchrun (LOCAL_WORLD_SIZE) or DeepSpeed's launcher (LOCAL_SIZE) says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or os.environ.get("WORLD_SIZE", "1"))


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
