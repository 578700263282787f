"""Programs that people put in front of a server: their clients, and bodies in the shapes that agents send."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
from serving import app_of, engine_of, events, post, running, saying, tokenizer

from onebox.testing import FakeEngine

CALL = (
    "I should look.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


def prompts_of(engine: FakeEngine) -> list[str]:
    return [tokenizer().decode(r.prompt) for r in engine.requests]


def langchain_model(url: str, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", max_retries=0, **options)


def test_langchain_answers_whole_and_streamed_with_usage() -> None:
    with running(app_of(saying("hm\n</think>\n\nHello there.", tokens_per_step=2))) as url:
        model = langchain_model(url, stream_usage=True)
        whole = model.invoke([("system", "Be brief."), ("human", "Hi")])
        assert whole.content == "Hello there."
        assert whole.usage_metadata["output_tokens"] == len(tokenizer().encode("hm\n</think>\n\nHello there."))
        parts = list(model.stream("Hi"))
        assert "".join(part.content for part in parts) == "Hello there."
        assert len(parts) > 2
        assert sum((part.usage_metadata or {}).get("total_tokens", 0) for part in parts) > 0


def test_langchain_calls_tools_and_reads_their_results() -> None:
    def weather(city: str, days: int) -> str:
        """The weather of a city."""
        return f"{city}: rain for {days} days"

    answers = iter([CALL, CALL, "It will rain.\n</think>\n\nRain."])
    engine = engine_of(lambda _: tokenizer().encode(next(answers)))
    with running(app_of(engine)) as url:
        model = langchain_model(url).bind_tools([weather])
        whole = model.invoke("Weather?")
        assert [(c["name"], c["args"]) for c in whole.tool_calls] == [("weather", {"city": "Köln", "days": 3})]
        streamed = None
        for part in model.stream("Weather?"):
            streamed = part if streamed is None else streamed + part
        assert streamed is not None
        assert streamed.tool_calls[0]["args"] == whole.tool_calls[0]["args"]
        result = {"role": "tool", "tool_call_id": whole.tool_calls[0]["id"], "content": weather("Köln", 3)}
        assert model.invoke([("human", "Weather?"), whole, result]).content == "Rain."
    assert "Köln: rain for 3 days" in prompts_of(engine)[-1]


LITELLM = """
import asyncio, json, os, sys
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
url, tools = sys.argv[1], json.loads(sys.argv[2])
ask = dict(model="hosted_vllm/tiny", api_base=f"{url}/v1", api_key="none", messages=[{"role": "user", "content": "Hi"}])
whole = litellm.completion(**ask)
message = whole.choices[0].message
parts = list(litellm.completion(**ask, stream=True))
text = "".join(p.choices[0].delta.content or "" for p in parts)
thought = "".join(getattr(p.choices[0].delta, "reasoning_content", None) or "" for p in parts)
call = litellm.completion(**ask, tools=tools).choices[0].message.tool_calls[0].function
errors = []
try:
    litellm.completion(**{**ask, "model": "hosted_vllm/other"})
except Exception as e:
    errors.append(type(e).__name__)
print(json.dumps([message.content, message.reasoning_content, whole.usage.total_tokens > 0, text, thought,
                  call.name, json.loads(call.arguments), errors]))
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]


