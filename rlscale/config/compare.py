"""Whether a configuration is still that of the run whose checkpoint it resumes from, and what to say about changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: a checkpoint with another value of these belongs to another run; the prompts themselves are compared by `PromptData`
MUST_MATCH = ("task", "trainer.seed", "model.path", "critic.path", "data.shuffle")
#: keys, or sections, that say where and how the same numbers are computed, and how long
LAYOUT_KEYS = (
    "trainer.", "actor.parallel.", "critic.parallel.", "actor.use_dynamic_bsz", "critic.use_dynamic_bsz",
    "actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu", "actor.ppo_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu", "actor.recompute", "critic.recompute", "actor.head_chunk_tokens",
    "actor.share_prompt_prefix", "rollout.tensor_model_parallel_size", "rollout.max_num", "rollout.kv_cache",
    "rollout.gpu_memory", "rollout.enforce_eager", "rollout.enable_prefix", "rollout.prefetch", "rollout.sync_bucket",
    "rollout.start_timeout_s", "rollout.request_timeout_s", "reward.num_workers", "data.val",
)  # fmt: skip
#: and those among them that say more
NOT_LAYOUT = ("trainer.critic_warmup",)
#: keys about which nothing is said
UNREPORTED = ("trainer.run_dir", "trainer.resume_mode", "trainer.resume_from_path")


def check_config(saved: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> list[str]:
    """What to tell about a configuration that is not the checkpoint's.

    Raises:
        ValueError: it belongs to another run; names every key.
    """
    before, after = _flat(saved), _flat(now)
    changed = {key for key in before.keys() & after.keys() if before[key] != after[key]} - set(UNREPORTED)
    refused = sorted(key for key in changed if key in MUST_MATCH)
    if refused:
        lines = [f"{key}: {_show(before[key])} in the checkpoint, {_show(after[key])} now" for key in refused]
        raise ValueError(
            "\n  ".join([f"{path} belongs to another run:", *lines])
            + "\nto start a new run from its weights, export them (rlscale export) and set model.path to the export"
        )
    layout = {key for key in changed if key.startswith(LAYOUT_KEYS) and key not in NOT_LAYOUT}
    said = {
        "resuming with another layout, budget or length: ": layout,
        "WARNING: settings differ from the checkpoint's: ": changed - layout,
    }
    return [
        text + ", ".join(f"{key} {_show(before[key])} -> {_show(after[key])}" for key in sorted(keys))
        for text, keys in said.items()
        if keys
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and not key.endswith("_args"):  # those are the user's own, and one value
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
