"""The engine in a thread of its caller's process: for tests, debugging and `--single-process`."""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from threading import Lock, Thread
from typing import TYPE_CHECKING

from onebox.config import EngineConfig
from onebox.engine.client import EngineInfo, EngineStats, Health, Items, StartClock, follow, untakable
from onebox.errors import EngineUnavailableError, OneboxError, RequestError
from onebox.request import Output, Request

if TYPE_CHECKING:
    from onebox.engine.engine import Engine

logger = logging.getLogger(__name__)


class ThreadEngine:
    """An engine in a thread of this process. Loading starts with `start()`; requests may come from one event loop.

    An error in a step is a bug or a lost device: it fails every request in flight with EngineUnavailableError and ends
    the engine; `alive()` is False from then on, and also when a step takes longer than `stall_s`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._stall_s = config.stall_s
        self._engine: Engine | None = None
        self._thread: Thread | None = None
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._sinks: dict[str, Callable[[Output | OneboxError], None]] = {}
        self._lock = Lock()  # of _sinks and _failure
        self._failure: EngineUnavailableError | None = EngineUnavailableError("The engine has not started.")
        self._step_began_s: float | None = None
        self._clock = StartClock("libraries")

    @property
    def info(self) -> EngineInfo:
        if self._engine is None:
            raise EngineUnavailableError("The engine has not started.")
        return self._engine.info

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._clock = StartClock("libraries")
        loaded: asyncio.Future[None] = loop.create_future()

        def finish(error: BaseException | None) -> None:
            if not loaded.done():
                loaded.set_exception(error) if error else loaded.set_result(None)

        def run() -> None:
            # torch and the weights load here, so that the socket answers at once
            from onebox.engine.engine import load_engine

            try:
                self._engine = load_engine(self._config, self._clock)
            except BaseException as e:
                loop.call_soon_threadsafe(finish, e)
                return
            self._clock.end()
            self._failure = None
            loop.call_soon_threadsafe(finish, None)
            self._run(self._engine)

        self._thread = Thread(target=run, name="onebox-engine", daemon=True)
        self._thread.start()
        await loaded

    async def stop(self) -> None:
        if self._thread is not None and self._thread.is_alive() and self._failure is None:
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        loop: asyncio.AbstractEventLoop | None = None
        items: Items = asyncio.Queue()

        def sink(item: Output | OneboxError) -> None:
            assert loop is not None
            with suppress(RuntimeError):  # the loop may have closed under a request
                loop.call_soon_threadsafe(items.put_nowait, item)

        def begin() -> None:
            nonlocal loop
            loop = asyncio.get_running_loop()
            with self._lock:  # either the engine's end finds this sink, or this finds the engine ended
                if self._failure is not None:
                    raise self._failure
                if request.id in self._sinks:
                    raise RequestError(f"Request id {request.id!r} is in use.", param="request_id")
                self._sinks[request.id] = sink
            self._commands.put(lambda engine: self._add(engine, request))

        return follow(begin, items, lambda: self._commands.put(lambda engine: self._cancel(engine, request.id)))

    def stats(self) -> EngineStats:
        return self._engine.stats() if self._engine is not None else EngineStats()

    def alive(self) -> bool:
        began_s = self._step_began_s
        return self._failure is None and (began_s is None or time.monotonic() - began_s < self._stall_s)

    def health(self) -> Health:
        clock = self._clock
        if self._engine is None and self._thread is not None and self._thread.is_alive():
            detail = f"the engine starts: {clock.phase}"
            return Health("starting", detail, clock.phase, clock.share, clock.seconds, clock.took)
        if self._failure is not None:
            return Health("failed", str(self._failure))
        if not self.alive():
            return Health("stalled", f"the engine has been in one step for more than {self._stall_s:g} s")
        return Health("ready", took=clock.took)

    def _run(self, engine: Engine) -> None:
        """Steps while there is work, else waits for a command."""
        error = EngineUnavailableError("The engine was stopped.")
        try:
            while self._obey(engine):
                self._step_began_s = time.monotonic()
                for output in engine.step():
                    self._tell(output.request_id, output, last=output.finish_reason is not None)
                self._step_began_s = None
        except Exception:
            logger.exception("the engine failed in a step")
            error = EngineUnavailableError("The engine failed and ended; its log says why. Restart the server.")
        self._step_began_s = None
        with self._lock:
            self._failure = error
            sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(error)

    def _obey(self, engine: Engine) -> bool:
        """Run waiting commands; block for one when there is no work. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)

    def _add(self, engine: Engine, request: Request) -> None:
        try:
            engine.add(request)
        except OneboxError as e:
            self._tell(request.id, e, last=True)
        except Exception as e:  # a bug, but this request's alone
            logger.exception("request %s could not be taken", request.id)
            self._tell(request.id, untakable(e), last=True)

    def _cancel(self, engine: Engine, request_id: str) -> None:
        with self._lock:
            self._sinks.pop(request_id, None)
        engine.cancel(request_id)

    def _tell(self, request_id: str, item: Output | OneboxError, *, last: bool) -> None:
        with self._lock:
            sink = self._sinks.pop(request_id, None) if last else self._sinks.get(request_id)
        if sink is not None:
            sink(item)
