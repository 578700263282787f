"""Anthropic's messages API: the official client over a real socket, and bodies as agents send them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from serving import app_of, client_of, post, running, saying, tokenizer

from onebox.testing import FakeEngine

anthropic = pytest.importorskip("anthropic")

PATH = "/v1/messages"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
TOOLS: list[Any] = [{"name": "edit", "description": "edits", "input_schema": SCHEMA}]
CALL = (
    "hm\n</think>\n\nDoing it.\n\n<tool_call>\n<function=edit>\n<parameter=path>\n a \n</parameter>\n"
    "<parameter=line>\n3\n</parameter>\n</function>\n</tool_call>"
)
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@contextmanager
def anthropic_of(engine: FakeEngine, **options: Any) -> Iterator[Any]:
    with (
        running(app_of(engine, **options)) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_message_has_its_blocks_and_counts() -> None:
    with anthropic_of(saying(CALL, tokens_per_step=3)) as client:
        message = client.messages.create(model="tiny", max_tokens=500, messages=HI, tools=TOOLS, thinking=THINKING)
        assert [b.type for b in message.content] == ["thinking", "text", "tool_use"]
        thinking, text, call = message.content
        assert (thinking.thinking, text.text) == ("hm", "Doing it.")
        assert (call.name, call.input) == ("edit", {"path": " a ", "line": 3})
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens == len(tokenizer().encode(CALL))


@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_the_stream_makes_the_same_message(tokens_per_step: int) -> None:
    ask: Any = {"model": "tiny", "max_tokens": 500, "messages": HI, "tools": TOOLS, "thinking": THINKING}
    with anthropic_of(saying(CALL, tokens_per_step=tokens_per_step)) as client:
        whole = client.messages.create(**ask)
        with client.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
        assert streamed.model_dump(exclude={"id", "content"}) == whole.model_dump(exclude={"id", "content"})
        for a, b in zip(streamed.content, whole.content, strict=True):
            assert a.model_dump(exclude={"id"}, exclude_none=True) == b.model_dump(exclude={"id"}, exclude_none=True)


def test_thinking_is_off_unless_asked_for() -> None:
    engine = saying("plain")
    assert post(engine, PATH, {"model": "tiny", "max_tokens": 9, "messages": HI}).json()["content"] == [
        {"type": "text", "text": "plain"}
    ]
    assert tokenizer().decode(engine.requests[0].prompt).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("body", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": [" three"]}, "stop_sequence", " three"),
        ({}, "end_turn", None),
    ],
)
def test_stop_reasons(body: dict[str, Any], reason: str, sequence: str | None) -> None:
    value = post(saying("one two three four"), PATH, {"max_tokens": 50, "messages": HI, **body}).json()
    assert (value["stop_reason"], value["stop_sequence"]) == (reason, sequence)


def test_a_body_as_claude_code_sends_it_keeps_its_prefix_from_turn_to_turn() -> None:
    def body(stamp: str, messages: list[Any]) -> dict[str, Any]:
        return {
            "model": "tiny",
            "max_tokens": 32000,
            "stream": True,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={stamp};"},
                {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": messages,
            "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
            "thinking": {"type": "adaptive"},
            "metadata": {"user_id": "u"},
            "context_management": {"edits": []},
        }

    first = [{"role": "user", "content": [{"type": "text", "text": "edit a", "cache_control": {"type": "ephemeral"}}]}]
    engine = saying(CALL)
    assert post(engine, PATH + "?beta=true", body("aa", first)).status_code == 200
    second = [
        *first,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "onebox"},
                {"type": "text", "text": "Doing it."},
                {"type": "tool_use", "id": "toolu_1", "name": "edit", "input": {"path": " a ", "line": 3}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "ok"}]}],
        },
    ]
    again = saying("done")
    assert post(again, PATH, body("bb", second)).status_code == 200
    turn = [*engine.requests[0].prompt, *tokenizer().encode(CALL + "<|im_end|>\n")]
    assert list(again.requests[0].prompt)[: len(turn)] == turn
    assert "web_search" not in tokenizer().decode(again.requests[0].prompt)


def test_system_messages_inside_the_list_are_read() -> None:
    messages = [*HI, {"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
    engine = saying("ok")
    assert post(engine, PATH, {"max_tokens": 9, "messages": messages}).status_code == 200
    assert tokenizer().decode(engine.requests[0].prompt).startswith("<|im_start|>system\nbe brief<|im_end|>")


def test_count_tokens_counts_what_the_engine_gets() -> None:
    async def run() -> None:
        engine = saying("x")
        async with client_of(engine) as client:
            body = {"model": "tiny", "messages": HI, "system": "s", "tools": TOOLS}
            counted = (await client.post(PATH + "/count_tokens", json=body)).json()["input_tokens"]
            used = (await client.post(PATH, json={**body, "max_tokens": 5})).json()["usage"]["input_tokens"]
            assert counted == used == len(engine.requests[0].prompt)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "status", "kind", "says"),
    [
        ({"messages": HI}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": HI, "max_tokens": 5, "model": "no"}, 404, "not_found_error", "no"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5},
            400,
            "invalid_request_error",
            "image",
        ),
        ({"messages": HI, "max_tokens": 5, "thinking": {"type": "odd"}}, 400, "invalid_request_error", "thinking.type"),
        (
            {"messages": HI, "max_tokens": 5, "tools": TOOLS, "tool_choice": {"type": "tool"}},
            400,
            "invalid_request_error",
            "tool_choice",
        ),
    ],
)
def test_errors_have_that_apis_shape(body: Any, status: int, kind: str, says: str) -> None:
    response = post(saying("x"), PATH, body)
    assert response.status_code == status
    assert response.json()["type"] == "error"
    error = response.json()["error"]
    assert error["type"] == kind
    assert says in error["message"]


def test_an_error_in_mid_stream_is_an_error_event() -> None:
    response = post(saying("a b c d", fail_after=2), PATH, {"messages": HI, "max_tokens": 50, "stream": True})
    assert response.status_code == 200
    assert response.text.rstrip().split("\n\n")[-1].startswith('event: error\ndata: {"type":"error"')


def test_x_api_key_is_accepted() -> None:
    with anthropic_of(saying("ok"), api_keys=["none"]) as client:
        assert client.messages.create(model="tiny", max_tokens=5, messages=HI).content[0].text == "ok"
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="other").messages.create(model="tiny", max_tokens=5, messages=HI)


@pytest.mark.parametrize("path", [PATH, PATH + "/count_tokens"])
@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"system": [{"type": "text", "text": "a"}, {"type": "x"}]}, "system[1]"),
        ({"system": [{"type": "text", "text": 3}]}, "system[0]"),
        ({"system": "s", "messages": [*HI, {"role": "king", "content": "a"}]}, "messages[1].role"),
        ({"system": "s", "messages": [*HI, {"role": "user", "content": None}]}, "messages[1].content"),
        (
            {"messages": [*HI, {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
            "messages[1].content",
        ),
        (
            {"messages": [*HI, {"role": "user", "content": [{"type": "tool_result", "content": 3}]}]},
            "messages[1].content",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]},
            "messages[1].content[0].name",
        ),
    ],
)
def test_an_error_names_the_place_in_this_api_s_body(path: str, fields: dict[str, Any], place: str) -> None:
    body = {"messages": HI, **fields} | ({} if path.endswith("tokens") else {"max_tokens": 4})
    answer = post(saying("x"), path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"'{place}'"), answer.text
