"""What clients, networks and disks do to a server: it says what is wrong, loses no answer, and serves the next one."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hmac
import json
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import app_of, client_of, engine_of, post, running, saying, tokenizer
from test_cli_serve import SERVE_FAKE

from onebox.engine.client import EngineStats
from onebox.server import app as server_app
from onebox.server import responses
from onebox.server.responses import Store
from onebox.testing import FakeEngine

CHAT, COMPLETE, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "x"}]


def chat_with(fields: str) -> httpx.Response:
    """A chat with JSON text among its fields, as it stands."""
    return post(
        saying("hm</think>Hello"), CHAT, b'{"messages":[{"role":"user","content":"x"}],' + fields.encode() + b"}"
    )


# Bodies


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"temperature": 1e400', "temperature"),
        ('"temperature": NaN', "temperature"),
        ('"top_p": -Infinity', "top_p"),
        ('"seed": 9223372036854775808', "seed"),
        ('"seed": -9223372036854775809', "seed"),
        ('"max_tokens": 0', "max_tokens"),
        ('"max_tokens": -1', "max_tokens"),
        ('"max_completion_tokens": 0', "max_completion_tokens"),
        ('"min_tokens": 99999999999999999999', "min_tokens"),
        ('"n": 0', "n"),
        ('"n": 129', "n"),
        ('"logprobs": true, "top_logprobs": 21', "top_logprobs"),
        ('"logprobs": true, "top_logprobs": -1', "top_logprobs"),
        ('"top_logprobs": 3', "top_logprobs"),
        ('"stop": ""', "stop"),
        ('"stop": ["a", ""]', "stop"),
        ('"stop": ' + json.dumps([str(i) for i in range(65)]), "stop"),
        ('"logit_bias": {"8192": 1}', "logit_bias"),
        ('"logit_bias": {"-1": 1}', "logit_bias"),
        ('"logit_bias": {"5.0": 1}', "logit_bias"),
        ('"logit_bias": {"\\u00b2": 1}', "logit_bias"),
        ('"logit_bias": {"' + "9" * 5000 + '": 1}', "logit_bias"),
        ('"logit_bias": {"5": NaN}', "logit_bias"),
        ('"stop_token_ids": [8192]', "stop_token_ids"),
        ('"seed": ' + "9" * 5000, None),
        ('"unheard_of": ' + "9" * 5000, None),
        ('"user": "\\ud800"', None),
        ('"user": "\\udc00\\ud800"', None),
    ],
)
def test_a_number_or_a_text_out_of_bounds_is_400_and_named(fields: str, param: str | None) -> None:
    response = chat_with(fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize(
    "fields",
    [
        '"seed": 9223372036854775807, "n": 3',
        '"seed": -9223372036854775808',
        '"max_tokens": 2000000000',
        '"n": 128',
        '"logprobs": true, "top_logprobs": 20',
        '"logprobs": true, "top_logprobs": 0',
        '"stop": []',
        '"stop": "e\\u0301"',
        '"stop": "' + "a" * 1_000_000 + '"',
        '"temperature": -5, "temperature": 0.5',  # of a field given twice the last counts
        '"user": "a\\u0000b"',
        '"logit_bias": ' + json.dumps({str(i): 100 for i in range(8192)}),
    ],
)
def test_what_is_only_unusual_is_served(fields: str) -> None:
    assert chat_with(fields).status_code == 200


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b'{"messages":[{"role":"user","content":"\xff"}]}', b"\xef\xbb\xbf{}", "{}".encode("utf-16")]
)
def test_a_body_that_is_no_utf8_json_is_400_and_says_where(data: bytes) -> None:
    response = post(saying("x"), CHAT, data)
    assert response.status_code == 400
    assert "not valid JSON" in response.json()["error"]["message"]


def test_a_combining_character_is_found_as_a_stop_string_across_tokens() -> None:
    engine = engine_of([t for c in "cafe\u0301 noir" for t in tokenizer().encode(c)])
    body = {"prompt": "x", "stop": "e\u0301", "max_tokens": 99}
    choice = post(engine, COMPLETE, body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("caf", "stop")


def test_a_content_type_is_not_looked_at_and_a_coding_is_refused_by_name() -> None:
    data = json.dumps({"messages": HI}).encode()

    async def run() -> None:
        async with client_of(saying("hm</think>Hello")) as client:
            for kind in ("text/plain", "application/xml", "nonsense"):
                assert (await client.post(CHAT, content=data, headers={"content-type": kind})).status_code == 200
            packed = await client.post(CHAT, content=gzip.compress(data), headers={"content-encoding": "gzip"})
            assert packed.status_code == 400
            assert "'gzip'" in packed.json()["error"]["message"]

    asyncio.run(run())


@pytest.mark.parametrize("part", ["image_url", "input_audio", "file", "video_url", None, 3])
def test_a_part_that_is_no_text_is_400_and_named(part: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": part, part or "x": {}}]}]
    error = post(saying("x"), CHAT, {"messages": messages}).json()["error"]
    assert error["param"] == "messages[0].content[1].type"


def test_a_result_without_its_call_is_read_and_a_role_nobody_knows_is_400() -> None:
    engine = saying("hm</think>Hello")
    stray = [*HI, {"role": "tool", "tool_call_id": "gone", "content": "42 degrees"}]
    assert post(engine, CHAT, {"messages": stray}).status_code == 200
    assert "42 degrees" in tokenizer().decode(engine.requests[0].prompt)
    error = post(saying("x"), CHAT, {"messages": [{"role": "king", "content": "x"}]}).json()["error"]
    assert error["param"] == "messages[0].role"


def test_ten_thousand_messages_and_a_thousand_tools_are_served_where_they_fit() -> None:
    engine = saying("hm</think>Hello", max_model_len=400_000)
    tools = [{"type": "function", "function": {"name": f"f{i}", "description": "does something"}} for i in range(1000)]
    assert post(engine, CHAT, {"messages": HI * 10_000, "tools": tools}).status_code == 200
    for body in ({"messages": HI * 10_000}, {"messages": HI, "tools": tools}):
        error = post(saying("x"), CHAT, body).json()["error"]
        assert error["code"] == "context_length_exceeded"


def test_megabytes_of_prompt_are_refused_without_reading_them_all_and_nobody_waits_for_it() -> None:
    async def run() -> None:
        async with client_of(saying("hm</think>Hello")) as client:
            body = json.dumps({"messages": [{"role": "user", "content": "a " * 5_000_000}]}).encode()
            begun_s, late_s = time.perf_counter(), 0.0
            asked = asyncio.create_task(client.post(CHAT, content=body))
            while not asked.done():
                before_s = time.perf_counter()
                await asyncio.sleep(0.005)
                late_s = max(late_s, time.perf_counter() - before_s - 0.005)
            response = asked.result()
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert time.perf_counter() - begun_s < 5  # all of it takes 10 s
            assert late_s < 0.5

    asyncio.run(run())


def test_unknown_fields_by_the_thousand_are_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    fields = ",".join(f'"no_such_field_{i}": 1' for i in range(5000))
    assert chat_with(fields).status_code == 200
    (record,) = [r for r in caplog.records if "no_such_field" in r.getMessage()]
    assert len(record.getMessage()) < 500


# Paths, methods and keys


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/v1/responses/a%00b",
        "/v1/responses/%ff%fe",
        "/v1/responses/" + "a" * 5000,
        "/v1/models/%2e%2e/%2e%2e/etc/passwd",
        "/v1/onebox/traces/..%2f..%2fetc%2fpasswd",
    ],
)
def test_an_id_that_is_a_path_finds_nothing(path: str) -> None:
    async def run() -> None:
        async with client_of(saying("x")) as client:
            response = await client.get(path)
            assert response.status_code == 404
            assert len(response.text) < 1000

    asyncio.run(run())


def test_nothing_that_is_sent_begins_a_line_of_its_own_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "onebox.access")
    sent = b'{"messages":\n[{"role":"user","content":"\\u001b[2J x"}],\r\n"user":"a\x7fb"}'

    async def run() -> None:
        async with client_of(saying("hm</think>Hello"), log_prompts=True) as client:
            await client.get("/v1/models/x%0d%0aINFO%20forged%1b[2J%e2%80%a8y%c3%b6")
            assert (await client.post(CHAT, content=sent)).status_code == 200

    asyncio.run(run())
    lines = [r.getMessage() for r in caplog.records if r.name == "onebox.access"]
    assert len(lines) == 3 and all(line.isprintable() for line in lines)
    assert any("x\\r\\nINFO forged\\x1b[2J\\u2028yö" in line for line in lines)


def test_head_is_answered_as_get_without_a_body() -> None:
    with running(app_of(saying("x"))) as url:
        for path in ("/health", "/health/ready", "/v1/models", "/version", "/metrics"):
            head, get = httpx.head(url + path), httpx.get(url + path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == get.headers["content-type"]
        assert httpx.head(url + CHAT).status_code == 405


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_failures_before_a_body_is_read_have_the_shape_of_their_api(path: str) -> None:
    async def run() -> None:
        async with client_of(saying("x"), api_keys=["k"]) as client:
            refused = await client.post(path, json={})
            wrong = await client.get(path, headers={"x-api-key": "k"})
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert wrong.status_code == 405
        if path == CHAT:
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert wrong.json()["error"]["code"] == "method_not_allowed"
        else:
            assert refused.json()["type"] == wrong.json()["type"] == "error"
            assert refused.json()["error"]["type"] == "authentication_error"

    asyncio.run(run())


def test_every_key_is_compared_in_full_whichever_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b))

    async def run() -> None:
        async with client_of(saying("x"), api_keys=["first", "second", "third"]) as client:
            for key in ("first", "third", "none of them", "f", ""):
                compared.clear()
                await client.get("/v1/models", headers={"x-api-key": key})
                assert compared == [(32, 32)] * 3

    asyncio.run(run())


# Connections


def request_bytes(path: str, body: dict[str, Any], *, version: str = "1.1", length: int | None = None) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data) if length is None else length}\r\n\r\n"
    return head.encode() + data


@contextmanager
def connected(url: str, data: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as s:
        s.sendall(data)
        yield s


def read_until(s: socket.socket, what: bytes | None) -> bytes:
    """What comes until it holds `what`, or until the other side closes."""
    got = b""
    while what is None or what not in got:
        part = s.recv(65536)
        if not part:
            break
        got += part
    return got


def reset(s: socket.socket) -> None:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    s.close()


def until(engine: FakeEngine, what: Any) -> EngineStats:
    """The engine's stats once they are as wanted."""
    end_s = time.monotonic() + 5
    while not what(engine.stats()) and time.monotonic() < end_s:
        time.sleep(0.01)
    return engine.stats()


