"""Checkpoints: a folder that is whole or not there, tensors as slices over canonical tensors, saving by all ranks.

Nothing in a checkpoint is pickled: tensors are safetensors files, everything else is JSON.
"""

from rlscale.checkpoint.saver import CheckpointData, SaveError, Saver
from rlscale.checkpoint.shards import Shards
from rlscale.checkpoint.store import Damaged, Manifest, Retention, Store

__all__ = ["CheckpointData", "Damaged", "Manifest", "Retention", "SaveError", "Saver", "Shards", "Store"]
