"""One streamed request against any OpenAI-compatible server. Takes a body, gives an Answer: when which tokens came.

Several tokens may share one event (speculation, joined events), and an event may carry none, so tokens are counted by
the first of these that the server offers: `ids` (`return_token_ids`), `usage` of each event (`continuous_usage_stats`),
a `tokenizer` over the text so far, `text`: the final usage spread over the events by length of text. `events` counts
each event with text as one token, where there is nothing better; results say which it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

Counter = Callable[[str], int]  # text -> tokens
TEXTS = ("reasoning_content", "reasoning", "content", "text")


@dataclass(frozen=True)
class Dialect:
    """What a server lets one ask for, beyond the fields that all have."""

    token_ids: bool = True
    continuous_usage: bool = True
    ignore_eos: bool = True

    def fields(self) -> dict[str, Any]:
        options: dict[str, Any] = {"include_usage": True}
        if self.continuous_usage:
            options["continuous_usage_stats"] = True
        found: dict[str, Any] = {"stream": True, "stream_options": options}
        if self.token_ids:
            found["return_token_ids"] = True
        if self.ignore_eos:
            found["ignore_eos"] = True
        return found

    def less(self) -> Iterator[Dialect]:
        """Ever plainer ones, for a server that refuses fields it does not know."""
        yield Dialect(token_ids=False)
        yield Dialect(token_ids=False, continuous_usage=False)
        yield Dialect(token_ids=False, continuous_usage=False, ignore_eos=False)


@dataclass(frozen=True)
class Failure:
    """Why a request has no full answer. `kind` is counted: connect, timeout, HTTP 503, error, cut, empty, short."""

    kind: str
    message: str


@dataclass(frozen=True)
class Answer:
    """One request. `events` are (seconds since the request was sent, tokens) of events that brought any."""

    start_s: float
    end_s: float
    events: tuple[tuple[float, int], ...]
    counted_by: str
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    failure: Failure | None = None

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.events)

    @property
    def ttft_s(self) -> float:
        """Until the first event with a token, thinking included."""
        return self.events[0][0]

    @property
    def e2e_s(self) -> float:
        return self.events[-1][0]

    def token_gaps_s(self) -> list[float]:
        """Inter-token latency by tokens: n tokens that came together share the time since the event before."""
        return [(b - a) / n for (a, _), (b, n) in pairwise(self.events) for _ in range(n)]

    def event_gaps_s(self) -> list[float]:
        """What a reader sees: time between events, however many tokens each brings."""
        return [b - a for (a, _), (b, _) in pairwise(self.events)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time a token after the first event; None for an answer of one event."""
        later = self.tokens - self.events[0][1]
        return (self.e2e_s - self.ttft_s) / later if later else None


