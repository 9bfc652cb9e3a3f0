"""vLLM's settings for one engine: its arguments, its cores and the variables that its processes inherit.

They must see neither the launcher's variables (vLLM would take the trainer's ranks for its own) nor the trainer's
cores.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlscale.cluster.mesh import RolloutDims
from rlscale.cluster.process import MALLOC
from rlscale.config.schema import Config

if TYPE_CHECKING:
    from rlscale.cluster.device import Device

LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "OMPI_", "PMI_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE",
                  "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
CPU_BLOCK_SIZE = 32  # tokens; vLLM's 128 on CPU is longer than many a prompt, of which no prefix could then be shared


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
        "worker_extension_cls": "rlscale.rollout.vllm.worker.WorkerExtension",
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
    dims = RolloutDims(tp, device.local_world)
    replicas, replica = max(1, dims.replicas), dims.replica(device.local_rank)
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
        if cfg.rollout.enforce_eager:  # vLLM compiles some functions even so, see cluster/megatron_cpu.py
            os.environ["TORCH_COMPILE_DISABLE"] = "1"
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
        # not what stays the same: another thread may be reading it
        for name in os.environ.keys() - saved.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in saved.items() if os.environ.get(name) != value})
