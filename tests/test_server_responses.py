"""OpenAI's responses API: the official client over a real socket, stored conversations, bodies as Codex sends them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import app_of, client_of, engine_of, post, running, saying, tokenizer

from onebox.errors import NotFoundError
from onebox.server.responses import Store
from onebox.testing import FakeEngine

PATH = "/v1/responses"
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "shell",
        "description": "runs",
        "strict": False,
        "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}},
    }
]
CALL = (
    "hm\n</think>\n\nRunning.\n\n<tool_call>\n<function=shell>\n<parameter=command>\n"
    '["ls", "-l"]\n</parameter>\n</function>\n</tool_call>'
)


@contextmanager
def openai_of(engine: FakeEngine, **options: Any) -> Iterator[openai.OpenAI]:
    with (
        running(app_of(engine, **options)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_response_has_reasoning_text_and_calls() -> None:
    with openai_of(saying(CALL, tokens_per_step=3)) as client:
        response = client.responses.create(model="tiny", input="list", instructions="be brief", tools=TOOLS)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "Running."
    call: Any = response.output[2]
    assert (call.name, json.loads(call.arguments), response.status) == ("shell", {"command": ["ls", "-l"]}, "completed")
    assert response.usage is not None
    assert response.usage.output_tokens == len(tokenizer().encode(CALL))


@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_the_stream_tells_the_same_in_order(tokens_per_step: int) -> None:
    with openai_of(saying(CALL, tokens_per_step=tokens_per_step)) as client:
        events = list(client.responses.create(model="tiny", input="list", tools=TOOLS, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    for kind in ("output_item", "content_part"):
        opened = [k for k in kinds if k in (f"response.{kind}.added", f"response.{kind}.done")]
        assert opened == [f"response.{kind}.added", f"response.{kind}.done"] * (len(opened) // 2)
    final: Any = events[-1]
    items = final.response.output
    for delta_kind, value in (
        ("response.reasoning_text.delta", items[0].content[0].text),
        ("response.output_text.delta", items[1].content[0].text),
        ("response.function_call_arguments.delta", items[2].arguments),
    ):
        deltas: list[Any] = [e for e in events if e.type == delta_kind]
        assert "".join(e.delta for e in deltas) == value
    created: Any = events[0]
    assert created.response.output == []


def test_a_stored_response_is_continued_with_a_shared_prefix() -> None:
    engine = saying(CALL)
    with openai_of(engine) as client:
        first = client.responses.create(model="tiny", input="list", tools=TOOLS)
        assert client.responses.retrieve(first.id).output_text == "Running."
        call: Any = first.output[2]
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "a.txt"}]
        client.responses.create(model="tiny", input=result, tools=TOOLS, previous_response_id=first.id)
        turn = [*engine.requests[0].prompt, *tokenizer().encode(CALL + "<|im_end|>\n")]
        assert list(engine.requests[1].prompt)[: len(turn)] == turn
        assert "a.txt" in tokenizer().decode(engine.requests[1].prompt)
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as e:
            client.responses.create(model="tiny", input="x", previous_response_id=first.id)
        assert e.value.param == "previous_response_id"


def test_store_false_keeps_nothing() -> None:
    with openai_of(saying("hm</think>x")) as client:
        response = client.responses.create(model="tiny", input="x", store=False)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)


def test_a_store_outlives_the_server(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.sqlite")
    response = post(saying("hm</think>x"), PATH, {"input": "x"}, response_store=path).json()
    store = Store(path)
    assert store.get(response["id"])[0] == response
    store.delete(response["id"])
    with pytest.raises(NotFoundError):
        store.get(response["id"])
    store.close()


def test_running_out_of_tokens_is_incomplete() -> None:
    value = post(saying("hm\n</think>\n\none two three"), PATH, {"input": "x", "max_output_tokens": 6}).json()
    assert (value["status"], value["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_a_body_as_codex_sends_it_is_served() -> None:
    body = {
        "model": "tiny",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"command": ["ls"]}'},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a.txt"}]},
        ],
        "tools": [
            *TOOLS,
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
            {"type": "web_search"},
            {"type": "namespace", "name": "mcp", "tools": []},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
    }
    engine = engine_of(tokenizer().encode("hm</think>done"))
    response = post(engine, PATH, body)
    assert response.status_code == 200
    assert 'event: response.completed\ndata: {"type":"response.completed"' in response.text
    prompt = tokenizer().decode(engine.requests[0].prompt)
    assert prompt.startswith("<|im_start|>system\nYou are a coding agent.\n\nsandbox\n\n# Tools")
    assert "<think>\nhm\n</think>\n\n<tool_call>\n<function=shell>" in prompt
    assert "apply_patch" not in prompt


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": "x", "tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_bad_fields_are_refused_by_name(body: Any, param: str) -> None:
    response = post(saying("x"), PATH, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_an_error_in_mid_stream_is_an_error_event() -> None:
    response = post(saying("a b c d", fail_after=2), PATH, {"input": "x", "stream": True})
    assert response.text.rstrip().split("\n\n")[-1].startswith('event: error\ndata: {"type":"')


def test_a_response_under_way_can_be_cancelled() -> None:
    async def run() -> None:
        engine = engine_of([5] * 8000, step_s=0.005)
        async with client_of(engine, drain_s=0) as client:
            asked = asyncio.create_task(client.post(PATH, json={"input": "x", "max_output_tokens": 5000}))
            await asyncio.sleep(0.05)
            (created,) = client._transport.app.state.responses.running  # type: ignore[attr-defined]
            assert (await client.post(f"{PATH}/{created}/cancel")).json()["status"] == "cancelled"
            value = (await asyncio.wait_for(asked, 2)).json()
            assert value["status"] == "cancelled"
            assert engine.stats().running == 0
            assert (await client.post(f"{PATH}/{created}/cancel")).status_code == 400
            assert (await client.post(f"{PATH}/resp_none/cancel")).status_code == 404

    asyncio.run(run())
