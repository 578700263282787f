"""Requests of a batch -> their results, through a server's API: so many at a time, tried again when that may help."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from onebox.batch.jobs import Call, Job, open_input, parse, read
from onebox.batch.results import Results
from onebox.errors import ConfigError, RequestError

AWAY = (429, 502, 503, 504)  # the server is full, starting or gone: the request is not at fault
AGAIN = (*AWAY, 408, 409, 500)
LONGEST_PAUSE_S = 30.0
Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Limits:
    """`concurrency` requests at a time; one that fails is tried `attempts` times; `timeout_s` without a byte is a
    failure; a server that is away for `patience_s` is given up. `pause_s` is the first wait before another try."""

    concurrency: int = 32
    attempts: int = 5
    timeout_s: float = 3600.0
    patience_s: float = 300.0
    pause_s: float = 0.5

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("attempts", 1), ("timeout_s", 0.001), ("patience_s", 0)):
            if not least <= getattr(self, name) < float("inf"):
                flag = name.removesuffix("_s")
                raise ConfigError(f"--{flag} must be at least {least:g}, got {getattr(self, name):g}.")


def base_of(url: str) -> str:
    """A server's URL with or without /v1, without it. Raises ConfigError."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as e:
        raise ConfigError(f"--base-url {url}: {e}.") from e
    if parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.fragment:
        raise ConfigError(f"--base-url must be such as http://127.0.0.1:8000/v1, got {url!r}.")
    return url.rstrip("/").removesuffix("/v1")


def result(call: Call, response: Mapping[str, Any] | None, error: tuple[str, str] | None = None) -> dict[str, Any]:
    told = {"code": error[0], "message": error[1]} if error else None
    return {"id": call.id, "custom_id": call.custom_id, "response": response, "error": told}


def result_of(call: Call, response: httpx.Response) -> dict[str, Any]:
    """The result that an HTTP response is."""
    head = {"status_code": response.status_code, "request_id": response.headers.get("x-request-id", "")}
    try:
        body = parse(response.content)
    except RequestError:
        shown = response.text[:200]
        return result(call, {**head, "body": None}, ("invalid_response", f"the server's answer is no JSON: {shown}"))
    return result(call, {**head, "body": body})


class Stop:
    """What a first signal asks for: begin nothing new. A second one drops what is under way."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.asked = asyncio.Event()
        self.tasks: Sequence[asyncio.Task[None]] = ()
        self.on_first: Callable[[], None] = lambda: None

    def ask(self, number: int) -> None:
        if self.signal is None:
            self.signal = number
            self.asked.set()
            self.on_first()
            return
        for task in self.tasks:
            task.cancel()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM ask; where signals go to another thread they do what they did."""
        loop, caught = asyncio.get_running_loop(), []
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(RuntimeError, ValueError):
                loop.add_signal_handler(number, self.ask, int(number))
                caught.append(number)
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)


