"""Resharding: weights move between a Hugging Face folder, Megatron shards and vLLM engines at the minimum of bytes."""

from rlscale.reshard.layout import Layout, Piece, rank_pieces_from_dicts
from rlscale.reshard.megatron import hf_layout, hf_shapes, megatron_layout
from rlscale.reshard.plan import Copy, Plan, plan
from rlscale.reshard.safetensors_io import export_hf, load_pieces
from rlscale.reshard.transport import Bucket, Transfer, execute, execute_into

__all__ = [
    "Bucket", "Copy", "Layout", "Piece", "Plan", "Transfer", "execute", "execute_into", "export_hf", "hf_layout",
    "hf_shapes", "load_pieces", "megatron_layout", "plan", "rank_pieces_from_dicts",
]  # fmt: skip
