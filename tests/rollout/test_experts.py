"""A mixture of experts from the trainer's layout into engines: what they then sample has the trainer's log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlscale.testing.models import tiny_model
from tests import worlds
from tests.rollout.helpers import EOS, EXACT, PROMPTS, START, prompts

SHAPE: dict[str, Any] = dict(tied=False, heads=4, kv_heads=2, head_dim=32, hidden=64, ffn=48)


def sync_and_compare(run_dir: str, rollout_tp: int, first: str, *folders: str) -> list[float]:
    """On every rank: engines started with the weights of ``first``; for each of ``folders`` a sync from a trainer that
    holds it, and the largest difference between the log-probs of the engine and of the trainer.
    """
    from rlscale.batch.types import Trajectory, pack
    from rlscale.cluster.device import Device, init_distributed
    from rlscale.config.schema import Config, ParallelConfig
    from rlscale.model.arch import ModelSpec
    from rlscale.rollout.rollout import Rollout
    from rlscale.rollout.sampling import Sampling
    from rlscale.train.engine import Batching, Engine

    device = init_distributed("cpu")
    cfg = Config()
    cfg.model.path, cfg.model.dtype, cfg.trainer.run_dir = first, "float32", run_dir
    cfg.data.max_prompt_length, cfg.data.max_response_length = 64, 64
    cfg.rollout.tensor_model_parallel_size = rollout_tp
    cfg.rollout.kv_cache_memory_gb, cfg.rollout.max_num_seqs, cfg.rollout.sync_bucket_mb = 1 / 32, 16, 1
    rollout = Rollout(cfg, Device("cpu", device.rank, device.rank, device.world, device.world), [EOS])
    rollout.start()
    differences = []
    try:
        for folder in folders:
            layout = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2)
            spec = ModelSpec.from_hf(folder)
            trainer = Engine("actor", spec, folder, layout, None, Batching(), device, dtype=torch.float32)
            rollout.sync(lambda trainer=trainer: (trainer.layout, trainer.tensors()))
            mine = rollout.generate(prompts(PROMPTS), Sampling(n=2, max_tokens=16, temperature=1.0, seed=3))
            shares: list[Any] = [None] * device.world
            torch.distributed.all_gather_object(shares, mine)
            trajectories: list[Trajectory] = sorted(
                (t for share in shares for t in share), key=lambda t: (t.prompt_index, t.sample_index)
            )
            batch = pack(trajectories)
            sampled = torch.cat([torch.tensor(t.rollout_logprobs) for t in trajectories])
            differences.append(float((trainer.logprobs(batch)[0] - sampled).abs().max()))
    finally:
        rollout.close()
    return differences


@pytest.mark.parametrize(
    "arch, rollout_tp, options",
    [("qwen3_moe", 1, dict(norm_topk_prob=False)), ("mixtral", 2, dict())],
    ids=["qwen3_moe", "mixtral-tp2"],
)
def test_engines_have_the_trainers_log_probs(
    tmp_path: Any, arch: str, rollout_tp: int, options: dict[str, Any]
) -> None:
    folders = [tiny_model(arch, **SHAPE, seed=seed, **options) for seed in (7, 0, 1)]
    for differences in worlds.run(2, sync_and_compare, str(tmp_path), rollout_tp, *folders, timeout=START):
        assert max(differences) < EXACT, differences
