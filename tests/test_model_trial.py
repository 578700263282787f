"""Prefill kernels are used where a trial in a process of its own has shown that they work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels_common import DEVICE, DTYPE
from test_kernels_decode import SPEC

from onebox.config import EngineConfig, bundled_model
from onebox.engine import engine
from onebox.kernels import prefill_attention
from onebox.model import layers, moe, prefill, qwen3_5, trial
from onebox.spec import Spec

SMALL = replace(trial.cut(SPEC), gdn_k_dim=32, gdn_v_dim=32, head_dim=32, rope_dims=8)


def said(code: int = 0, out: str = "", err: str = "") -> Callable[[list[str], float], Any]:
    return lambda command, timeout_s: subprocess.CompletedProcess(command, code, out, err)


def late(command: list[str], timeout_s: float) -> Any:
    raise subprocess.TimeoutExpired(command, timeout_s)


def no_room(command: list[str], timeout_s: float) -> Any:
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (said(out='{"off": 0.5}'), "0.5 from torch's"),
        (said(out='{"off": Infinity}'), "inf from torch's"),
        (said(out='{"off": NaN}'), "ended with 0"),
        (said(out="nothing of use"), "ended with 0"),
        (said(out="[]"), "ended with 0"),
        (said(), "it said nothing"),
        (said(1, err="Traceback\nRuntimeError: no kernel image"), "no kernel image"),
        (said(-11, out='{"off": 0.0}'), "ended with -11"),
        (late, "no result within"),
        (no_room, "Cannot allocate memory"),
    ],
)
def test_whatever_goes_wrong_in_the_trial_only_turns_the_kernels_off(run: Any, why: str, tmp_path: Path) -> None:
    verdict = trial.try_prefill(SPEC, torch.bfloat16, tmp_path, run=run)
    assert not verdict.works and why in verdict.why
    assert not list(tmp_path.iterdir()), "a failure is tried again"


def test_what_worked_is_remembered_for_the_same_heads_and_sources(tmp_path: Path) -> None:
    works = said(out='a warning\n{"off": 0.003}')
    fails = said(1)
    assert trial.try_prefill(SPEC, torch.bfloat16, tmp_path / "new", run=works).works
    assert trial.try_prefill(SPEC, torch.bfloat16, tmp_path / "new", run=fails).works
    assert trial.try_prefill(replace(SPEC, hidden=512, n_experts=0), torch.bfloat16, tmp_path / "new", run=fails).works
    assert not trial.try_prefill(SPEC, torch.float16, tmp_path / "new", run=fails).works
    assert not trial.try_prefill(replace(SPEC, n_heads=8), torch.bfloat16, tmp_path / "new", run=fails).works
    assert not trial.try_prefill(SPEC, torch.bfloat16, tmp_path / "new", kv="tq4", run=fails).works
    assert not trial.try_prefill(SPEC, torch.bfloat16, tmp_path / "new", sparse=True, run=fails).works
    assert trial.try_prefill(SPEC, torch.bfloat16, None, run=works).works
    file = tmp_path / "file"
    file.write_text("in the way")
    assert trial.try_prefill(SPEC, torch.bfloat16, file, run=works).works  # and cannot be remembered


def through_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layers, moe, qwen3_5):
        monkeypatch.setattr(module, "on_gpu", lambda x: x.element_size() == 2)


def test_the_trial_runs_the_kernels_and_finds_them_right(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(trial, "CHUNKS", (20, 5))
    monkeypatch.setattr(trial, "SEQUENCES", 1)
    monkeypatch.setattr(prefill_attention, "attend", counted(prefill_attention.attend, launched))
    through_kernels(monkeypatch)
    off = trial.difference(trial.random_model(SMALL, DTYPE, DEVICE))
    assert 0 < off < trial.BOUND / 3
    assert len(launched) == 2


def test_the_trial_runs_page_formats_and_sparse_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse: list[None] = []
    monkeypatch.setattr(trial, "CHUNKS", (70, 70))
    monkeypatch.setattr(trial, "SEQUENCES", 1)
    monkeypatch.setattr(prefill, "sparse_attend", counted(prefill.sparse_attend, sparse))
    through_kernels(monkeypatch)
    small = replace(SMALL, layer_types=("full_attention",))
    off = trial.difference(trial.random_model(small, DTYPE, DEVICE), "tq4", sparse=True)
    assert 0 < off < trial.BOUND_CODED / 3
    assert len(sparse) == 2


def test_the_trial_notices_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: Any, qkv: Any, *args: Any) -> Any:
        return 1.1 * right(q, qkv, *args)

    right = prefill_attention.attend
    monkeypatch.setattr(trial, "CHUNKS", (20,))
    monkeypatch.setattr(trial, "SEQUENCES", 1)
    monkeypatch.setattr(prefill_attention, "attend", wrong)
    through_kernels(monkeypatch)
    model = trial.random_model(SMALL, DTYPE, DEVICE)
    assert trial.difference(model) > trial.BOUND
    monkeypatch.setattr(prefill_attention, "attend", lambda *args: right(*args) * float("nan"))
    assert trial.difference(model) == float("inf")


def counted(function: Callable[..., Any], calls: list[None]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return function(*args, **kwargs)

    return wrapped


def test_the_process_takes_its_task_from_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """All but the device: the task reads back as the spec it was made of."""
    found: list[Spec] = []

    def model(spec: Spec, dtype: torch.dtype, device: torch.device) -> Any:
        found.append(spec)
        assert (dtype, device.type) == (torch.bfloat16, "cuda")

    monkeypatch.setattr(trial, "random_model", model)
    monkeypatch.setattr(trial, "difference", lambda model, kv, sparse: 0.25 if (kv, sparse) == ("tq4", True) else 1.0)
    spec = trial.cut(SPEC)
    monkeypatch.setattr(
        sys, "argv", ["trial", json.dumps({"spec": asdict(spec), "dtype": "bfloat16", "kv": "tq4", "sparse": True})]
    )
    trial.main()
    assert found == [spec] and json.loads(capsys.readouterr().out) == {"off": 0.25}


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_the_process_finds_this_package_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    verdict = trial.try_prefill(SPEC, torch.bfloat16, None)
    assert not verdict.works and "CUDA" in verdict.why


@pytest.mark.parametrize(("asked", "works", "used"), [(None, True, True), (None, False, False), (True, False, True)])
def test_the_engine_asks_the_trial_only_where_it_was_not_told(
    asked: bool | None, works: bool, used: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(model=str(bundled_model()), device="cpu", prefill_kernels=asked)
    monkeypatch.setattr(engine, "try_prefill", lambda *_, **__: trial.Verdict(works, "because"))
    asks = engine.wants_prefill_kernels(replace(config, device="cuda", dtype="bfloat16"), SPEC)
    assert asks is used
    assert (asked is None and not works) == ("because" in caplog.text)
    assert engine.wants_prefill_kernels(replace(config, device="cpu", dtype="float32"), SPEC) is bool(asked)
