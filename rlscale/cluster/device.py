"""The accelerator of this process and its world: CPU over gloo or CUDA over NCCL, behind one object."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rlscale.cluster.process import free_port, tune_malloc

_timeout: timedelta | None = None  # of collectives


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

    def synchronize(self) -> None:
        """Wait for queued work, so that a timer around it means something."""
        if self.kind == "cuda":
            import torch

            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        if self.kind == "cuda":
            import torch

            torch.cuda.empty_cache()


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


def native_dtype(kind: str) -> str:
    """What model.dtype: auto stands for.

    Without AVX-512, torch emulates products of bfloat16, about ten times slower than float32, and vLLM's kernels round
    towards zero: for SmolLM2-135M its log-probs differ from the trainer's by 0.15 on average, with AVX-512 by 0.04.
    """
    import torch

    native = kind == "cuda" or "AVX512" in torch.backends.cpu.get_cpu_capability()
    return "bfloat16" if native else "float32"


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


def init_distributed(kind: str, timeout_s: float = 1800.0, deterministic: bool = False) -> Device:
    """Join the world that the launcher describes in RANK, WORLD_SIZE, LOCAL_RANK; alone without them.

    Args:
        kind: cpu or cuda, for which `prepare_process` has been called.
        timeout_s: of collectives.
        deterministic: see `be_deterministic`.

    Raises:
        ValueError: the master's port is in use.
    """
    global _timeout
    _timeout = timedelta(seconds=timeout_s)
    if deterministic:
        be_deterministic()
    import torch
    import torch.distributed as dist

    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))
    device = launched_as(kind)
    if kind == "cpu":
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        torch.cuda.set_device(device.local_rank)
    quiet_libraries()
    import deepspeed

    # its shared-memory collective compiles for most of a minute and leaves one file per rank in /dev/shm
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        try:
            backend = "nccl" if kind == "cuda" else "gloo"
            deepspeed.init_distributed(backend, timeout=_timeout, verbose=False, auto_mpi_discovery=False)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise ValueError(
                f"port {os.environ['MASTER_PORT']} of this machine is in use, by another run perhaps; choose one with "
                "deepspeed --master_port N"
            ) from error
    return device


def launched_as(kind: str) -> Device:
    """This process as the launcher describes it, whether it has joined its world or not."""
    rank, world, local = (int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
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


def local_world() -> int:
    """Ranks on this machine, as torchrun (LOCAL_WORLD_SIZE) or DeepSpeed's launcher (LOCAL_SIZE) says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or os.environ.get("WORLD_SIZE", "1"))
