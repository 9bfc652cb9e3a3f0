"""Real engines on tiny models, shared by the tests of this folder, and what their samples must look like.

The engines of a layout are started once, on the ranks of a pooled world, and used by all tests of the layout; a test
gets them alive and with the settings of `configuration`, whatever tests before it did. Weights are the test's own: it
syncs what it needs, or asks for engines that have taken no update (`untouched`).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlscale.testing.models import tiny_model

START = 240.0  # seconds for a call that starts engines, on a busy machine
EXACT = 2e-5
SHAPES: dict[str, dict[str, Any]] = {
    "replicas": dict(arch="qwen2", tied=True, heads=4, kv_heads=2, head_dim=32),
    "split": dict(arch="qwen3", tied=False, heads=4, kv_heads=1, head_dim=32, hidden=96),
}
PROMPTS = [[4 + (7 * p + 3 * i) % 300 for i in range(20 + 9 * p)] for p in range(5)]  # shorter and longer than a block
EOS = 3


def model(layout: str, seed: int) -> str:
    return tiny_model(**SHAPES[layout], seed=seed)


# Functions that run on the ranks; the rollout of a layout stays in the rank's process from call to call.

_rollouts: dict[str, Any] = {}


def configuration(layout: str, path: str, run_dir: str, **rollout: Any) -> Any:
    from rlscale.config.schema import Config

    cfg = Config()
    cfg.model.path, cfg.model.dtype, cfg.trainer.run_dir = path, "float32", run_dir
    cfg.data.max_prompt_length, cfg.data.max_response_length = 64, 64
    cfg.rollout.tensor_model_parallel_size = 2 if layout == "split" else 1
    cfg.rollout.kv_cache_memory_gb, cfg.rollout.max_num_seqs, cfg.rollout.sync_bucket_mb = 1 / 32, 16, 1
    cfg.rollout.engine_restarts = 0
    for key, value in rollout.items():
        setattr(cfg.rollout, key, value)
    return cfg


def close(layout: str) -> None:
    if layout in _rollouts:
        _rollouts.pop(layout).close()


def close_all() -> None:
    for layout in list(_rollouts):
        close(layout)


def new_rollout(layout: str, run_dir: str) -> Any:
    """The shared rollout of a layout, in place of one that there may be; its engines are not started."""
    from rlscale.cluster.device import Device
    from rlscale.rollout.rollout import Rollout

    close(layout)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = Device("cpu", rank, rank, world, world)
    _rollouts[layout] = Rollout(configuration(layout, model(layout, 0), run_dir), device, [EOS])
    return _rollouts[layout]


def rollout_of(layout: str, run_dir: str, untouched: bool = False) -> Any:
    """The engines of a layout as a test finds them; ``untouched``: with the weights that they have started with."""
    from rlscale.cluster.collective import gather
    from rlscale.rollout.trajectory import sample_trajectory

    kept = _rollouts.get(layout)
    if kept is not None:
        usable = kept.backend is None or kept.backend.alive
        if all(gather(usable and not (untouched and kept.weights), kept.ranks.control)):
            kept.cfg.rollout.__dict__.update(vars(configuration(layout, model(layout, 0), run_dir).rollout))
            kept.cfg.trainer.deterministic = False
            kept.restarts = kept.resampled = 0
            kept.interrupted, kept.sample, kept.tokenizer = lambda: False, sample_trajectory, None
            if kept.weight_sync.stale:
                kept.sync(lambda: weights(layout, 0))
            return kept
    rollout = new_rollout(layout, run_dir)
    rollout.start()
    return rollout


def weights(layout: str, seed: int, without: str | None = None) -> Any:
    """A source layout in which every tensor is cut over the ranks, and this rank's parts."""
    from safetensors.torch import load_file

    from rlscale.reshard.layout import Layout, Piece, whole

    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    full = {k: v for k, v in load_file(f"{model(layout, seed)}/model.safetensors").items() if k != without}
    pieces, mine = [], {}
    for name, tensor in full.items():
        for r in range(world):
            rows = tensor.shape[0] * r // world, tensor.shape[0] * (r + 1) // world
            part = tensor[rows[0] : rows[1]]
            pieces.append(Piece(name, r, (rows, *whole(tuple(tensor.shape[1:]))), name, whole(tuple(part.shape))))
            if r == rank:
                mine[name] = part.clone()
    return Layout({name: tuple(t.shape) for name, t in full.items()}, pieces), mine


def prompts(ids: list[list[int]]) -> list[Any]:
    return [SimpleNamespace(token_ids=p, text=str(i), data_source="tiny") for i, p in enumerate(ids)]


def generate(layout: str, run_dir: str, given: int | None, untouched: bool = False, **sampling: Any) -> list[Any]:
    """Sync the weights of model ``given`` (None: as they are) and generate; this rank's trajectories."""
    from rlscale.rollout.sampling import Sampling

    rollout = rollout_of(layout, run_dir, untouched)
    if given is not None:
        metrics = rollout.sync(lambda: weights(layout, given))
        assert metrics["rollout/sync_bytes"] > 0
    return rollout.generate(prompts(PROMPTS), Sampling(**{"n": 1, "max_tokens": 16, **sampling}))


def together(shares: list[list[Any]]) -> list[Any]:
    return sorted((t for share in shares for t in share), key=lambda t: (t.prompt_index, t.sample_index))


# What the weights say: transformers in fp32.

_references: dict[str, Any] = {}


def reference_logits(path: str, trajectory: Any) -> torch.Tensor:
    """[t, vocabulary] logits that each response token was drawn from."""
    from transformers import AutoModelForCausalLM

    if path not in _references:
        _references[path] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])
    with torch.no_grad():
        return _references[path](ids).logits[0, len(trajectory.prompt_ids) - 1 : -1]


def check(trajectories: list[Any], path: str, temperature: float = 1.0, greedy: bool = False) -> None:
    for t in trajectories:
        logits = reference_logits(path, t)
        ids = torch.tensor(t.response_ids)
        if greedy:
            assert logits.argmax(-1).tolist() == t.response_ids
        expected = (logits / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(t.rollout_logprobs), expected, atol=EXACT, rtol=0)


def family(run_dir: str, layout: str) -> tuple[list[int], set[str]]:
    """The processes of this rank's engine, and the names of the files that they share."""
    rollout = rollout_of(layout, run_dir)
    return engine_processes(rollout), {path.name for path in rollout.backend.shared} if rollout.is_leader else set()


def engine_processes(rollout: Any) -> list[int]:
    import psutil

    roots = [process.pid for process in rollout.backend.processes] if rollout.is_leader else []
    return roots + [child.pid for root in roots for child in psutil.Process(root).children(recursive=True)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
