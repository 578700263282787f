"""The server in front of another one: same answers, keys and streams go through, a bad server behind is 502 or 504."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from serving import app_of, events, running, saying
from test_server_intake import LONG, in_place  # noqa: F401  # compression in place

from onebox.bench import soak
from onebox.server.intake import IntakeOptions
from onebox.server.upstream import create_upstream_app
from onebox.testing import FakeEngine

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
SAID = "I think.\n</think>\n\nHello there."
CHANGING = {"id", "created", "created_at", "completed_at", "item_id", "response_id"}


def fixed(value: Any) -> Any:
    """An answer without what differs between any two."""
    if isinstance(value, dict):
        return {k: fixed(v) for k, v in value.items() if k not in CHANGING}
    return [fixed(v) for v in value] if isinstance(value, list) else value


@asynccontextmanager
async def front_of(app: FastAPI, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an upstream app whose server behind is `app`, in this process."""
    front = create_upstream_app("http://behind/v1", transport=httpx.ASGITransport(app), **options)
    async with app.router.lifespan_context(app), front.router.lifespan_context(front):
        transport = httpx.ASGITransport(front, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            yield client


def through(
    path: str, body: Any, *, engine: FakeEngine | None = None, method: str = "POST", headers: Any = None, **options: Any
) -> httpx.Response:
    behind = {k: options.pop(k) for k in ("behind_keys",) if k in options}

    async def run() -> httpx.Response:
        app = app_of(engine or saying(SAID), api_keys=behind.get("behind_keys", ()))
        async with front_of(app, **options) as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(run())


def direct(path: str, body: Any, method: str = "POST") -> httpx.Response:
    async def run() -> httpx.Response:
        app = app_of(saying(SAID))
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://behind") as client:
                return await client.request(method, path, json=body)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI}),
        (CHAT, {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 5}),
        ("/v1/completions", {"prompt": [1, 2, 3], "stream": True}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/responses", {"input": "Hi", "stream": True}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9, "stream": True}),
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/tokenize", {"prompt": "Hi there"}),
        ("/v1/embeddings", {"input": "x"}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": HI, "model": "other"}),
        (CHAT, {"messages": HI, "temperature": 1000}),
        ("/v1/messages", {"messages": HI}),
    ],
)
def test_answers_are_those_of_the_server_behind(path: str, body: Any) -> None:
    got, want = through(path, body), direct(path, body)
    assert (got.status_code, got.headers["content-type"]) == (want.status_code, want.headers["content-type"])
    if want.headers["content-type"].startswith("text/event-stream"):
        lines = [[line for line in r.text.split("\n") if not line.startswith(":")] for r in (got, want)]
        assert len(lines[0]) == len(lines[1])
        for a, b in zip(*lines, strict=True):
            same = a == b or fixed(json.loads(a.partition(": ")[2])) == fixed(json.loads(b.partition(": ")[2]))
            assert same, (a, b)
    else:
        assert fixed(got.json()) == fixed(want.json())


def test_models_come_from_behind_and_unknown_paths_do_not_go_there() -> None:
    assert through("/v1/models", None, method="GET").json()["data"][0]["id"] == "tiny"
    assert through("/somewhere", None, method="GET").status_code == 404


def test_a_prompt_is_compressed_on_its_way_and_usage_says_so() -> None:
    engine = saying(SAID)
    answer = through(CHAT, {"messages": LONG, "compress": {"target_tokens": 300}}, engine=engine)
    told = answer.json()["usage"]["onebox"]["compression"]
    assert told["tokens_after"] <= 300
    assert len(engine.requests[0].prompt) == answer.json()["usage"]["prompt_tokens"] < 340
    assert answer.headers["x-onebox-trace"] == answer.json()["usage"]["onebox"]["trace_id"]


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (CHAT, {"messages": LONG, "stream": True, "stream_options": {"include_usage": True}}, None),
        ("/v1/messages", {"messages": LONG, "max_tokens": 9, "stream": True, "system": "Be brief."}, None),
        ("/v1/responses", {"input": LONG, "stream": True, "instructions": "Be brief."}, None),
        ("/v1/responses", {"input": LONG}, None),
        ("/v1/completions", {"prompt": LONG[0]["content"]}, None),
    ],
)
def test_every_api_s_prompt_is_shortened_by_the_server_s_own_rule(path: str, body: Any, where: None) -> None:
    engine = saying(SAID)
    answer = through(path, body, engine=engine, intake=IntakeOptions(compress_over=400))
    assert answer.status_code == 200, answer.text
    assert len(engine.requests[0].prompt) < 450
    assert '"tokens_before"' in answer.text


def test_a_body_goes_on_byte_for_byte_when_nothing_is_to_be_changed() -> None:
    seen: list[bytes] = []

    async def echo(request: httpx.Request) -> httpx.Response:
        seen.append(request.content)
        return httpx.Response(200, json={"ok": 1})

    body = b'{ "messages": [], "x":1.50, "y": "\\u00e9", "big": 123456789012345678901234567890 }'
    assert front(httpx.MockTransport(echo), CHAT, body).status_code == 200
    assert seen == [body]