def test_a_length_that_lies_is_refused_or_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_app, "BODY_SILENCE_S", 0.2)
    engine = saying("hm</think>Hello")
    with running(app_of(engine)) as url:
        with connected(url, request_bytes(CHAT, {"messages": HI}, length=5)) as s:
            assert read_until(s, b"}}").startswith(b"HTTP/1.1 400")
        with connected(url, request_bytes(CHAT, {"messages": HI}, length=-5)) as s:
            assert read_until(s, None).startswith(b"HTTP/1.1 400")
        with connected(url, request_bytes(CHAT, {"messages": HI}, length=5000)) as s:
            got = read_until(s, None)
            assert got.startswith(b"HTTP/1.1 408") and b"request_timeout" in got  # and the connection is closed
        with connected(url, request_bytes(CHAT, {"messages": HI}, length=99_999_999_999)) as s:
            assert b"request_too_large" in read_until(s, b"}}")  # without waiting for the rest
        with connected(url, request_bytes(CHAT, {"messages": HI}, length=5000)) as s:
            s.shutdown(socket.SHUT_WR)
            read_until(s, None)
        assert httpx.post(url + CHAT, json={"messages": HI}).status_code == 200
    assert len(engine.requests) == 1


def test_a_hundred_megabytes_are_413() -> None:
    with running(app_of(saying("x"))) as url:
        part = b"a" * 2**20
        assert httpx.post(url + CHAT, content=(part for _ in range(100))).status_code == 413
        assert httpx.post(url + CHAT, content=part * 100).status_code == 413


