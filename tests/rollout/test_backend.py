"""What a vLLM backend does to this process and asks of its engine; no engine is started."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlscale.cluster.device import Device
from rlscale.config.schema import Config
from rlscale.rollout.vllm.client import VllmBackend
from rlscale.rollout.vllm.settings import environment


def test_variables_that_stay_the_same_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be reading them, in C."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "93")
    monkeypatch.setenv("UNTOUCHED", "1")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    before, written = dict(os.environ), []
    with environment(Config(), Device("cpu", 0, 0, 1, 1)):
        assert "RANK" not in os.environ and os.environ["OMP_NUM_THREADS"] != "93"
        os.environ["OF_THE_ENGINE"] = "1"
        put, unset = os.putenv, os.unsetenv
        monkeypatch.setattr(os, "putenv", lambda name, value: (written.append(name), put(name, value)))
        monkeypatch.setattr(os, "unsetenv", lambda name: (written.append(name), unset(name)))
    names = {os.fsdecode(name) for name in written}
    assert dict(os.environ) == before
    assert {"RANK", "OMP_NUM_THREADS", "OF_THE_ENGINE"} <= names and not {"UNTOUCHED", "PATH"} & names


def test_only_what_is_asleep_is_woken(tmp_path: Path) -> None:
    """An update that has failed half-way leaves the weights awake."""
    cfg, calls = Config(), []
    cfg.trainer.run_dir = str(tmp_path)

    class Engine(SimpleNamespace):
        def __getattr__(self, method: str) -> Any:
            async def called(*args: Any) -> Any:
                calls.append((method, *args))
                return [(None, "")]

            return called

    backend = VllmBackend(cfg, Device("cuda", 0, 0, 1, 1))
    backend.llm = Engine(errored=False)
    backend.sleep()
    backend.begin_update(False)
    backend.wake()
    backend.wake()
    backend.loop.close()
    assert [args for name, *args in calls if name == "wake_up"] == [[["weights"]], [["kv_cache"]]]
