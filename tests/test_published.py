"""Published speeds against the ledger: each implies a share of the bandwidth that a real machine can have."""

from __future__ import annotations

from pathlib import Path

import pytest

from onebox.bench.published import HIGH, LOW, PUBLISHED, RECIPE, Published, markdown
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