class Sender:
    """A server's API, asked until it says something that stays."""

    def __init__(
        self, url: str, limits: Limits, *, key: str | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.url, self.limits, self.stop = base_of(url), limits, Stop()
        self._heard_s = time.monotonic()
        self._away_s: float | None = None  # since when every answer was a refusal or none
        self.client = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(limits.timeout_s, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=limits.concurrency, max_keepalive_connections=limits.concurrency),
            transport=transport,
        )

    async def models(self) -> list[str] | None:
        """Names of the server's models; None where it does not say. Waits while it starts. Raises ConfigError."""
        for attempt in itertools.count(1):
            try:
                response = await self.client.get("/v1/models", timeout=10.0)
            except httpx.HTTPError as e:
                raise ConfigError(f"{self.url}: no server answers there ({str(e) or type(e).__name__}).") from e
            if response.status_code in (401, 403):
                raise ConfigError(f"{self.url}: refuses the key ({response.status_code}); give --api-key KEY.")
            if response.status_code not in AWAY:
                self._heard()
                with contextlib.suppress(RequestError, TypeError, KeyError):
                    return [str(model["id"]) for model in parse(response.content)["data"]]
                return None
            self._check_patience(f"it answers with {response.status_code}")
            await self._pause(attempt, response)
            if self.stop.signal is not None:
                return None
        raise AssertionError("counting ended")

    async def result(self, call: Call) -> dict[str, Any] | None:
        """The result of one request; None when it was stopped between two tries. Raises ConfigError when the server is
        gone for good."""
        begun_s = time.monotonic()
        for attempt in itertools.count(1):
            made, response, away = await self._try(call)
            if response is not None and not away:
                self._heard()
            if response is not None and response.status_code not in AGAIN:
                return made
            # with the server away and nobody answered since, the request is not the one to blame
            if attempt >= self.limits.attempts and (not away or self._heard_s > begun_s):
                return made
            if away:
                self._check_patience(f"it answers with {response.status_code}" if response else "no connection")
            await self._pause(attempt, response)
            if self.stop.signal is not None:
                return None
        raise AssertionError("counting ended")

    async def _try(self, call: Call) -> tuple[dict[str, Any], httpx.Response | None, bool]:
        """What came of it, what was answered, and whether the server was away."""
        try:
            response = await self.client.post(call.url, json=call.body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as e:
            return result(call, None, ("no_connection", str(e) or type(e).__name__)), None, True
        except httpx.TimeoutException:
            return result(call, None, ("timeout", f"nothing came for {self.limits.timeout_s:g} s")), None, False
        except httpx.HTTPError as e:
            return result(call, None, ("connection_lost", str(e) or type(e).__name__)), None, False
        return result_of(call, response), response, response.status_code in AWAY

    def _heard(self) -> None:
        self._heard_s, self._away_s = time.monotonic(), None

    def _check_patience(self, why: str) -> None:
        """Raises ConfigError when the server has been away for too long."""
        now_s = time.monotonic()
        self._away_s = now_s if self._away_s is None else self._away_s
        if now_s - self._away_s > self.limits.patience_s:
            raise ConfigError(
                f"{self.url}: away for {now_s - self._away_s:.0f} s ({why}); what is done is kept, run it again to go "
                "on."
            )

    async def _pause(self, attempt: int, response: httpx.Response | None) -> None:
        """Wait as the server asks, or longer each time; not when stopped."""
        wait_s = self.limits.pause_s * 2 ** min(attempt - 1, 10)
        asked = response.headers.get("retry-after", "") if response is not None else ""
        if asked.isascii() and asked.isdigit() and len(asked) < 6:
            wait_s = max(wait_s, int(asked))
        wait_s = min(wait_s, LONGEST_PAUSE_S) * random.uniform(0.8, 1.2)  # not all at the same moment
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.asked.wait(), wait_s)


async def run(path: Path, found: Sequence[Job], results: Results, sender: Sender, *, tell: Tell) -> int | None:
    """Answer every job of the file at `path` and append each result as it comes; `tell` hears of each.

    The signal that ended it early, or None. Raises ConfigError when the server is gone or results cannot be written.
    """
    stop, waiting = sender.stop, iter(found)
    with open_input(path) as file, stop.signals():

        async def work() -> None:
            for job in waiting:
                if stop.signal is not None:
                    return
                made = await sender.result(read(file, job))
                if made is None:
                    return
                results.append(made)
                tell(made)

        tasks = [asyncio.create_task(work()) for _ in range(min(sender.limits.concurrency, len(found)))]
        stop.tasks = tasks
        try:
            if tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    return stop.signal


@contextlib.asynccontextmanager
async def open_sender(url: str, limits: Limits, key: str | None) -> AsyncIterator[Sender]:
    sender = Sender(url, limits, key=key)
    try:
        yield sender
    finally:
        await sender.client.aclose()
