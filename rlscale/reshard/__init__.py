"""Resharding: weights move between a Hugging Face folder, Megatron shards and vLLM engines at the minimum of bytes."""

from importlib import import_module
from typing import TYPE_CHECKING

from rlscale.reshard.canonical import hf_layout, hf_shapes
from rlscale.reshard.layout import Layout, Piece, rank_pieces_from_dicts
from rlscale.reshard.megatron import megatron_layout
from rlscale.reshard.plan import Copy, Plan, plan
from rlscale.reshard.vllm import vllm_layout

if TYPE_CHECKING:
    from rlscale.reshard.hf_export import export_hf
    from rlscale.reshard.hf_load import load_pieces
    from rlscale.reshard.transport import Bucket, Transfer, execute, execute_into

__all__ = [
    "Bucket", "Copy", "Layout", "Piece", "Plan", "Transfer", "execute", "execute_into", "export_hf", "hf_layout",
    "hf_shapes", "load_pieces", "megatron_layout", "plan", "rank_pieces_from_dicts", "vllm_layout",
]  # fmt: skip


_LATER = {"Bucket": "transport", "Transfer": "transport", "execute": "transport", "execute_into": "transport",
          "export_hf": "hf_export", "load_pieces": "hf_load"}  # fmt: skip


def __getattr__(name: str) -> object:
    """What moves data needs torch; a plan can be made without."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