def test_old_and_pipelined_requests_are_answered() -> None:
    with running(app_of(saying("hm</think>Hello"))) as url:
        for stream in (False, True):
            with connected(url, request_bytes(CHAT, {"messages": HI, "stream": stream}, version="1.0")) as s:
                got = read_until(s, None)  # the end of the answer is the end of the connection
            assert b"200 OK" in got and b"Hello" in got and b"chunked" not in got
        with connected(url, request_bytes(CHAT, {"messages": HI}) * 5) as s:
            got = b""
            while got.count(b"200 OK") < 5:
                got += s.recv(65536)
        with connected(url, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03") as s:  # a client that speaks TLS
            assert read_until(s, None).startswith(b"HTTP/1.1 400")


def test_a_client_that_stops_reading_costs_a_window_of_text_and_leaves_when_it_resets() -> None:
    engine = engine_of([5] * 400_000, tokens_per_step=50, step_s=0.0005, max_model_len=500_000)
    with running(app_of(engine, drain_s=0)) as url:
        before = server_memory_kb()
        with connected(url, request_bytes(COMPLETE, {"prompt": "x", "max_tokens": 400_000, "stream": True})) as s:
            until(engine, lambda stats: stats.generated_tokens > 60_000)
            assert engine.stats().running == 1
            assert server_memory_kb() - before < 60_000
            # others are served meanwhile
            assert httpx.post(url + COMPLETE, json={"prompt": "y", "max_tokens": 1}).status_code == 200
            reset(s)
        assert until(engine, lambda stats: stats.running == 0).running == 0
        for _ in range(30):
            with connected(url, request_bytes(COMPLETE, {"prompt": "x", "max_tokens": 9999, "stream": True})) as s:
                s.recv(100)
                reset(s)
        stats = until(engine, lambda stats: stats.running == 0)
        assert (stats.running, stats.slots_free) == (0, stats.slots_total)
    assert len(engine.cancelled) == 31


def server_memory_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def test_a_second_sigterm_does_not_wait_for_answers() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    code = SERVE_FAKE.format(tests=str(Path(__file__).parent), port=port).replace("0.03", "0.1")
    server = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(400):
            try:
                if httpx.get(f"{url}/health/ready").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        ask = {"prompt": "x", "max_tokens": 99, "stream": True}
        with httpx.stream("POST", url + COMPLETE, json=ask) as response:
            lines = response.iter_lines()
            next(lines)
            begun_s = time.monotonic()
            server.send_signal(signal.SIGTERM)
            assert next(line for line in lines if line).startswith("data: {")  # the first one waits
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(httpx.RemoteProtocolError):
                assert "data: [DONE]" not in list(lines)
        server.wait(20)
        assert time.monotonic() - begun_s < 2.5  # the answer would have taken 4
    finally:
        server.kill()
        _, err = server.communicate(timeout=20)
    assert "Traceback" not in err


# The store of responses


def broken(store: Store, how: str, path: Path) -> Any:
    """Makes the store's file fail as disks do; gives what must be kept meanwhile."""
    if how == "full":
        pages = store._db.execute("pragma page_count").fetchone()[0]
        store._db.execute(f"pragma max_page_count = {pages}")
        return None
    if how == "read-only":
        return store._db.execute("pragma query_only = 1")
    other = sqlite3.connect(path)
    other.execute("begin immediate")
    return other


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["full", "read-only", "locked"])
def test_a_finished_response_is_delivered_although_it_cannot_be_stored(
    how: str, stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(responses, "LOCKED_S", 1.0)
    path = tmp_path / "responses.db"

    async def run() -> None:
        async with client_of(saying("hm</think>" + "Hello" * 2000), response_store=str(path)) as client:
            store = client._transport.app.state.responses.store  # type: ignore[attr-defined]
            first = (await client.post(RESPONSES, json={"input": "x", "max_output_tokens": 5})).json()
            assert first["store"] is True and "warnings" not in first
            kept = broken(store, how, path)
            asked = asyncio.create_task(client.post(RESPONSES, json={"input": "x", "stream": stream}))
            late_s = 0.0
            while not asked.done():
                before_s = time.perf_counter()
                await asyncio.sleep(0.005)
                late_s = max(late_s, time.perf_counter() - before_s)
            response = asked.result()
            assert response.status_code == 200
            value = response.json() if not stream else last_event(response.text)["response"]
            assert value["status"] == "completed"
            assert value["output"][-1]["content"][0]["text"] == "Hello" * 2000
            assert value["store"] is False
            assert "Not stored" in value["warnings"][0]
            assert late_s < 0.8  # a file that is locked holds nobody else up
            assert "is not stored" in caplog.text
            # what was stored before is still there, the other is not
            assert (await client.get(f"{RESPONSES}/{first['id']}")).status_code == 200
            assert (await client.get(f"{RESPONSES}/{value['id']}")).status_code == 404
            del kept

    asyncio.run(run())


def last_event(text: str) -> Any:
    name, data = text.rstrip().split("\n\n")[-1].split("\n")
    assert name == "event: response.completed"
    return json.loads(data.removeprefix("data: "))


def test_a_store_that_fails_is_503_to_those_who_ask_for_what_it_holds() -> None:
    async def run() -> None:
        async with client_of(saying("hm</think>Hello")) as client:
            id = (await client.post(RESPONSES, json={"input": "x"})).json()["id"]
            client._transport.app.state.responses.store.close()  # type: ignore[attr-defined]
            ask = {"input": "y", "previous_response_id": id}
            for response in (
                await client.get(f"{RESPONSES}/{id}"),
                await client.delete(f"{RESPONSES}/{id}"),
                await client.post(RESPONSES, json=ask),
            ):
                assert (response.status_code, response.json()["error"]["code"]) == (503, "store_unavailable")
            assert (await client.post(RESPONSES, json={"input": "y"})).json()["status"] == "completed"

    asyncio.run(run())


def test_deletes_and_gets_at_once_find_a_response_once() -> None:
    async def run() -> None:
        async with client_of(saying("hm</think>Hello")) as client:
            for _ in range(5):
                id = (await client.post(RESPONSES, json={"input": "x"})).json()["id"]
                calls = [
                    client.delete(f"{RESPONSES}/{id}") if i % 2 else client.get(f"{RESPONSES}/{id}") for i in range(16)
                ]
                answers = await asyncio.gather(*calls)
                assert {a.status_code for a in answers} <= {200, 404}
                assert sum(a.status_code == 200 and "deleted" in a.json() for a in answers) == 1
                assert (await client.get(f"{RESPONSES}/{id}")).status_code == 404
                unknown = await client.post(RESPONSES, json={"input": "y", "previous_response_id": id})
                assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "previous_response_id")

    asyncio.run(run())


