"""The same app in front of another server that speaks OpenAI's API: guard and compression here, answers from there.

Takes a base URL, gives an ASGI app. Bodies go on as they came unless a prompt was changed; keys and streams pass
through. A server behind that cannot be reached, is too slow or makes no sense is 502 or 504, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import Counter, Gauge, Histogram

import onebox
from onebox.errors import QueueFullError, RequestError, UpstreamError, UpstreamTimeoutError
from onebox.server import face, messages, metrics
from onebox.server.app import (
    MAX_BODY_BYTES,
    PING_S,
    EventStream,
    add_error_handlers,
    add_gate,
    add_intake,
    encode_json,
    end,
    error_json,
    json_response,
    named_event,
    read_bytes,
    shaped_error,
    unless_hung_up,
)
from onebox.server.intake import Intake, IntakeOptions, Report
from onebox.server.protocol import IntakeFields, RequestBody, parse_body

log = logging.getLogger(__name__)

CONNECT_S = 5.0
CONNECT_RETRIES = 2
READ_S = 600.0  # without a byte; a long prefill sends none
READY_S = 2.0
MAX_ANSWER_BYTES = 256 * 2**20
MAX_EVENT_BYTES = 16 * 2**20
# Of one connection, or made anew for the other one (RFC 9110, 7.6.1); the rest goes through.
CONNECTION_HEADERS = ("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect")
CODING_HEADERS = ("content-length", "accept-encoding", "content-encoding")
HOP_HEADERS = frozenset({*CONNECTION_HEADERS, *CODING_HEADERS, "host", "x-request-id", "date", "server"})
KEY_HEADERS = frozenset({"authorization", "x-api-key"})
SSE_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
Fields = dict[str, Any]


class UpstreamBody(RequestBody, IntakeFields):
    """Any body; only compression and guard are read here."""

    stream: bool | None = None

    def check_fields(self) -> None:
        """Every other field is the server's behind to judge."""


# Where each API keeps its prompt: body -> messages, and messages -> the body's fields


def chat_prompt(body: Fields) -> list[Fields] | None:
    found = body.get("messages")
    return found if isinstance(found, list) and all(isinstance(m, dict) for m in found) else None


def anthropic_prompt(body: Fields) -> list[Fields] | None:
    found, system = chat_prompt(body), body.get("system")
    return [{"role": "system", "content": system}, *found] if found and system else found


def put_anthropic(body: Fields, made: list[Fields]) -> Fields:
    if made and made[0].get("role") == "system":
        return {**body, "system": made[0]["content"], "messages": made[1:]}
    return {**body, "messages": made}


TEXT_PARTS = ("input_text", "output_text")


def responses_prompt(body: Fields) -> list[Fields] | None:
    """Message items and tool outputs as messages; other items stay where they are."""
    given, instructions = body.get("input"), body.get("instructions")
    if isinstance(given, str):
        found: list[Fields] = [{"role": "user", "content": given}]
    elif isinstance(given, list) and all(isinstance(item, dict) for item in given):
        found = [item_message(item) for item in given if item_role(item)]
    else:
        return None
    return [{"role": "system", "content": instructions}, *found] if isinstance(instructions, str) else found


def item_role(item: Fields) -> str | None:
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str):
        return str(item["role"])
    return "tool" if kind == "function_call_output" and isinstance(item.get("output"), str) else None


