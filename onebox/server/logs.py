"""What the server writes of itself: text or one JSON object a line, each with the id of the request it belongs to."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Literal

LogFormat = Literal["text", "json"]
access = logging.getLogger("onebox.access")
#: Id of the request that is being served, in whatever task serves it.
request_id: ContextVar[str] = ContextVar("request_id", default="")
_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "request_id"}


def one_line(text: str) -> str:
    """What a client sent, as it may stand in a line: nothing in it begins another or speaks to a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class RequestIds(logging.Filter):
    """Gives every record the current request's id, and lets all pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(record, "request_id", ""):
            record.request_id = request_id.get()
        return True


class JsonLines(logging.Formatter):
    """One object a record: time, level, logger, message, request_id, then what `extra=` gave."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {"time": stamp, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if id := getattr(record, "request_id", ""):
            line["request_id"] = id
        line |= {name: value for name, value in record.__dict__.items() if name not in _PLAIN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """A line for people; the request's id at its end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text, id = super().format(record), getattr(record, "request_id", "")
        return f"{text} [{id}]" if id else text


def configure(level: str, form: LogFormat = "text") -> None:
    """Logs of this process to stderr, unless whoever runs it has said already where they go."""
    handler = logging.StreamHandler()
    handler.addFilter(RequestIds())
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # What they say of every request and connection is said better by the access log.
    for name in ("httpx", "httpcore", "uvicorn.error"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
