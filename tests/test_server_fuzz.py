"""Bodies nobody would send: every answer is a 200 or a 4xx with a message, never a 5xx."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from pathlib import Path
from typing import Any

import pytest
from serving import client_of, saying
from test_server_intake import in_place  # noqa: F401  # compression and guard in place: a process each is slow

from onebox.prompt.security import Guard, PhraseDetector
from onebox.server import app as server_app
from onebox.server import intake

SCALARS = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**70,
    -(2**66),
    1.5,
    float("nan"),
    float("inf"),
    -1e308,
    "",
    "auto",
    "function",
]
SCALARS += ["function", "text", "user", "assistant", "tool", "required", "enabled", "\ud800", "xyz"]
KEYS = ["type", "text", "role", "content", "name", "function", "arguments", "parameters", "tool_calls", "id", "input"]
CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "ok", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    "tool_choice": "auto",
    "max_tokens": 8,
    "stop": ["x"],
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"enable_thinking": True},
    "logit_bias": {"5": 1},
    "n": 1,
    "seed": 1,
    "temperature": 1.0,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": True,
    "compress": {"rate": 0.5, "roles": {"user": "compress"}, "question": "q"},
    "guard": "flag",
    "thinking_token_budget": 3,
    "continue_final_message": False,
}
ANTHROPIC = {
    "max_tokens": 8,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 4},
}
RESPONSES = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": "auto",
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}},
    "max_output_tokens": 8,
}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a", "max_tokens": 8, "logprobs": 1, "echo": False, "n": 2, "stop": "x"},
    "/v1/messages": ANTHROPIC,
    "/v1/messages/count_tokens": {k: v for k, v in ANTHROPIC.items() if k != "max_tokens"},
    "/v1/responses": RESPONSES,
    "/v1/compress": {"messages": CHAT["messages"], "rate": 0.5, "method": "auto", "question": "q"},
    "/v1/guard": {"messages": CHAT["messages"], "policy": "flag"},
    "/tokenize": {"messages": CHAT["messages"], "tools": CHAT["tools"]},
    "/detokenize": {"tokens": [5, 6]},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, by the keys that lead there."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random() if depth < 3 else 1
    if kind < 0.25:
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if kind < 0.5:
        return {rng.choice(KEYS): random_value(rng, depth + 1) for _ in range(rng.randint(0, 4))}
    return rng.choice(SCALARS)


def mutated(rng: random.Random) -> tuple[str, bytes]:
    path = rng.choice(sorted(BODIES))
    body = BODIES[path]
    for _ in range(rng.randint(1, 3)):
        body = replaced(body, rng.choice(places(body)), random_value(rng))
    data = json.dumps(body).encode()
    if rng.random() < 0.1:
        cut = rng.randrange(len(data) + 1)
        data = data[:cut] + rng.randbytes(rng.randint(0, 3)) + data[cut + 1 :]
    return path, data


def resident_kb() -> int:
    """Memory of this process, in kB."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


@pytest.mark.parametrize(("seed", "n"), [(1, 1500), pytest.param(2, 10_000, marks=pytest.mark.slow)])
def test_no_body_gets_a_5xx(seed: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # the guard's phrases in place of its trained head, which takes longer than all the rest
    monkeypatch.setattr(intake, "guard_of", lambda policy: Guard(policy, detector=PhraseDetector()))

    async def run() -> None:
        rng, engine, refused = random.Random(seed), saying("hm\n</think>\n\nok"), 0
        async with client_of(engine, drain_s=1) as client:
            warm_kb = 0
            for i in range(n):
                if i == n // 3:
                    warm_kb = resident_kb()
                path, data = mutated(rng)
                response = await client.post(path, content=data)
                assert response.status_code in (200, 400, 404), (path, data, response.text)
                assert '"internal_error"' not in response.text, (path, data)  # in a stream, whose status is 200
                if response.status_code != 200:
                    refused += 1
                    assert response.json()["error"]["message"]
            assert resident_kb() < 1.05 * warm_kb + 4000  # traces and stored responses are kept, within bounds
            assert engine.stats().running == 0
        assert n / 4 < refused < n

    asyncio.run(run())


WRONG: list[Any] = [{"x": 1}, "\ud800", [None], 2**70, float("nan"), True]
MORE: list[Any] = [
    0,
    -1,
    1.5,
    float("-inf"),
    "",
    "x",
    [],
    [[]],
    ["x"],
    [0],
    {},
    {"type": "x"},
    {"type": None, "text": 3},
]


def wrong_bodies(path: str, values: list[Any]) -> list[tuple[str, bytes]]:
    """For each field of a body, known, refused or without effect, and each place in it: one wrong value a body."""
    kind, base = (
        server_app.BODIES[path],
        {k: v for k, v in BODIES[path].items() if k not in ("stream", "stream_options")},
    )
    known = {info.alias or name for name, info in kind.model_fields.items()} - {"stream"}
    known |= set(getattr(kind, "refused", ())) | set(getattr(kind, "without_effect", ()))
    inside = [(place[0], replaced(base, place, v)) for place in places(base) if len(place) > 1 for v in values]
    made = [*((name, {**base, name: v}) for name in sorted(known) for v in values), *inside]
    return [(name, json.dumps(body).encode()) for name, body in made]


@pytest.mark.parametrize("values", [WRONG, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize("path", BODIES)
def test_a_wrong_value_in_any_field_is_served_or_400_and_named(
    path: str, values: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "guard_of", lambda policy: Guard(policy, detector=PhraseDetector()))

    async def run() -> int:
        refused = 0
        async with client_of(saying("hm\n</think>\n\nok"), drain_s=1) as client:
            for name, data in wrong_bodies(path, values):
                response = await client.post(path, content=data)
                assert response.status_code in (200, 400, 404), (data, response.text)
                if response.status_code != 200:
                    refused += 1
                    error = response.json()["error"]
                    assert 0 < len(error["message"]) < 600 and "\n" not in error["message"]
                    told = f"{error.get('param')} {error['message']}"
                    # a text that is no UTF-8 is a fault of the whole body; a grammar may clash with another field
                    assert name in told or "not valid JSON" in told or "'tool_choice': 'none'" in told, (data, told)
        return refused

    assert asyncio.run(run()) > 10
