"""Published speeds against the ledger: each implies a share of the bandwidth that a real machine can have."""

from __future__ import annotations

from pathlib import Path

import pytest

from onebox.bench.published import HIGH, LOW, PUBLISHED, RECIPE, Published, markdown
from onebox.config import EngineConfig
from onebox.engine.forecast import Subject, forecast
from onebox.ledger import BUILDS

BY_NAME = {(p.what, p.tok_s): p for p in PUBLISHED}


def test_every_published_figure_of_the_issue_is_there() -> None:
    want = [28.3, 30.8, 38.4, 51, 39, 112, 26.9, 44.2, 63, 81.5, 109, 141, 187, 226, 228, 223, 55.9, 28, 33, 10, 15.2]
    assert {*want, 433.4, 155.6, 36} == {p.tok_s for p in PUBLISHED}


@pytest.mark.parametrize("p", PUBLISHED, ids=lambda p: f"{p.what} {p.tok_s:g}")
def test_the_implied_share_of_the_bandwidth_is_possible_or_explained(p: Published) -> None:
    assert p.share < 1, "more bytes than the memory can give"
    assert p.explained, f"{p.share:.3f} is outside {LOW} to {HIGH}"
    assert not (p.why and LOW <= p.share <= HIGH), "explained, and needs no explanation"


def test_explanations_are_few_and_concern_what_the_ledger_leaves_out() -> None:
    outside = [p for p in PUBLISHED if not LOW <= p.share <= HIGH]
    assert [p.tok_s for p in outside] == [223.0, 28.0, 33.0, 155.6]


def test_the_recipes_rungs_gain_what_their_bytes_say() -> None:
    int4, shared, head = (next(p for p in PUBLISHED if p.tok_s == t) for t in (28.3, 30.8, 36.0))
    for below, above in ((int4, shared), (shared, head)):
        measured, predicted = above.tok_s / below.tok_s, above.roof_tok_s / below.roof_tok_s
        assert measured == pytest.approx(predicted, rel=0.05)


def test_streams_of_the_concurrency_table_share_weights_as_the_ledger_says() -> None:
    shares = [p.share for p in PUBLISHED if p.what.endswith("at a time") and p.model.endswith("a10b") and p.batch <= 64]
    assert len(shares) == 7 and max(shares) - min(shares) < 0.2


def test_a_figure_no_memory_can_give_would_be_found() -> None:
    wrong = Published("27B in FP8", RECIPE, "qwen3.5-27b", BUILDS["fp8"], 15.2)
    assert wrong.share > 1.4 and not wrong.explained


def test_the_table_in_the_docs_is_the_one_the_code_makes() -> None:
    text = (Path(__file__).parent.parent / "docs" / "benchmarks.md").read_text("utf-8")
    assert markdown() in text, "docs/benchmarks.md: paste onebox.bench.published.markdown() again"


@pytest.mark.parametrize("model", ["qwen3.5-122b-a10b", "qwen3.5-35b-a3b"])
@pytest.mark.parametrize("box", ["dgx-spark", "rtx-pro-6000", "h200"])
def test_the_plans_in_the_docs_are_those_of_the_command(model: str, box: str) -> None:
    text = (Path(__file__).parent.parent / "docs" / "benchmarks.md").read_text("utf-8")
    [row] = [line for line in text.splitlines() if line.startswith(f"| {model} | {box} |")]
    weights, best, step, roof, expected = (float(cell) for cell in row.split("|")[3:8])
    made = forecast(Subject.of(model, "hybrid"), box, context=4096, users=1, config=EngineConfig(model)).json()
    fastest = max((s for s in made["speeds"] if s["users"] == 1), key=lambda s: s["expected_tok_s"])
    assert weights == round(made["weights_gb"], 1) and best == fastest["k"] and step == round(fastest["step_gb"], 2)
    assert roof == round(fastest["roof_tok_s"]) and expected == round(fastest["expected_tok_s"])
    [kv] = [fit for fit in made["fits"] if fit["kv"] == "bf16"]
    assert row.split("|")[8].strip() == str(kv["users"]) and row.split("|")[9].strip() == f"{kv['longest']:,}"
