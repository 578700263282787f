"""Odd input: refused in one line that names the thing, or compressed without loss of sense, order or bytes."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from onebox.errors import PromptError
from onebox.prompt import Compressor

PROSE = "The mill by the river was sold in 1921 for 40 pounds. Nobody knew who paid. " * 6
TURN = {"role": "user", "content": PROSE}
NAN, INF = math.nan, math.inf

TEXTS = {
    "nothing": "",
    "spaces": " \t ",
    "line breaks": "\n\n\n",
    "an emoji": "😀",
    "families": "👩‍👩‍👧‍👦" * 30,
    "flags in text": "👩🏽‍🚀 says hello 🏳️‍🌈 " * 20,
    "right to left": "שלום עולם, זה טקסט ארוך. " * 15,
    "direction marks": "abc \u202eשלום\u202c def " * 15,
    "NULs": "a\0b c\0d " * 30,
    "lone surrogates": "bad \ud800 surrogate " * 15,
    "surrogates alone": "\udfff\ud800" * 20,
    "private use": "\ue000\uf8ff" * 50,
    "control characters": "".join(map(chr, range(32))) * 10,
    "combining marks": "e" + "\u0301" * 500,
    "zero width": "\u200b" * 200 + "a",
    "a byte order mark": "\ufeff" + PROSE,
    "CR": PROSE.replace(". ", ".\r"),
    "CRLF": PROSE.replace(". ", ".\r\n"),
    "line separators": PROSE.replace(". ", ".\u2028"),
    "unclosed tags": '<a><b>text</a> more <c attr="x' * 10,
    "closing tags": "</p></div>" * 20,
    "signs": "<" * 800,
    "a closed section": "<![CDATA[" + PROSE + "]]>",
    "entities": "&lt;&amp;&bogus;" * 30,
    "a script": f"<html><script>if(a<b){{}}</script><p>{PROSE}</html>",
    "keys twice": '{"a":1,"a":2,"b":"' + "long words here " * 15 + '"}',
    "no numbers": '{"a":NaN,"b":Infinity,"c":"' + "long words " * 20 + '"}',
    "a huge number": '{"a":' + "9" * 5000 + ',"b":"' + "long words " * 20 + '"}',
    "a deep list": "[" * 1500 + "]" * 1500,
    "broken JSON": '{"a":1,} ' * 20,
    "anchors": "a: &x [1,2]\nb: *x\nc: |\n  text\n  more\n" * 8,
    "tabs in YAML": "a:\n\t- b\n\t- c\n" * 8,
    "fences in fences": "````md\n```py\nx=1\n```\n````\ntext here\n" * 6,
    "open fences": "```py\nx=1\nfor y in z:\n" * 6,
    "a table": "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 20,
    "a ragged table": "| a | b |\n|---|---|\n" + "| 1 |\n| 2 | 3 | 4 |\n" * 10,
    "half links": "[a](b " * 80,
    "brackets": "[" * 600 + "x" + "]" * 600,
    "backslashes": "\\" * 800,
    "dollars": "$$" * 300,
    "a long address": "https://x.y/" + "a" * 3000 + " " + PROSE,
    "digits": "1234567890" * 100,
    "special tokens": "<|endoftext|></s>[SEP]" * 20,
    "equal lines of a log": "2024-01-01 10:00:00 INFO x\n" * 100,
    "a diff": "--- a\n+++ b\n@@ -1 +1 @@\n-x\n+y\n" * 10,
    "Hindi": "नमस्ते दुनिया यह एक परीक्षण है। " * 10,
    "Thai": "สวัสดีชาวโลกนี่คือการทดสอบ" * 10,
}


@pytest.mark.parametrize("name", TEXTS)
def test_odd_text_is_compressed_restored_and_never_grows(name: str) -> None:
    text = TEXTS[name]
    for question in (None, "Who paid for the mill?"):
        found = Compressor().compress(text, question=question, rate=0.3, append_question=False)
        assert found.tokens <= found.original_tokens
        assert len(found.text) <= len(text)
        assert found.trace.restore() == text
        assert found.trace.to_html()
        json.loads(found.trace.to_json())
    assert Compressor().compress(text, rate=1.0).text == text


def test_a_long_line_without_a_space_is_no_trouble() -> None:
    text = "x" * 300_000
    assert Compressor().compress(text, rate=0.5).trace.restore() == text


def raising(text: str) -> int:
    raise RuntimeError("boom\nand more")


@pytest.mark.parametrize(
    ("call", "named"),
    [
        *[(lambda c, v=v: c.compress(PROSE, rate=v), "rate=") for v in (NAN, INF, -0.1, 1.1, "0.5", True, [0.5], 1j)],
        *[
            (lambda c, v=v: c.compress(PROSE, target_tokens=v), "target_tokens: ")
            for v in (-1, 2.5, "100", NAN, True, [])
        ],
        *[
            (lambda c, v=v: c.compress(PROSE, rate=0.3, tokenizer=v), "tokenizer: ")
            for v in (raising, float, lambda t: None, lambda t: -3, lambda t: 1.5, lambda: 1, str, "gpt2", 5, object())
        ],
        *[
            (lambda c, v=v: c.compress(documents=v, rate=0.3), "document")
            for v in (PROSE, b"abc", {"a": PROSE}, {PROSE}, 5, [1], [None, PROSE], [[PROSE]])
        ],
        *[(lambda c, v=v: c.compress(messages=v, rate=0.3), "messages") for v in ("x", TURN, [TURN, "x"], 5, [None])],
        *[(lambda c, v=v: c.compress(PROSE, rate=0.3, question=v), "question: ") for v in (5, ["x"], b"x")],
        *[(lambda c, v=v: c.compress_many(v, rate=0.3), "compress_many: ") for v in (None, PROSE, 5)],
        *[
            (lambda c, k=k, v=v: c.compress(documents=[PROSE, PROSE], rate=0.3, **{k: v}), k)
            for k, v in (
                ("rat", 0.3),
                ("keep_documents", 5),
                ("keep_documents", ["a"]),
                ("max_documents", -1),
                ("max_documents", 1.5),
                ("document_rates", "ab"),
                ("document_rates", [0.3]),
                ("document_rates", [NAN, 0.5]),
                ("document_rates", [2, 0.5]),
                ("document_rates", ["a", 0.5]),
                ("progress", 5),
            )
        ],
        (lambda c: c.compress_many([PROSE], rate=0.3, foo=1), "'foo'"),
        (lambda c: c.compress(PROSE, target_tokens=40, question=PROSE * 20), "protected spans alone take"),
    ],
)
def test_wrong_values_are_refused_in_one_line_that_names_them(call: Callable[[Compressor], Any], named: str) -> None:
    with pytest.raises(PromptError) as found:
        call(Compressor())
    assert named in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policies", 5),
        ("force_tokens", 5),
        ("force_tokens", [5]),
        ("force_tokens", "abc"),
        ("roles", 5),
        ("scorer", 5),
        ("ranker", 5),
        ("coarse", NAN),
        ("segment", True),
        ("dynamic", "a"),
        ("order", []),
        ("aggregate", {}),
    ],
)
def test_wrong_settings_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(PromptError, match=name):
        Compressor(**{name: value})


class Ranking:
    name = "mine"

    def __init__(self, scores: Any) -> None:
        self.scores = scores

    def rank(self, question: str, documents: Any) -> Any:
        return self.scores


@pytest.mark.parametrize("scores", [[NAN, 1.0], [1.0], None, ["a", "b"], 5])
def test_a_ranker_gives_a_number_a_document(scores: Any) -> None:
    with pytest.raises(PromptError, match="ranker 'mine': gave"):
        Compressor(ranker=Ranking(scores)).compress(documents=[PROSE, PROSE], question="Who?", rate=0.3)


@pytest.mark.parametrize(
    "count",
    [lambda text: 7, lambda text: len(text) // 3 + len(text) % 5, lambda text: len(text.split()) ** 2, str.split],
    ids=["always 7", "uneven", "squares", "words"],
)
def test_a_tokenizer_that_does_not_add_up_never_passes_its_budget(count: Callable[[str], Any]) -> None:
    size = count if isinstance(count(PROSE), int) else lambda text: len(count(text))
    found = Compressor().compress(PROSE, rate=0.3, tokenizer=count)
    assert not found.text or size(found.text) <= max(0.3 * size(PROSE), found.floor_tokens)
    assert found.trace.restore() == PROSE


@pytest.mark.parametrize(
    "documents", [[""] * 8, ["", PROSE, "  ", PROSE], (PROSE, PROSE), ["a"] * 500, [PROSE] * 12, iter([PROSE, PROSE])]
)
def test_odd_lists_of_documents_are_compressed(documents: Any) -> None:
    given = list(documents)
    found = Compressor().compress(documents=iter(given), question="Who paid?", rate=0.3, append_question=False)
    assert found.tokens <= max(0.3 * found.original_tokens, 0)
    assert len(found.documents) == len(given)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": []}],
        [{"role": "user"}, TURN],
        [{"content": PROSE}],
        [{"role": 7, "content": PROSE}, TURN],
        [{"role": "user", "content": [{"type": "text"}]}, TURN],
        [{"role": "user", "content": [{"type": "text", "text": None}]}, TURN],
        [{"role": "user", "content": "\ud800 " * 50}, TURN],
        [{"role": "assistant", "content": None, "refusal": PROSE}, TURN],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": PROSE}, {"type": "image_url", "image_url": {"url": "data:x"}}],
            },
            TURN,
        ],
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": NaN}'}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": PROSE},
            TURN,
        ],
    ],
)
def test_odd_messages_keep_roles_order_and_all_that_is_not_text(messages: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(messages)
    for options in ({"rate": 0.3}, {"rate": 0.3, "stable": True}):
        found = Compressor().compress(messages=messages, **options)
        assert messages == before
        assert found.messages is not None
        for old, new in zip(messages, found.messages, strict=True):
            bare = [{key: value for key, value in one.items() if key != "content"} for one in (old, new)]
            assert bare[0] == bare[1]
            if isinstance(old.get("content"), list):
                assert [p.get("image_url") for p in old["content"]] == [p.get("image_url") for p in new["content"]]
        assert found.messages[-1:] == messages[-1:] or messages[-1].get("role") != "user"
