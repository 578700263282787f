"""Ray Serve on a cluster of this machine: the answers of one engine, prefixes kept together, replicas that die."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import socket
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request
from serving import saying

with warnings.catch_warnings():  # its own use of others
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'onebox[ray]'")
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    from onebox.integrations.ray_serve import Front, Head, Options, app, build

from onebox.config import EngineConfig, bundled_model
from onebox.engine.process import ProcessEngine
from onebox.errors import ConfigError
from onebox.server.serve import ServeOptions, in_background

pytestmark = pytest.mark.filterwarnings("default")
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
URL = f"http://127.0.0.1:{PORT}"
KEEPERS = ("Ines", "Tomas", "Marta", "Jonas", "Vera", "Otto", "Lena", "Paul")
PROMPTS, EACH = 40, 5
SESSIONS = itertools.count()


def body(story: int, n: int, **more: Any) -> dict[str, Any]:
    """Question `n` after a system prompt of some 180 tokens that is the story's own."""
    told = random.Random(story)
    text = " ".join(f"In year {told.randrange(999)} {told.choice(KEEPERS)} kept the light." for _ in range(14))
    return {
        "messages": [{"role": "system", "content": text}, {"role": "user", "content": f"Say {n}."}],
        "max_tokens": 4,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
        **more,
    }


def long_body(n: int) -> dict[str, Any]:
    return body(100 + n % 6, n, max_tokens=32)


