"""How torch's CPU threads wait, and how many there are: decided before torch is loaded, whoever loads it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from onebox import config
from onebox.errors import ConfigError


def _python(code: str, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, text=True, check=True
    ).stdout.strip()


SHOW = "import os; from onebox import config; print(os.environ.get('OMP_WAIT_POLICY'), config.WAITS_SPIN)"


def test_threads_sleep_while_they_wait_when_onebox_is_imported_first() -> None:
    assert _python(SHOW) == "passive False"
    assert _python(SHOW, OMP_WAIT_POLICY="active") == "active True"
    assert _python("import sys; sys.modules['torch'] = sys; " + SHOW) == "None True"  # too late to say


@pytest.mark.parametrize("module", ["onebox.llm", "onebox.prompt", "onebox.server.app", "onebox.bench.command"])
def test_every_way_in_says_so_before_torch(module: str) -> None:
    assert _python(f"import os, {module}; print(os.environ['OMP_WAIT_POLICY'])") == "passive"


def test_small_weights_have_one_thread_where_threads_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(config, "WAITS_SPIN", True)
    assert [config.cpu_threads(b) for b in (1e8, 1e11, None)] == [1, 4, 4]
    monkeypatch.setattr(config, "WAITS_SPIN", False)
    assert config.cpu_threads(1e8) == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert config.cpu_threads(1e8) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
        config.cpu_threads()
