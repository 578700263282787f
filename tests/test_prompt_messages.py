"""Conversations: what stays untouched, policies by role, and prefixes that stay the same as a conversation grows."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from onebox.errors import PromptError
from onebox.prompt import Compressor
from tests.test_prompt_acceptance import prose, words

CALL = {"id": "call_9", "type": "function", "function": {"name": "f", "arguments": '{"x":  1, "y": "a, b"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be terse. " + prose(3)},
    {"role": "user", "content": prose(6, 1), "name": "ana"},
    {"role": "assistant", "content": prose(5, 2), "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_9", "content": json.dumps({"rows": [{"id": i} for i in range(40)]})},
    {"role": "assistant", "content": None, "refusal": None},
    {
        "role": "user",
        "content": [{"type": "text", "text": prose(2, 3)}, {"type": "image_url", "image_url": {"url": "u"}}],
    },
    {"role": "assistant", "content": prose(5, 4)},
    {"role": "user", "content": "And who paid for the mill?"},
]


def test_only_the_texts_that_may_change_do() -> None:
    before = copy.deepcopy(CHAT)
    result = Compressor().compress(CHAT, rate=0.5, tokenizer=words)
    assert before == CHAT and result.messages is not None
    for given, left in zip(CHAT, result.messages, strict=True):
        assert {k: v for k, v in given.items() if k != "content"} == {k: v for k, v in left.items() if k != "content"}
    for index in (0, 4, 7):
        assert result.messages[index] == CHAT[index]
    assert result.messages[5]["content"][1] == CHAT[5]["content"][1]
    assert len(result.messages[1]["content"]) < len(CHAT[1]["content"])
    assert json.loads(result.messages[3]["content"]).keys() == {"rows"}


def test_roles_have_policies_and_rates() -> None:
    roles = {"system": 0.5, "assistant": "keep", "tool": "keep", "user": "compress"}
    result = Compressor(roles=roles).compress(CHAT, rate=0.8, tokenizer=words)
    assert result.messages is not None
    system = result.messages[0]["content"]
    assert "Be terse." in system or words(system) <= 0.5 * words(CHAT[0]["content"])
    assert 0.4 <= words(system) / words(CHAT[0]["content"]) <= 0.5
    assert [result.messages[i]["content"] for i in (2, 3, 6)] == [CHAT[i]["content"] for i in (2, 3, 6)]


@pytest.mark.parametrize("rate", [0.3, 0.6])
def test_a_longer_conversation_keeps_the_bytes_of_its_beginning(rate: float) -> None:
    prefix: list[dict[str, Any]] = []
    for length in range(1, len(CHAT) + 1):
        # another Compressor each time: nothing is remembered from the turn before
        result = Compressor().compress(CHAT[:length], rate=rate, stable=True, tokenizer=words)
        assert result.messages is not None
        assert json.dumps(result.messages[: len(prefix)]) == json.dumps(prefix)
        prefix = result.messages
    assert words(prefix[6]["content"]) <= rate * words(CHAT[6]["content"])
    assert [prefix[i] for i in (0, 1, 5, 7)] == [CHAT[i] for i in (0, 1, 5, 7)]
    assert result.trace.restore() and result.tokens < result.original_tokens


def test_only_what_is_new_is_compressed_again() -> None:
    compressor = Compressor()
    scored: list[str] = []

    class Counting:
        name = "counting"

        def score(self, texts: Any, *, prefixes: Any = None) -> Any:
            scored.extend(texts)
            return compressor.scorer.score(texts)

    again = Compressor("llmlingua2", scorer=Counting())
    again.compress(CHAT[:4], rate=0.5, stable=True, tokenizer=words)
    first = len(scored)
    again.compress(CHAT, rate=0.5, stable=True, tokenizer=words)
    assert 0 < first < len(scored) and len(scored) == len(set(scored))


@pytest.mark.parametrize(
    "options", [{"target_tokens": 50}, {"rate": 0.5, "question": "x"}, {"rate": 0.5, "max_tokens": 9}]
)
def test_a_stable_prefix_and_a_budget_of_the_whole_exclude_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match="stable"):
        Compressor().compress(CHAT, stable=True, **options)


def test_stable_is_for_messages() -> None:
    with pytest.raises(PromptError, match="stable"):
        Compressor().compress("text", stable=True, rate=0.5)


@pytest.mark.parametrize("target", [300, 350, 400])
def test_a_conversation_meets_its_target(target: int) -> None:
    result = Compressor(policies={"json": "atomic"}).compress(CHAT, target_tokens=target, tokenizer=words)
    assert 0.95 * target <= result.tokens <= target