def part_type(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def item_message(item: Fields) -> Fields:
    content = item.get("content") if item_role(item) != "tool" else item["output"]
    if isinstance(content, list):
        content = [{**p, "type": "text"} if part_type(p) in TEXT_PARTS else p for p in content]
    return {"role": item_role(item), "content": content}


def put_responses(body: Fields, made: list[Fields]) -> Fields:
    given, head = body["input"], None
    if isinstance(body.get("instructions"), str) or len(made) > n_messages(given):  # or the guard put a message first
        head = made[0]["content"]
    rest = iter(made[1:] if head is not None else made)
    out = {**body, "instructions": head} if head is not None else dict(body)
    if isinstance(given, str):
        return {**out, "input": next(rest)["content"]}
    items = []
    for item in given:
        if item_role(item) is None:
            items.append(item)
            continue
        content = next(rest)["content"]
        if isinstance(content, list):
            name = next((k for k in map(part_type, item["content"]) if k in TEXT_PARTS), "input_text")
            content = [{**p, "type": name} if part_type(p) == "text" else p for p in content]
        items.append({**item, ("output" if item_role(item) == "tool" else "content"): content})
    return {**out, "input": items}


def n_messages(given: Any) -> int:
    return 1 if isinstance(given, str) else sum(item_role(item) is not None for item in given)


PROMPTS: Mapping[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (chat_prompt, lambda body, made: {**body, "messages": made}),
    "/v1/messages": (anthropic_prompt, put_anthropic),
    "/v1/responses": (responses_prompt, put_responses),
}


class UpstreamMetrics(metrics.HttpMetrics):
    """What one server behind did, and how long it took to begin."""

    def __init__(self, intake: Intake) -> None:
        super().__init__(intake.savings)
        told = "Requests sent on, by status (0: no answer)."
        self.requests = Counter("onebox:upstream_requests", told, ("status",), registry=self.registry)
        self.running = Gauge("onebox:upstream_running", "Requests under way behind this one.", registry=self.registry)
        self.begun = Histogram(
            "onebox:upstream_first_byte_seconds",
            "Sent on to first byte of the answer.",
            buckets=metrics.LATENCY_S,
            registry=self.registry,
        )


class Upstream:
    """One server behind this one. `key` replaces the caller's; `own_keys` says that a caller's key is for this server
    alone and must not go on."""

    def __init__(
        self,
        url: str,
        intake: Intake,
        *,
        key: str | None = None,
        own_keys: bool = False,
        read_s: float = READ_S,
        connect_s: float = CONNECT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.intake = intake
        self.metrics = UpstreamMetrics(intake)
        self._key, self._drop_key, self._read_s = key, own_keys or key is not None, read_s
        # httpx retries a connection that was not made, and nothing else: a request is sent once
        self.client = httpx.AsyncClient(
            transport=transport
            or httpx.AsyncHTTPTransport(retries=CONNECT_RETRIES, limits=httpx.Limits(max_keepalive_connections=64)),
            timeout=httpx.Timeout(connect=connect_s, read=read_s, write=60.0, pool=None),
            follow_redirects=False,
        )

    def headers(self, request: Request) -> list[tuple[str, str]]:
        kept = [
            (name, value)
            for name, value in request.headers.items()
            if name not in HOP_HEADERS and not (self._drop_key and name in KEY_HEADERS)
        ]
        if self._key is not None:
            kept += [("authorization", f"Bearer {self._key}")]
            kept += [("x-api-key", self._key)] if request.url.path.startswith("/v1/messages") else []
        return [*kept, ("accept-encoding", "identity"), ("x-request-id", request.scope["state"]["request_id"])]

    async def send(self, request: Request, content: bytes | None) -> httpx.Response:
        """The answer's head; its body is still to be read. Raises UpstreamError or UpstreamTimeoutError."""
        query = request.url.query
        url = self.url + request.scope["path"] + (f"?{query}" if query else "")
        begun_s = time.perf_counter()
        with self.failures():
            made = self.client.build_request(request.method, url, headers=self.headers(request), content=content)
            response = await self.client.send(made, stream=True)
        self.metrics.begun.observe(time.perf_counter() - begun_s)
        self.metrics.requests.labels(str(response.status_code)).inc()
        return response

    @contextlib.contextmanager
    def failures(self) -> Any:
        """httpx's errors as ours: what happened, and whose fault it is."""
        try:
            yield
        except (httpx.ConnectTimeout, httpx.ConnectError) as e:
            self.metrics.requests.labels("0").inc()
            kind = UpstreamTimeoutError if isinstance(e, httpx.TimeoutException) else UpstreamError
            raise kind(f"{self.url} cannot be reached: {str(e) or type(e).__name__}.") from e
        except httpx.TimeoutException as e:
            self.metrics.requests.labels("0").inc()
            raise UpstreamTimeoutError(f"{self.url} sent nothing for {self._read_s:g} s.") from e
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            self.metrics.requests.labels("0").inc()
            raise UpstreamError(f"{self.url} broke off or did not speak HTTP: {str(e) or type(e).__name__}.") from e

    async def whole(self, response: httpx.Response) -> bytes:
        """The answer's body. Raises UpstreamError when it is endless."""
        data = bytearray()
        with self.failures():
            async for part in response.aiter_bytes():
                data += part
                if len(data) > MAX_ANSWER_BYTES:
                    raise UpstreamError(f"{self.url} answered with more than {MAX_ANSWER_BYTES} bytes.")
        return bytes(data)

    async def events(self, response: httpx.Response, report: Report | None) -> AsyncGenerator[bytes, None]:
        """Whole events as they come. Raises UpstreamError for what is no event stream, or breaks off."""
        held, said = b"", False
        try:
            with self.failures():
                async for part in response.aiter_raw():
                    held += part
                    if len(held) > MAX_EVENT_BYTES:
                        raise UpstreamError(f"{self.url} sent an event of more than {MAX_EVENT_BYTES} bytes.")
                    cut = max(held.rfind(b"\n\n"), held.rfind(b"\n\r\n"))
                    if cut < 0:
                        self.check_events(held, whole=False)
                        continue
                    end = cut + (2 if held[cut : cut + 2] == b"\n\n" else 3)
                    events, held = held[:end], held[end:]
                    self.check_events(events)
                    said = said or b"data:" in events
                    yield with_usage(events, report) if report else events
            if held.strip():
                raise UpstreamError(f"{self.url} ended its stream inside an event.")
            if not said:
                raise UpstreamError(f"{self.url} ended its stream without an event.")
        finally:
            await response.aclose()

    def check_events(self, events: bytes, *, whole: bool = True) -> None:
        """Raises UpstreamError for a line that no event stream has."""
        lines = events.split(b"\n")
        for line in lines if whole else lines[:-1]:
            if line.strip() and not line.startswith(SSE_FIELDS):
                raise UpstreamError(f"{self.url} sent {line[:80].decode('utf-8', 'replace')!r} where an event was due.")

    async def ready(self) -> str | None:
        """None when the server behind answers, or why it does not."""
        try:
            with self.failures():
                response = await self.client.get(f"{self.url}/v1/models", timeout=READY_S)
        except UpstreamError as e:
            return str(e)
        return f"{self.url} answers with {response.status_code}" if response.status_code >= 500 else None


def with_usage(events: bytes, report: Report) -> bytes:
    """The same events, compression and guard told wherever one shows usage."""
    if b'"usage"' not in events:
        return events
    lines = events.split(b"\n")
    for i, line in enumerate(lines):
        if line.startswith(b"data:") and b'"usage"' in line:
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                lines[i] = b"data: " + encode_json(reported(msgspec.json.decode(line[5:]), report))
    return b"\n".join(lines)


def reported(value: Any, report: Report | None) -> Any:
    """An answer or event with what was done to its prompt in its usage: its own, its response's or its message's."""
    if report is None or not isinstance(value, dict):
        return value
    if isinstance(value.get("usage"), dict):
        return {**value, "usage": {**value["usage"], **report.usage()}}
    return value | {k: reported(value[k], report) for k in ("response", "message") if isinstance(value.get(k), dict)}


def create_upstream_app(
    url: str,
    *,
    intake: IntakeOptions | None = None,
    key: str | None = None,
    api_keys: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    log_prompts: bool = False,
    read_s: float = READ_S,
    connect_s: float = CONNECT_S,
    ping_s: float = PING_S,
    max_body_bytes: int = MAX_BODY_BYTES,
    drain_s: float = 30.0,
    transport: httpx.AsyncBaseTransport | None = None,
) -> FastAPI:
    """The app in front of the server at `url` (with or without /v1). `transport` stands in for the network in tests."""
    taken = Intake(intake)
    upstream = Upstream(
        url, taken, key=key, own_keys=bool(api_keys), read_s=read_s, connect_s=connect_s, transport=transport
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        warming = asyncio.ensure_future(taken.warm())
        try:
            yield
        finally:
            await end(warming)
            end_s = time.monotonic() + drain_s
            while upstream.metrics.running._value.get() and time.monotonic() < end_s:
                await asyncio.sleep(0.02)
            await upstream.client.aclose()

    app = FastAPI(title="onebox", version=onebox.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.upstream, app.state.log_prompts = upstream, log_prompts
    add_gate(app, upstream.metrics, api_keys=api_keys, allowed_origins=allowed_origins)
    add_error_handlers(app, upstream.metrics)
    add_intake(app, taken, max_body_bytes=max_body_bytes)
    face.add_face(app)
    add_upstream(app, upstream, ping_s=ping_s, max_body_bytes=max_body_bytes)
    return app


def add_upstream(app: FastAPI, upstream: Upstream, *, ping_s: float, max_body_bytes: int) -> None:
    async def prepared(path: str, data: bytes) -> tuple[bytes, bool, Report | None]:
        """The body to send on, whether it asks for a stream, and what was done to its prompt."""
        intake = upstream.intake
        body = parse_body(UpstreamBody, data)
        asked = {"compress", "guard"} & body.model_fields_set
        if not asked and not intake.wanted(None, None):
            return data, bool(body.stream), None
        fields: Fields = dict(body.model_extra or {})
        fields |= {"stream": body.stream} if "stream" in body.model_fields_set else {}
        if not intake.wanted(body.compress, body.guard):
            return encode_json(fields), bool(body.stream), None
        report: Report | None = None
        if path == "/v1/completions":
            if isinstance(fields.get("prompt"), str):
                fields["prompt"], report = await intake.text(fields["prompt"], body.compress, body.guard)
        else:
            find, put = PROMPTS[path]
            found = find(fields)
            if found:
                made, report = await intake.messages(found, body.compress, body.guard)
                fields = put(fields, made)
        if report is None and (body.compress or body.guard):
            raise RequestError("'compress' and 'guard' need a prompt of text or messages.", param="compress")
        return encode_json(fields), bool(body.stream), report

    async def answer(request: Request, content: bytes | None, *, stream: bool, report: Report | None) -> Response:
        path, headers = request.url.path, report.headers() if report else {}
        with upstream.metrics.running.track_inprogress():
            response = await upstream.send(request, content)
            kind = response.headers.get("content-type", "")
            if response.status_code >= 400 or not kind.startswith("text/event-stream"):
                try:
                    data = await upstream.whole(response)
                finally:
                    await response.aclose()
                return plain(response, data, path, kind, headers, report)
        if not stream:
            await response.aclose()
            raise UpstreamError(f"{upstream.url} answered with a stream that nobody asked for.")
        anthropic = path.startswith("/v1/messages")
        shape = messages.error_json if anthropic else error_json
        return EventStream(
            counted(upstream, upstream.events(response, report)),
            ping_s=ping_s,
            done=b"",
            error_event=(lambda e: named_event("error", shape(e)))
            if anthropic or path == "/v1/responses"
            else (lambda e: b"data: " + encode_json(shape(e)) + b"\n\ndata: [DONE]\n\n"),
            refusal=lambda e: shaped_error(path, e),
            headers=headers,
        )

    def plain(
        response: httpx.Response, data: bytes, path: str, kind: str, headers: dict[str, str], report: Report | None
    ) -> Response:
        """A whole answer. Raises UpstreamError for one that is not JSON on an endpoint that answers in JSON."""
        status = response.status_code
        passed = {k: v for k, v in response.headers.items() if k not in HOP_HEADERS} | headers
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
            if path not in (*PROMPTS, "/v1/completions") and status < 400:
                return Response(data, status, passed)
            said = data[:80].decode("utf-8", "replace")
            told = f"{upstream.url} answered {status} with {said!r} ({kind or 'no type'}), no JSON."
            if status == 429:
                wait = response.headers.get("retry-after", "")
                raise QueueFullError(told, retry_after_s=int(wait) if wait.isascii() and wait.isdecimal() else 1) from e
            if 300 <= status < 400 and "location" in response.headers:
                told += f" It points to {response.headers['location'][:200]!r}; give --upstream that address."
            raise UpstreamError(told) from e
        passed.pop("content-type", None)
        if report is None or status >= 400:
            return Response(data, status, passed, media_type="application/json")
        return json_response(reported(value, report), status, passed)

    async def generate(request: Request) -> Response:
        data = await read_bytes(request, max_body_bytes)
        content, stream, report = await unless_hung_up(request, prepared(request.url.path, data))
        return await unless_hung_up(request, answer(request, content, stream=stream, report=report))

    for path in (*PROMPTS, "/v1/completions"):
        app.add_api_route(path, generate, methods=["POST"], tags=["generation"])

    @app.get("/health", tags=["health"])
    async def health() -> Response:
        return json_response({"status": "ok", "upstream": upstream.url})

    @app.get("/health/ready", tags=["health"])
    async def ready() -> Response:
        """Whether the server behind answers."""
        reason = await upstream.ready()
        value = {"status": "unreachable" if reason else "ready", "detail": reason or "", "upstream": upstream.url}
        return json_response(value, 503 if reason else 200)

    @app.get("/version", tags=["health"])
    async def version() -> Response:
        return json_response({"version": onebox.__version__, "upstream": upstream.url})

    @app.get("/metrics", tags=["health"])
    async def prometheus() -> Response:
        return Response(upstream.metrics.render(), media_type=metrics.CONTENT_TYPE)

    async def other(request: Request) -> Response:
        """Everything else goes through as it is."""
        data = await read_bytes(request, max_body_bytes)
        return await unless_hung_up(request, answer(request, data or None, stream=True, report=None))

    for path in ("/v1/{rest:path}", "/tokenize", "/detokenize"):
        app.add_api_route(path, other, methods=["GET", "POST", "DELETE"], include_in_schema=False)


async def counted(upstream: Upstream, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    with upstream.metrics.running.track_inprogress():
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()
