"""The fifteen scenarios that a server for these models should pass, over HTTP with the bundled model at tiny scale.

Where a scenario is shown elsewhere too, at greater length or closer to its cause:

 1. test_engine_prefix_real.py: page edges in any chunks, k from 0 to 4, seven others beside; test_engine_gpu.py
 2. test_engine_prefix_real.py: the first token of a repeated prompt of 4,000 tokens in a tenth of the time
 3. test_engine_prefix_real.py: twenty chats with a common head, prompts that part at 777
 4. test_engine_prefix_real.py, test_engine_simulation.py: 32 requests in a pool that evicts all the time
 5. test_engine_prefix_real.py: 30 turns to 6,000 tokens with aborts
 6. test_server_structured.py: 200 of 200; test_engine_grammar.py: the end of thinking at every place of a window
 7. test_parsers.py, test_parsers_windows.py: every cut of the text, every window
 8. test_server_steering.py: with steps of one and four tokens; test_server_structured.py: at any temperature
 9. test_parsers_windows.py: `</think>` cut at every token and character
10. test_server_agents.py: more shapes, and the turn after each
11. test_engine_process.py: `test_a_stopped_engine_is_not_ready_within_ten_seconds_fails_its_requests_and_comes_back`
12. test_server_app.py: before the first token, with n answers; test_server_hostile.py: connections that are reset
13. test_engine_engine.py: in the engine
14. test_checkpoint_reader.py, test_checkpoint_refusals.py: every layout, MTP heads outside the index, tensors by name
15. test_engine_plan.py: 24 to 141 GB and unified memory, max_num_seqs cut with one note, the host's floor kept

11, 14 and 15 are there alone. The self-check at the start, which stands beside them: test_model_selfcheck.py.
"""

from __future__ import annotations

import json
import random
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from serving import TINY, engine_of, events, post, running, tokenizer
from test_server_agents import CLAUDE_CODE, CODEX, OPENCODE, next_turn

from onebox.config import EngineConfig
from onebox.engine.thread import ThreadEngine
from onebox.server.app import create_app

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
CONTEXT = 1600
ESSAY = (
    "The harbour of a small town has a light, a crane and a wall of grey stone. Boats come in with the tide and go out "
    "with the next one. In winter nets are mended in a shed beside the wall, and in summer children fish from it. "
)


@dataclass(frozen=True)
class Served:
    """A server around an engine of its own, and its engine."""

    url: str
    engine: ThreadEngine

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = httpx.post(self.url + path, json=body, timeout=120)
        assert response.status_code == 200, response.text
        value: dict[str, Any] = response.json()
        return value

    def metric(self, name: str) -> float:
        """Sum of a metric's series; `name` may have labels."""
        text = httpx.get(self.url + "/metrics").text
        found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.M)
        assert found, name
        return sum(map(float, found))


@contextmanager
def served(**options: Any) -> Iterator[Served]:
    config = EngineConfig(str(TINY), device="cpu", **{"max_num_seqs": 8, "max_model_len": CONTEXT, **options})
    engine = ThreadEngine(config)
    app = create_app(engine, tokenizer=tokenizer(), served_names=["tiny"], defaults={"temperature": 0}, drain_s=5)
    with running(app) as url:
        yield Served(url, engine)


@pytest.fixture(scope="module")
def drafting() -> Iterator[Served]:
    """Three drafts a step, prefix cache, prompts in chunks."""
    with served(draft_len=3, max_num_batched_tokens=512) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    """What the others are held to: one token a step, nothing cached, prompts in one piece."""
    with served(draft_len=0, prefix_caching=False) as server:
        yield server


