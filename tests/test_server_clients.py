"""The official openai client against a real server on a free port, over the fake engine."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from rich.console import Console
from serving import app_of, engine_of, running, saying, tokenizer

from onebox.server.terminal import Speed, chat, reachable
from onebox.testing import FakeEngine

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
ARGUMENTS = {"city": " Köln\n", "days": 3}
CALL = (
    "I should look.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\n Köln\n\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
HI: list[Any] = [{"role": "user", "content": "Hi"}]


@contextmanager
def client_of(engine: FakeEngine, **options: Any) -> Iterator[openai.OpenAI]:
    key = options.pop("key", "none")
    with (
        running(app_of(engine, **options)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client


def test_chat_streams_with_usage() -> None:
    with client_of(saying("hm\n</think>\n\nHello!", tokens_per_step=2)) as client:
        stream = client.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello!"
        usage = chunks[-1].usage
        assert usage is not None and usage.completion_tokens_details is not None
        assert usage.completion_tokens == len(tokenizer().encode("hm\n</think>\n\nHello!"))
        assert usage.completion_tokens_details.accepted_prediction_tokens


def test_stop_seed_n_and_logprobs() -> None:
    engine = engine_of(lambda r: tokenizer().encode(f"x\n</think>\n\nseed {r.params.seed} END more"))
    with client_of(engine) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=HI, n=2, seed=7, stop="END", logprobs=True, top_logprobs=3
        )
        assert [c.message.content for c in answer.choices] == ["seed 7 ", "seed 8 "]
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            assert choice.logprobs is not None and choice.logprobs.content
            assert all(len(e.top_logprobs) == 3 for e in choice.logprobs.content)


@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_tool_call_streamed_equals_whole(tokens_per_step: int) -> None:
    with client_of(saying(CALL, tokens_per_step=tokens_per_step)) as client:
        whole = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        (call,) = whole.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
        with client.chat.completions.stream(model="tiny", messages=HI, tools=TOOLS) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        (streamed,) = final.message.tool_calls or []
        assert streamed.function.arguments == call.function.arguments


def test_tool_choice_none_shows_the_model_no_tools() -> None:
    engine = saying("hm</think>no call")
    with client_of(engine) as client:
        client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, tool_choice="none")
        client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
    without, with_tools = (tokenizer().decode(r.prompt) for r in engine.requests)
    assert "weather" not in without
    assert "weather" in with_tools


def test_completions_stream_and_whole() -> None:
    with client_of(saying(" one two")) as client:
        whole = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=20, n=2)
        assert [c.text for c in whole.choices] == [" one two"] * 4
        stream = client.completions.create(model="tiny", prompt="a", max_tokens=20, stream=True)
        assert "".join(c.choices[0].text for c in stream) == " one two"


def test_errors_become_the_clients_own_exceptions() -> None:
    with client_of(saying("x"), api_keys=["k"], key="k") as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="nope", messages=HI)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "word " * 9000}])
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="tiny", messages=HI, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        assert [m.id for m in client.models.list()] == ["tiny"]


def test_an_error_in_mid_stream_is_raised_by_the_client() -> None:
    with (
        client_of(saying("a b c d e f", fail_after=2)) as client,
        pytest.raises(openai.APIError, match="scripted failure"),
    ):
        list(client.completions.create(model="tiny", prompt="x", stream=True))


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_frees_the_slot(stream: bool) -> None:
    engine = engine_of([5] * 8000, step_s=0.005)
    with client_of(engine, drain_s=0) as client:
        if stream:
            answer = client.completions.create(model="tiny", prompt="x", max_tokens=4000, stream=True)
            next(iter(answer))
            assert engine.stats().running == 1
            answer.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.completions.create(model="tiny", prompt="x", max_tokens=4000, timeout=0.2)
        end = time.monotonic() + 2
        while engine.stats().running and time.monotonic() < end:
            time.sleep(0.005)
        assert engine.stats().running == 0
        assert engine.stats().slots_free == engine.info.max_num_seqs
        assert len(engine.cancelled) == 1


def test_terminal_chat_streams_and_tells_speed_and_kept_drafts() -> None:
    engine = saying("hm\n</think>\n\nHello [there]!", tokens_per_step=3, step_s=0.005)
    out = io.StringIO()
    with running(app_of(engine)) as url:
        assert reachable(url)
        chat(url, ["Hi", "Again"], system="be brief", console=Console(file=out, width=200))
    assert not reachable(url)
    text = out.getvalue()
    assert text.count("Hello [there]!") == 2
    assert text.count("tok/s") == text.count("drafts kept") == 2
    assert "be brief" in tokenizer().decode(engine.requests[1].prompt)
    assert "Hello [there]!" in tokenizer().decode(engine.requests[1].prompt)


def test_speed_line_without_drafts_or_tokens() -> None:
    assert Speed(0, 0.0, 0.0, 0, 0).line() == "0 tokens · first after 0.00 s · - tok/s · no drafts"
    assert Speed(11, 0.5, 2.0, 3, 4).line() == "11 tokens · first after 0.50 s · 5.0 tok/s · 75% of 4 drafts kept"
