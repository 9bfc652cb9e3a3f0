"""Make a Hugging Face folder of a checkpoint, in one process and with little memory.

    python tools/export.py runs/x/checkpoints/step_000040 OUT [--role critic] [--dtype float32] [--model FOLDER]

The checkpoint may have been written by any number of ranks. OUT is what transformers and vLLM open.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that was never installed

USAGE_ERROR = 2


def export(checkpoint: Path, out: Path, role: str, dtype: str | None, model: str | None) -> None:
    """Check the checkpoint and write its model to ``out``.

    Raises:
        ValueError: the checkpoint is damaged or holds no such model, or the folder it came from is not there.
    """
    import torch

    from rlscale.checkpoint import Shards
    from rlscale.checkpoint.store import read_record
    from rlscale.model.arch import ModelSpec, folder_problem, resolve_folder
    from rlscale.reshard.canonical import hf_shapes
    from rlscale.reshard.layout import Layout, Piece
    from rlscale.reshard.safetensors_io import export_hf

    record = read_record(checkpoint)
    record.verify()
    shards, config = Shards(record), record.json("run.json")["config"]
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
        raise ValueError(f"{origin} is another model than that of the checkpoint (--model)")
    export_hf(
        out,
        Layout(saved.shapes, held),
        sources,
        reference_folder=folder,
        dtype=getattr(torch, dtype or config["model"]["dtype"]),
    )
    print(f"{role} of step {record.step} written to {out}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder checkpoints/step_* of a run")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; one that is there is replaced")
    parser.add_argument("--role", default="actor", choices=("actor", "critic"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: the run's model.dtype")
    parser.add_argument("--model", help="folder for config.json and tokenizer (default: the run's model.path)")
    args = parser.parse_args(argv)
    try:
        export(args.checkpoint, args.out, args.role, args.dtype, args.model)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
