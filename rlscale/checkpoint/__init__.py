"""Checkpoints: a folder that is whole or not there, tensors as slices over canonical tensors, saving by all ranks.

Nothing in a checkpoint is pickled: tensors are safetensors files, everything else is JSON.
"""
