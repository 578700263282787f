"""HTTP: routes, streaming, errors -> status. Takes a Service, gives an ASGI app.

Every failure has OpenAI's shape, `{"error": {message, type, param, code}}`; after the first byte of a stream it is a
`data:` event of the same shape. A client that goes away cancels its answers, streaming or not.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import onebox
from onebox.engine.client import EngineClient
from onebox.errors import (
    ApiKeyError,
    BodyTimeoutError,
    BodyTooLargeError,
    InternalError,
    NotServedError,
    OneboxError,
    QueueFullError,
    RequestError,
)
from onebox.server import completions, face, logs, messages, metrics
from onebox.server.answers import Service, new_id
from onebox.server.chat import Tokenizer
from onebox.server.intake import Intake, IntakeOptions
from onebox.server.owners import owner, owner_of
from onebox.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    CompressBody,
    DetokenizeBody,
    GuardBody,
    TokenizeBody,
    parse_body,
)
from onebox.server.responses import Responses, ResponsesBody, Store

log = logging.getLogger(__name__)

T = TypeVar("T")
Count = Callable[[int, str | None], None]
encode_json = msgspec.json.Encoder().encode
PING_S = 10.0
MAX_BODY_BYTES = 32 * 2**20
MAX_BODY_VALUES = 2**20  # commas and opening brackets: a prompt of a million ids, and no gigabytes of empty lists
BODY_SILENCE_S = 30.0  # a body that stands still for longer is given up
OPEN_PATHS = frozenset({"/health", "/health/ready", "/metrics", "/ping"}) | face.PATHS  # no key needed
BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": messages.MessagesBody,
    "/v1/messages/count_tokens": messages.CountBody,
    "/v1/compress": CompressBody,
    "/v1/guard": GuardBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(value), status, dict(headers or {}), media_type="application/json")


def error_json(e: RequestError) -> dict[str, Any]:
    return {"error": {"message": str(e), "type": e.type, "param": e.param, "code": e.code}}


def error_response(e: RequestError) -> Response:
    headers = {"Retry-After": str(e.retry_after_s)} if isinstance(e, QueueFullError) else {}
    if e.status == 503:
        headers["Retry-After"] = "5"
    elif e.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    elif e.status == 408:
        headers["Connection"] = "close"  # what else the client sends would be taken for a request
    return json_response(error_json(e), e.status, headers)


async def read_body(request: Request, kind: type[Body], limit: int) -> Body:
    """The body, checked. Its content type is not looked at: it can only be JSON. Raises RequestError."""
    return parse_body(kind, await read_bytes(request, limit))


async def read_bytes(request: Request, limit: int) -> bytes:
    """The body as it came. Raises BodyTooLargeError, BodyTimeoutError, and RequestError for a compressed one."""
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise RequestError(f"A body with Content-Encoding {coding[:40]!r} is not read; send it as it is.")
    too_large = BodyTooLargeError(f"The body is larger than {limit} bytes.")
    if int(request.headers.get("content-length", 0)) > limit:  # the HTTP layer lets only digits through
        raise too_large
    data, parts = bytearray(), request.stream()
    while True:
        try:
            part = await asyncio.wait_for(anext(parts, None), BODY_SILENCE_S)
        except TimeoutError:
            raise BodyTimeoutError(
                f"The body did not come: {len(data)} bytes, then {BODY_SILENCE_S:g} s of nothing."
            ) from None
        if part is None:
            break
        data += part
        if len(data) > limit:
            raise too_large
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_BODY_VALUES:
        raise BodyTooLargeError(f"The body holds more than {MAX_BODY_VALUES} values, by its commas and brackets.")
    if getattr(request.app.state, "log_prompts", False):
        path, text = request.scope["path"], data.decode("utf-8", "replace")
        logs.access.info("body of %s: %s", logs.one_line(path), logs.one_line(text))
    return bytes(data)


async def hung_up(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientGone(Exception):
    """The client hung up; nobody reads the response."""


async def unless_hung_up(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up. Raises ClientGone then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(hung_up(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await end(task, watcher)


async def end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events of an async iterator of `data:` payloads.

    The response begins with the first event, so that what fails before it has its own status; when that takes longer
    than `ping_s`, it begins with a comment, and a comment follows every `ping_s` of silence. Hanging up closes the
    iterator at once, not at the next event.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        ping_s: float = PING_S,
        done: bytes = b"data: [DONE]\n\n",
        error_event: Callable[[RequestError], bytes] | None = None,
        refusal: Callable[[RequestError], Response] = error_response,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers=headers, media_type="text/event-stream")
        self.events = events
        self.ping_s = ping_s
        self.done = done
        self.error_event = error_event or (lambda e: b"data: " + encode_json(error_json(e)) + b"\n\n")
        self.refusal = refusal
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(scope, receive, send))
        watcher = asyncio.ensure_future(hung_up(receive))
        try:
            await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        except OSError:
            pass  # the client went away while something was sent
        finally:
            await end(pump, watcher)

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = asyncio.ensure_future(anext(self.events, None))
        pinger: asyncio.Future[None] | None = None
        try:
            try:
                await asyncio.wait({first}, timeout=self.ping_s)
                if first.done() and (e := first.exception()) is not None:
                    if not isinstance(e, RequestError):
                        raise e
                    await self.refusal(e)(scope, receive, send)
                    return
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._sent_s = asyncio.get_running_loop().time() - (0 if first.done() else self.ping_s)
                pinger = asyncio.ensure_future(self._ping(send))
                try:
                    event = await first
                    while event is not None:
                        await self._send(send, event)
                        event = await anext(self.events, None)
                    tail = self.done
                except RequestError as e:
                    tail = self.error_event(e) + self.done
                except Exception:
                    log.exception("a stream failed")
                    tail = self.error_event(InternalError()) + self.done
                pinger.cancel()
                await send({"type": "http.response.body", "body": tail, "more_body": False})
            finally:
                await end(*([first, pinger] if pinger else [first]))
        finally:
            await self.events.aclose()

    async def _send(self, send: Send, data: bytes) -> None:
        self._sent_s = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _ping(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        while True:
            wait_s = self._sent_s + self.ping_s - now()
            if wait_s <= 0:
                await self._send(send, b": ping\n\n")
            else:
                await asyncio.sleep(wait_s)


async def data_events(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in chunks:
            yield b"data: " + encode_json(chunk) + b"\n\n"
    finally:
        await chunks.aclose()


async def named_events(events: AsyncGenerator[messages.Event, None]) -> AsyncGenerator[bytes, None]:
    """Anthropic's event form: the name twice, as event and as type."""
    try:
        async for name, value in events:
            yield named_event(name, {"type": name, **value})
    finally:
        await events.aclose()


