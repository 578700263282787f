"""The self-check: wrong weights, wrong kernels and wrong stored logits keep a model from being served."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from serving import TINY

from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.errors import CheckpointError
from onebox.model import selfcheck
from onebox.model.load import load_model
from onebox.model.qwen3_5 import Qwen35
from onebox.model.selfcheck import Fingerprint, check_paths, first_layers, hidden, probe, self_check


@pytest.fixture(scope="module")
def model() -> Qwen35:
    return load_model(TINY, mtp=False).model


def copy_of(folder: Path, to: Path, *without: str) -> Path:
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns(*without))
    return to


def with_scaled_norm(model: Qwen35, factor: float) -> Qwen35:
    """A model that says something else: its layers' outputs weigh differently."""
    layers = tuple(replace(layer, mlp_norm=layer.mlp_norm * factor + factor - 1) for layer in model.layers)
    return replace(model, layers=layers)


def test_the_bundled_model_agrees_with_the_logits_it_is_shipped_with(model: Qwen35) -> None:
    assert self_check(model, TINY, None) == "stored logits"


def test_the_bundled_model_in_16_bits_agrees_too() -> None:
    assert self_check(load_model(TINY, mtp=False, dtype=torch.bfloat16).model, TINY, None) == "stored logits"


def test_other_weights_are_refused_with_the_file_and_the_way_out(model: Qwen35) -> None:
    with pytest.raises(CheckpointError, match=r"off by .*fingerprint\.json.*onebox build --verify"):
        self_check(with_scaled_norm(model, 1.5), TINY, None)


@pytest.mark.parametrize(
    ("value", "finding"), [(math.nan, "no numbers"), (math.inf, "no numbers"), (0.0, "all the same")]
)
def test_logits_that_are_no_numbers_or_all_the_same_are_refused(
    model: Qwen35, value: float, finding: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=finding):
        self_check(replace(model, norm=torch.full_like(model.norm, value), head=model.head * value), tmp_path, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_first_start_stores_logits_and_the_next_is_held_to_them(model: Qwen35, tmp_path: Path) -> None:
    folder = copy_of(TINY, tmp_path / "m", "fingerprint.json")
    assert "stored now" in self_check(model, folder, tmp_path / "store")
    assert self_check(model, folder, tmp_path / "store") == "stored logits"
    with pytest.raises(CheckpointError, match="off by"):
        self_check(with_scaled_norm(model, 1.5), folder, tmp_path / "store")
    assert len(list((tmp_path / "store").iterdir())) == 1


@pytest.mark.parametrize("without", ["onebox.json", "nothing"])
def test_changed_files_are_other_weights_and_copies_of_a_build_the_same(
    model: Qwen35, without: str, tmp_path: Path
) -> None:
    folder = copy_of(TINY, tmp_path / "m", "fingerprint.json", without)
    before = selfcheck.identity(folder)
    shard = next(folder.glob("*.safetensors"))
    os.utime(shard, ns=(1, 1))
    assert (selfcheck.identity(folder) == before) is (without == "nothing")


def test_a_store_that_cannot_be_used_refuses_nothing(model: Qwen35, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    folder = copy_of(TINY, tmp_path / "m", "fingerprint.json")
    assert self_check(model, folder, tmp_path / "store") == "finite logits"


def test_a_damaged_entry_of_the_store_is_replaced(model: Qwen35, tmp_path: Path) -> None:
    folder = copy_of(TINY, tmp_path / "m", "fingerprint.json")
    self_check(model, folder, tmp_path)
    (tmp_path / f"{selfcheck.identity(folder)}.json").write_text("{")
    assert "stored now" in self_check(model, folder, tmp_path)
    assert self_check(model, folder, tmp_path) == "stored logits"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "\x00",
        '{"version": 1}',
        '{"version": 1, "tokens": 7}',
        '{"version": 1, "tokens": [1], "logits": [], "spread": 1, "dtype": "float32"}',
        '{"version": 1, "tokens": ["a"], "logits": [1], "spread": 1, "dtype": "float32"}',
    ],
)
def test_a_damaged_fingerprint_is_refused_by_name(model: Qwen35, text: str, tmp_path: Path) -> None:
    folder = copy_of(TINY, tmp_path / "m")
    (folder / "fingerprint.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"fingerprint\.json: not a fingerprint"):
        self_check(model, folder, None)


def test_a_fingerprint_of_another_version_is_passed_over(model: Qwen35, tmp_path: Path) -> None:
    folder = copy_of(TINY, tmp_path / "m")
    value = json.loads((folder / "fingerprint.json").read_text())
    (folder / "fingerprint.json").write_text(json.dumps({**value, "version": 99, "new": 1}))
    assert self_check(model, folder, None) == "finite logits"


def test_a_token_outside_the_vocabulary_is_other_weights(model: Qwen35) -> None:
    stored = Fingerprint((model.spec.vocab,), (1.0,), 1.0, "float32")
    with pytest.raises(CheckpointError, match="off by inf"):
        selfcheck.check_logits(probe(model), stored, Path("f"), TINY, model.dtype)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda m: m, False),
        (lambda m: with_scaled_norm(m, 1.6), True),
        (lambda m: replace(m, embedding=m.embedding.roll(1, 0)), True),
        (lambda m: replace(m, norm=m.norm * math.nan), True),
    ],
    ids=["right", "scaled", "rolled", "nan"],
)
def test_kernels_that_compute_something_else_are_refused(
    change: Callable[[Qwen35], Qwen35], wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = load_model(TINY, mtp=False, dtype=torch.bfloat16, unpack=False).model
    right = selfcheck.hidden
    # what runs in 16 bits stands for the kernels
    monkeypatch.setattr(selfcheck, "hidden", lambda m: right(m if m.dtype == torch.float32 else change(m)))
    with torch.inference_mode():
        if wrong:
            with pytest.raises(CheckpointError, match="kernels give wrong numbers"):
                check_paths(packed, TINY)
        else:
            check_paths(packed, TINY)


def test_dense_16_bit_experts_run_in_fp32_too(model: Qwen35) -> None:
    dense = load_model(TINY, mtp=False, dtype=torch.bfloat16, unpack=True).model
    cut = replace(first_layers(dense), dtype=torch.float32)
    torch.testing.assert_close(hidden(cut), hidden(first_layers(model)), rtol=0.1, atol=0.1)


def test_an_engine_does_not_start_on_wrong_numbers(tmp_path: Path) -> None:
    folder = copy_of(TINY, tmp_path / "m")
    value = json.loads((folder / "fingerprint.json").read_text())
    value["logits"] = [v + 3 * value["spread"] for v in value["logits"]]
    (folder / "fingerprint.json").write_text(json.dumps(value))
    config = EngineConfig(model=str(folder), device="cpu", max_num_seqs=2, max_model_len=256)
    heard: list[str] = []
    with pytest.raises(CheckpointError, match="self-check"):
        Engine(config, progress=lambda phase, done, total: heard.append(phase))
    assert heard[-1] == "self-check"
    Engine(replace(config, self_check=False))
