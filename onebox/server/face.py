"""The face at /ui: pages of the package served as they are, and the forecast that one of them draws.

The pages talk to the same endpoints as any client. Their policy lets them load nothing from elsewhere, run no inline
script, and send nothing to another origin.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import RedirectResponse

from onebox.errors import OneboxError, RequestError

FOLDER = Path(__file__).parent / "ui"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for anew each time, and 304 while it is the same
}
NAMES = tuple(sorted(path.name for path in FOLDER.iterdir() if path.suffix in TYPES))
PATHS = frozenset({"/ui", "/ui/", *(f"/ui/{name}" for name in NAMES)})  # hold no secret, so need no key
MAX_DIGITS = 9


def add_face(app: FastAPI) -> None:
    """The pages, from memory. There is no route for any other path."""

    def page(name: str) -> tuple[bytes, str, str]:
        data = (FOLDER / name).read_bytes()
        return data, TYPES[Path(name).suffix], f'"{hashlib.sha256(data).hexdigest()[:32]}"'

    pages: Mapping[str, tuple[bytes, str, str]] = {f"/ui/{name}": page(name) for name in NAMES}

    async def send(request: Request) -> Response:
        path = request.url.path
        data, kind, tag = pages[path if path in pages else "/ui/index.html"]
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={**HEADERS, "ETag": tag})
        return Response(data, headers={**HEADERS, "ETag": tag}, media_type=kind)

    async def enter() -> Response:
        return RedirectResponse("ui/")  # relative: right behind a proxy's prefix too

    app.add_api_route("/ui", enter, methods=["GET"], include_in_schema=False)
    for path in ("/ui/", *pages):
        app.add_api_route(path, send, methods=["GET"], include_in_schema=False)


def add_forecast(app: FastAPI) -> None:
    @app.get("/v1/onebox/forecast", tags=["health"])
    async def forecast(
        model: Annotated[str, Query(description="A shape, such as qwen3.5-35b-a3b.")] = "",
        box: Annotated[str, Query(description="A machine, such as dgx-spark.")] = "",
        build: Annotated[str, Query(description="hybrid, int4, fp8, ...; empty: hybrid.")] = "",
        context: Annotated[str, Query(description="Tokens of each user.")] = "4096",
        users: Annotated[str, Query(description="Answers at a time.")] = "1",
    ) -> Response:
        """What a machine would do with a model: bytes, what fits, the ladder, as `onebox plan --box` says. Without a
        model, the names that are known."""
        n_context, n_users = whole("context", context), whole("users", users)
        made = await asyncio.to_thread(forecast_json, model, box, build or None, n_context, n_users)
        return Response(made, media_type="application/json")


def whole(name: str, text: str) -> int:
    """A positive number of a query. Raises RequestError."""
    if not re.fullmatch(rf"[0-9]{{1,{MAX_DIGITS}}}", text) or int(text) < 1:
        raise RequestError(f"'{name}' must be a whole number above 0, got {text[:40]!r}.", param=name)
    return int(text)


def forecast_json(model: str, box: str, build: str | None, context: int, users: int) -> bytes:
    """The forecast of a known shape, or the names it can be asked for. No checkpoint is read."""
    from onebox.engine.forecast import Subject
    from onebox.engine.forecast import forecast as made_for
    from onebox.ledger import BOXES, BUILDS, SHAPES

    if not model:
        boxes = {name: made.title for name, made in BOXES.items()}
        return msgspec.json.encode({"models": list(SHAPES), "boxes": boxes, "builds": list(BUILDS)})
    if model not in SHAPES:
        raise RequestError(f"'model' must be one of {', '.join(SHAPES)}.", param="model")
    try:
        return msgspec.json.encode(made_for(Subject.of(model, build), box, context=context, users=users).json())
    except OneboxError as e:
        raise RequestError(str(e)) from e
