"""The engine as its callers see it: requests in, a stream of Outputs back, whichever thread or process it runs in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from onebox.errors import OneboxError, RequestError
from onebox.request import Output, Request, joined

MAX_JOINED = 128  # tokens of one Output that were joined from several
Status = Literal["stopped", "starting", "ready", "stalled", "restarting", "failed"]
Progress = Callable[[str, int, int], None]  # told of a start: what it does now, how much is done, of how much


def unheard(phase: str, done: int, total: int) -> None:
    """A Progress that nobody follows."""


Took = tuple[str, float]  # a phase of a start, and the seconds it took


class StartClock:
    """A Progress that times what it hears. A phase ends when another begins."""

    def __init__(self, phase: str) -> None:
        self.phase, self.done, self.total = phase, 0, 0
        self.took: tuple[Took, ...] = ()
        self._began_s = time.monotonic()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self.phase:
            self.took = (*self.took, (self.phase, self.seconds))
            self.phase, self._began_s = phase, time.monotonic()
        self.done, self.total = done, total

    @property
    def seconds(self) -> float:
        """Of the phase under way."""
        return round(time.monotonic() - self._began_s, 3)

    @property
    def share(self) -> float | None:
        return self.done / self.total if self.total else None

    def end(self) -> None:
        self("ready", 0, 0)


@dataclass(frozen=True)
class Health:
    """What an engine is busy with. `phase`, `progress` (0 to 1) and `seconds` are those of a load under way; `took` has
    the phases before it, and those of the last load once it is over."""

    status: Status
    detail: str = ""
    phase: str = ""
    progress: float | None = None
    seconds: float = 0.0
    took: tuple[Took, ...] = ()


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
    host_pages_total: int = 0
    host_pages_free: int = 0
    restarts: int = 0
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

    def health(self) -> Health:
        """What the engine is busy with, and why it is not alive when it is not."""
        ...


Items = asyncio.Queue[Output | OneboxError]


async def follow(begin: Callable[[], None], items: Items, cancel: Callable[[], None]) -> AsyncGenerator[Output, None]:
    """The Outputs of one request: `begin` hands it to the engine, which fills `items`; `cancel` if it is left early."""
    begin()
    ended = False
    try:
        while not ended:
            item = await items.get()
            # a reader slower than the engine gets what has waited at once, in turn with others, and so keeps up
            while isinstance(item, Output) and item.finish_reason is None and not items.empty():
                if len(item.tokens) >= MAX_JOINED:
                    await asyncio.sleep(0)
                    break
                later = items.get_nowait()
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
            cancel()


def untakable(e: Exception) -> RequestError:
    """What the caller of a request hears that ran into a bug before it was queued."""
    return RequestError(f"The engine cannot run this request ({type(e).__name__}: {e}); its log says where.")