def front(transport: httpx.AsyncBaseTransport, path: str, body: bytes, **options: Any) -> httpx.Response:
    headers = options.pop("headers", None)

    async def run() -> httpx.Response:
        app = create_upstream_app("http://behind", transport=transport, **options)
        async with app.router.lifespan_context(app):
            inner = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=inner, base_url="http://front") as client:
                return await client.post(path, content=body, headers=headers)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "sent", "reaches"),
    [
        ({}, {"authorization": "Bearer mine"}, {"authorization": "Bearer mine"}),
        ({}, {"x-api-key": "mine"}, {"x-api-key": "mine"}),
        ({"key": "theirs"}, {"authorization": "Bearer mine"}, {"authorization": "Bearer theirs"}),
        ({"api_keys": ["front"]}, {"authorization": "Bearer front"}, {}),
        ({"api_keys": ["front"], "key": "theirs"}, {"x-api-key": "front"}, {"authorization": "Bearer theirs"}),
    ],
)
def test_keys_go_through_unless_they_are_this_server_s_own(options: Any, sent: Any, reaches: Any) -> None:
    seen: list[httpx.Headers] = []

    async def note(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers)
        return httpx.Response(200, json={})

    front(httpx.MockTransport(note), CHAT, b"{}", headers={**sent, "x-request-id": "abc", "x-team": "blue"}, **options)
    (headers,) = seen
    assert {k: v for k, v in headers.items() if k in ("authorization", "x-api-key")} == reaches
    assert (headers["x-request-id"], headers["x-team"], headers["host"]) == ("abc", "blue", "behind")


