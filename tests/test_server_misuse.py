"""Requests that mean nothing good: each is a 4xx that names its fault, or served; none costs memory, time or others."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from serving import TINY, client_of, events, post, saying, tokenizer

from onebox.engine import grammar as engine_grammar
from onebox.request import Grammar
from onebox.server.upstream import create_upstream_app

CHAT, COMPLETE, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HI: list[Any] = [{"role": "user", "content": "x"}]
SAID = "hm\n</think>\n\nok"


def error_of(path: str, body: Any) -> dict[str, Any]:
    answer = post(saying(SAID), path, body)
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


# Size: what a body costs is bounded by its values too


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETE, b'{"prompt":[' + b"5," * 1_100_000 + b"5]}"),
        (COMPLETE, b'{"prompt":[' + b"[]," * 600_000 + b"[]]}"),
        (CHAT, b'{"messages":[{"role":"user","content":"x"}],"unheard":[' + b"{}," * 600_000 + b"{}]}"),
        (CHAT, b'{"messages":' + b"[[1]," * 550_000),
    ],
    ids=["ids", "lists", "unknown", "cut"],
)
def test_a_body_of_a_million_values_is_413_before_it_is_parsed(path: str, body: bytes) -> None:
    begun_s = time.process_time()
    answer = post(saying("x"), path, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert "values" in answer.json()["error"]["message"]
    assert time.process_time() - begun_s < 1


MANY = 150_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETE, {"prompt": [{}] * MANY}, "prompt"),
        (COMPLETE, {"prompt": [[5], ["a"]] * (MANY // 2)}, "prompt"),
        (CHAT, {"messages": HI * 100_001}, "messages"),
        (CHAT, {"messages": [{}] * MANY}, "messages[0].role"),
        (CHAT, {"messages": HI, "tools": [{}] * 10_001}, "tools"),
        (CHAT, {"messages": HI, "stop": [1] * MANY}, "stop"),
        (CHAT, {"messages": HI, "stop_token_ids": [""] * MANY}, "stop_token_ids[0]"),
        (CHAT, {"messages": HI, "guided_choice": [3] * MANY}, "guided_choice[0]"),
        (CHAT, {"messages": HI, "structured_outputs": {"choice": [3] * MANY}}, "structured_outputs.choice[0]"),
        (CHAT, {"messages": HI, "logit_bias": dict.fromkeys(map(str, range(MANY)), "")}, "logit_bias"),
        (CHAT, {"messages": HI, "compress": {"roles": dict.fromkeys(map(str, range(MANY)), 3)}}, "compress.roles"),
        (CHAT, {"messages": HI, "compress": dict.fromkeys(map(str, range(MANY)), 3)}, "compress"),
        (RESPONSES, {"input": [3] * MANY}, "input"),
        (RESPONSES, {"input": "x", "tools": [3] * MANY}, "tools[0]"),
        (MESSAGES, {"max_tokens": 1, "messages": HI, "system": [3] * MANY}, "system"),
        ("/detokenize", {"tokens": [""] * MANY}, "tokens[0]"),
        ("/v1/compress", {"documents": [3] * MANY}, "documents[0]"),
        ("/v1/guard", {"messages": [3] * MANY}, "messages[0]"),
    ],
)
def test_of_many_faults_the_first_is_told_without_looking_at_the_rest(path: str, body: Any, param: str) -> None:
    data = json.dumps(body).encode()
    begun_s = time.process_time()
    answer = post(saying("x"), path, data)
    took_s = time.process_time() - begun_s
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.get("param", param) == param
    assert f"'{param}" in error["message"] and len(error["message"]) < 400
    assert took_s < 0.8  # to describe every fault takes 2 s and more


# Values: one odd field a body


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"0" * 5000 + "5": 1}}, "logit_bias"),
        ({"logit_bias": {"0000000000008192": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "3"}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"logit_bias": {"5": None}}, "logit_bias"),
        ({"priority": 2**63}, "priority"),
        ({"priority": -(2**63) - 1}, "priority"),
        ({"chat_template_kwargs": {"namespace": 5}}, "messages"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f\n"}}]}, "tools[0].function.name"),
        ({"continue_final_message": True, "messages": [*HI, {"role": "assistant", "content": ""}]}, "messages"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, None),
    ],
)
def test_an_odd_value_is_400_and_named(fields: dict[str, Any], param: str | None) -> None:
    error = error_of(CHAT, {"messages": HI, **fields})
    assert error["param"] == (param or "response_format.json_schema.schema")


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"05": 1, "5": -1, "\u0665": 2}},
        {"priority": -(2**63)},
        {"stop_token_ids": [5] * 100_000},
        {"chat_template_kwargs": {"self": 1, "context": 2, "raise_exception": 3, "": 4, "enable_thinking": {"a": 1}}},
        {"seed": 7.0, "temperature": 1e-300, "top_p": 5e-324, "min_p": 1, "repetition_penalty": 5e-324},
        {"messages": [*HI, {"role": "assistant", "content": "a", "reasoning": {"x": 1}, "reasoning_content": ["a"]}]},
        {"messages": [{"role": "user", "content": "", "name": {"a": 1}}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"tools": [{"type": "function", "function": {"name": "größe", "parameters": {}}}] * 2},
        {"cache_salt": "\x00" * 100_000, "user": "\uffff"},
    ],
)
def test_what_is_odd_but_clear_is_served(fields: dict[str, Any]) -> None:
    assert post(saying(SAID), CHAT, {"messages": HI, **fields}).status_code == 200


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        ([called('{"a": 1, "a": 2}')], "<parameter=a>\n2\n</parameter>"),
        ([called('{"a": "\\ud800 lone"}')], "\ufffd lone"),
        ([called('{"\\udc00": 1}')], "<parameter=\ufffd>"),
        ([called('{"a": "\\ud83d\\ude42"}')], "\N{SLIGHTLY SMILING FACE}"),
        ([called("[" * 20_000 + "]" * 20_000)], "<function=f>"),
        ([called('{"a": ' * 990 + "1" + "}" * 990)], "<function=f>"),
        ([called('{"a": ' + "9" * 5000 + "}")], "99999"),
        ([called('{"a": NaN, "b": 1e999}')], "<parameter=a>"),
        ([called("not JSON at all")], "not JSON at all"),
        ([called(None)], "<function=f>"),
        ([called("{}", index=0), called('{"b": 1}', index=0)], "<parameter=b>"),  # two of the same index and id
    ],
)
def test_earlier_calls_whatever_their_arguments_are_do_not_refuse_the_chat(calls: list[Any], shown: str) -> None:
    engine = saying(SAID, max_model_len=100_000)
    history = [*HI, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "r"}]
    answer = post(engine, CHAT, {"messages": history})
    if answer.status_code == 400:  # JSON too deep to be written again: told, and not a failure
        assert "chat template failed" in answer.json()["error"]["message"]
        return
    assert answer.status_code == 200, answer.text
    assert shown in tokenizer().decode(engine.requests[0].prompt)


# What a model may say, and what schemas may be


SCHEMAS: list[Any] = [
    {"properties": 3},
    {"properties": {"a": 3}},
    {"properties": {"a": {"type": ["string", 3]}}},
    {"properties": {"a": {"type": {"x": 1}}}},
    {"properties": {"a": {"allOf": 3}}},
    {"properties": {"a": {"anyOf": "abc"}}},
    {"properties": {"a": {"enum": 3}}},
    {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"properties": {"a": {"$ref": "#"}}},
    {"properties": {"a": {"$ref": 3}}, "required": "a"},
    {"required": ["a", 3]},
    {"required": 3},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_whose_schema_is_none_is_called_all_the_same_or_refused(schema: Any, stream: bool, choice: str) -> None:
    said = "hm\n</think>\n\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    answer = post(saying(said), CHAT, {"messages": HI, "tools": tools, "tool_choice": choice, "stream": stream})
    if choice == "required" and answer.status_code == 400:
        assert answer.json()["error"]["param"] == "tools"
        return
    assert answer.status_code == 200, answer.text
    if stream:
        deltas = [c["delta"] for e in events(answer) for c in e["choices"]]
        arguments = "".join(c["function"]["arguments"] for d in deltas for c in d.get("tool_calls", ()))
    else:
        arguments = answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments)["a"] in (1, "1")


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("call", "value"),
    [
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', {"a": "\ufffd"}),
        ('{"name": "f", "arguments": {"\\udc00": 1}}', {"\ufffd": 1}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f"}', {}),
        ('<function=f>\n<parameter=a>\n["\\ud800"]\n</parameter>\n</function>', {"a": ["\ufffd"]}),
        ("<function=f>\n<parameter=a>\n['\\ud800']\n</parameter>\n</function>", {"a": ["\ufffd"]}),
    ],
)
def test_halves_of_characters_in_a_call_do_not_break_its_answer(path: str, stream: bool, call: str, value: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": ["string", "array"]}}}
    function = {"name": "f", "parameters": schema}
    body: dict[str, Any] = {"stream": stream}
    if path == CHAT:
        body |= {"messages": HI, "tools": [{"type": "function", "function": function}]}
    elif path == RESPONSES:
        body |= {"input": "x", "tools": [{"type": "function", **function}]}
    else:
        body |= {"messages": HI, "max_tokens": 99, "tools": [{"name": "f", "input_schema": schema}]}
        body["thinking"] = {"type": "enabled", "budget_tokens": 50}
    answer = post(saying(f"hm\n</think>\n\n<tool_call>\n{call}\n</tool_call>"), path, body)
    assert answer.status_code == 200, answer.text
    assert "internal_error" not in answer.text and '"error":{' not in answer.text
    found = json.loads(json.dumps(arguments_of(path, stream, answer)).encode("utf-8", "replace"))
    if call.startswith("<") and '"' in call and (stream or path != MESSAGES):  # given as the model wrote it
        value = {"a": ["\ud800"]}
    assert found == value


def arguments_of(path: str, stream: bool, answer: Any) -> Any:
    """The arguments of an answer's one call, parsed."""
    if not stream:
        value = answer.json()
        if path == CHAT:
            return json.loads(value["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
        if path == RESPONSES:
            return json.loads(value["output"][-1]["arguments"])
        return value["content"][-1]["input"]
    found = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    if path == CHAT:
        calls = [c for e in found for choice in e["choices"] for c in choice["delta"].get("tool_calls", ())]
        return json.loads("".join(c["function"]["arguments"] for c in calls))
    if path == RESPONSES:
        return json.loads("".join(e["delta"] for e in found if e["type"].endswith("arguments.delta")))
    parts = [e["delta"]["partial_json"] for e in found if e.get("delta", {}).get("type") == "input_json_delta"]
    return json.loads("".join(parts) or "{}")


def test_a_call_whose_json_has_no_number_for_it_is_text() -> None:
    for number in ("NaN", "-Infinity", "1e999"):
        said = f'hm\n</think>\n\n<tool_call>\n{{"name": "f", "arguments": {{"a": {number}}}}}\n</tool_call>'
        tools = [{"type": "function", "function": {"name": "f"}}]
        message = post(saying(said), CHAT, {"messages": HI, "tools": tools}).json()["choices"][0]["message"]
        assert number in message["content"] and "tool_calls" not in message


# Grammars of thousands


def walk(grammar: Grammar, text: str) -> engine_grammar.Matcher:
    """The matcher after `text`, each of whose tokens its mask allows."""
    (eos,) = tokenizer().encode("<|im_end|>")
    matcher = engine_grammar.make_matcher(grammar, engine_grammar.make_tokenizer(TINY / "tokenizer.json", 8192, [eos]))
    for token in tokenizer().encode(text):
        mask = matcher.mask()
        assert mask is not None and mask[token // 8] >> token % 8 & 1, matcher.error
        matcher.accept(token)
        assert matcher.error is None
    return matcher


def test_ten_thousand_choices_and_five_hundred_properties_can_be_said() -> None:
    choices = [f"choice {i}" for i in range(10_000)]
    assert walk(Grammar("choice", json.dumps(choices)), "choice 9999").finished
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}}
    assert walk(Grammar("json_schema", json.dumps(schema)), '{"p1":1,"p499": 5}').finished


def test_a_grammar_that_nothing_fits_says_so() -> None:
    (eos,) = tokenizer().encode("<|im_end|>")
    made = engine_grammar.make_tokenizer(TINY / "tokenizer.json", 8192, [eos])
    matcher = engine_grammar.make_matcher(Grammar("grammar", "start: x\nx: x"), made)
    assert matcher.mask() is None
    assert matcher.error == "The grammar cannot go on: nothing may follow what was said."


# The names of fields in the APIs that are translated


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
        (MESSAGES, {"stop_sequences": ["x"] * 65}, "stop_sequences"),
        (MESSAGES, {"tools": [{"type": "web_search"}, {"name": "a b", "input_schema": {}}]}, "tools[1].name"),
        (RESPONSES, {"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        (RESPONSES, {"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        (RESPONSES, {"input": [*HI, {"role": "user"}], "instructions": "i"}, "input[1].content"),
        (RESPONSES, {"input": [*HI, {"type": "function_call", "call_id": "c"}]}, "input[1].name"),
        (
            RESPONSES,
            {"input": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": ["b", {"type": "x"}]}]},
            "input[1].content[1]",
        ),
        (RESPONSES, {"input": [*HI, {"type": "function_call_output", "call_id": "c", "output": 3}]}, "input[1].output"),
    ],
)
def test_an_error_names_the_field_of_its_own_api(path: str, fields: dict[str, Any], place: str) -> None:
    base: dict[str, Any] = {"input": "x"} if path == RESPONSES else {"messages": HI, "max_tokens": 4}
    assert error_of(path, base | fields)["message"].startswith(f"'{place}'")


def test_items_after_a_stored_conversation_are_counted_from_the_body_s_own() -> None:
    async def run() -> None:
        async with client_of(saying(SAID)) as client:
            id = (await client.post(RESPONSES, json={"input": [*HI, *HI, *HI]})).json()["id"]
            for item, place in (({"type": "zzz"}, "input[1].type"), ({"role": "king"}, "input[1].role")):
                body = {"input": [*HI, item], "previous_response_id": id}
                assert (await client.post(RESPONSES, json=body)).json()["error"]["param"] == place

    asyncio.run(run())


def test_the_beginning_of_an_answer_is_gone_on_from_in_the_messages_api() -> None:
    begun = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "The answer is "}]}]
    engine = saying("42.")
    assert post(engine, MESSAGES, {"messages": begun, "max_tokens": 9}).json()["content"][0]["text"] == "42."
    assert tokenizer().decode(engine.requests[0].prompt).endswith("</think>\n\nThe answer is")
    counted = post(engine, MESSAGES + "/count_tokens", {"messages": begun}).json()["input_tokens"]
    assert counted == len(engine.requests[0].prompt)


def test_values_are_counted_in_front_of_another_server_too() -> None:
    async def run() -> None:
        app = create_upstream_app("http://127.0.0.1:9")
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
                body = b'{"prompt":[' + b"5," * 1_100_000 + b"5]}"
                assert (await client.post(COMPLETE, content=body)).status_code == 413

    asyncio.run(run())