def ask(request: dict[str, Any], url: str = URL, **headers: str) -> tuple[str, int, int, str]:
    """The text, prompt tokens, those found in the cache, and the replica."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=request, headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    value = answer.json()
    cached = value["usage"]["prompt_tokens_details"]["cached_tokens"]
    replica = answer.headers.get("x-onebox-replica", "")
    return value["choices"][0]["message"]["content"], value["usage"]["prompt_tokens"], cached, replica


def streamed(request: dict[str, Any]) -> tuple[str, str | None, str, bool]:
    """The text of a stream, its error, the replica, and whether a part of the answer came."""
    text, error, begun = "", None, False
    ask = {**request, "stream": True}
    with httpx.stream("POST", f"{URL}/v1/chat/completions", json=ask, timeout=300) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                value = json.loads(line[6:])
                error = error or (value.get("error") or {}).get("code")
                begun = begun or "choices" in value
                text += "".join(choice["delta"].get("content") or "" for choice in value.get("choices", ()))
        return text, error, answer.headers["x-onebox-replica"], begun


def many(requests: list[Any], at_a_time: int, how: Any = ask) -> list[Any]:
    with ThreadPoolExecutor(at_a_time) as pool:
        return list(pool.map(how, requests))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two CPUs' worth of replicas, and nothing that talks to anybody."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    given = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": path}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        ray.init(
            "local",
            num_cpus=2,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
            logging_level="ERROR",
        )
        try:
            serve.start(http_options={"port": PORT}, logging_config={"log_level": "ERROR"})
            yield
        finally:
            serve.shutdown()
            ray.shutdown()


@contextmanager
def served(options: Options, **more: Any) -> Iterator[None]:
    serve.run(build(options, **more), name="onebox")
    try:
        yield
    finally:
        serve.delete("onebox")


def pid_of(replica: str) -> int:
    actor = ray.get_actor(f"SERVE_REPLICA::onebox#Box#{replica}", namespace="serve")
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


def replicas(n: int = 24) -> set[str]:
    """Those that answer: new sessions are spread over all of them."""
    return {by_session(f"new {next(SESSIONS)}") for _ in range(n)}


def by_session(session: str) -> str:
    """Who answers it; that may have to wait until one is free."""
    get = httpx.get(f"{URL}/v1/models", headers={"x-session-id": session}, timeout=120)
    return get.raise_for_status().headers["x-onebox-replica"]


def wait_until(true: Any, seconds: float = 240) -> None:
    end_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.2)


def hit_rate(answers: list[tuple[str, int, int, str]]) -> float:
    return sum(cached for _, _, cached, _ in answers) / sum(tokens for _, tokens, _, _ in answers)


@pytest.mark.slow
def test_replicas_answer_as_one_engine_and_keep_prefixes_together(cluster, recorded):
    order = [(story, n) for story in range(PROMPTS) for n in range(EACH)]
    random.Random(7).shuffle(order)
    with in_background(
        ServeOptions(engine=EngineConfig(bundled_model()), port=0, drain_s=1), ProcessEngine, say=lambda _: None
    ) as (url, _):
        alone = many([body(*which) for which in order], 8, lambda request: ask(request, url))
    texts = [text for text, *_ in alone]

    with served(Options(replicas=2, gpus=0)):
        together = many([body(*which) for which in order], 8)
        assert [text for text, *_ in together] == texts
        assert len({replica for *_, replica in together}) == 2
    with served(Options(replicas=2, gpus=0)):  # nothing is cached; a session of its own puts each anywhere
        chance = random.Random(11)
        anywhere = [(body(*which), str(chance.random())) for which in order]
        scattered = many(anywhere, 8, lambda r: ask(r[0], **{"x-session-id": r[1]}))
        assert [text for text, *_ in scattered] == texts
    rates = [hit_rate(answers) for answers in (alone, together, scattered)]
    values = {
        "bench": "ray_replicas",
        "model": "tiny",
        "replicas": 2,
        "requests": len(order),
        "prompts": PROMPTS,
        "at_a_time": 8,
        "right": 1.0,
        **{
            f"cached_share_{name}": round(rate, 4)
            for name, rate in zip(("one", "prefix", "random"), rates, strict=True)
        },
        "by_replica": sorted(Counter(replica for *_, replica in together).values()),
    }
    recorded("ray.jsonl", values)
    print(values)
    assert rates[1] > rates[2] + 0.1 and rates[1] > rates[0] - 0.1


@pytest.mark.slow
def test_a_killed_replica_costs_its_streams_alone_and_comes_back(cluster, recorded):
    with served(Options(replicas=2, gpus=0)):
        expected = [text for text, *_ in many([long_body(n) for n in range(40)], 8)]
        victim = Counter(by_session(str(n)) for n in range(8)).most_common(1)[0][0]
        pid, done, killed_s = pid_of(victim), Counter[str](), 0.0

        def one(n: int) -> tuple[bool, str, str | None, str]:
            nonlocal killed_s
            how = "stream" if n % 2 else "whole"
            if how == "stream":
                text, error, replica, _ = streamed(long_body(n))
            else:
                (text, _, _, replica), error = ask(long_body(n)), None
            done[replica] += 1
            if sum(done.values()) >= 12 and not killed_s:
                killed_s = time.monotonic()
                os.kill(pid, signal.SIGKILL)
            return text == expected[n], how, error, replica

        outcomes = many(list(range(40)), 8, one)
        failed = [outcome for outcome in outcomes if not outcome[0]]
        assert killed_s and done[victim] and len(failed) <= 8
        assert {outcome[1:] for outcome in failed} <= {("stream", "engine_unavailable", victim)}
        wait_until(lambda: len(replicas()) == 2)
        back_s = time.monotonic() - killed_s
        again = many([long_body(n) for n in range(16)], 8)
        assert [text for text, *_ in again] == expected[:16] and victim not in {replica for *_, replica in again}
        values = {"bench": "ray_kill", "model": "tiny", "replicas": 2, "requests": 40, "at_a_time": 8}
        values |= {"failed_streams": len(failed), "failed_whole": 0, "back_s": round(back_s, 1)}
        recorded("ray.jsonl", values)
        print(values)


def slow_speech(config: EngineConfig) -> Any:
    """An engine whose answers take two seconds."""
    return saying("hm</think>" + "Hello " * 20, step_s=0.05, max_num_seqs=config.max_num_seqs)


@pytest.mark.slow
def test_load_adds_replicas_a_restart_loses_nothing_and_clients_that_leave_cancel(cluster):
    options = {"max_replicas": 2, "gpus": 0, "target": 1, "up_s": 1, "down_s": 600, "max_num_seqs": 2, "waiting": 64}
    with served(Options(**options), make=slow_speech):
        assert len(replicas()) == 1
        assert httpx.get(f"{URL}/ui", follow_redirects=True).status_code == 200
        wrong = httpx.post(f"{URL}/v1/messages", content=b"{")
        assert wrong.status_code == 400 and wrong.json()["type"] == "error"
        asked = {"messages": [{"role": "user", "content": "Hi"}]}
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(ask, [asked] * 48)
            wait_until(lambda: len(replicas(6)) == 2)
            assert {text for text, *_ in answers} == {"Hello " * 20}
        together = many([asked] * 4, 4, lambda request: ask(request, **{"x-session-id": "one"}))
        assert len({replica for *_, replica in together}) == 2  # two fill the one that the session has

        old = replicas()
        with ThreadPoolExecutor(1) as pool:
            restart = pool.submit(
                serve.run, build(Options(**options, replicas=2, generation="2"), make=slow_speech), name="onebox"
            )
            asked_meanwhile = 0
            while not restart.done():
                many([asked] * 2, 2)
                asked_meanwhile += 2
            restart.result()
        assert asked_meanwhile >= 2
        wait_until(lambda: not old & replicas())

        with httpx.stream("POST", f"{URL}/v1/chat/completions", json={**asked, "stream": True}, timeout=60) as answer:
            next(answer.iter_lines())
            replica = answer.headers["x-onebox-replica"]
        stats = {"x-session-id": next(s for s in map(str, range(99)) if by_session(s) == replica)}

        def running() -> int:
            return httpx.get(f"{URL}/v1/onebox/stats", headers=stats).json()["running"]

        wait_until(lambda: running() == 0, 1.5)  # sooner than the answer would have ended


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"replica": "2"}, "replica not known"),
        ({"replicas": "many"}, "replicas must be a number"),
        ({"replicas": "0"}, "replicas must be at least 1"),
        ({"replicas": "3", "max_replicas": "2"}, "max_replicas must be replicas (3) or more"),
        ({"routing": "luck"}, "routing must be one of prefix, load"),
        ({"gpus": "-1"}, "gpus must be 0 or more"),
        ({"engine": "[]"}, "engine must be a JSON object"),
        ({"engine": '{"kv": 1}'}, "engine must be a JSON object of the engine's settings"),
        ({"engine": '{"kv_gb": -1}'}, "kv_gb must be above 0"),
        ({"target": "nan"}, "target must be at least 0.1"),
    ],
)
def test_a_mistake_is_one_line(args, says):
    with pytest.raises(SystemExit, match="error: ") as ended:
        app(args)
    assert says in str(ended.value) and "\n" not in str(ended.value)


def test_settings_come_from_arguments_before_the_environment(monkeypatch):
    monkeypatch.setenv("ONEBOX_RAY_REPLICAS", "many")
    with pytest.raises(SystemExit, match="replicas must be a number"):
        app({})
    monkeypatch.setenv("ONEBOX_API_KEY", "k1,k2")
    options = Options.of({"replicas": "2", "engine": {"kv_gb": 1}})
    assert options.api_keys == ("k1", "k2") and "k1" not in repr(options)
    assert options.serve_options().engine.kv_gb == 1
    with pytest.raises(ConfigError, match="api_keys not known"):
        Options.of({"api_keys": "k"})


class Told:
    """A handle whose calls say what is scripted: heads, bytes, or errors; `asked` has what each call was to avoid."""

    def __init__(self, *calls: list[Any]) -> None:
        self.calls, self.asked, self.cancelled = list(calls), [], 0
        self.ask = self

    def options(self, **_: Any) -> Told:
        return self

    def remote(self, *_: Any, avoid: list[str], **more: Any) -> Told:
        self.asked.append(list(avoid))
        self.script = iter(self.calls.pop(0))
        return self

    def __aiter__(self) -> Told:
        return self

    async def __anext__(self) -> Any:
        said = next(self.script, StopAsyncIteration())
        if isinstance(said, Exception):
            raise said
        return said

    def cancel(self) -> None:
        self.cancelled += 1


def passed(handle: Told, path: str = "/v1/chat/completions") -> httpx.Response:
    """What a client of a front sees."""
    front = Front(handle)

    async def whole() -> httpx.Response:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await (await front(Request(scope, receive)))(scope, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as client:
            return await client.post(path, json={"messages": [{"role": "user", "content": "Hi"}]})

    return asyncio.run(whole())


DEAD = RayActorError()
GOOD = Head(200, [("content-type", "application/json")], "b", b"{}")
BUSY = Head(503, [("retry-after", "5")], "a", b'{"error": {}}')
STREAM = Head(200, [("content-type", "text/event-stream")], "a", None)


@pytest.mark.parametrize("first", [[BUSY], [Head(429, [], "a", b"")], [DEAD]])
def test_a_request_of_which_nothing_was_sent_is_tried_elsewhere(first):
    handle = Told(first, [GOOD])
    answer = passed(handle)
    assert answer.status_code == 200 and answer.headers["x-onebox-replica"] == "b"
    assert handle.asked[0] == [] and handle.asked[1] == (
        [] if first == [DEAD] else ["a"]
    )  # Serve drops the dead itself


def test_when_no_replica_helps_the_client_is_told_so():
    busy = passed(Told([BUSY], [Head(503, [], "b", b"{}")], [BUSY]))
    assert busy.status_code == 503 and busy.headers["retry-after"] == "5"
    gone = passed(Told([DEAD], [DEAD], [DEAD]))
    assert gone.status_code == 503 and gone.json()["error"]["code"] == "engine_unavailable"
    full = passed(Told([BackPressureError(300, 256)]))
    assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full"
    assert passed(Told([DeploymentUnavailableError("x")])).status_code == 503


def test_a_stream_that_breaks_ends_in_an_error_event_of_its_api():
    part = b'data: {"choices": []}\n\n'
    chat = passed(handle := Told([STREAM, part, DEAD]))
    events = [line for line in chat.text.splitlines() if line]
    assert chat.status_code == 200 and events[0] == part.decode().strip() and events[2] == "data: [DONE]"
    assert json.loads(events[1][6:])["error"]["code"] == "engine_unavailable" and handle.asked == [[]]
    other = passed(Told([STREAM, b"event: ping\ndata: {}\n\n", DEAD]), "/v1/messages")
    assert "event: error\n" in other.text and "[DONE]" not in other.text
    assert passed(handle := Told([STREAM, part])).text == part.decode() and not handle.cancelled
