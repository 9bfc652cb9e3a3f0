"""Flat batches of experience, their loss weights, and their division into ranks and micro-batches."""
