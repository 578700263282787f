"""Structured output and forced tool calls over HTTP, from the bundled model at temperature 1 with three drafts a step.

The model is small and was never taught these schemas: what is valid is so because of the mask.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from serving import TINY, engine_of, post, running, saying, tokenizer

from onebox.config import EngineConfig
from onebox.engine.thread import ThreadEngine
from onebox.request import Grammar, Request
from onebox.server.app import create_app

CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "Hello"}]
CLOSED = {"enable_thinking": False}


class Address(BaseModel):
    model_config = ConfigDict(extra="forbid")
    zip: str = Field(pattern="^[0-9]{5}$")
    country: Literal["de", "fr"]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    age: int = Field(ge=0, le=120)
    address: Address
    tags: list[Literal["a", "b"]] = Field(max_length=2)
    note: str | None = Field(max_length=6)


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "place",
            "parameters": {
                "type": "object",
                "properties": {
                    "n": {"type": "integer", "minimum": 1, "maximum": 50},
                    "unit": {"enum": ["m", "km"]},
                    "at": {"$ref": "#/$defs/point"},
                    "on": {"type": ["boolean", "null"]},
                },
                "required": ["n", "unit", "at"],
                "$defs": {
                    "point": {
                        "type": "array",
                        "items": {"type": "integer", "minimum": 0, "maximum": 9},
                        "minItems": 2,
                        "maxItems": 2,
                    }
                },
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = ThreadEngine(EngineConfig(str(TINY), device="cpu", max_num_seqs=8, max_model_len=2048, draft_len=3))
    app = create_app(engine, tokenizer=tokenizer(), served_names=["tiny"], defaults={"temperature": 1.0}, drain_s=5)
    with running(app) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(body: dict[str, Any], path: str = CHAT) -> Grammar | None:
    """The grammar of the engine request that a body becomes."""
    engine = saying("x")
    response = post(engine, path, {"messages": HI, **body})
    assert response.status_code == 200, response.text
    return engine.requests[0].grammar


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
THINK_END = tuple(tokenizer().encode("</think>"))


@pytest.mark.parametrize(
    ("body", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_json": '{"type": "integer"}'}, "json_schema", '{"type": "integer"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
    ],
)
def test_every_field_becomes_the_engines_grammar(body: dict[str, Any], kind: Any, source: str) -> None:
    assert asked(body) == Grammar(kind, source, THINK_END)
    assert asked({**body, "chat_template_kwargs": CLOSED}) == Grammar(kind, source)
    engine = saying("x")
    assert post(engine, "/v1/completions", {"prompt": "x", **body}).status_code == 200
    assert engine.requests[0].grammar == Grammar(kind, source)


def test_the_other_apis_fields_become_the_same_grammar() -> None:
    want = Grammar("json_schema", json.dumps(SCHEMA))
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    engine = saying("{}")
    body = {"input": "x", "text": {"format": form}, "chat_template_kwargs": CLOSED}
    response = post(engine, "/v1/responses", body).json()
    assert engine.requests[0].grammar == want
    assert response["text"]["format"] == form
    for fields in (
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ):
        assert asked({"max_tokens": 5, **fields}, "/v1/messages") == want


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"guided_grammar": 'start: "a"', "tools": TOOLS}, "tools"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    response = post(saying("x"), CHAT, {"messages": HI, **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_closed_budget_leaves_the_constraint_to_begin_at_once() -> None:
    def script(request: Request) -> list[int]:
        return tokenizer().encode("and so on" if request.grammar and request.grammar.start_after else "7")

    engine = engine_of(script)
    body = {"messages": HI, "guided_regex": "[0-9]", "thinking_token_budget": 2}
    message = post(engine, CHAT, body).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("and so", "7")
    assert [r.grammar and r.grammar.start_after for r in engine.requests] == [THINK_END, None]


def in_letters(text: str) -> list[int]:
    """Ids of a text whose tags are spelled by ordinary tokens."""
    return [t for part in re.split("(?<=<)", text) for t in tokenizer().encode(part)]


CALLS = (
    "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    '<tool_call>{"name": "stop", "arguments": {}}</tool_call>',
)


@pytest.mark.parametrize("text", [*CALLS, '["<function=stop>\n</function>\n</tool_call>"]', '"' + CALLS[0] + '"'])
@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize("stop", [None, "\n</think>!", "<tool_call>?"])
def test_a_constrained_answer_that_spells_a_call_in_letters_is_text(
    text: str, tokens_per_step: int, think: bool, stop: str | None
) -> None:
    def ask(ids: list[int]) -> Any:
        before = tokenizer().encode(f"I may {CALLS[0]} later\n</think>\n\n") if think else []
        body = {"messages": HI, "tools": TOOLS, "guided_choice": [text], "stop": stop}
        body |= {} if think else {"chat_template_kwargs": CLOSED}
        engine = engine_of(before + ids, tokens_per_step=tokens_per_step)
        return post(engine, CHAT, body).json()["choices"][0]

    assert tokenizer().decode(in_letters(text)) == text
    said = ask(in_letters(text))
    assert (said["message"]["content"], said["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in said["message"]
    assert said["message"].get("reasoning") == (f"I may {CALLS[0]} later" if think else None)
    if text in CALLS:
        called = ask(tokenizer().encode(text))
        assert called["message"]["tool_calls"][0]["function"] == {"name": "stop", "arguments": "{}"}
        assert called["finish_reason"] == "tool_calls"


def test_thinking_that_breaks_off_inside_a_call_does_not_swallow_a_constrained_answer() -> None:
    broken = "<tool_call>\n<function=place>\n<parameter=unit>\nm</think>\n\n7"
    body = {"messages": HI, "tools": TOOLS, "guided_regex": "[0-9]"}
    message = post(saying(broken), CHAT, body).json()["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == ("7", None)
    assert message["reasoning"] == broken.partition("</think>")[0]


@pytest.mark.parametrize("value", ["a</parameter>", "</function>"])
def test_a_value_that_would_close_its_own_call_is_refused_by_name(value: str) -> None:
    function = {"name": "mark", "parameters": {"type": "object", "properties": {"tag": {"enum": ["b", value]}}}}
    body = {"messages": HI, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    response = post(saying("x"), CHAT, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "'tag' of function 'mark'" in response.json()["error"]["message"]


# The bundled model


@pytest.mark.parametrize("think", [False, True])
def test_the_openai_client_parses_a_pydantic_model(client: openai.OpenAI, think: bool) -> None:
    extra = {"thinking_token_budget": 10} if think else {"chat_template_kwargs": CLOSED}
    for seed in range(2):
        answer = client.chat.completions.parse(
            model="tiny", messages=HI, response_format=Person, max_tokens=300, seed=seed, extra_body=extra
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
        assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(
        model="tiny", messages=HI, response_format=Person, max_tokens=300, seed=1, extra_body=extra
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_the_responses_and_anthropic_clients_get_their_schema(url: str, client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="tiny",
        input="Hello",
        text_format=Person,
        max_output_tokens=300,
        extra_body={"chat_template_kwargs": CLOSED},
    )
    assert isinstance(parsed.output_parsed, Person)
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
        message = claude.messages.create(
            model="tiny",
            max_tokens=300,
            messages=HI,
            output_config={"format": {"type": "json_schema", "schema": Person.model_json_schema()}},
        )
    assert message.content[0].type == "text"
    Person.model_validate_json(message.content[0].text)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 30.0, 100.0])
@pytest.mark.parametrize("choice", ["required", "place"])
def test_a_forced_call_is_made_and_typed_at_any_temperature(
    client: openai.OpenAI, temperature: float, choice: str
) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=HI,
        tools=TOOLS,
        tool_choice="required" if choice == "required" else {"type": "function", "function": {"name": choice}},
        temperature=temperature,
        extra_body={"repetition_penalty": 1.3, "thinking_token_budget": 4, "temperature": temperature},
        presence_penalty=1.0,
        parallel_tool_calls=False,
        max_tokens=200,
        seed=3,
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "stop":
        assert choice == "required" and arguments == {}
        return
    assert {"n", "unit", "at"} <= set(arguments) <= {"n", "unit", "at", "on"}
    assert 1 <= arguments["n"] <= 50 and arguments["unit"] in ("m", "km")
    assert len(arguments["at"]) == 2 and all(isinstance(i, int) for i in arguments["at"])
    assert arguments.get("on") in (True, False, None)


def test_a_schema_beside_tools_gives_one_or_the_other(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema()}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model="tiny",
            messages=HI,
            tools=TOOLS,
            response_format=form,
            seed=seed,
            max_tokens=300,
            parallel_tool_calls=False,
            extra_body={"chat_template_kwargs": CLOSED},
        )
        message = answer.choices[0].message
        if message.tool_calls:
            assert message.tool_calls[0].type == "function"
            assert message.tool_calls[0].function.name in ("place", "stop")
        else:
            Person.model_validate_json(message.content or "")


def test_different_grammars_and_none_at_once(client: openai.OpenAI) -> None:
    def ask(extra: dict[str, Any]) -> str:
        body = {"chat_template_kwargs": CLOSED, **extra}
        answer = client.chat.completions.create(model="tiny", messages=HI, max_tokens=40, seed=9, extra_body=body)
        return answer.choices[0].message.content or ""

    bodies: list[dict[str, Any]] = [
        {"guided_regex": "[a-f]{4}-[0-9]{2}"},
        {},
        {"structured_outputs": {"choice": ["north", "south"]}},
        {"guided_grammar": 'root ::= "x=" [0-9] | "y=" [a-z]'},
        {"guided_json": {"enum": [1, "two", None]}},
        {"guided_regex": "("},
    ]
    alone = ask({})
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(ask, body) for body in bodies]
    with pytest.raises(openai.BadRequestError, match="regular expression"):
        futures[5].result()
    regex, free, choice, grammar, value = (f.result() for f in futures[:5])
    assert re.fullmatch("[a-f]{4}-[0-9]{2}", regex)
    assert free == alone
    assert choice in ("north", "south")
    assert re.fullmatch("x=[0-9]|y=[a-z]", grammar)
    assert json.loads(value) in (1, "two", None)


NOT: Any = {"not": {"type": "string"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HI, "guided_regex": "("}, "guided_regex"),
        (CHAT, {"messages": HI, "structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs.regex"),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": NOT}}},
            "response_format",
        ),
        (
            CHAT,
            {
                "messages": HI,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": NOT}}}}],
                "tool_choice": "required",
            },
            None,  # lenient: what cannot be held to is left free
        ),
        ("/v1/completions", {"prompt": "x", "guided_grammar": "start: gone"}, "guided_grammar"),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": NOT}}},
            "text.format",
        ),
    ],
)
def test_a_fault_in_a_grammar_is_400_and_names_its_field(
    url: str, path: str, body: dict[str, Any], param: str | None, stream: bool
) -> None:
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    response = httpx.post(f"{url}{path}", json={**body, limit: 8, "stream": stream}, timeout=60)
    if param is None:
        assert response.status_code == 200
        return
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_enums_and_choices_that_spell_a_tag_are_said(client: openai.OpenAI) -> None:
    for extra in (
        {"guided_choice": ["<tool_call>"], "chat_template_kwargs": CLOSED},
        {"guided_json": {"enum": ["<tool_call>"]}, "thinking_token_budget": 3},
    ):
        answer = client.chat.completions.create(model="tiny", messages=HI, max_tokens=60, extra_body=extra)
        assert answer.choices[0].message.content in ("<tool_call>", '"<tool_call>"')
        assert answer.choices[0].finish_reason == "stop"
    modes = {"type": "object", "properties": {"tag": {"enum": ["</think>", "<tool_call>"]}}, "required": ["tag"]}
    answer = client.chat.completions.create(
        model="tiny",
        messages=HI,
        tools=[{"type": "function", "function": {"name": "mark", "parameters": modes}}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
        extra_body={"chat_template_kwargs": CLOSED},
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["tag"] in ("</think>", "<tool_call>")


def test_a_stop_string_ends_even_a_constrained_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=HI,
        stop="-",
        extra_body={"guided_regex": "[a-f]{4}-[0-9]{2}", "chat_template_kwargs": CLOSED},
    )
    assert re.fullmatch("[a-f]{4}", answer.choices[0].message.content or "")


def valid_answers(client: openai.OpenAI, n: int) -> int:
    """How many of `n` answers to five schemas, temperature 1, thinking on, fit theirs."""
    models: list[type[BaseModel]] = [Person, Address]

    def ask(seed: int) -> bool:
        model = models[seed % len(models)]
        form: Any = {"type": "json_schema", "json_schema": {"name": "m", "schema": model.model_json_schema()}}
        answer = client.chat.completions.create(
            model="tiny",
            messages=HI,
            response_format=form,
            seed=seed,
            temperature=1.0,
            max_tokens=400,
            # half of them close their thinking by themselves, wherever that lands in a window
            extra_body={"thinking_token_budget": 8} if seed % 4 < 2 else {"logit_bias": {str(THINK_END[0]): 9}},
        )
        try:
            model.model_validate_json(answer.choices[0].message.content or "")
        except ValueError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(ask, range(n)))


def test_20_of_20_answers_after_thinking_fit_their_schema(client: openai.OpenAI) -> None:
    assert valid_answers(client, 20) == 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_200_of_200_answers_after_thinking_fit_their_schema(client: openai.OpenAI) -> None:
    assert valid_answers(client, 200) == 200
