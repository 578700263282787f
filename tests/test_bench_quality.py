"""`onebox bench quality`: figures by an independent formula, texts cut as documented, a gate that can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import onebox
from onebox.bench.quality import (
    FAILED,
    HELDOUT,
    Acceptance,
    Agreement,
    Quality,
    Thresholds,
    agreement,
    main,
    needle_items,
    next_token_logits,
    read_texts,
    read_windows,
)
from onebox.errors import ConfigError
from onebox.model.load import load_model
from onebox.model.qwen3_5 import Qwen35
from onebox.server.chat import Tokenizer

TINY = Path(onebox.__file__).parent / "models" / "tiny"
FOUND = Quality(
    Agreement(kl=0.02, top1=0.9, perplexity=33.0, reference_perplexity=30.0, tokens=100),
    Acceptance((0.8, 0.6, 0.5), steps=100),
    needles={512: 1.0, 1024: 0.7},
    key_values={512: 0.9},
)


@pytest.fixture(scope="module")
def tiny() -> Qwen35:
    return load_model(TINY).model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(TINY)


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        (Thresholds(max_kl=0.01), ["KL 0.02 is above --max-kl 0.01"]),
        (Thresholds(max_kl=0.02, min_top1=0.9), []),
        (Thresholds(min_top1=0.95), ["top-1 agreement 0.9 is below --min-top1 0.95"]),
        (Thresholds(max_perplexity_ratio=1.05), ["perplexity ratio 1.1 is above --max-perplexity-ratio 1.05"]),
        (Thresholds(min_needles=0.8), ["needle recall at 1024 tokens 0.7 is below --min-needles 0.8"]),
        (Thresholds(min_key_values=0.9), []),
        (
            Thresholds(min_acceptance=(0.7, 0.7, 0.6)),
            [
                "share of steps that kept 2 drafts 0.6 is below --min-acceptance 0.7",
                "share of steps that kept 3 drafts 0.5 is below --min-acceptance 0.6",
            ],
        ),
        (
            Thresholds(min_acceptance=(0.1, 0.1, 0.1, 0.1)),
            ["share of steps that kept 4 drafts was not measured, and --min-acceptance 0.1 asks for it"],
        ),
    ],
)
def test_a_gate_names_figure_and_bound(bounds: Thresholds, says: list[str]) -> None:
    assert bounds.misses(FOUND) == says


def test_a_gate_fails_on_what_is_no_number_or_was_not_measured() -> None:
    broken = Quality(replace(FOUND.agreement, kl=float("nan")))
    assert len(Thresholds(max_kl=1.0).misses(broken)) == 1
    assert len(Thresholds(min_needles=0.0, min_key_values=0.0, min_acceptance=(0.0,)).misses(broken)) == 3


def test_kl_top1_and_perplexity_are_those_of_torch(tiny: Qwen35) -> None:
    other = replace(tiny, norm=tiny.norm * 0.5)
    windows = [torch.arange(100, 140), torch.arange(900, 921)]
    with torch.inference_mode():
        found = agreement(tiny, other, windows)
        ours, theirs = (torch.cat([next_token_logits(m, w)[:-1] for w in windows]) for m in (other, tiny))
    targets = torch.cat([w[1:] for w in windows])
    kl = torch.nn.functional.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), reduction="sum", log_target=True)
    assert found.tokens == 59 and found.kl > 0.01
    assert found.kl == pytest.approx(float(kl) / 59, rel=1e-4)
    assert found.top1 == pytest.approx(float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()))
    for value, logits in ((found.perplexity, ours), (found.reference_perplexity, theirs)):
        assert value == pytest.approx(float(torch.nn.functional.cross_entropy(logits, targets).exp()), rel=1e-4)


def test_plain_text_is_cut_into_windows_and_a_jsonl_line_gives_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain, rows = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one two three four five six seven eight nine ten " * 8, "utf-8")
    rows.write_text("".join(json.dumps({"text": plain.read_text("utf-8")}) + "\n" for _ in range(2)), "utf-8")
    ids = tokenizer.encode(plain.read_text("utf-8"))
    windows, texts = read_windows(tokenizer, [plain], 16, 100)
    assert torch.cat(windows).tolist() == ids[: sum(map(len, windows))] and len(texts) == 1
    assert len(ids) - sum(map(len, windows)) <= 1  # a last token alone predicts nothing
    assert [w.tolist() for w in read_windows(tokenizer, [rows], 16, 100)[0]] == [ids[:16]] * 2
    assert len(read_windows(tokenizer, [plain, rows], 16, 3)[0]) == 3


@pytest.mark.parametrize("text", ["", "[1]\n", '{"text": 5}\n', "{\n"])
def test_a_file_without_texts_is_refused_by_name(tmp_path: Path, tokenizer: Tokenizer, text: str) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=r"texts\.jsonl"):
        read_windows(tokenizer, [file], 16, 10)


@pytest.mark.parametrize("length", [100, 3000])  # the second is longer than any text
def test_needles_stand_at_even_depths_of_the_length_asked_for(tokenizer: Tokenizer, length: int) -> None:
    items = needle_items(tokenizer, read_texts(HELDOUT), length, 5)
    assert items == needle_items(tokenizer, read_texts(HELDOUT), length, 5)
    for i, item in enumerate(items):
        assert item.question.count(item.answer) == 1
        assert item.question.find(item.answer) / len(item.question) == pytest.approx(i / 4, abs=0.6 if i == 4 else 0.4)
        assert abs(len(tokenizer.encode(item.question)) - length) < 60
    depths = [item.question.find(item.answer) / len(item.question) for item in items]
    assert depths == sorted(depths) and len({item.answer for item in items}) == 5


def test_the_command_prints_a_row_and_the_gate_decides_its_status(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "quality.jsonl"
    argv = [str(TINY), "--against", str(TINY), "--windows", "2", "--window", "40", "--prompt-tokens", "24"]
    argv += ["--new-tokens", "12", "--needles", "64", "--items", "2", "--device", "cpu", "--out", str(out)]
    main([*argv, "--max-kl", "1e-6", "--min-top1", "1", "--min-needles", "0.5"])
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0].split()[:3] == ["build", "KL", "top-1"] and " 0.0000  1.0000 " in shown.out
    with pytest.raises(SystemExit) as e:
        main([*argv, "--max-perplexity-ratio", "0.5", "--min-key-values", "0.5"])
    assert e.value.code == FAILED
    err = capsys.readouterr().err
    assert "tiny: perplexity ratio 1 is above --max-perplexity-ratio 0.5" in err
    assert "tiny: key-value recall was not measured" in err
    held, failed = (json.loads(line) for line in out.read_text("utf-8").splitlines())
    assert (held["gate"], failed["gate"]) == ("held", "failed")
    assert held["kl"] == 0 and held["needle_recall"] == {"64": 1.0} and len(held["reach"]) == 3


def test_kv_formats_are_rows_of_one_build(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "quality.jsonl"
    argv = [
        str(TINY),
        "--against",
        str(TINY),
        "--windows",
        "2",
        "--window",
        "100",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    main([*argv, "--kv-cache-dtype", "auto,fp8,tq2.5", "--needles", "64", "--items", "1"])
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["auto", "fp8", "tq2.5"]
    auto, fp8, tq = (json.loads(line) for line in out.read_text("utf-8").splitlines())
    assert auto["kl"] == 0 < fp8["kl"] < tq["kl"] < 1
    assert (auto["kv"], auto["kv_bytes_per_token"], tq["kv_bytes_per_token"]) == ("auto", 3 * 2048, 3 * 2 * 160 / 2)
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of"):
        main([*argv, "--kv-cache-dtype", "tq9"])


def test_builds_of_two_vocabularies_are_refused() -> None:
    from onebox.bench.quality import Measure
    from onebox.config import EngineConfig

    loaded = load_model(TINY)
    spec = replace(loaded.model.spec, vocab=100)
    with pytest.raises(ConfigError, match="vocabulary of 8192, its reference 100"):
        Measure([torch.arange(5)], ["x"]).of(
            replace(loaded.model, spec=spec), loaded, Tokenizer.from_folder(TINY), EngineConfig(model=str(TINY))
        )
