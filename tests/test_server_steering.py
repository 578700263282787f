"""Answers that are made to do something: tool_choice, one call at most, a thinking budget; whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import engine_of, events, post, tokenizer

from onebox.request import Request
from onebox.testing import FakeEngine

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
    for name in ("first", "second")
]
THINKING = "I think a lot about it"
REST = "<parameter=x>\n4\n</parameter>\n</function>\n</tool_call>"


def obliging(after_think: str = "plain answer", *, closes: bool = True, **options: Any) -> FakeEngine:
    """Thinks, then answers in text, or with the call that its grammar asks for."""

    def script(request: Request) -> list[int]:
        nonlocal after_think
        tail = tokenizer().decode(request.prompt).rpartition("<|im_start|>assistant\n")[2]
        if request.grammar is not None:
            name = "second" if '"first>' not in request.grammar.source else "first"
            after_think = f"<tool_call>\n<function={name}>\n" + REST
        if "</think>" in tail:
            return tokenizer().encode(after_think)
        return tokenizer().encode(f"{THINKING}\n</think>\n\n{after_think}" if closes else f"{THINKING} {THINKING}")

    return engine_of(script, **options)


def ask(engine: FakeEngine, *, stream: bool, **body: Any) -> dict[str, Any]:
    """reasoning, content, calls, finish and usage of one answer, however it was transported."""
    body = {"messages": HI, "stream": stream, "stream_options": {"include_usage": True} if stream else None, **body}
    response = post(engine, CHAT, body)
    assert response.status_code == 200, response.text
    if not stream:
        choice = response.json()["choices"][0]
        message = choice["message"]
        calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
        usage = response.json()["usage"]
        return {
            "reasoning": message.get("reasoning", ""),
            "content": message["content"] or "",
            "calls": calls,
            "finish": choice["finish_reason"],
            "usage": usage,
        }
    got: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "finish": None}
    for chunk in events(response):
        got["usage"] = chunk["usage"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            got["reasoning"] += delta.get("reasoning", "")
            got["content"] += delta.get("content", "")
            got["finish"] = choice["finish_reason"] or got["finish"]
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    got["calls"].append([call["function"]["name"], ""])
                got["calls"][call["index"]][1] += call["function"]["arguments"]
    got["calls"] = [(name, json.loads(arguments)) for name, arguments in got["calls"]]
    return got


both = pytest.mark.parametrize("stream", [False, True])
steps = pytest.mark.parametrize("tokens_per_step", [1, 4])


@both
@steps
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("choice", ["auto", "none", "required", "named"])
def test_tool_choice_is_kept(stream: bool, tokens_per_step: int, thinking: bool, choice: str) -> None:
    tool_choice = {"type": "function", "function": {"name": "second"}} if choice == "named" else choice
    engine = obliging(tokens_per_step=tokens_per_step)
    options = {"enable_thinking": thinking}
    got = ask(engine, stream=stream, tools=TOOLS, tool_choice=tool_choice, chat_template_kwargs=options)
    assert got["reasoning"] == (THINKING if thinking else "")
    if choice in ("auto", "none"):
        assert (got["content"], got["calls"], got["finish"]) == ("plain answer", [], "stop")
    else:
        ((name, arguments),) = got["calls"]
        assert name == "second" if choice == "named" else name in ("first", "second")
        assert arguments == {"x": 4}
        assert (got["content"], got["finish"]) == ("", "tool_calls")
    left_to_it = "none" if choice == "none" else "auto"
    plain = ask(obliging(), stream=stream, tools=TOOLS, tool_choice=left_to_it, chat_template_kwargs=options)
    assert got["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


@both
@steps
@pytest.mark.parametrize("budget", [0, 1, 3, 1000])
def test_a_thinking_budget_closes_cleanly(stream: bool, tokens_per_step: int, budget: int) -> None:
    got = ask(obliging(tokens_per_step=tokens_per_step), stream=stream, thinking_token_budget=budget)
    kept = tokenizer().decode(tokenizer().encode(THINKING)[:budget])
    assert got["reasoning"] == (kept if budget < 1000 else THINKING)
    assert (got["content"], got["finish"]) == ("plain answer", "stop")


@both
def test_a_budget_and_max_tokens_end_where_max_tokens_says(stream: bool) -> None:
    for max_tokens in range(1, 12):
        got = ask(obliging(), stream=stream, thinking_token_budget=3, max_tokens=max_tokens)
        total = len(tokenizer().encode("I think a\n</think>\n\nplain answer"))
        assert got["usage"]["completion_tokens"] == min(max_tokens, total)
        assert got["finish"] == ("length" if max_tokens <= total else "stop")


@both
def test_one_call_at_most_when_parallel_calls_are_off(stream: bool) -> None:
    call = "<tool_call>\n<function=first>\n" + REST
    engine = obliging(call + "\n" + call)
    got = ask(engine, stream=stream, tools=TOOLS, parallel_tool_calls=False)
    assert (got["calls"], got["finish"]) == ([("first", {"x": 4})], "tool_calls")
    assert len(ask(obliging(call + "\n" + call), stream=stream, tools=TOOLS)["calls"]) == 2


def test_logprobs_still_pair_with_tokens_when_tokens_are_put_in() -> None:
    body = {"messages": HI, "thinking_token_budget": 3, "logprobs": True, "return_token_ids": True}
    choice = post(obliging(tokens_per_step=3), CHAT, body).json()["choices"][0]
    text = b"".join(bytes(e["bytes"]) for e in choice["logprobs"]["content"]).decode()
    assert text == tokenizer().decode(choice["token_ids"])
    assert text == "I think a\n</think>\n\nplain answer"


@pytest.mark.parametrize(
    "choice", [{"type": "function", "function": {"name": "third"}}, {"function": 3}, {"type": "function"}]
)
def test_a_choice_that_is_no_tool_is_refused(choice: Any) -> None:
    response = post(obliging(), CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": choice})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")
    response = post(obliging(), CHAT, {"messages": HI, "tool_choice": "required"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")