def test_stored_responses_stay_within_their_bytes_and_the_newest_stays_whatever_its_size(tmp_path: Path) -> None:
    path = str(tmp_path / "r.db")
    store = Store(path, max_bytes=10_000)
    for i in range(100):
        store.put({"id": f"r{i}", "text": "x" * 900}, [])
    assert store.get("r99")[0]["id"] == "r99"
    store.close()
    store = Store(path, max_bytes=10_000)  # which knows what it holds
    found = [i for i in range(100) if exists(store, f"r{i}")]
    assert found == list(range(100 - len(found), 100)) and 8 <= len(found) <= 11
    store.put({"id": "big", "text": "x" * 50_000}, [])
    assert exists(store, "big") and not exists(store, "r99")
    store.delete("big")
    store.put({"id": "next"}, [])
    assert exists(store, "next")
    store.close()


def exists(store: Store, id: str) -> bool:
    try:
        store.get(id)
    except responses.NotFoundError:
        return False
    return True


# One key's things and another's


def test_what_one_key_stored_is_not_there_for_another() -> None:
    async def run() -> None:
        store = {"model": "tiny", "input": "Remember heron.", "compress": {"rate": 0.5}}
        async with client_of(saying("hm</think>Hello"), api_keys=["mine", "yours"]) as client:
            mine, yours = ({"authorization": f"Bearer {key}"} for key in ("mine", "yours"))
            made = await client.post(RESPONSES, json=store, headers=mine)
            id, trace = made.json()["id"], made.headers["x-onebox-trace"]
            go_on = {"input": "What was it?", "previous_response_id": id}
            refused = await client.post(RESPONSES, json=go_on, headers=yours)
            unknown = await client.post(RESPONSES, json={**go_on, "previous_response_id": "resp_x"}, headers=yours)
            assert refused.json()["error"]["message"].replace(id, "resp_x") == unknown.json()["error"]["message"]
            for path, method in ((f"{RESPONSES}/{id}", "GET"), (f"{RESPONSES}/{id}", "DELETE")):
                assert (await client.request(method, path, headers=yours)).status_code == 404
            assert (await client.post(f"{RESPONSES}/{id}/cancel", headers=yours)).status_code == 404
            assert (await client.get(f"/v1/onebox/traces/{trace}", headers=yours)).status_code == 404
            # and still there for the first, by either header
            assert (await client.get(f"/v1/onebox/traces/{trace}", headers=mine)).status_code == 200
            assert (await client.post(RESPONSES, json=go_on, headers={"x-api-key": "mine"})).status_code == 200
            assert (await client.delete(f"{RESPONSES}/{id}", headers=mine)).status_code == 200

    asyncio.run(run())