def ids(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 8000) for _ in range(n)]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_01_greedy_text_is_the_same_with_drafts_a_warm_cache_and_chunks_around_page_edges(
    drafting: Served, plain: Served
) -> None:
    asked = [{"prompt": ids(n, n), "max_tokens": 12, "ignore_eos": True} for n in (63, 64, 65, 128, 257)]

    def answers(server: Served) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(lambda body: server.post(TEXT, body), asked))

    want = [a["choices"][0]["text"] for a in answers(plain)]
    with served(draft_len=2, max_num_batched_tokens=100) as small:
        for server in (drafting, small):
            cold, warm = answers(server), answers(server)
            assert [a["choices"][0]["text"] for a in cold] == want
            assert [a["choices"][0]["text"] for a in warm] == want
            # below a page nothing is kept
            assert [cached(a) for a in warm[2:]] == [len(body["prompt"]) - 1 for body in asked[2:]]


def test_02_a_long_prompt_thrice_is_cached_has_its_first_token_soon_and_metrics_agree(drafting: Served) -> None:
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_cached_total")
    before = [drafting.metric(name) for name in names]
    body = {"prompt": ids(1500, 2), "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    firsts_s, hits = [], []
    for _ in range(3):
        begun_s = time.perf_counter()
        with httpx.stream("POST", drafting.url + TEXT, json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            rest = [next(lines)]
            firsts_s.append(time.perf_counter() - begun_s)
            rest += lines
        hits.append(json.loads(rest[-2].removeprefix("data: "))["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert hits[0] == 0 and min(hits[1:]) > 0.9 * 1500
    assert max(firsts_s[1:]) < 0.25 * firsts_s[0]
    after = [drafting.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4500, sum(hits), sum(hits)]


def test_03_a_head_of_900_tokens_is_shared_by_short_chats_up_to_where_they_part(drafting: Served) -> None:
    system = ESSAY * 14
    n = len(tokenizer().encode(system))
    assert 850 < n < 950

    def ask(head: str, question: str) -> int:
        body = {"messages": [{"role": "system", "content": head}, user(question)], "max_tokens": 4}
        return cached(drafting.post(CHAT, body))

    hits = [ask(system, f"What is {i} + {i}?") for i in range(4)]
    assert hits[0] == 0 and min(hits[1:]) > n
    # another head, the same to its middle: the third to part there finds all that is shared
    shared = len(tokenizer().encode(ESSAY * 6))
    parted = [ask(ESSAY * 6 + f"Number {i}. " + ESSAY * 6, "What is 2 + 3?") for i in (7, 8, 9)]
    assert parted[2] > shared - 8


@pytest.mark.slow
def test_04_twenty_six_at_once_in_a_pool_that_evicts_keep_their_text_and_their_drafts(drafting: Served) -> None:
    plan = httpx.get(drafting.url + "/v1/onebox/plan").json()
    page_gb = plan["bytes"]["kv_pages"] / plan["pages"] / 1e9
    bodies = [
        {"messages": [user(f"Story {i}: " + ESSAY * 4 + f"\nWhat is {i + 3} + {2 * i}?")], "max_tokens": 40}
        for i in range(26)
    ]
    alone = [drafting.post(CHAT, body)["choices"][0]["message"]["reasoning"] for body in bodies]
    with served(draft_len=3, kv_gb=24.5 * page_gb, max_model_len=512) as small:
        assert small.engine.stats().pages_total == 24
        with ThreadPoolExecutor(26) as pool:
            answers = list(pool.map(lambda body: small.post(CHAT, body), bodies))
        assert small.metric("onebox:prefix_evicted_pages_total") > 0
    assert [a["choices"][0]["message"]["reasoning"] for a in answers] == alone
    assert not any(loop in text for text in alone for loop in ("!!!!", "////"))
    tokens = sum(a["usage"]["completion_tokens"] for a in answers)
    kept = sum(a["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] for a in answers)
    assert tokens / (tokens - kept) > 1.5


@pytest.mark.parametrize("turns", [7, pytest.param(30, marks=pytest.mark.slow)])
def test_05_a_growing_chat_goes_on_from_what_it_had_though_every_third_answer_is_broken_off(
    drafting: Served, turns: int
) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": ESSAY * 2}]
    before = 0
    for turn in range(turns):
        messages.append(user(f"The boats of {turn} came late. What is {turn} + 11?"))
        body = {"messages": messages, "max_tokens": 16, "stream": True, "stream_options": {"include_usage": True}}
        body["stream_options"]["continuous_usage_stats"] = True
        text, usage = "", {}
        with httpx.stream("POST", drafting.url + CHAT, json=body, timeout=60) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk["usage"] or usage
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                if turn % 3 == 2 and usage.get("completion_tokens", 0) >= 6:
                    break
        # all of the last prompt; its answer's thinking is left out of the next one
        assert usage["prompt_tokens_details"]["cached_tokens"] >= before - 8, turn
        before = usage["prompt_tokens"]
        messages.append({"role": "assistant", "content": text})
    assert before > 20 * turns


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "</think>"]}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}


def valid(server: Served, i: int, temperature: float) -> bool:
    """Whether an answer after thinking fits the schema; every second one closes its thinking by itself."""
    body: dict[str, Any] = {
        "messages": [user(f"What is {i} + {i * 7 % 13}?")],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
        "temperature": temperature,
        "seed": i,
        "max_tokens": 400,
    }
    body |= {"thinking_token_budget": 5 + i % 7} if i % 2 else {"logit_bias": {str(THINK_END): 6}}
    answer = server.post(CHAT, body)["choices"][0]
    value = json.loads(answer["message"]["content"])
    return (
        answer["finish_reason"] == "stop"
        and set(value) == {"name", "count", "tags"}
        and isinstance(value["count"], int)
        and set(value["tags"]) <= {"red", "green", "</think>"}
        and len(value["tags"]) <= 3
        and len(value["name"]) <= 12
    )


(THINK_END,) = tokenizer().encode("</think>")


@pytest.mark.parametrize("n", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_06_strict_schemas_hold_after_thinking_with_three_drafts_greedy_and_not(drafting: Served, n: int) -> None:
    asked = [(i, temperature) for temperature in (0.0, 1.0) for i in range(n)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda each: valid(drafting, *each), asked))


VALUES: dict[str, Any] = {
    "path": "  leading and trailing  ",
    "text": 'line\n\n\ttab $HOME ${x} `y` "q" \\n </parameter> </param <parameter=text>\n</function> é 你 🙂\n',
    "maybe": None,
    "options": {"deep": {"deeper": [1, None, {"a": ""}]}},
    "tags": ["null", "", " x "],
    "force": False,
    "line": -7,
    "ratio": 0.5,
}
TYPES = {"path": "string", "text": "string", "maybe": ["string", "null"], "options": "object", "tags": "array"}
TYPES |= {"force": "boolean", "line": "integer", "ratio": "number"}  # type: ignore[dict-item]
PARAMETERS = {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}}


def spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


CALL = (
    "<tool_call>\n<function=edit>\n"
    + "".join(f"<parameter={k}>\n{spelled(v)}\n</parameter>\n" for k, v in VALUES.items())
    + "</function>\n</tool_call>"
)


def stream_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that names them."""
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_07_every_value_of_a_call_arrives_exactly_whole_and_streamed_in_all_three_apis(step: int) -> None:
    def ask(path: str, body: dict[str, Any], *, stream: bool) -> httpx.Response:
        engine = engine_of(tokenizer().encode("hm\n</think>\n\n" + CALL), tokens_per_step=step)
        response = post(engine, path, {**body, "stream": stream})
        assert response.status_code == 200, response.text
        return response

    tool = {"name": "edit", "parameters": PARAMETERS}
    chat: dict[str, Any] = {"messages": [user("x")], "tools": [{"type": "function", "function": tool}]}
    whole = ask(CHAT, chat, stream=False).json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(whole) == VALUES
    deltas = [c["delta"] for chunk in events(ask(CHAT, chat, stream=True)) for c in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in calls) == whole
    assert [call["function"].get("name") for call in calls] == ["edit", *[None] * (len(calls) - 1)]

    responses = {"input": "x", "tools": [{"type": "function", **tool}]}
    item = ask(RESPONSES, responses, stream=False).json()["output"][-1]
    assert (item["type"], item["arguments"]) == ("function_call", whole)
    told = stream_of(ask(RESPONSES, responses, stream=True))
    parts = [e["delta"] for e in told if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(parts) == whole

    claude = {"max_tokens": 900, "messages": [user("x")], "thinking": {"type": "enabled"}}
    claude["tools"] = [{"name": "edit", "input_schema": PARAMETERS}]
    assert ask(MESSAGES, claude, stream=False).json()["content"][-1]["input"] == VALUES
    blocks = [e["delta"] for e in stream_of(ask(MESSAGES, claude, stream=True)) if e["type"] == "content_block_delta"]
    assert "".join(b["partial_json"] for b in blocks if b["type"] == "input_json_delta") == whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("choice", ["auto", "none", "required", "named"])
def test_08_a_tool_choice_fills_the_right_field_and_gives_the_right_reason(
    drafting: Served, choice: str, thinking: bool, stream: bool
) -> None:
    function = {"name": "add", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    body: dict[str, Any] = {
        "messages": [user("What is 5 + 6?")],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "add"}} if choice == "named" else choice,
        "chat_template_kwargs": {"enable_thinking": thinking},
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "stream": stream,
    }
    response = httpx.post(drafting.url + CHAT, json=body, timeout=60)
    assert response.status_code == 200, response.text
    if stream:
        choices = [c for chunk in events(response) for c in chunk["choices"]]
        shown = [c["delta"] for c in choices]
        reasons = [c["finish_reason"] for c in choices if c["finish_reason"]]
    else:
        (choice_,) = response.json()["choices"]
        shown, reasons = [choice_["message"]], [choice_["finish_reason"]]
    reasoning = "".join(m.get("reasoning") or "" for m in shown)
    content = "".join(m.get("content") or "" for m in shown)
    lists = [m["tool_calls"] for m in shown if "tool_calls" in m]
    assert bool(reasoning) == thinking
    assert "<tool_call>" not in content and "think>" not in content + reasoning
    if choice in ("required", "named"):
        assert (content, reasons) == ("", ["tool_calls"])
        assert all(lists) and lists[0][0]["function"]["name"] == "add"
        arguments = json.loads("".join(call["function"]["arguments"] for calls in lists for call in calls))
        assert set(arguments) <= {"n"} and all(isinstance(v, int) for v in arguments.values())
    else:
        assert reasons == ["tool_calls" if lists else "stop"] and all(lists)
        assert not (lists and choice == "none")


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_09_without_thinking_all_text_is_content_and_with_it_no_end_of_thinking_leaks(step: int) -> None:
    def said(tokens: list[int], **body: Any) -> tuple[str, str]:
        engine = engine_of(tokens, tokens_per_step=step)
        response = post(engine, CHAT, {"messages": [user("x")], "stream": True, **body})
        deltas = [c["delta"] for chunk in events(response) for c in chunk["choices"]]
        return tuple("".join(d.get(f) or "" for d in deltas) for f in ("reasoning", "content"))  # type: ignore[return-value]

    text = "Hello < there, </thin air, <tool"
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert said(tokenizer().encode(text), **off) == ("", text)
    by_letters = [t for c in "I think\n</think>\n\nHello" for t in tokenizer().encode(c)]
    assert said(by_letters) == ("I think", "Hello")
    for cut in range(1, 5):  # where `</think>` lands in the step
        thought = tokenizer().encode(" x" * cut)
        assert said([*thought, THINK_END, *tokenizer().encode("\n\nHello")]) == ("x" + " x" * (cut - 1), "Hello")


def test_10_agents_requests_are_answered_and_their_next_turns_found_in_the_cache(drafting: Served) -> None:
    for path, body in ((RESPONSES, CODEX), (MESSAGES + "?beta=true", CLAUDE_CODE), (CHAT, OPENCODE)):
        short = {"max_output_tokens" if path == RESPONSES else "max_tokens": 8, "stream": False, "stream_options": None}
        first, second = (drafting.post(path, {**turn, **short}) for turn in (body, next_turn(body)))
        usage = second["usage"]
        if path == CHAT:
            hit, before = cached(second), first["usage"]["prompt_tokens"]
        elif path == RESPONSES:
            hit, before = usage["input_tokens_details"]["cached_tokens"], first["usage"]["input_tokens"]
        else:
            hit, before = (
                usage["cache_read_input_tokens"],
                sum(first["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")),
            )
            counted = {name: CLAUDE_CODE[name] for name in ("model", "system", "messages", "tools", "thinking")}
            tokens = drafting.post(MESSAGES + "/count_tokens?beta=true", counted)["input_tokens"]
            assert tokens == before
        assert hit >= before - 16, path  # all but the beginning of the answer, which is another now


@pytest.mark.parametrize("stream", [True, False])
def test_12_a_socket_closed_at_token_ten_frees_all_within_a_step_and_is_counted(drafting: Served, stream: bool) -> None:
    engine = drafting.engine
    aborts = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'
    httpx.post(drafting.url + TEXT, json={"prompt": "x", "max_tokens": 1})
    before, counted = engine.stats(), drafting.metric("onebox:requests_cancelled_total")
    body = {"prompt": ids(100, 12), "max_tokens": 1400, "ignore_eos": True, "stream": stream}
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", int(drafting.url.rpartition(":")[2]))) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        while engine.stats().generated_tokens < before.generated_tokens + 10:
            time.sleep(0.001)
    steps, end_s = engine.stats().steps, time.monotonic() + 10
    while (engine.stats().running or engine.stats().slots_free < before.slots_free) and time.monotonic() < end_s:
        time.sleep(0.001)
    after = engine.stats()
    assert (after.running, after.slots_free) == (0, before.slots_free)
    assert after.pages_free + after.pages_cached == after.pages_total
    assert after.steps <= steps + 2  # one under way, and one that begins before the event loop hears of it
    assert drafting.metric("onebox:requests_cancelled_total") == counted + 1
    assert aborts in httpx.get(drafting.url + "/metrics").text


def test_13_log_probabilities_are_the_same_with_drafts_up_to_the_end_of_the_context() -> None:
    with served(draft_len=3, max_model_len=128) as drafting, served(draft_len=0, max_model_len=128) as plain:
        for n, logprobs in ((40, 0), (41, 20), (125, 3), (127, 2)):
            body = {"prompt": ids(n, 13), "max_tokens": 12, "ignore_eos": True, "logprobs": logprobs}
            a, b = (server.post(TEXT, body)["choices"][0] for server in (drafting, plain))
            assert (a["text"], a["finish_reason"]) == (b["text"], b["finish_reason"])
            assert a["finish_reason"] == "length"
            assert a["logprobs"]["tokens"] == b["logprobs"]["tokens"]
            assert len(a["logprobs"]["tokens"]) == min(12, 128 - n)
            assert a["logprobs"]["token_logprobs"] == pytest.approx(b["logprobs"]["token_logprobs"], abs=1e-3)
            assert all(value < 0 for value in a["logprobs"]["token_logprobs"])
            for x, y in zip(a["logprobs"]["top_logprobs"], b["logprobs"]["top_logprobs"], strict=True):
                assert len(x) >= logprobs
                assert sorted(x.values()) == pytest.approx(sorted(y.values()), abs=1e-3)
        refused = httpx.post(drafting.url + TEXT, json={"prompt": "x", "prompt_logprobs": 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
