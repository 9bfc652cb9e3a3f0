"""Does the engine equal one process with transformers and AdamW? The cases, the plain process, the comparison, and
the program that runs many (`tools/parity.py`).
"""
