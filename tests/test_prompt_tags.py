"""Tags with rates of their own in a text: nesting, any `<` inside, and mistakes that are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import PromptError
from onebox.prompt import Compressor
from onebox.prompt.tags import parse_tags


def regions(text: str) -> list[tuple[str, float]]:
    plain, found = parse_tags(text)
    return [(plain[region.start : region.end], region.rate) for region in found]


@pytest.mark.parametrize(
    ("text", "plain", "expected"),
    [
        ("no tags", "no tags", []),
        ("a<llmlingua, rate=0.4>b</llmlingua>c", "abc", [("b", 0.4)]),
        ("<llmlingua rate='0.4' compress=True>b</llmlingua>", "b", [("b", 0.4)]),
        ("<llmlingua, compress=false>x < y > z</llmlingua>", "x < y > z", [("x < y > z", 1.0)]),
        ("<llmlingua, compress=False, rate=0.4>b</llmlingua>", "b", [("b", 1.0)]),
        ("<llmlingua>b</llmlingua>", "b", []),
        (
            "<llmlingua, rate=0.4>a<llmlingua, compress=False>b<i>c</i></llmlingua>d</llmlingua>e",
            "ab<i>c</i>de",
            [("a", 0.4), ("b<i>c</i>", 1.0), ("d", 0.4)],
        ),
        ("<llmlingua, rate=0.4>a<llmlingua>b</llmlingua></llmlingua>", "ab", [("a", 0.4), ("b", 0.4)]),
        ("<llmlingua, rate=0>gone</llmlingua>", "gone", [("gone", 0.0)]),
        ("a <llmlinguafoo> b </llm>", "a <llmlinguafoo> b </llm>", []),
    ],
)
def test_tags_are_read(text: str, plain: str, expected: list[tuple[str, float]]) -> None:
    assert parse_tags(text)[0] == plain
    assert regions(text) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a<llmlingua>b", "never closed"),
        ("a</llmlingua>b", "no tag is open"),
        ("<llmlingua, rate=2>b</llmlingua>", "rate=2"),
        ("<llmlingua, rate=half>b</llmlingua>", "rate=half"),
        ("<llmlingua, compress=maybe>b</llmlingua>", "compress=maybe"),
        ("<llmlingua, speed=3>b</llmlingua>", "speed"),
        ("<llmlingua>b</llmlingua x>", "closing tag"),
    ],
)
def test_mistakes_name_their_place(text: str, named: str) -> None:
    with pytest.raises(PromptError, match=named):
        parse_tags(text)


@given(st.text(alphabet="ab<>/ =,\n", max_size=60), st.text(alphabet="xy<>&\"' \t", max_size=40))
def test_any_text_inside_a_protected_tag_is_untouched(before: str, inside: str) -> None:
    plain, found = parse_tags(f"{before}<llmlingua, compress=False>{inside}</llmlingua>{before}")
    assert plain == before + inside + before
    assert [plain[region.start : region.end] for region in found] == ([inside] if inside else [])


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.6])
def test_each_region_has_its_own_rate(rate: float) -> None:
    prose = "Engineers from Lisbon designed the long breakwater, which still protects the old town and its boats. "
    text = f"{prose * 3}<llmlingua, rate={rate}>{prose * 5}</llmlingua>{prose * 3}"
    result = Compressor().compress(text, rate=0.5, tags=True, tokenizer=len)
    begin, end = len(prose) * 3, len(prose) * 8
    inside = sum(span.end - span.start for span in result.kept if begin <= span.start < end)
    outside = sum(span.end - span.start for span in result.kept if not begin <= span.start < end)
    assert inside <= rate * len(prose) * 5 and inside >= (rate - 0.12) * len(prose) * 5
    assert abs(outside / (len(prose) * 6) - 0.45) < 0.1
