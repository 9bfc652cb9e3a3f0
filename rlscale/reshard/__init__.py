"""Resharding: weights move between a Hugging Face folder, Megatron shards and vLLM engines at the minimum of bytes."""