@contextmanager
def talking(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server of raw bytes: `talk` has each connection. Its base URL."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = sock.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    talk(connection)
                    with suppress(OSError):  # what is unread at a close makes it a reset
                        connection.shutdown(socket.SHUT_WR)
                        connection.settimeout(1)
                        while connection.recv(65536):
                            pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        sock.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def ask(url: str, body: Any = None, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        app = create_upstream_app(url, **options)
        async with app.router.lifespan_context(app):
            inner = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=inner, base_url="http://front", timeout=20) as client:
                return await client.post(CHAT, json=body or {"messages": HI})

    return asyncio.run(run())


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("bytes_", "says"),
    [
        (b"", "broke off"),
        (b"\x00\xff garbage garbage\r\n\r\n", "broke off"),
        (HEAD % b"text/html" + b"<html>Welcome to nginx</html>", "Welcome to nginx"),
        (HEAD % b"application/json" + b'{"choices": [', "answered 200"),
        (b"HTTP/1.1 500 Oops\r\nConnection: close\r\n\r\nstack trace", "answered 500"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{", "broke off"),
        (HEAD % b"text/event-stream" + b"data: {}\n\n", "nobody asked for"),
        (
            b"HTTP/1.1 301 Moved\r\nLocation: https://there/v1\r\nConnection: close\r\n\r\n",
            "points to 'https://there/v1'",
        ),
        (HEAD % b"application/json" + b"[" * 100_000, "no JSON"),
        (HEAD % b"application/json\r\nContent-Encoding: gzip" + b"nope", "decompressing"),
        (HEAD % (b"application/json\r\nX: " + b"a" * 200_000), "broke off"),
        (b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", "did not speak HTTP"),
    ],
    ids=[
        *("silence", "noise", "html", "cut json", "500 text", "cut body", "unasked stream", "redirect", "nested"),
        *("gzip", "header", "http2"),
    ],
)
def test_a_server_behind_that_makes_no_sense_is_502_with_the_reason(bytes_: bytes, says: str) -> None:
    with talking(lambda connection: connection.sendall(bytes_)) as url:
        answer = ask(url)
    assert answer.status_code == 502, answer.text
    error = answer.json()["error"]
    assert error["code"] == "upstream_error"
    assert says in error["message"]
    assert url in error["message"]


@pytest.mark.parametrize(
    "sent", [b"", b": hello\n\n", b"\xef\xbb\xbfdata: {}\n\n", b'{"choices": []}\n\n', b"data: {}\r\r"]
)
def test_a_stream_behind_without_an_event_is_502(sent: bytes) -> None:
    with talking(lambda connection: connection.sendall(HEAD % b"text/event-stream" + sent)) as url:
        answer = ask(url, {"messages": HI, "stream": True})
    if answer.status_code == 200:  # a comment was passed on before the end came
        assert "without an event" in events(answer)[-1]["error"]["message"]
        return
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")


def test_a_full_server_behind_is_429_whatever_form_it_says_that_in() -> None:
    head = b"HTTP/1.1 429 Busy\r\nContent-Type: text/html\r\nRetry-After: 7\r\nConnection: close\r\n\r\n"
    with talking(lambda connection: connection.sendall(head + b"<html>slow down</html>")) as url:
        answer = ask(url)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert "slow down" in answer.json()["error"]["message"]


def test_a_dead_server_behind_is_502() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    answer = ask(url)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
    assert "cannot be reached" in answer.json()["error"]["message"]


def test_a_slow_server_behind_is_504() -> None:
    with talking(lambda connection: time.sleep(2)) as url:
        answer = ask(url, read_s=0.3)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")
    assert "0.3 s" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("rest", "says"),
    [(b"<html>\n\n", "<html>"), (b"data: {", "inside an event"), (None, "sent nothing for")],
    ids=["garbage", "cut", "slow"],
)
def test_what_goes_wrong_after_the_first_event_ends_the_stream_with_an_error_event(
    rest: bytes | None, says: str
) -> None:
    def talk(connection: socket.socket) -> None:
        connection.sendall(HEAD % b"text/event-stream" + b'data: {"choices":[]}\n\n')
        time.sleep(0.1)
        if rest is None:
            time.sleep(1)
        else:
            connection.sendall(rest)

    with talking(talk) as url:
        answer = ask(url, {"messages": HI, "stream": True}, read_s=0.4)
    assert answer.status_code == 200
    last = events(answer)[-1]
    assert says in last["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
@pytest.mark.parametrize(
    "body",
    [
        *soak.RUBBISH,
        b'{"messages": 3, "input": 3, "prompt": 3, "compress": true}',
        b'{"messages": [{"role": "user", "content": [{"type": "text"}]}], "input": [{"content": 3}], "compress": true}',
        b'{"messages": [3], "input": [3], "prompt": [3], "guard": "flag"}',
        b'{"messages": [{}], "input": [{"role": null}], "prompt": null, "compress": {"rate": 0.5}}',
        b'{"messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": "x", "compress": {"rate": 9}}',
    ],
    ids=range(len(soak.RUBBISH) + 5),
)
def test_rubbish_is_a_4xx_on_its_way_as_at_the_end(path: str, body: bytes) -> None:
    answer = through(path, body)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["message"]


def test_an_error_of_the_server_behind_keeps_status_and_words() -> None:
    async def busy(_: httpx.Request) -> httpx.Response:
        return httpx.Response(429, json={"error": {"message": "slow down"}}, headers={"retry-after": "7"})

    answer = front(httpx.MockTransport(busy), CHAT, b'{"messages":[]}')
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json() == {"error": {"message": "slow down"}}


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_that_calls_itself_a_stream_keeps_its_status(stream: bool) -> None:
    async def broken(_: httpx.Request) -> httpx.Response:
        return httpx.Response(
            503, text='{"error": {"message": "later"}}', headers={"content-type": "text/event-stream"}
        )

    answer = front(httpx.MockTransport(broken), CHAT, json.dumps({"messages": [], "stream": stream}).encode())
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "later")


def test_only_a_connection_that_was_not_made_is_tried_again() -> None:
    connections = []

    def talk(connection: socket.socket) -> None:
        connections.append(connection)

    with talking(talk) as url:
        assert ask(url).status_code == 502
    assert len(connections) == 1


def test_over_sockets_a_hang_up_reaches_the_server_behind() -> None:
    engine = saying("word " * 2000, step_s=0.01)
    with running(app_of(engine)) as behind, running(create_upstream_app(behind)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)  # type: ignore[call-overload]
        for _, _chunk in zip(range(5), stream, strict=False):
            pass
        assert not engine.cancelled
        stream.close()
        client.close()
        for _ in range(500):
            if engine.cancelled:
                break
            time.sleep(0.02)
        assert len(engine.cancelled) == 1
        assert httpx.get(f"{url}/health/ready").json()["status"] == "ready"
        text = httpx.get(f"{url}/metrics").text
        assert 'onebox:upstream_requests_total{status="200"} 1.0' in text
        assert "onebox:upstream_running 0.0" in text


def test_ready_says_why_not() -> None:
    async def run() -> None:
        app = create_upstream_app("http://127.0.0.1:9")
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
                assert (await client.get("/health")).status_code == 200
                ready = await client.get("/health/ready")
                assert ready.status_code == 503
                assert "cannot be reached" in ready.json()["detail"]

    asyncio.run(run())


def test_the_command_needs_no_torch_and_starts_within_seconds() -> None:
    code = (
        "import sys, threading, time, signal, os\n"
        "from onebox import cli\n"
        "import onebox.server.serve as serve\n"
        "def say(line):\n"
        "    if line.startswith('ready'):\n"
        "        heavy = 'torch' in sys.modules, 'transformers' in sys.modules\n"
        "        print(time.process_time(), *heavy, flush=True)\n"
        "        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "cli.say = say\n"
        "cli.main(['serve', '--upstream', 'http://127.0.0.1:9/v1', '--port', '0'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    seconds, *heavy = done.stdout.split()
    assert heavy == ["False", "False"], done.stderr
    assert float(seconds) < 2.5  # of processor time, which other work on the machine does not add to: about 1
    assert "Traceback" not in done.stderr
