"""An engine that took an update computes what a new engine computes that was started from the exported folder.

Every case starts engines twice, so that only one runs by default. All of them (three architectures, tied and untied,
engines of one and two ranks): python -m pytest tests/rollout/test_fresh_engine.py --exhaustive
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from rlscale.cluster.mesh import ParallelDims
from rlscale.testing.models import tiny_model
from tests import worlds
from tests.rollout.helpers import EOS, PROMPTS, START, configuration, prompts

EXACT = 1e-5
CASES = [
    pytest.param(*case, marks=[] if case == ("llama", True, 2) else [pytest.mark.exhaustive])
    for case in itertools.product(("llama", "qwen2", "qwen3"), (True, False), (1, 2))
]


def folder_of(arch: str, tied: bool, seed: int) -> str:
    return tiny_model(arch, tied=tied, heads=4, kv_heads=2, head_dim=32, seed=seed)


def shards_of(path: str, dims: ParallelDims, rank: int) -> Any:
    """The trainer's layout, and this rank's shards of the folder's model."""
    from rlscale.model.arch import ModelSpec
    from rlscale.reshard.canonical import hf_shapes
    from rlscale.reshard.hf_load import load_pieces
    from rlscale.reshard.megatron import megatron_layout
    from tests.reshard.models import megatron_shards

    spec = ModelSpec.from_hf(path)
    layout = megatron_layout(spec, dims)
    blank = {name: torch.zeros(shape) for name, shape in hf_shapes(spec).items()}
    shards = megatron_shards(spec, dims, rank, blank)
    load_pieces(path, layout.of_rank(rank), shards, shapes=layout.shapes)
    return layout, shards


def generated(rollout: Any) -> list[tuple[int, list[int], list[float]]]:
    from rlscale.rollout.sampling import Sampling

    got = rollout.generate(prompts(PROMPTS), Sampling(n=1, max_tokens=16, temperature=0.0))
    return [(t.prompt_index, t.response_ids, t.rollout_logprobs) for t in got]


def updated_then_fresh(old: str, new: str, tied: bool, tp: int, run_dir: str) -> tuple[Any, Any, Any]:
    """What an engine started from ``old`` says before and after an update, and a fresh one with the exported weights.

    The trainer has the weights of ``new``, changed as if by a step.
    """
    from rlscale.cluster.device import Device
    from rlscale.reshard.hf_export import export_hf
    from rlscale.rollout.rollout import Rollout

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = Device("cpu", rank, rank, world, world)
    dims = ParallelDims(pp=2) if tied and world == 2 else ParallelDims(tp=world)
    layout, shards = shards_of(new, dims, rank)
    for shard in shards.values():
        shard += 0.01 * torch.sin(torch.arange(shard.numel(), dtype=torch.float32)).view_as(shard)
    exported = Path(run_dir) / "exported"
    if dims.pp > 1 and tied:  # the two copies of a tied embedding stay equal in training
        layout, shards = settled(layout, shards, exported, new, dims, rank)
    export_hf(exported, layout, shards, reference_folder=new, dtype=torch.float32)

    def engine(path: str) -> Rollout:
        cfg = configuration("split" if tp == 2 else "replicas", path, run_dir, sync_verify="always")
        rollout = Rollout(cfg, device, [EOS])
        rollout.start()
        return rollout

    first = engine(old)
    try:
        before = generated(first)
        first.sync(lambda: (layout, shards))
        after = generated(first)
    finally:
        first.close()
    second = engine(str(exported))
    try:
        return before, after, generated(second)
    finally:
        second.close()


def settled(layout: Any, shards: Any, folder: Path, reference: str, dims: ParallelDims, rank: int) -> Any:
    """Shards in which all copies of a tensor are equal: through a folder and back."""
    from rlscale.reshard.hf_export import export_hf

    export_hf(folder, layout, shards, reference_folder=reference, dtype=torch.float32)
    return shards_of(str(folder), dims, rank)


@pytest.mark.parametrize(("arch", "tied", "tp"), CASES)
def test_an_updated_engine_equals_a_fresh_one(arch: str, tied: bool, tp: int, tmp_path: Path) -> None:
    old, new = (folder_of(arch, tied, seed) for seed in (0, 1))
    answers = worlds.run(tp, updated_then_fresh, old, new, tied, tp, str(tmp_path), timeout=2 * START)
    before, after, fresh = ([t for share in column for t in share] for column in zip(*answers, strict=True))
    assert len(after) == len(PROMPTS)
    assert [ids for _, ids, _ in before] != [ids for _, ids, _ in after], "the weights must have changed"
    for (index, ids, logprobs), (_, fresh_ids, fresh_logprobs) in zip(after, fresh, strict=True):
        assert ids == fresh_ids, f"prompt {index}"
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(fresh_logprobs), atol=EXACT, rtol=0)
