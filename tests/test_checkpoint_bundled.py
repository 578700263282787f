"""The model in this repository is what its folder says: whole, small enough for git, and as good as its README."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import onebox
from onebox.bench.quality import (
    HELDOUT,
    acceptance,
    agreement,
    needle_items,
    read_texts,
    recall,
    tokenizer_of,
    windows_of,
)
from onebox.checkpoint.verify import verify
from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.model.complete import check_complete
from onebox.model.load import load_model
from onebox.model.qwen3_5 import Qwen35
from onebox.server.chat import Tokenizer

TINY = Path(onebox.__file__).parent / "models" / "tiny"
TEXTS = read_texts(HELDOUT)


@pytest.fixture(scope="module")
def tiny() -> Qwen35:
    return load_model(TINY, mtp=True).model


def test_bundled_model_is_whole_and_fits_in_git() -> None:
    report = verify(TINY)
    assert report.errors and report.worst(1)[0][1] < 0.12
    assert sum(f.stat().st_size for f in TINY.iterdir()) <= 20e6
    assert check_complete(TINY).mtp


def test_bundled_model_reads_text_as_its_readme_says(tiny: Qwen35) -> None:
    with torch.inference_mode():
        score = agreement(tiny, tiny, windows_of(tokenizer_of(TINY), TEXTS, 512))
    assert 32.5 < score.perplexity < 33.5


def test_bundled_model_finds_numbers_in_text() -> None:
    engine, tokenizer = Engine(EngineConfig(model=str(TINY), device="cpu", draft_len=0)), Tokenizer.from_folder(TINY)
    assert recall(engine, tokenizer, needle_items(tokenizer, TEXTS, 300, 6)) == 1.0


def test_bundled_drafter_lands_most_first_drafts(tiny: Qwen35) -> None:
    with torch.inference_mode():
        prompts = torch.stack(windows_of(tokenizer_of(TINY), TEXTS, 128)[:4])
        drafted = acceptance(tiny, prompts, 32)
    assert drafted.reach[0] > 0.7 and list(drafted.reach) == sorted(drafted.reach, reverse=True)
