"""The engine as its callers see it: requests in, a stream of Outputs back, whichever thread or process it runs in."""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Protocol

from onebox.config import EngineConfig
from onebox.errors import EngineUnavailableError, OneboxError, RequestError
from onebox.request import Output, Request, joined

if TYPE_CHECKING:
    from onebox.engine.engine import Engine

logger = logging.getLogger(__name__)
MAX_JOINED = 128  # tokens of one Output that were joined from several


@dataclass(frozen=True)
class EngineInfo:
    """What a caller must know of the engine to build a request. Lengths in tokens."""

    model: str  # path or name of the checkpoint
    build: str  # e.g. "hybrid", "bf16"
    vocab: int
    max_model_len: int
    max_num_seqs: int
    draft_len: int
    eos_token_ids: tuple[int, ...]
    device: str
    plan: Mapping[str, Any] = field(default_factory=dict)  # the memory plan, as /v1/onebox/plan answers it


@dataclass(frozen=True)
class EngineStats:
    """Counters since start, and gauges of now."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0  # held by the prefix cache alone: given up when a request needs room
    slots_total: int = 0
    slots_free: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_windows: int = 0  # verified windows that had drafts
    accepted_per_pos: tuple[int, ...] = ()  # windows in which draft i was kept
    preemptions: int = 0
    finished: int = 0
    cancelled: int = 0
    snapshots_total: int = 0
    snapshots_free: int = 0
    host_snapshots_total: int = 0
    host_snapshots_free: int = 0
    prefix: Mapping[str, int] = field(default_factory=dict)  # lookups, hits, misses by reason, evictions


class EngineClient(Protocol):
    """An engine that answers many requests at once."""

    @property
    def info(self) -> EngineInfo: ...

    async def start(self) -> None:
        """Begin stepping. Returns when requests can be served."""

    async def stop(self) -> None:
        """Fail what is in flight with EngineUnavailableError and free everything."""

    def generate(self, request: Request) -> AsyncIterator[Output]:
        """Outputs of one request as steps produce them; the last has `finish_reason`.

        Closing the iterator early cancels the request: its pages and slot are free within one step. Raises
        ContextLengthError or QueueFullError before the first Output, EngineUnavailableError when the engine stops.
        """
        ...

    def stats(self) -> EngineStats: ...

    def alive(self) -> bool:
        """Whether the engine makes progress (or has nothing to do)."""
        ...


class ThreadEngine:
    """An engine in a thread of this process. Loading starts with `start()`; requests may come from one event loop.

    An error in a step is a bug or a lost device: it fails every request in flight with EngineUnavailableError and ends
    the engine; `alive()` is False from then on, and also when a step takes longer than `stall_s`.
    """

    def __init__(self, config: EngineConfig, *, stall_s: float = 60.0) -> None:
        self._config = config
        self._stall_s = stall_s
        self._engine: Engine | None = None
        self._thread: Thread | None = None
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._sinks: dict[str, Callable[[Output | OneboxError], None]] = {}
        self._lock = Lock()  # of _sinks and _failure
        self._failure: EngineUnavailableError | None = EngineUnavailableError("The engine has not started.")
        self._step_began_s: float | None = None

    @property
    def info(self) -> EngineInfo:
        if self._engine is None:
            raise EngineUnavailableError("The engine has not started.")
        return self._engine.info

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[None] = loop.create_future()

        def finish(error: BaseException | None) -> None:
            if not loaded.done():
                loaded.set_exception(error) if error else loaded.set_result(None)

        def run() -> None:
            # torch and the weights load here, so that the socket answers at once
            from onebox.engine.engine import Engine

            try:
                self._engine = Engine(self._config)
            except BaseException as e:
                loop.call_soon_threadsafe(finish, e)
                return
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

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[Output | OneboxError] = asyncio.Queue()

        def sink(item: Output | OneboxError) -> None:
            with suppress(RuntimeError):  # the loop may have closed under a request
                loop.call_soon_threadsafe(outputs.put_nowait, item)

        with self._lock:  # either the engine's end finds this sink, or this finds the engine ended
            if self._failure is not None:
                raise self._failure
            if request.id in self._sinks:
                raise RequestError(f"Request id {request.id!r} is in use.", param="request_id")
            self._sinks[request.id] = sink
        self._commands.put(lambda engine: self._add(engine, request))
        ended = False
        try:
            while not ended:
                item = await outputs.get()
                # a reader slower than the engine gets what has waited at once, in turn with others, and so keeps up
                while isinstance(item, Output) and item.finish_reason is None and not outputs.empty():
                    if len(item.tokens) >= MAX_JOINED:
                        await asyncio.sleep(0)
                        break
                    later = outputs.get_nowait()
                    if isinstance(later, Output):
                        item = joined(item, later)
                    else:
                        yield item
                        item = later
                ended = isinstance(item, OneboxError) or item.finish_reason is not None
                if isinstance(item, OneboxError):
                    raise item
                yield item
        finally:
            if not ended:
                self._commands.put(lambda engine: self._cancel(engine, request.id))

    def stats(self) -> EngineStats:
        return self._engine.stats() if self._engine is not None else EngineStats()

    def alive(self) -> bool:
        began_s = self._step_began_s
        return self._failure is None and (began_s is None or time.monotonic() - began_s < self._stall_s)

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

    def _cancel(self, engine: Engine, request_id: str) -> None:
        with self._lock:
            self._sinks.pop(request_id, None)
        engine.cancel(request_id)

    def _tell(self, request_id: str, item: Output | OneboxError, *, last: bool) -> None:
        with self._lock:
            sink = self._sinks.pop(request_id, None) if last else self._sinks.get(request_id)
        if sink is not None:
            sink(item)
