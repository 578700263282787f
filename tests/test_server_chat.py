"""The text layer: tokens to text, stop strings, messages to prompts."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import TINY, tokenizer

from onebox.errors import CheckpointError, RequestError
from onebox.request import Output, TokenLogprob
from onebox.server.chat import (
    REPLACEMENT,
    Answer,
    AnswerDelta,
    Detokenizer,
    StopMatcher,
    Tokenizer,
    content_text,
    normalize_messages,
    prompt_thinking,
)
from onebox.server.parsers import AnswerParser


def decoded(ids: list[int], **options: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer(), **options)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_text_survives_encoding_and_stepwise_decoding(text: str) -> None:
    ids = tokenizer().encode(text)
    assert "".join(decoded(ids, skip_special=False)) == tokenizer().rust.decode(ids, skip_special_tokens=False)


@given(st.lists(st.integers(0, 8191), max_size=60))
@settings(max_examples=200, deadline=None)
def test_random_ids_decode_as_the_tokenizer_decodes_them(ids: list[int]) -> None:
    assert "".join(decoded(ids)) == tokenizer().rust.decode(ids, skip_special_tokens=True)


def test_a_character_split_over_tokens_comes_out_whole() -> None:
    ids = tokenizer().encode("🦜 ok")
    assert len(ids) > 4
    pieces = decoded(ids)
    assert "".join(pieces) == "🦜 ok"
    assert not any(REPLACEMENT in p for p in pieces)
    assert pieces[0] == ""


def test_an_unfinished_character_ends_as_one_replacement() -> None:
    ids = tokenizer().encode("🦜")
    assert "".join(decoded(ids[:-1])) == REPLACEMENT


@pytest.mark.parametrize(
    ("stops", "text", "before", "stop"),
    [
        (["END"], "go END on", "go ", "END"),
        (["END"], "go EN", "go EN", None),
        (["aab"], "aaab", "a", "aab"),
        (["abc", "b"], "xabc", "xa", "b"),
        (["abc", "bc"], "xabc", "x", "abc"),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
        (["é"], "café!", "caf", "é"),
    ],
)
def test_stop_is_found_however_the_text_is_cut(stops: list[str], text: str, before: str, stop: str | None) -> None:
    for i in range(len(text) + 1):
        for j in range(i, len(text) + 1):
            matcher, out, found = StopMatcher(stops), "", None
            for part in (text[:i], text[i:j], text[j:]):
                if found is None:
                    piece, found = matcher.push(part)
                    out += piece
            out += "" if found else matcher.finish()
            assert (out, found) == (before, stop)


def test_stop_string_may_be_kept() -> None:
    assert StopMatcher(["END"], include=True).push("go END on") == ("go END", "END")


def answer_of(ids: list[int], sizes: list[int], **options: Any) -> tuple[Answer, list[AnswerDelta]]:
    answer, deltas, at = Answer(tokenizer(), **options), [], 0
    for size in sizes:
        part = tuple(ids[at : at + size])
        at += size
        end = "stop" if at >= len(ids) else None
        deltas.append(
            answer.push(
                Output("r", part, tuple(TokenLogprob(t, -1.0) for t in part), end, prompt_tokens=7)  # type: ignore[arg-type]
            )
        )
        if answer.done:
            break
    return answer, deltas


@pytest.mark.parametrize("stop", [[], ["seven"], [" ei", "x"], ["\n"]])
def test_text_logprobs_and_counts_do_not_depend_on_how_steps_group_tokens(stop: list[str]) -> None:
    text = "hm one two\n</think>\n\nthree 🦜 four five six\nseven eight nine"
    ids, rng = tokenizer().encode(text), random.Random(3)
    seen = set()
    for _ in range(50):
        sizes = [rng.randint(0, 4) for _ in range(200)]
        answer, deltas = answer_of(ids, sizes, stop=stop, parser=AnswerParser(thinking="open"))
        assert answer.done
        seen.add(
            (
                "".join(d.reasoning for d in deltas),
                "".join(d.content for d in deltas),
                tuple(t for d in deltas for t in d.tokens),
                tuple(p.token for d in deltas for p in d.logprobs),
                tuple(o for d in deltas for o in d.offsets),
                answer.usage.completion_tokens,
                answer.usage.reasoning_tokens,
                deltas[-1].stop_reason,
            )
        )
    assert len(seen) == 1
    reasoning, content, tokens, logprob_tokens, *_ = seen.pop()
    assert tokens == logprob_tokens
    if not stop:
        assert (reasoning, content) == ("hm one two", "three 🦜 four five six\nseven eight nine")
        assert tokens == tuple(ids)


def test_tokens_of_the_stop_string_are_counted_but_not_shown() -> None:
    ids = tokenizer().encode("one two three four")
    answer, deltas = answer_of(ids, [len(ids)], stop=[" three"])
    assert deltas[-1].content == "one two"
    assert tokenizer().decode(deltas[-1].tokens) == "one two"
    assert answer.usage.completion_tokens == len(tokenizer().encode("one two three"))


def test_stop_strings_wait_for_min_tokens() -> None:
    ids = tokenizer().encode("a a a a")
    _, deltas = answer_of(ids, [1] * 9, stop=[" a"], min_tokens=3)
    assert "".join(d.content for d in deltas) == "a a a"


def test_special_tokens_are_left_out_of_text() -> None:
    ids = tokenizer().encode("a<|im_end|>b")
    assert "".join(decoded(ids)) == "ab"
    assert "".join(decoded(ids, skip_special=False)) == "a<|im_end|>b"


def test_system_messages_anywhere_are_merged_at_the_head() -> None:
    messages = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "developer", "content": "two"},
    ]
    assert normalize_messages(messages) == [
        {"role": "system", "content": "one\n\ntwo"},
        {"role": "user", "content": "ab"},
    ]


def test_the_changing_billing_line_is_stripped() -> None:
    text = "x-anthropic-billing-header: cc_version=1.2; cch=ab12\nYou are helpful."
    assert normalize_messages([{"role": "system", "content": text}, {"role": "user", "content": "hi"}])[0] == {
        "role": "system",
        "content": "You are helpful.",
    }


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function.name"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages[0].content[0].text"),
    ],
)
def test_bad_messages_are_refused_by_name(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as e:
        normalize_messages([message])
    assert e.value.param == param


def test_arguments_of_earlier_calls_that_are_no_json_do_not_refuse_the_chat() -> None:
    calls = [{"id": "c", "function": {"name": "f", "arguments": '{"a": '}}]
    messages = normalize_messages([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}])
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"arguments": '{"a": '}
    assert "<parameter=arguments>" in tokenizer().render(messages)


def test_thinking_follows_the_template() -> None:
    messages = [{"role": "user", "content": "do not write <think>"}]
    assert prompt_thinking(tokenizer().render(messages)) == "open"
    assert prompt_thinking(tokenizer().render(messages, options={"enable_thinking": False})) == "closed"
    assert prompt_thinking("plain prompt") == "unknown"


def test_a_turn_of_a_tool_chat_is_a_byte_prefix_of_the_next() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    first = [{"role": "user", "content": "go"}]
    answer = "hm\n</think>\n\n<tool_call>\n<function=f>\n<parameter=a>\n 1 \n</parameter>\n</function>\n</tool_call>"
    answer += "<|im_end|>\n"
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": " 1 "}'}}
    second = [*first, {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}]
    second.append({"role": "tool", "content": [{"type": "text", "text": "ok"}], "tool_call_id": "c"})
    before = tokenizer().render(normalize_messages(first), tools=tools) + answer
    assert tokenizer().render(normalize_messages(second), tools=tools).startswith(before)


def test_the_final_message_may_be_continued() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer is"}]
    text = tokenizer().render(messages, continue_final=True)
    assert text.endswith("</think>\n\nThe answer is")


def test_turn_ends_are_after_the_head_and_before_the_answer() -> None:
    text = tokenizer().render([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    ids = tokenizer().encode(text)
    head, before_answer = tokenizer().turn_ends(ids)
    assert tokenizer().decode(ids[:head]) == "<|im_start|>system\ns<|im_end|>\n"
    assert tokenizer().decode(ids[before_answer:]) == "<|im_start|>assistant\n<think>\n"


def test_template_refusals_are_request_errors() -> None:
    with pytest.raises(RequestError, match="system message must come first"):
        tokenizer().render([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}])


def test_template_cannot_reach_into_python() -> None:
    evil = Tokenizer(tokenizer().rust, template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError):
        evil.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("content", [None, "{"])
def test_missing_or_broken_tokenizer_is_named(tmp_path: Any, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_template_agrees_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(TINY)
    tools = [{"type": "function", "function": {"name": "f", "description": "é <x>", "parameters": {"type": "object"}}}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a & b"}]
    want = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert tokenizer().render(messages, tools=tools) == want
    assert tokenizer().encode(want) == theirs(want, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": None}, {"type": "text", "text": 3}])
def test_a_text_part_without_text_is_refused(part: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=r"content\[1\]\.text"):
        content_text([{"type": "text", "text": ""}, part], param="messages[0].content")
