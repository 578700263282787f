"""Helpers for tests of the server: the bundled tokenizer, a fake engine that says given text, and an app around it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

import onebox
from onebox.server.app import create_app
from onebox.server.chat import Tokenizer
from onebox.testing import FakeEngine

TINY = Path(onebox.__file__).parent / "models" / "tiny"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(TINY)


def saying(text: str, **options: Any) -> FakeEngine:
    """An engine whose every answer is `text`."""
    return engine_of(tokenizer().encode(text), **options)


def engine_of(script: Any, **options: Any) -> FakeEngine:
    eos = tokenizer().rust.token_to_id("<|im_end|>")
    return FakeEngine(script, vocab=8192, eos=eos, **options)


def app_of(engine: FakeEngine, **options: Any) -> FastAPI:
    return create_app(engine, tokenizer=tokenizer(), served_names=options.pop("served_names", ["tiny"]), **options)


@asynccontextmanager
async def client_of(engine: FakeEngine, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app around `engine`, in this process, started and stopped as a server would."""
    app = app_of(engine, **options)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


def post(engine: FakeEngine, path: str, body: Any, **options: Any) -> httpx.Response:
    """One request to a fresh app around `engine`. Bytes are sent as they are."""

    async def run() -> httpx.Response:
        async with client_of(engine, **options) as client:
            if isinstance(body, bytes):
                return await client.post(path, content=body)
            return await client.post(path, json=body)

    return asyncio.run(run())


def events(response: httpx.Response) -> list[Any]:
    """The JSON payloads of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """The app under uvicorn on a free port; its base URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        for _ in range(1000):
            if server.started:
                break
            threading.Event().wait(0.01)
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
