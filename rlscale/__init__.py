"""rlscale: reinforcement learning of language models, Megatron-core under DeepSpeed ZeRO with colocated vLLM engines.

Importing the package imports nothing else; every subpackage imports what it needs itself.
"""

__version__ = "0.1.0"
