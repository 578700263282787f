"""A batch file -> its requests. A line that is no request is told by its number and stops nobody."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from onebox.errors import ConfigError, RequestError

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/compress",
    "/v1/guard",
)
ID_PREFIX = "batch_req_"


@dataclass(frozen=True)
class Call:
    """One request as a line has it."""

    custom_id: str
    url: str
    body: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The id of its result: a hash of what is asked, so that a changed request is not taken for an answered one."""
        asked = json.dumps([self.custom_id, self.url, self.body], sort_keys=True)
        return ID_PREFIX + hashlib.sha256(asked.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Job:
    """Where a request stands: its line, counted from 1, and the offset of that line in bytes."""

    line: int
    offset: int
    custom_id: str
    id: str


@dataclass(frozen=True)
class BadLine:
    """A line that is no request. `custom_id` is None where it cannot be read."""

    line: int
    custom_id: str | None
    message: str

    def json(self) -> dict[str, Any]:
        error = {"code": "invalid_line", "message": self.message}
        return {"line": self.line, "custom_id": self.custom_id, "error": error}


@dataclass
class Scan:
    """What a file asks for. `models` counts the names of models in it; None stands for bodies without one."""

    jobs: list[Job] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)
    models: Counter[str | None] = field(default_factory=Counter)


def no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse(data: bytes) -> Any:
    """Raises RequestError for what is not JSON in UTF-8."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=no_constant)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"not JSON: {e}") from e


def call_of(value: Any) -> Call:
    """The request of a line's value. Raises RequestError naming the field at fault."""
    if not isinstance(value, dict):
        raise RequestError("must be an object with custom_id, method, url and body")
    id, method, url, body = (value.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(id, str) or not id:
        raise RequestError("'custom_id' must be a text that is not empty", param="custom_id")
    if method != "POST":
        raise RequestError(f"'method' must be \"POST\", got {method!r:.40}", param="method")
    if url not in URLS:
        raise RequestError(f"'url' must be one of {', '.join(URLS)}, got {url!r:.80}", param="url")
    if not isinstance(body, dict):
        raise RequestError("'body' must be an object", param="body")
    if body.get("stream"):
        raise RequestError("'stream' has no place in a batch; leave it out", param="stream")
    return Call(id, url, body)


def open_input(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({e.strerror or e}).") from e


def scan(path: Path) -> Scan:
    """Every line of the file, looked at once; bodies are not kept. Raises ConfigError when it cannot be read."""
    found, seen, offset = Scan(), dict[str, int](), 0
    with open_input(path) as file:
        for number, data in enumerate(file, 1):
            here, offset = offset, offset + len(data)
            if number == 1 and data.startswith(b"\xef\xbb\xbf"):
                here, data = 3, data[3:]
            if not data.strip():
                continue
            value = None
            try:
                value = parse(data)
                call = call_of(value)
                if call.custom_id in seen:
                    first = seen[call.custom_id]
                    raise RequestError(f"'custom_id' {call.custom_id!r:.80} stands on line {first} already")
            except RequestError as e:
                id = value.get("custom_id") if isinstance(value, dict) else None
                found.bad.append(BadLine(number, id if isinstance(id, str) else None, str(e)))
                continue
            seen[call.custom_id] = number
            model = call.body.get("model")
            found.models[model if isinstance(model, str) else None] += 1
            found.jobs.append(Job(number, here, call.custom_id, call.id))
    return found


def read(file: BinaryIO, job: Job) -> Call:
    """The request of a job, from the file it was found in. Raises ConfigError when it is not there any more."""
    file.seek(job.offset)
    try:
        call = call_of(parse(file.readline()))
    except RequestError as e:
        raise ConfigError(f"line {job.line} changed while the batch ran: {e}; run it again.") from e
    if call.id != job.id:
        raise ConfigError(f"line {job.line} changed while the batch ran; run it again.")
    return call