@pytest.mark.slow  # the package is 250 MB and takes seconds to import: extra `clients`
@pytest.mark.skipif(find_spec("litellm") is None, reason="needs pip install 'onebox[clients]'")
def test_litellm_answers_thinks_streams_calls_and_maps_errors() -> None:
    answers = iter(["hm\n</think>\n\nHello.", "hm\n</think>\n\nHello.", CALL])
    with running(app_of(engine_of(lambda _: tokenizer().encode(next(answers))))) as url:
        command = [sys.executable, "-c", LITELLM, url, json.dumps(TOOLS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    want = ["Hello.", "hm", True, "Hello.", "hm", "weather", {"city": "Köln", "days": 3}, ["NotFoundError"]]
    assert json.loads(done.stdout.splitlines()[-1]) == want


# Bodies in the shapes that agents send: fields, roles, part types and tools as theirs, words our own.

SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
CODEX = {
    "model": "tiny",
    "instructions": "You are a coding agent running in a terminal.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox: read-only"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/repo</cwd>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Use the shell."}],
            "content": None,
            "encrypted_content": None,
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "shell",
            "arguments": '{"command":["ls"],"workdir":"/repo"}',
        },
        {"type": "function_call_output", "call_id": "call_1", "output": '{"output":"a.py","metadata":{"exit_code":0}}'},
    ],
    "tools": [
        SHELL,
        {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"type": "grammar"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__docs", "tools": []},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-aaaa",
    "text": {"verbosity": "medium"},
    "client_metadata": {"session": "1"},
}
CLAUDE_CODE = {
    "model": "tiny",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.0; cch=12ab;"},
        {"type": "text", "text": "You are a command-line agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>notes</system-reminder>"}]},
        {"role": "user", "content": [{"type": "text", "text": "Fix it.", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Read the file.", "signature": "abc"},
                {"type": "text", "text": "I will look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/a.py"}},
            ],
        },
        {"role": "system", "content": "The user has opened another file."},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "is_error": False,
                    "content": [{"type": "text", "text": "print(1)"}],
                }
            ],
        },
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Reads.",
            "input_schema": {"type": "object", "properties": {"file_path": {"type": "string"}}},
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "metadata": {"user_id": "user_1_account__session_2"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "temperature": 1,
    "stream": True,
}
OPEN_WEBUI = {
    "stream": True,
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Answer in German."},
        {"role": "user", "content": "Hallo"},
        {"role": "assistant", "content": "Hallo!", "reasoning_content": "A greeting."},
        {"role": "user", "content": [{"type": "text", "text": "Wie geht's?"}]},
    ],
    "params": {},
    "features": {"web_search": False, "image_generation": False},
    "chat_id": "0a1b",
    "session_id": "s",
    "id": "m",
    "background_tasks": {"title_generation": True},
    "stream_options": {"include_usage": True},
}
AIDER = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Act as an expert developer. Use SEARCH/REPLACE blocks."},
        {"role": "user", "content": "I have *added these files to the chat*:\n\na.py\n```\nprint(1)\n```\n"},
        {"role": "assistant", "content": "Ok, any changes I propose will be to those files."},
        {"role": "user", "content": "Print 2."},
        {"role": "system", "content": "Every block must use the file's name."},
    ],
    "temperature": 0,
    "stream": True,
    "extra_headers": {"X-Title": "Aider"},
}
OPENCODE = {
    "model": "tiny",
    "max_tokens": 32000,
    "temperature": 0.55,
    "top_p": 1,
    "messages": [
        {"role": "system", "content": "You are a terminal agent."},
        {"role": "system", "content": "<env>linux</env>"},
        {"role": "user", "content": [{"type": "text", "text": "What is in here?"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "List it.",
            "tool_calls": [
                {"id": "call_9", "type": "function", "function": {"name": "list", "arguments": '{"path":"."}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_9", "content": "a.py"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "list",
                "description": "Lists.",
                "parameters": {
                    "$schema": "http://json-schema.org/draft-07/schema#",
                    "type": "object",
                    "properties": {"path": {"type": "string"}},
                    "additionalProperties": False,
                },
            },
        }
    ],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
    "reasoning_effort": "medium",
}
SHAPES = [
    pytest.param("/v1/responses", CODEX, ["coding agent", "sandbox: read-only", "Use the shell.", "a.py"], id="codex"),
    pytest.param("/v1/messages?beta=true", CLAUDE_CODE, ["opened another file", "print(1)"], id="claude-code"),
    pytest.param("/v1/chat/completions", OPEN_WEBUI, ["Answer in German.", "Wie geht's?"], id="open-webui"),
    pytest.param("/v1/chat/completions", AIDER, ["SEARCH/REPLACE", "use the file's name"], id="aider"),
    pytest.param("/v1/chat/completions", OPENCODE, ["terminal agent", "<env>linux</env>", "a.py"], id="opencode"),
]


@pytest.mark.parametrize(("path", "body", "shown"), SHAPES)
def test_bodies_of_agents_are_answered_and_the_model_sees_what_they_say(
    path: str, body: dict[str, Any], shown: list[str]
) -> None:
    engine = saying("I see.\n</think>\n\nDone.", tokens_per_step=50)
    answer = post(engine, path, body)
    assert answer.status_code == 200, answer.text
    (prompt,) = prompts_of(engine)
    for text in shown:
        assert text in prompt
    assert prompt.count("<|im_start|>system") == 1
    assert "Done." in answer.text
    if path.endswith("completions"):
        assert events(answer)[-1]["choices"] == [] or events(answer)[-1]["choices"][0]["finish_reason"] == "stop"


def next_turn(body: dict[str, Any]) -> dict[str, Any]:
    """What the agent sends next: a further call and its result, or a word of the user where it has no tools."""
    if body is CODEX:
        call = {"type": "function_call", "call_id": "call_2", "name": "shell", "arguments": '{"command":["pwd"]}'}
        result = {"type": "function_call_output", "call_id": "call_2", "output": "/repo"}
        return {**body, "input": [*body["input"], call, result]}
    if body is CLAUDE_CODE:
        use = {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"file_path": "/b.py"}}
        told = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "print(2)"}
        more = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [told]}]
        billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.0; cch=99ff;"}
        return {**body, "messages": [*body["messages"], *more], "system": [billing, *body["system"][1:]]}
    if body is OPENCODE:
        function = {"name": "list", "arguments": '{"path":"src"}'}
        called = {"role": "assistant", "tool_calls": [{"id": "call_10", "type": "function", "function": function}]}
        more = [called, {"role": "tool", "tool_call_id": "call_10", "content": "b.py"}]
    else:
        more = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Go on."}]
    return {**body, "messages": [*body["messages"], *more]}


@pytest.mark.parametrize(("path", "body", "_shown"), SHAPES)
def test_an_agent_s_next_turn_goes_on_from_the_prompt_of_the_last(
    path: str, body: dict[str, Any], _shown: list[str]
) -> None:
    engine = saying("I see.\n</think>\n\nDone.")
    for turn in (body, next_turn(body)):
        assert post(engine, path, turn).status_code == 200
    first, second = prompts_of(engine)
    assert second.startswith(first[: first.rindex("<|im_start|>assistant")])


def test_claude_code_counts_the_same_tokens_that_it_is_answered_with() -> None:
    engine = saying("I see.\n</think>\n\nDone.")
    counted = {k: CLAUDE_CODE[k] for k in ("model", "system", "messages", "tools", "thinking")}
    tokens = post(engine, "/v1/messages/count_tokens?beta=true", counted).json()["input_tokens"]
    post(engine, "/v1/messages?beta=true", CLAUDE_CODE)
    assert len(engine.requests[0].prompt) == tokens
