"""The policy of a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from rlscale.config.schema import Config
from rlscale.train.engine import Engine


def export_folder(cfg: Config, step: int) -> Path:
    """Where the policy of a step is exported to."""
    return Path(cfg.trainer.run_dir) / "export" / f"step_{step:06d}"


def export_policy(cfg: Config, actor: Engine, step: int) -> Path:
    """Write export/step_*: the policy as a folder that transformers and vLLM open. Collective."""
    from rlscale.config.paths import resolve_folder
    from rlscale.reshard.hf_export import export_hf

    folder = export_folder(cfg, step)
    export_hf(
        folder,
        actor.layout,
        actor.tensors(),
        reference_folder=resolve_folder(cfg.model.path),
        dtype=actor.dtype,
    )
    return folder