def test_a_response_under_way_is_cancelled_by_its_own_key_alone_and_once() -> None:
    async def run() -> None:
        engine = engine_of([5] * 8000, step_s=0.005)
        async with client_of(engine, drain_s=0, api_keys=["mine", "yours"]) as client:
            mine, yours = {"x-api-key": "mine"}, {"x-api-key": "yours"}
            body = {"input": "x", "max_output_tokens": 5000}
            asked = asyncio.create_task(client.post(RESPONSES, json=body, headers=mine))
            running = client._transport.app.state.responses.running  # type: ignore[attr-defined]
            while not running:
                await asyncio.sleep(0.01)
            (id,) = running
            assert (await client.post(f"{RESPONSES}/{id}/cancel", headers=yours)).status_code == 404
            assert engine.stats().running == 1
            early = await client.post(RESPONSES, json={"input": "y", "previous_response_id": id}, headers=mine)
            assert (early.status_code, early.json()["error"]["param"]) == (400, "previous_response_id")
            cancels = await asyncio.gather(*(client.post(f"{RESPONSES}/{id}/cancel", headers=mine) for _ in range(8)))
            assert {c.status_code for c in cancels} <= {200, 400} and cancels[0].status_code == 200
            assert (await asyncio.wait_for(asked, 5)).json()["status"] == "cancelled"
            assert (engine.stats().running, len(running)) == (0, 0)

    asyncio.run(run())


def test_a_file_of_responses_without_owners_is_read_by_a_server_without_keys(tmp_path: Path) -> None:
    path = str(tmp_path / "old.db")
    old = sqlite3.connect(path)
    old.execute("create table responses (n integer primary key, id unique, response, items)")
    old.execute("insert into responses (id, response, items) values ('r1', '{\"id\": \"r1\"}', '[]')")
    old.commit()
    old.close()
    store = Store(path)
    assert store.get("r1")[0] == {"id": "r1"}
    with pytest.raises(responses.NotFoundError):
        store.get("r1", "somebody")
    store.put({"id": "r2"}, [], "somebody")
    with pytest.raises(responses.NotFoundError):
        store.get("r2")
    store.close()