def named_event(name: str, value: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode_json(value) + b"\n\n"


def shaped_error(path: str, e: RequestError) -> Response:
    """An error in the shape of the API that the path belongs to."""
    made = error_response(e)
    if path.startswith("/v1/messages"):
        kept = {k: v for k, v in made.headers.items() if not k.startswith("content-")}
        made = json_response(messages.error_json(e), e.status, kept)
    return made


async def typed_events(events: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    try:
        async for event in events:
            yield named_event(event["type"], event)
    finally:
        await events.aclose()


class Gate:
    """Names each request, checks its key, and writes the access log. Bearer or x-api-key; compared in constant time.

    HEAD is answered as GET; the HTTP layer leaves the body out.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], count: Count) -> None:
        self.app = app
        self.count = count
        self.keys = [digest(k.encode()) for k in keys]
        self.owners = [owner_of(k) for k in self.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        # what a client sends ends up in logs and headers: printable, without spaces, and short
        given = headers.get(b"x-request-id", b"")[:128]
        id = given.decode("ascii") if re.fullmatch(rb"[!-~]+", given) else new_id("req")
        scope.setdefault("state", {})["request_id"] = id
        token, begun_s, status = logs.request_id.set(id), time.perf_counter(), 0
        known = self._known(headers)
        whose = owner.set(known or "")

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", id.encode())]
            await send(message)

        try:
            if self.keys and scope["path"] not in OPEN_PATHS and known is None:
                e = ApiKeyError("No valid API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
                self.count(e.status, e.code)
                await shaped_error(scope["path"], e)(scope, receive, send_named)
            else:
                head = scope["method"] == "HEAD"
                await self.app({**scope, "method": "GET"} if head else scope, receive, send_named)
        except Exception:
            status = 500
            raise
        finally:
            ms = round((time.perf_counter() - begun_s) * 1000, 1)
            level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO
            path, method = (logs.one_line(scope[name][:200]) for name in ("path", "method"))
            told = {"method": method, "path": path, "status": status or 499, "ms": ms}
            logs.access.log(level, "%(method)s %(path)s %(status)d %(ms)s ms", told, extra=told)
            logs.request_id.reset(token)
            owner.reset(whose)

    def _known(self, headers: Mapping[bytes, bytes]) -> str | None:
        """The owner of the key that was sent, or None."""
        given = [headers.get(b"x-api-key", b"")]
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            given.append(bearer.strip())
        # No short cut: the time must not tell which key nearly matched, nor how long one is.
        same = [i for g in given for i, k in enumerate(self.keys) if hmac.compare_digest(digest(g), k)]
        return self.owners[same[0]] if same else None


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def add_gate(
    app: FastAPI, counters: metrics.HttpMetrics, *, api_keys: Sequence[str], allowed_origins: Sequence[str]
) -> None:
    """Keys and request ids, and outside them what a browser's page of another origin may do (nothing, by default)."""
    app.add_middleware(Gate, keys=tuple(api_keys), count=counters.count_error)
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-onebox-trace", "x-onebox-compression", "x-onebox-guard", "retry-after"],
        )


def create_app(
    engine: EngineClient,
    *,
    tokenizer: Tokenizer,
    served_names: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
    reasoning: bool = True,
    tools: bool = True,
    template_options: Mapping[str, Any] | None = None,
    api_keys: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    log_prompts: bool = False,
    ping_s: float = PING_S,
    max_body_bytes: int = MAX_BODY_BYTES,
    drain_s: float = 30.0,
    response_store: str = ":memory:",
    intake: IntakeOptions | None = None,
    on_start: Callable[[OneboxError | None], None] | None = None,
) -> FastAPI:
    """The server around an engine that is not started yet: it starts with the app and stops with it.

    `on_start` is called once, with None when requests can be served, or with the error that prevents it; without it
    such an error ends the app's start.
    """
    service = Service(
        engine,
        tokenizer,
        served_names,
        defaults=defaults,
        reasoning=reasoning,
        tools=tools,
        template_options=template_options,
        intake=Intake(intake, tokenizer=tokenizer.file),
    )

    async def start() -> None:
        try:
            await service.start()
        except OneboxError as e:
            if on_start is None:
                raise
            on_start(e)
        else:
            if on_start is not None:
                on_start(None)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # With a caller to tell, the socket opens first, so that /health/ready can say what the start is busy with.
        starting, warming = asyncio.ensure_future(start()), asyncio.ensure_future(service.intake.warm())
        if on_start is None:
            await starting
        try:
            yield
        finally:
            await service.drain(drain_s)
            await end(starting, warming)
            await engine.stop()
            responses.store.close()

    responses = Responses(service, Store(response_store))
    app = FastAPI(title="onebox", version=onebox.__version__, lifespan=lifespan, docs_url="/docs", redoc_url=None)
    app.state.service, app.state.responses = service, responses
    app.state.log_prompts = log_prompts
    add_gate(app, service.metrics, api_keys=api_keys, allowed_origins=allowed_origins)
    add_error_handlers(app, service.metrics)
    add_responses(app, responses, ping_s=ping_s, max_body_bytes=max_body_bytes)
    add_routes(app, service, ping_s=ping_s, max_body_bytes=max_body_bytes)
    add_intake(app, service.intake, max_body_bytes=max_body_bytes)
    face.add_forecast(app)
    face.add_face(app)
    app.openapi = lambda: openapi(app)  # type: ignore[method-assign]
    return app


def add_error_handlers(app: FastAPI, counters: metrics.HttpMetrics) -> None:
    count = counters.count_error

    async def refused(request: Request, e: Exception) -> Response:
        assert isinstance(e, RequestError)
        count(e.status, e.code)
        return shaped_error(request.url.path, e)

    async def http(request: Request, e: Exception) -> Response:
        assert isinstance(e, HTTPException)
        codes = {404: "not_found", 405: "method_not_allowed"}
        made = RequestError(str(e.detail))
        made.status, made.code = e.status_code, codes.get(e.status_code, "invalid_request")
        count(made.status, made.code)
        response = shaped_error(request.url.path, made)
        response.headers.update(e.headers or {})
        return response

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    async def internal(request: Request, _: Exception) -> Response:
        count(500, "internal_error")
        response = shaped_error(request.url.path, InternalError())
        response.headers["x-request-id"] = request.scope.get("state", {}).get("request_id", "")
        return response

    app.add_exception_handler(RequestError, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, internal)


def add_routes(app: FastAPI, service: Service, *, ping_s: float, max_body_bytes: int) -> None:
    def model_json(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "onebox",
            "root": service.served_names[0],
            "parent": None,
            "max_model_len": service.engine.info.max_model_len,
        }

    async def body_of(request: Request, kind: type[Body]) -> Body:
        return await read_body(request, kind, max_body_bytes)

    @app.get("/v1/models", tags=["models"])
    async def models() -> Response:
        service.check_ready()
        return json_response({"object": "list", "data": [model_json(name) for name in service.served_names]})

    @app.get("/v1/models/{model:path}", tags=["models"])
    async def model(model: str) -> Response:
        service.check_ready()
        return json_response(model_json(service.model_name(model)))

    @app.post("/v1/chat/completions", tags=["generation"])
    async def chat(request: Request) -> Response:
        body = await body_of(request, ChatBody)
        run = await unless_hung_up(request, completions.prepare_chat(service, body))
        if body.stream:
            return EventStream(data_events(completions.chat_chunks(service, run)), ping_s=ping_s, headers=run.headers)
        value = await unless_hung_up(request, completions.chat_response(service, run))
        return json_response(value, headers=run.headers)

    @app.post("/v1/completions", tags=["generation"])
    async def complete(request: Request) -> Response:
        body = await body_of(request, CompletionBody)
        run = await unless_hung_up(request, completions.prepare_completion(service, body))
        if body.stream:
            chunks = completions.completion_chunks(service, run)
            return EventStream(data_events(chunks), ping_s=ping_s, headers=run.headers)
        value = await unless_hung_up(request, completions.completion_response(service, run))
        return json_response(value, headers=run.headers)

    @app.post("/v1/messages", tags=["generation"])
    async def anthropic(request: Request) -> Response:
        body = await body_of(request, messages.MessagesBody)
        run = await unless_hung_up(request, messages.prepare(service, body))
        if not body.stream:
            value = await unless_hung_up(request, messages.response(service, run))
            return json_response(value, headers=run.headers)
        return EventStream(
            named_events(messages.stream(service, run)),
            ping_s=ping_s,
            done=b"",
            error_event=lambda e: named_event("error", messages.error_json(e)),
            refusal=lambda e: shaped_error("/v1/messages", e),
            headers=run.headers,
        )

    @app.post("/v1/messages/count_tokens", tags=["tokens"])
    async def count_tokens(request: Request) -> Response:
        return json_response(await messages.count_tokens(service, await body_of(request, messages.CountBody)))

    @app.post("/tokenize", tags=["tokens"])
    async def tokenize(request: Request) -> Response:
        body = await body_of(request, TokenizeBody)
        service.check_ready()
        service.model_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Send either 'prompt' or 'messages'.", param="prompt")
        if body.prompt is not None:
            ids: Sequence[int] = await service.encode(body.prompt)
        else:
            tools = [t.model_dump(exclude_unset=True) for t in body.tools or ()]
            prompt = await service.chat_prompt(
                [m.model_dump(exclude_unset=True) for m in body.messages or ()],
                tools=tools,
                options=body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt is not False,
            )
            ids = prompt.ids
        strings = [service.tokenizer.decode([i]) for i in ids] if body.return_token_strs else None
        limit = service.engine.info.max_model_len
        return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

    @app.post("/detokenize", tags=["tokens"])
    async def detokenize(request: Request) -> Response:
        body = await body_of(request, DetokenizeBody)
        service.check_ready()
        service.model_name(body.model)
        prompt = await service.text_prompt(body.tokens, param="tokens")
        return json_response({"prompt": service.tokenizer.decode(prompt.ids)})

    @app.get("/health", tags=["health"])
    async def health() -> Response:
        """Whether the process is worth keeping: 503 once the engine has failed for good."""
        dead = service.phase == "failed" or (service.phase == "ready" and service.engine.health().status == "failed")
        return json_response({"status": "failed" if dead else "ok"}, 503 if dead else 200)

    @app.get("/health/ready", tags=["health"])
    async def ready() -> Response:
        """Whether a request would be served now, and if not, what the server is busy with."""
        ok, health = service.ready(), service.engine.health()
        value: dict[str, Any] = {"status": service.phase, "detail": service.detail, "active": service.active}
        if service.phase in ("starting", "ready") and not ok:
            value |= {"status": health.status, "detail": health.detail}
            if health.phase:
                value |= {"phase": health.phase, "progress": health.progress, "phase_seconds": health.seconds}
        value["phases"] = [{"phase": phase, "seconds": seconds} for phase, seconds in health.took]
        value["seconds"] = service.start_s()
        if ok:
            stats = service.engine.stats()
            value |= {"running": stats.running, "waiting": stats.waiting, "steps": stats.steps}
        return json_response(value, 200 if ok else 503)

    @app.get("/ping", tags=["health"])
    async def ping() -> Response:
        return await health()

    @app.get("/v1/onebox/stats", tags=["health"])
    async def stats() -> Response:
        """The engine's counters and gauges."""
        return json_response(service.engine.stats())

    @app.get("/v1/onebox/plan", tags=["health"])
    async def plan() -> Response:
        """Where the memory goes, in bytes, and the counts that it buys."""
        service.check_ready()
        return json_response(dict(service.engine.info.plan))

    @app.post("/v1/embeddings", tags=["models"])
    async def embeddings() -> Response:
        raise NotServedError("Embeddings are not served: this model generates text.")

    @app.get("/version", tags=["health"])
    async def version() -> Response:
        return json_response({"version": onebox.__version__})

    @app.get("/metrics", tags=["health"])
    async def prometheus() -> Response:
        return Response(service.metrics.render(), media_type=metrics.CONTENT_TYPE)


def add_responses(app: FastAPI, responses: Responses, *, ping_s: float, max_body_bytes: int) -> None:
    def failed(e: RequestError) -> bytes:
        return named_event("error", {"type": "error", **error_json(e)["error"], "sequence_number": 0})

    @app.post("/v1/responses", tags=["generation"])
    async def create(request: Request) -> Response:
        body = await read_body(request, ResponsesBody, max_body_bytes)
        run, items = await unless_hung_up(request, responses.prepare(body))
        if not body.stream:
            value = await unless_hung_up(request, responses.whole(body, run, items))
            return json_response(value, headers=run.headers)
        events = typed_events(responses.stream(body, run, items))
        return EventStream(events, ping_s=ping_s, done=b"", error_event=failed, headers=run.headers)

    @app.get("/v1/responses/{response_id}", tags=["generation"])
    async def stored(response_id: str) -> Response:
        return json_response((await asyncio.to_thread(responses.store.get, response_id, owner.get()))[0])

    @app.post("/v1/responses/{response_id}/cancel", tags=["generation"])
    async def cancel(response_id: str) -> Response:
        await responses.cancel(response_id)
        return json_response({"id": response_id, "object": "response", "status": "cancelled"})

    @app.delete("/v1/responses/{response_id}", tags=["generation"])
    async def delete(response_id: str) -> Response:
        await asyncio.to_thread(responses.store.delete, response_id, owner.get())
        return json_response({"id": response_id, "object": "response", "deleted": True})


def add_intake(app: FastAPI, intake: Intake, *, max_body_bytes: int) -> None:
    """Compression and guard by themselves, and what they did to the prompts of other requests."""

    def one_of(values: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in values.items() if value is not None}
        if len(given) != 1:
            raise RequestError(f"Send exactly one of {', '.join(map(repr, values))}.", param=next(iter(values)))
        return given

    @app.post("/v1/compress", tags=["prompts"])
    async def compress(request: Request) -> Response:
        body = await read_body(request, CompressBody, max_body_bytes)
        source = one_of({"messages": body.messages, "documents": body.documents, "prompt": body.prompt})
        if body.messages is None:
            source["instruction"] = body.instruction
        done, report = await unless_hung_up(request, intake.compress(body.options(), **source))
        value = {"object": "compression", **report.usage()["onebox"]["compression"], "trace_id": report.trace_id}
        value |= {"messages": done.messages} if body.messages is not None else {"text": done.text}
        return json_response(value, headers=report.headers())

    @app.post("/v1/guard", tags=["prompts"])
    async def guard(request: Request) -> Response:
        body = await read_body(request, GuardBody, max_body_bytes)
        source = one_of({"messages": body.messages, "prompt": body.prompt})
        done, report = await unless_hung_up(request, intake.guard(body.policy, **source))
        verdict = msgspec.json.decode(done.trace)["guard"]
        value = {"object": "verdict", **verdict, "messages": done.messages, "trace_id": report.trace_id}
        return json_response(value, headers=report.headers())

    @app.get("/v1/onebox/traces/{trace_id}", tags=["prompts"])
    async def trace(trace_id: str) -> Response:
        """Which pieces of a prompt were dropped and why, and what the guard found."""
        return Response(intake.traces.get(trace_id, owner.get()), media_type="application/json")


ERROR_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
FAILURES = {
    "400": "The request is wrong; `param` names the field.",
    "401": "No valid API key.",
    "404": "No such model, response or trace.",
    "408": "The body stopped coming.",
    "413": "The body is too large.",
    "429": "The queue is full; Retry-After says when to come back.",
    "501": "Not served.",
    "503": "The server starts, drains or has failed.",
}


def openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document. Bodies are parsed by hand, so their schemas, and those of failures, are put in by hand."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        _, schemas = models_json_schema(
            [(kind, "validation") for kind in BODIES.values()], ref_template="#/components/schemas/{model}"
        )
        known = document.setdefault("components", {}).setdefault("schemas", {})
        known |= schemas["$defs"] | {"Error": ERROR_SCHEMA}
        failure = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        value = {"application/json": {"schema": {"type": "object"}}}
        for path, methods in document["paths"].items():
            for operation in methods.values():
                operation["responses"] = {"200": {"description": "The answer.", "content": dict(value)}}
                operation["responses"] |= {
                    status: {"description": text, "content": failure} for status, text in FAILURES.items()
                }
            if path == "/metrics":
                methods["get"]["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
            elif path in ("/health", "/health/ready", "/ping"):
                methods["get"]["responses"]["503"]["content"] = value
            if (kind := BODIES.get(path)) is not None:
                schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
                methods["post"]["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
                if "stream" in kind.model_fields:
                    events = {"text/event-stream": {"schema": {"type": "object"}}}
                    methods["post"]["responses"]["200"]["content"] |= events
        app.openapi_schema = document
    return app.openapi_schema
