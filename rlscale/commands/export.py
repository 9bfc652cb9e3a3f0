"""Make a Hugging Face folder of a checkpoint, in one process and with little memory.

    rlscale export runs/x/checkpoints/step_000040 OUT [--role critic] [--dtype float32] [--model FOLDER]

The checkpoint may have been written by any number of ranks. OUT is what transformers and vLLM open.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def export(checkpoint: Path, out: Path, role: str, dtype: str | None, model: str | None) -> None:
    """Check the checkpoint and write its model to ``out``.

    Raises:
        ValueError: the checkpoint is damaged or holds no such model, or the folder it came from is not there.
    """
    import torch

    from rlscale.checkpoint.shards import Shards
    from rlscale.checkpoint.store import read_manifest
    from rlscale.config.paths import folder_problem, resolve_folder
    from rlscale.model.arch import ModelSpec
    from rlscale.reshard.canonical import hf_shapes
    from rlscale.reshard.hf_export import export_hf
    from rlscale.reshard.layout import Layout, Piece

    manifest = read_manifest(checkpoint)
    manifest.verify()
    shards, config = Shards(manifest), manifest.json("run.json")["config"]
    state = f"{role}/master"
    if state not in shards.states:
        roles = sorted({name.partition("/")[0] for name in shards.states})
        raise ValueError(f"{checkpoint} holds no {role}, only {', '.join(roles)} (--role)")
    saved = shards.layout(state)
    # one process holds everything: the files are mapped, and read as the export comes to them
    held = [Piece(p.name, 0, p.index, f"{p.rank}/{p.key}", p.at) for p in saved.pieces]
    sources = {f"{p.rank}/{p.key}": shards.tensors(p.rank)[p.key] for p in saved.pieces}
    if out.resolve() in (checkpoint.resolve(), *checkpoint.resolve().parents):
        raise ValueError(f"{out} is the checkpoint, or a folder around it")
    origin = model or (config["critic"]["path"] if role == "critic" else None) or config["model"]["path"]
    if (problem := folder_problem(origin)) is not None:
        raise ValueError(f"{problem} (--model)")
    folder = resolve_folder(origin)
    spec = ModelSpec.from_hf(str(folder))
    if hf_shapes(spec.as_critic() if role == "critic" else spec) != saved.shapes:
        raise ValueError(f"{origin} is not the model of this checkpoint (--model)")
    export_hf(
        out,
        Layout(saved.shapes, held),
        sources,
        reference_folder=folder,
        dtype=getattr(torch, dtype or config["model"]["dtype"]),
    )
    print(f"{role} of step {manifest.step} written to {out}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder checkpoints/step_* of a run")
    parser.add_argument("out", type=Path, metavar="OUT", help="output folder; an existing export is replaced")
    parser.add_argument("--role", default="actor", choices=("actor", "critic"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: the run's model.dtype")
    parser.add_argument("--model", help="folder for config.json and tokenizer (default: the run's model.path)")


def run(args: argparse.Namespace) -> int:
    export(args.checkpoint, args.out, args.role, args.dtype, args.model)
    return 0
