"""Sequence: one request while the engine works on it. Mutable; owned by the scheduler."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from onebox.request import Request

if TYPE_CHECKING:
    from onebox.engine.grammar import Matcher
    from onebox.engine.prefix import Node


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """Positions [0, computed) of `tokens` have KV and state; in DECODE exactly the last token has not.

    `pending` rows of the last window are accepted but not yet applied to the slot's state: the next step's commit.
    `drafts` are proposed tokens after tokens[-1]. `cuts` are the token counts ahead of `computed` where a prefill chunk
    must end because a snapshot is taken there, `saved` the last one taken; `node` is its deepest page in the cache.
    """

    request: Request
    arrival: int
    seed: int
    draft_len: int
    stop_ids: frozenset[int]
    max_len: int  # of prompt and answer together
    tokens: list[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    pending: int = 0
    drafts: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    cancelled: bool = False
    cached_tokens: int = 0
    cuts: list[int] = field(default_factory=list)
    saved: int = 0
    node: Node | None = None
    matcher: Matcher | None = None
    ready: bool = True  # False: its grammar is being compiled
    came_s: float = field(default_factory=time.monotonic)
    waited_s: float | None = None  # until it was first admitted
    draft_now: int = 0  # most drafts of its next window: draft_len, or what an adaptive length says

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.draft_now = self.draft_len
        self.accepted_per_pos = [0] * self.draft_len

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: lower priority number, then earlier arrival."""
        return (self.request.priority, self.arrival)

    @property
    def n_drafts(self) -> int:
        """How many drafts the next window may carry: none past the last token that may be emitted."""
        return max(0, min(self.draft_now, self.max_len - len(self.tokens) - 1))

    @property
    def reserve(self) -> int:
        """Entries that the next window may write: its own rows, then the drafter's passes ahead of them."""
        return len(self.tokens) + 2 * self.draft_len

    def prefilled(self, n: int) -> None:
        """Settle a chunk: `n` more rows are in the state, nothing pending."""
        self.computed, self.pending = self.computed + n, 0

    def verified(self, n_rows: int, tokens: Seq[int]) -> None:
        """Settle a window: `n_rows` rows of it stand (0 or more) and gave `tokens`, fewer when a stop cut them.

        The window itself applied the rows that were pending before it, so zero rows leave nothing pending. Rows behind
        the last kept token are not kept either: their tokens are unknown to everybody else.
        """
        self.tokens += tokens
        self.pending = min(n_rows, len(self.tokens) - self.computed)
        self.computed += self.pending
        self.drafts = []
