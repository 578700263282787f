"""The HTTP surface over a fake engine: shapes, errors, streams, hang-ups."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from serving import app_of, client_of, engine_of, events, post, saying, tokenizer

from onebox.errors import CheckpointError
from onebox.request import Request

HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
THOUGHT = "I think.\n</think>\n\nHello there."


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


def test_chat_answers_with_reasoning_apart_and_usage() -> None:
    engine = saying(THOUGHT, tokens_per_step=3)
    response = post(engine, CHAT, {"model": "tiny", "messages": HI})
    assert response.status_code == 200
    value = response.json()
    message = value["choices"][0]["message"]
    assert message["content"] == "Hello there."
    assert message["reasoning_content"] == message["reasoning"] == "I think."
    assert value["choices"][0]["finish_reason"] == "stop"
    usage, n = value["usage"], len(tokenizer().encode(THOUGHT))
    assert usage["completion_tokens"] == n
    assert usage["total_tokens"] == usage["prompt_tokens"] + n == len(engine.requests[0].prompt) + n
    details = usage["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(tokenizer().encode("I think.\n</think>"))
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] == 1


def test_streamed_deltas_make_the_whole_answer() -> None:
    body = {"model": "tiny", "messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(post(saying(THOUGHT, tokens_per_step=2), CHAT, body))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    deltas = [c["choices"][0]["delta"] for c in chunks[:-1]]
    assert "".join(d.get("content") or "" for d in deltas) == "Hello there."
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "I think."
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(tokenizer().encode(THOUGHT))
    assert all(c["usage"] is None for c in chunks[:-1])
    assert len({c["id"] for c in chunks}) == 1


def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a", "max_tokens": 5, "stream": True, "stream_options": options}
    chunks = events(post(saying("one two three four five six"), TEXT, body))
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 4, 5, 5]


def test_length_inside_thinking_gives_empty_content() -> None:
    value = post(saying("I think and think and think"), CHAT, {"messages": HI, "max_tokens": 3}).json()
    choice = value["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["message"]["reasoning"]


def test_enable_thinking_false_puts_all_text_into_content() -> None:
    body = {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}
    for stream in (False, True):
        response = post(saying("plain < text"), CHAT, {**body, "stream": stream})
        if stream:
            deltas = [c["choices"][0]["delta"] for c in events(response)]
            assert "".join(d.get("content", "") for d in deltas) == "plain < text"
            assert not any("reasoning" in d for d in deltas)
        else:
            message = response.json()["choices"][0]["message"]
            assert message["content"] == "plain < text"
            assert "reasoning" not in message


def test_n_answers_have_their_own_seeds_and_indices() -> None:
    engine = engine_of(lambda r: tokenizer().encode(f"x\n</think>\n\nseed {r.params.seed}"))
    value = post(engine, CHAT, {"messages": HI, "n": 3, "seed": 5}).json()
    assert [c["message"]["content"] for c in value["choices"]] == ["seed 5", "seed 6", "seed 7"]
    assert [c["index"] for c in value["choices"]] == [0, 1, 2]
    assert value["usage"]["prompt_tokens"] == len(engine.requests[0].prompt)
    chunks = events(post(engine, CHAT, {"messages": HI, "n": 3, "seed": 5, "stream": True}))
    texts = dict.fromkeys(range(3), "")
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "seed 5", 1: "seed 6", 2: "seed 7"}


def test_stop_string_ends_the_answer_and_cancels_the_engine() -> None:
    engine = saying("one two three four five")
    value = post(engine, TEXT, {"prompt": "count", "max_tokens": 50, "stop": [" thr"]}).json()
    choice = value["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one two", "stop", " thr")
    assert engine.cancelled == [engine.requests[0].id]
    assert engine.stats().running == 0


def test_stop_token_is_reported() -> None:
    ids = tokenizer().encode("one two three")
    value = post(engine_of(ids), TEXT, {"prompt": "x", "max_tokens": 50, "stop_token_ids": [ids[-1]]}).json()
    assert value["choices"][0]["stop_reason"] == ids[-1]
    assert value["choices"][0]["text"] == tokenizer().decode(ids[:-1])


@pytest.mark.parametrize(
    "prompt", ["one", ["one", "two"], tokenizer().encode("one"), [tokenizer().encode("one"), tokenizer().encode("two")]]
)
def test_prompts_as_text_lists_and_token_ids(prompt: Any) -> None:
    engine = engine_of(lambda r: tokenizer().encode(f" {len(r.prompt)} {tokenizer().decode(r.prompt)}"))
    value = post(engine, TEXT, {"prompt": prompt, "echo": True, "max_tokens": 30}).json()
    texts = [c["text"].split()[-1] for c in value["choices"]]
    assert texts == (["one", "two"] if len(value["choices"]) == 2 else ["one"])
    assert all(c["text"].startswith(t) for c, t in zip(value["choices"], texts, strict=True))
    assert value["usage"]["prompt_tokens"] == sum(len(r.prompt) for r in engine.requests)


def test_chat_logprobs_cover_each_token_with_bytes_and_alternatives() -> None:
    text = "a\n</think>\n\n🦜"
    value = post(saying(text), CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2}).json()
    content = value["choices"][0]["logprobs"]["content"]
    assert bytes(b for e in content for b in e["bytes"]).decode() == text
    assert len(content) == value["usage"]["completion_tokens"]
    assert all(len(e["top_logprobs"]) == 2 and e["logprob"] == -0.5 for e in content)
    streamed = events(post(saying(text), CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2, "stream": True}))
    parts = [c["choices"][0]["logprobs"] for c in streamed]
    assert [e for p in parts if p for e in p["content"]] == content


def test_top_logprobs_zero_gives_no_alternatives() -> None:
    value = post(saying("a</think>b"), CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 0}).json()
    assert all(e["top_logprobs"] == [] for e in value["choices"][0]["logprobs"]["content"])


def test_completion_logprobs_have_offsets_into_the_text() -> None:
    value = post(saying("one two 🦜"), TEXT, {"prompt": "x", "logprobs": 1, "max_tokens": 50}).json()
    choice = value["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"])
    for token, offset in zip(logprobs["tokens"][:2], logprobs["text_offset"], strict=False):
        assert choice["text"][offset:].startswith(token)


def test_sampling_fields_reach_the_engine_and_defaults_fill_the_rest() -> None:
    engine = saying("a</think>b")
    body = {
        "messages": HI,
        "max_completion_tokens": 9,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": -100},
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "cache_salt": "mine",
        "priority": 2,
    }
    assert post(engine, CHAT, body, defaults={"temperature": 0.8, "top_k": 20, "top_p": 0.9}).status_code == 200
    request = engine.requests[0]
    p = request.params
    assert (p.max_tokens, p.temperature, p.top_k, p.top_p, p.min_p) == (9, 0.8, 3, 0.9, 0.1)
    assert (p.presence_penalty, p.frequency_penalty, p.logit_bias) == (0.5, -0.5, ((5, -100.0),))
    assert (p.min_tokens, p.ignore_eos, p.stop_token_ids) == (2, True, (7,))
    assert (request.cache_salt, request.priority, len(request.snapshot_at)) == ("mine", 2, 1)


def test_token_ids_are_returned_when_asked_for() -> None:
    engine = saying("a\n</think>\nb")
    value = post(engine, CHAT, {"messages": HI, "return_token_ids": True}).json()
    assert value["choices"][0]["token_ids"] == tokenizer().encode("a\n</think>\nb")
    assert tuple(value["prompt_token_ids"]) == engine.requests[0].prompt


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HI, "temperature": "hot"}, "temperature"),
        (CHAT, {"messages": HI, "temperature": -1}, "temperature"),
        (CHAT, {"messages": HI, "n": 0}, "n"),
        (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HI, "stop": ["a", ""]}, "stop"),
        (CHAT, {"messages": HI, "logit_bias": {"99999": 1}}, "logit_bias"),
        (CHAT, {"messages": HI, "logit_bias": {"5": 101}}, "logit_bias"),
        (CHAT, {"messages": HI, "seed": 2**70}, "seed"),
        (CHAT, {"messages": HI, "min_tokens": 9, "max_tokens": 2}, "min_tokens"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"messages": HI, "prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"messages": HI, "functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"messages": HI, "stop_token_ids": [-1]}, "stop_token_ids"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [99999]}, "prompt"),
        (TEXT, {"prompt": "x", "suffix": "y"}, "suffix"),
        (TEXT, {"prompt": "x", "best_of": 3}, "best_of"),
        (TEXT, {"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
    ],
)
def test_a_bad_field_is_refused_by_name(path: str, body: Any, param: str) -> None:
    response = post(saying("x"), path, body)
    error = error_of(response)
    assert response.status_code == 400
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"messages": ' + b"[" * 5000, b"null", b"1"])
def test_malformed_json_is_400(data: bytes) -> None:
    response = post(saying("x"), CHAT, data)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_request"


def test_fields_that_ask_for_nothing_and_unknown_fields_pass() -> None:
    body = {"messages": HI, "prompt_logprobs": None, "metadata": {"a": 1}, "never_heard_of": 1, "functions": []}
    assert post(saying("a</think>b"), CHAT, body).status_code == 200


def test_an_unknown_model_is_404() -> None:
    response = post(saying("x"), CHAT, {"model": "gpt-9", "messages": HI})
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def test_a_prompt_over_the_context_is_400_with_both_numbers() -> None:
    response = post(saying("x"), TEXT, {"prompt": [5] * 9000})
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"] and "9000" in error["message"]


def test_max_tokens_beyond_the_context_is_cut_to_its_room() -> None:
    engine = saying("a b c d e f g h", max_model_len=20)
    value = post(engine, TEXT, {"prompt": [5] * 15, "max_tokens": 1000}).json()
    assert engine.requests[0].params.max_tokens == 5
    assert value["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/chat/completions", 405)])
def test_unknown_routes_have_the_error_shape(path: str, status: int) -> None:
    async def run() -> httpx.Response:
        async with client_of(saying("x")) as client:
            return await client.get(path)

    response = asyncio.run(run())
    assert response.status_code == status
    error_of(response)


def test_a_full_queue_is_429_with_retry_after() -> None:
    async def run() -> None:
        async with client_of(saying("a b c d", step_s=0.05, max_num_seqs=1, max_waiting=1)) as client:
            body = {"prompt": "x"}
            posts = [asyncio.create_task(client.post(TEXT, json={**body, "stream": i % 2 == 0})) for i in range(4)]
            responses = await asyncio.gather(*posts)
            statuses = sorted(r.status_code for r in responses)
            assert statuses == [200, 200, 429, 429]
            refused = next(r for r in responses if r.status_code == 429)
            assert int(refused.headers["retry-after"]) >= 1
            assert error_of(refused)["type"] == "rate_limit_error"

    asyncio.run(run())


def test_a_dead_engine_is_503() -> None:
    async def run() -> None:
        engine = saying("x")
        async with client_of(engine) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/health/ready")).status_code == 200
            engine.is_alive = False
            response = await client.post(TEXT, json={"prompt": "x"})
            assert response.status_code == 503
            assert error_of(response)["code"] == "engine_unavailable"
            assert (await client.get("/health")).status_code == 503
            ready = await client.get("/health/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "failed")

    asyncio.run(run())


def test_an_engine_error_after_the_first_byte_is_an_error_event() -> None:
    response = post(saying("a b c d e f", fail_after=3), TEXT, {"prompt": "x", "stream": True})
    assert response.status_code == 200
    *chunks, error = events(response)
    assert chunks
    assert error["error"]["code"] == "engine_unavailable"
    assert "scripted failure" in error["error"]["message"]
    assert post(saying("a b c d", fail_after=3), TEXT, {"prompt": "x"}).status_code == 503


def test_a_start_that_fails_is_told_and_kept() -> None:
    async def run() -> None:
        told: list[Any] = []
        engine = saying("x", fail_start=CheckpointError("model.safetensors: cut short"))
        async with client_of(engine, on_start=told.append) as client:
            await asyncio.sleep(0.01)
            ready = await client.get("/health/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "failed")
            assert "cut short" in ready.json()["detail"]
            assert (await client.get("/health")).status_code == 503
            assert (await client.post(TEXT, json={"prompt": "x"})).status_code == 503
        assert [str(e) for e in told] == ["model.safetensors: cut short"]

    asyncio.run(run())


def test_pings_keep_a_long_prefill_alive_and_errors_still_arrive() -> None:
    response = post(saying("a b", prefill_s=0.1), TEXT, {"prompt": "x", "stream": True}, ping_s=0.02)
    assert response.text.startswith(": ping\n\n")
    assert response.text.count(": ping") >= 3
    assert len(events(response)) >= 2
    failed = post(saying("a", prefill_s=0.1, fail_after=1), TEXT, {"prompt": "x", "stream": True}, ping_s=0.02)
    assert events(failed)[-1]["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "x"}),
        (CHAT, {"messages": HI}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
    ],
)
def test_pings_come_in_every_silence_of_every_stream(path: str, body: dict[str, Any]) -> None:
    """Between events too: a slow step is a silence as a long prefill is."""
    response = post(saying("a b c", step_s=0.15), path, {**body, "stream": True}, ping_s=0.04)
    parts = [part for part in response.text.split("\n\n") if part]
    pings = [i for i, part in enumerate(parts) if part == ": ping"]
    data = [i for i, part in enumerate(parts) if "data: " in part]
    assert pings[0] < data[0]
    assert any(data[0] < i < data[-1] for i in pings)
    assert all(part == ": ping" or part.startswith(("data: ", "event: ")) for part in parts)  # never inside one


def test_models_lists_every_served_name() -> None:
    async def run() -> None:
        async with client_of(saying("x"), served_names=["a", "org/b"]) as client:
            listed = (await client.get("/v1/models")).json()["data"]
            assert [m["id"] for m in listed] == ["a", "org/b"]
            assert listed[0]["max_model_len"] == 8192
            assert (await client.get("/v1/models/org/b")).json()["id"] == "org/b"
            assert (await client.get("/v1/models/c")).status_code == 404

    asyncio.run(run())


def test_tokenize_and_detokenize_are_inverse() -> None:
    async def run() -> None:
        async with client_of(saying("x")) as client:
            value = (await client.post("/tokenize", json={"prompt": "Hello 🦜", "return_token_strs": True})).json()
            assert value["count"] == len(value["tokens"]) == len(value["token_strs"])
            text = (await client.post("/detokenize", json={"tokens": value["tokens"]})).json()["prompt"]
            assert text == "Hello 🦜"
            chat = (await client.post("/tokenize", json={"messages": HI})).json()["tokens"]
            assert tokenizer().decode(chat).startswith("<|im_start|>user\nHi<|im_end|>")

    asyncio.run(run())


def test_api_keys_guard_all_but_health_and_metrics() -> None:
    async def run() -> None:
        async with client_of(saying("x"), api_keys=["one", "two"]) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200
            refused = await client.get("/v1/models")
            assert refused.status_code == 401
            assert error_of(refused)["code"] == "invalid_api_key"
            for headers in ({"authorization": "Bearer two"}, {"x-api-key": "one"}):
                assert (await client.get("/v1/models", headers=headers)).status_code == 200
            for headers in ({"authorization": "Bearer three"}, {"authorization": "two"}, {"x-api-key": ""}):
                assert (await client.get("/v1/models", headers=headers)).status_code == 401

    asyncio.run(run())


def test_a_body_over_the_limit_is_413() -> None:
    response = post(saying("x"), TEXT, {"prompt": "x" * 5000}, max_body_bytes=1000)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"


def test_metrics_carry_vllm_names_and_true_counts() -> None:
    async def run() -> None:
        async with client_of(saying("a b c d", tokens_per_step=2)) as client:
            n = (await client.post(TEXT, json={"prompt": "x"})).json()["usage"]["completion_tokens"]
            await client.post(TEXT, json={"prompt": "x", "stop": "b"})
            await client.post(TEXT, json={"prompt": "x", "model": "no"})
            text = (await client.get("/metrics")).text
            labels = '{engine="0",model_name="tiny"}'
            assert f"vllm:num_requests_running{labels} 0.0" in text
            assert f"vllm:generation_tokens_total{labels}" in text
            assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 2.0' in text
            assert f"vllm:time_to_first_token_seconds_count{labels} 2.0" in text
            assert f"vllm:request_generation_tokens_sum{labels} {float(n + 2)}" in text
            assert 'onebox:http_errors_total{code="model_not_found",status="404"} 1.0' in text

    asyncio.run(run())


def test_openapi_describes_every_body() -> None:
    document = app_of(saying("x")).openapi()
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        ref = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert ref.rpartition("/")[2] in document["components"]["schemas"]
    json.dumps(document)


def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    async def run() -> None:
        app = app_of(saying("a b c d", step_s=0.02))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            lifespan = app.router.lifespan_context(app)
            await lifespan.__aenter__()
            old = asyncio.create_task(client.post(TEXT, json={"prompt": "x"}))
            await asyncio.sleep(0.03)
            stopping = asyncio.create_task(lifespan.__aexit__(None, None, None))
            await asyncio.sleep(0)
            new = await client.post(TEXT, json={"prompt": "x"})
            assert (new.status_code, "retry-after" in new.headers) == (503, True)
            assert (await old).json()["choices"][0]["text"] == "a b c d"
            await stopping

    asyncio.run(run())


async def raw(app: Any, path: str, body: Any, hang_up: asyncio.Event, sent: list[Any]) -> None:
    """One request straight to the ASGI app by a client that goes away when told."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        await hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }
    await app({**scope, "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}, receive, send)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prefill_s", [0.0, 60.0])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_hangs_up_frees_its_slots_at_once(stream: bool, prefill_s: float, n: int) -> None:
    async def run() -> None:
        engine = engine_of([5] * 8000, step_s=0.01, prefill_s=prefill_s)
        app = app_of(engine, drain_s=0)
        async with app.router.lifespan_context(app):
            hang_up, sent = asyncio.Event(), []
            body = {"prompt": "x", "max_tokens": 4000, "stream": stream, "n": n}
            request = asyncio.create_task(raw(app, TEXT, body, hang_up, sent))
            await asyncio.sleep(0.05)
            assert engine.stats().running == n
            steps = engine.stats().steps
            hang_up.set()
            await asyncio.wait_for(request, 1)
            assert engine.stats().running == 0
            assert engine.stats().slots_free == engine.info.max_num_seqs
            assert engine.stats().steps <= steps + n
            assert len(engine.cancelled) == n
            assert app.state.service.active == 0
            aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'
            assert f"{aborted} {float(n)}".encode() in app.state.service.metrics.render()

    asyncio.run(run())


def test_a_bug_is_a_500_with_the_error_shape() -> None:
    def broken(_: Request) -> list[int]:
        raise ZeroDivisionError

    response = post(engine_of(broken), TEXT, {"prompt": "x"})
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"


def test_embeddings_are_501_by_name_and_stats_are_the_engines() -> None:
    async def run() -> None:
        async with client_of(saying("a b")) as client:
            refused = await client.post("/v1/embeddings", json={"input": "x"})
            assert (refused.status_code, error_of(refused)["code"]) == (501, "not_served")
            await client.post(TEXT, json={"prompt": "x"})
            assert (await client.get("/v1/onebox/stats")).json()["finished"] == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
        (TEXT, {"prompt": "word " * 9000}, "prompt"),
        ("/v1/responses", {"input": "word " * 9000}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "word " * 9000}], "max_tokens": 5}, None),
        ("/v1/responses", {"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
    ],
)
def test_a_refusal_names_the_field_of_its_own_api(path: str, body: dict[str, Any], param: str | None) -> None:
    response = post(saying("x"), path, body)
    assert response.status_code == 400
    if param is not None:
        error = error_of(response)
        assert error["param"] == param
        assert param == "messages" or "'messages" not in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_stream_options_without_a_stream_are_refused(path: str) -> None:
    body = {"messages": HI, "prompt": "Hi", "stream_options": {"include_usage": True}}
    assert error_of(post(saying("x"), path, body))["param"] == "stream_options"
    assert post(saying("x"), path, {**body, "stream_options": None}).status_code == 200
    assert post(saying("x"), path, {**body, "stream": True}).status_code == 200


@pytest.mark.parametrize("role", ["user", "system", "developer"])
@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["missing", "null"])
def test_a_message_without_content_is_refused(role: str, content: dict[str, Any]) -> None:
    error = error_of(post(saying("x"), CHAT, {"messages": [*HI, {"role": role, **content}]}))
    assert error["param"] == "messages[1].content"


def test_a_turn_of_calls_alone_and_a_tool_that_said_nothing_are_fine() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": None}]
    assert post(saying("x"), CHAT, {"messages": [*HI, *history]}).status_code == 200
