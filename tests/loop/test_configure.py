"""What is decided when a configuration is read."""

from __future__ import annotations

import pytest

from rlscale.loop.configure import configure
from rlscale.testing.models import tiny_model
from tests.e2e.program import ROOT


@pytest.mark.parametrize(("cpu", "dtype"), [("AVX512", "bfloat16"), ("AVX2", "float32"), ("DEFAULT", "float32")])
def test_dtype_auto_is_what_the_device_multiplies(cpu: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: cpu)
    overrides = [f"model.path={tiny_model('qwen2')}", "trainer.device=cpu"]
    assert configure(str(ROOT / "yamls/quickstart_cpu.yaml"), overrides, 2).cfg.model.dtype == dtype