@dataclass
class _Seen:
    """A stream so far."""

    events: list[tuple[float, int, str]] = field(default_factory=list)  # seconds, ids or usage's tokens, text
    by_ids: bool = False
    n_text: int = 0  # events with text, and those of them that have a usage
    n_with_usage: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None
    done: bool = False
    error: str | None = None
    last_total: int = 0

    def take(self, at_s: float, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.error = self.error or f"not JSON: {data[:80]!r}"
            return
        if not isinstance(event, dict):
            self.error = self.error or f"not an object: {data[:80]!r}"
            return
        if event.get("error"):
            error = event["error"]
            self.error = self.error or str(error.get("message") if isinstance(error, Mapping) else error)
            return
        text, ids = "", 0
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice
            text += next((delta[name] for name in TEXTS if delta.get(name)), "")
            for call in delta.get("tool_calls") or ():
                text += (call.get("function") or {}).get("arguments") or ""
            ids += len(choice.get("token_ids") or delta.get("token_ids") or ())
            self.by_ids |= ids > 0
            self.finish = choice.get("finish_reason") or self.finish
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        total = int(self.usage.get("completion_tokens") or 0)
        self.n_text += bool(text)
        self.n_with_usage += bool(text and usage and total)
        grown, self.last_total = (total - self.last_total, total) if usage else (0, self.last_total)
        if text or ids or (grown and event.get("choices")):
            self.events.append((at_s, ids if self.by_ids else grown, text))

    def counted(self, count: Counter | None) -> tuple[str, tuple[tuple[float, int], ...]]:
        final = int(self.usage.get("completion_tokens") or 0)
        by_usage = 0 < self.n_text == self.n_with_usage  # one usage at the end says nothing about events
        if self.by_ids or by_usage:
            return ("ids" if self.by_ids else "usage"), tuple((t, n) for t, n, _ in self.events if n > 0)
        with_text = [(t, text) for t, _, text in self.events if text]
        if count is not None:
            so_far, totals = "", [0]
            for _, text in with_text:
                so_far += text
                totals.append(max(count(so_far), totals[-1]))
            return "tokenizer", _events([t for t, _ in with_text], totals)
        if final:
            length = sum(len(text) for _, text in with_text) or 1
            share, totals = 0, [0]
            for _, text in with_text:
                share += len(text)
                totals.append(round(final * share / length))
            return "text", _events([t for t, _ in with_text], totals)
        return "events", tuple((t, 1) for t, _ in with_text)


def _events(times: Sequence[float], totals: Sequence[int]) -> tuple[tuple[float, int], ...]:
    return tuple((t, b - a) for t, (a, b) in zip(times, pairwise(totals), strict=True) if b > a)


async def ask(
    client: httpx.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    dialect: Dialect,
    *,
    count: Counter | None = None,
    full_length: bool = True,
) -> Answer:
    """Send `body` and read the stream. Never raises for what a server does: `failure` says it.

    `full_length`: fewer tokens than `max_tokens` is a failure where the server was asked to go on past an end.
    """
    seen, rest = _Seen(), b""
    start_s = time.perf_counter()
    failure: Failure | None = None
    try:
        async with client.stream("POST", url, json={**body, **dialect.fields()}) as response:
            if response.status_code != 200:
                text = (await response.aread())[:2000].decode("utf-8", "replace")
                failure = Failure(f"HTTP {response.status_code}", _message(text))
            else:
                async for part in response.aiter_bytes():
                    at_s = time.perf_counter() - start_s
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data:"):
                            seen.take(at_s, line[5:].strip())
    except httpx.TimeoutException as e:
        failure = Failure("timeout", type(e).__name__)
    except httpx.ConnectError as e:
        failure = Failure("connect", str(e) or type(e).__name__)
    except httpx.HTTPError as e:  # the peer closed before the end
        failure = Failure("cut", str(e) or type(e).__name__)
    end_s = time.perf_counter()
    counted_by, events = seen.counted(count)
    tokens = sum(n for _, n in events)
    if failure is None:
        asked = int(body.get("max_tokens") or 0)
        if seen.error is not None:
            failure = Failure("error", seen.error)
        elif not seen.done and seen.finish is None:
            failure = Failure("cut", f"the stream ended after {tokens} tokens without a finish reason")
        elif not events:
            failure = Failure("empty", "no token came")
        elif full_length and dialect.ignore_eos and counted_by != "events" and tokens < asked:
            failure = Failure("short", f"{tokens} of {asked} tokens (finish reason {seen.finish})")
    details = seen.usage.get("completion_tokens_details") or {}
    accepted = int(details.get("accepted_prediction_tokens") or 0)
    return Answer(
        start_s,
        end_s,
        events,
        counted_by,
        text="".join(text for _, _, text in seen.events),
        prompt_tokens=int(seen.usage.get("prompt_tokens") or 0),
        cached_tokens=int((seen.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        completion_tokens=int(seen.usage.get("completion_tokens") or tokens),
        accepted=accepted,
        drafted=accepted + int(details.get("rejected_prediction_tokens") or 0),
        failure=failure,
    )


def _message(text: str) -> str:
    """The message of an error body, else its beginning."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, Mapping) else error)[:300]
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:300]
