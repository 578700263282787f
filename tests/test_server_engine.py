"""End to end with the bundled model: the official client, a real socket, the engine of this package."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from serving import TINY, running, tokenizer

from onebox.config import EngineConfig
from onebox.engine.thread import ThreadEngine
from onebox.server.app import create_app

HI: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def engine() -> ThreadEngine:
    return ThreadEngine(EngineConfig(str(TINY), device="cpu", max_num_seqs=4, max_model_len=8192))


@pytest.fixture(scope="module")
def url(engine: ThreadEngine) -> Iterator[str]:
    app = create_app(engine, tokenizer=tokenizer(), served_names=["tiny"], defaults={"temperature": 0}, drain_s=5)
    with running(app) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_streams_with_usage_and_kept_drafts(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}, max_tokens=60
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    whole = client.chat.completions.create(model="tiny", messages=HI, max_tokens=60)
    assert text
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.completion_tokens_details.accepted_prediction_tokens
    assert "<think>" not in text and "</think>" not in text


def test_a_stop_string_cuts_the_same_text(client: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "prompt": "1 2 3 4 5 6 7", "max_tokens": 30}
    whole = client.completions.create(**ask).choices[0].text
    stop = whole[4:7]
    cut = client.completions.create(**ask, stop=stop).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


def test_a_seed_fixes_sampled_text_and_n_varies_it(client: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 1.0, "n": 2}
    first, again = (client.completions.create(**ask, seed=11) for _ in range(2))
    other = client.completions.create(**ask, seed=12)
    assert [c.text for c in first.choices] == [c.text for c in again.choices]
    assert first.choices[0].text != first.choices[1].text
    assert first.choices[1].text == other.choices[0].text  # seed 11 + 1


def test_logprobs_are_those_of_the_chosen_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, max_tokens=12, logprobs=True, top_logprobs=3)
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content and answer.usage is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    for entry in choice.logprobs.content:
        assert entry.logprob < 0 or entry.logprob == pytest.approx(0, abs=1e-6)
        assert entry.top_logprobs[0].token == entry.token  # greedy: the best is the chosen one
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-4)


def test_a_required_tool_is_called_by_name(client: openai.OpenAI) -> None:
    tools: Any = [
        {"type": "function", "function": {"name": n, "parameters": {"type": "object", "properties": {}}}}
        for n in ("get_time", "get_weather")
    ]
    answer = client.chat.completions.create(
        model="tiny", messages=HI, tools=tools, tool_choice="required", max_tokens=200, parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in ("get_time", "get_weather")


def test_a_prompt_of_9000_tokens_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model="tiny", prompt=[100] * 9000)
    assert e.value.code == "context_length_exceeded"


def test_unknown_models_and_malformed_bodies_are_refused(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=HI)
    response = httpx.post(f"{url}/v1/chat/completions", content=b'{"messages": [')
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_slot_within_one_step(
    engine: ThreadEngine, client: openai.OpenAI, stream: bool
) -> None:
    free = engine.stats().slots_free
    ask: Any = {"model": "tiny", "prompt": "Count: 1 2 3", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    if stream:
        answer = client.completions.create(**ask, stream=True)
        next(iter(answer))
        assert engine.stats().slots_free == free - 1
        answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(**ask, timeout=0.5)
    steps, end = engine.stats().steps, time.monotonic() + 10
    while engine.stats().slots_free < free and time.monotonic() < end:
        time.sleep(0.001)
    assert engine.stats().slots_free == free
    assert engine.stats().running == 0
    # one step may be under way when the connection closes, and one more begin before the event loop hears of it
    assert engine.stats().steps <= steps + 2


def test_health_and_metrics_tell_of_the_engine(url: str, engine: ThreadEngine) -> None:
    ready = httpx.get(f"{url}/health/ready")
    assert (ready.status_code, ready.json()["steps"]) == (200, engine.stats().steps)
    plan = httpx.get(f"{url}/v1/onebox/plan").json()
    assert plan["pages"] == engine.stats().pages_total and plan["bytes"]["kv_pages"] > 0
    text = httpx.get(f"{url}/metrics").text
    assert "vllm:spec_decode_num_accepted_tokens_total" in text
    assert json.loads(httpx.get(f"{url}/v1/models").text)["data"][0]["max_model_len"] == 8192


def streamed_choices(url: str, path: str, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The choices of a stream put together: text, tokens of log probabilities, and the end."""
    made: dict[int, dict[str, Any]] = {}
    with httpx.stream("POST", url + path, json={**body, "stream": True}, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                one = made.setdefault(choice["index"], {"text": "", "tokens": [], "finish": None, "stop": None})
                one["text"] += choice["text"]
                one["tokens"] += (choice["logprobs"] or {}).get("tokens", [])
                if choice["finish_reason"]:
                    one |= {"finish": choice["finish_reason"], "stop": choice["stop_reason"]}
    return made


def whole_choices(url: str, path: str, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    response = httpx.post(url + path, json=body, timeout=120)
    assert response.status_code == 200, response.text
    return {
        c["index"]: {
            "text": c["text"],
            "tokens": (c["logprobs"] or {}).get("tokens", []),
            "finish": c["finish_reason"],
            "stop": c["stop_reason"],
        }
        for c in response.json()["choices"]
    }


def test_eight_mixed_answers_of_one_stream_are_those_of_the_whole(url: str) -> None:
    body = {"prompt": "The weather in", "n": 8, "seed": 5, "temperature": 1.0, "max_tokens": 10}
    body |= {"stop": [" the", "an", "\n"], "logprobs": 1, "min_tokens": 2}
    whole = whole_choices(url, "/v1/completions", body)
    assert streamed_choices(url, "/v1/completions", body) == whole
    assert len(whole) == 8 and len({c["text"] for c in whole.values()}) > 4
    assert {c["finish"] for c in whole.values()} == {"stop", "length"}
    for seed in (5, 6):  # each is the answer of its own seed
        alone = whole_choices(url, "/v1/completions", {**body, "n": 1, "seed": seed})
        assert alone[0] == whole[seed - 5]


def test_stop_strings_are_found_wherever_they_straddle_windows_and_tokens(url: str) -> None:
    body = {"prompt": "1 2 3 4 5 6 7 8 9", "max_tokens": 40}
    text = whole_choices(url, "/v1/completions", body)[0]["text"]
    rng = random.Random(3)
    places = [(a, a + rng.randint(1, 9)) for a in rng.sample(range(1, len(text) - 9), 5)]

    def ask(stop: str) -> tuple[dict[int, Any], dict[int, Any]]:
        asked = {**body, "stop": [stop, "never said"]}
        return whole_choices(url, "/v1/completions", asked), streamed_choices(url, "/v1/completions", asked)

    stops = [text[a:b] for a, b in places]
    with ThreadPoolExecutor(4) as pool:
        for stop, (whole, streamed) in zip(stops, pool.map(ask, stops), strict=True):
            assert whole == streamed
            assert whole[0]["text"] == text[: text.index(stop)]
            assert (whole[0]["finish"], whole[0]["stop"]) == ("stop", stop)


@pytest.mark.parametrize("stop", [None, "\N{SLIGHTLY SMILING FACE}"])
def test_characters_of_several_tokens_are_whole_in_every_event(url: str, stop: str | None) -> None:
    characters = "\N{CJK UNIFIED IDEOGRAPH-4F60}\N{SLIGHTLY SMILING FACE}"
    body = {"prompt": "x", "guided_regex": f"({characters}){{4}}", "max_tokens": 60}
    whole = whole_choices(url, "/v1/completions", body)[0]["text"]
    assert whole == characters * 4 and len(tokenizer().encode(whole)) > 16
    body |= {"stop": stop} if stop else {}
    streamed = streamed_choices(url, "/v1/completions", body)[0]["text"]
    assert "\N{REPLACEMENT CHARACTER}" not in streamed
    assert streamed == (whole.partition(stop)[0] if stop else whole)


def test_clients_that_leave_at_any_time_leave_nothing_behind(url: str, engine: ThreadEngine) -> None:
    """Streams and wholes, one answer and several, closed before, in and after prefill; others go on."""
    rng = random.Random(4)

    def rude(i: int) -> None:
        body = {"prompt": f"{i} " + "word " * rng.randint(1, 300), "n": 1 + i % 3, "max_tokens": 200}
        body |= {"ignore_eos": True, "stream": i % 2 == 0, "temperature": 1.0}
        with suppress(httpx.HTTPError), httpx.Client(timeout=0.02 + rng.random() / 4) as client:
            client.post(url + "/v1/completions", json=body)

    polite = {"prompt": "1 2 3 4 5", "max_tokens": 12}
    alone = whole_choices(url, "/v1/completions", polite)
    with ThreadPoolExecutor(8) as pool:
        leaving = [pool.submit(rude, i) for i in range(24)]
        assert all(whole_choices(url, "/v1/completions", polite) == alone for _ in range(3))
        for future in leaving:
            future.result()
    end_s = time.monotonic() + 20
    while (engine.stats().running or engine.stats().waiting) and time.monotonic() < end_s:
        time.sleep(0.01)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.slots_free) == (0, 0, stats.slots_total)
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert httpx.get(url + "/health/ready").json()["active"] == 0
