"""The engine as its callers see it: requests in, a stream of Outputs back, whichever thread or process it runs in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from onebox.request import Output, Request


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


@dataclass(frozen=True)
class EngineStats:
    """Counters since start, and gauges of now."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    slots_total: int = 0
    slots_free: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    cancelled: int = 0


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
