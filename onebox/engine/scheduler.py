"""Which sequences run this step, and how many tokens each. Takes sequences, gives a Plan. Knows no tensors.

A step is a window batch (every decoding sequence: its last token and its drafts) and a prefill batch (chunks of prompts
from what is left of the token budget). Decoding sequences run in every step, so a long prompt delays them by at most
one step of `max_num_batched_tokens` rows; prompts always get at least one row, so they are never starved either.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from onebox.engine.pages import Pool, pages_for
from onebox.engine.sequence import Phase, Sequence
from onebox.errors import QueueFullError, RequestError


@dataclass(frozen=True)
class Chunk:
    """Rows [start, start + n) of a sequence to prefill."""

    sequence: Sequence
    start: int
    n: int

    @property
    def last(self) -> bool:
        return self.start + self.n == len(self.sequence.tokens)


@dataclass(frozen=True)
class Plan:
    """One step. A sequence is in at most one of the two."""

    prefill: tuple[Chunk, ...]
    window: tuple[Sequence, ...]


class Scheduler:
    """Admits by priority, then arrival; preempts in the reverse order when pages run out, losing nothing but time."""

    def __init__(
        self, pages: Pool, slots: Pool, *, max_num_seqs: int, max_num_batched_tokens: int, max_waiting: int
    ) -> None:
        self.pages, self.slots = pages, slots
        self.max_num_seqs = min(max_num_seqs, slots.total)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_waiting = max_waiting
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises QueueFullError, or RequestError when it could never run."""
        need, full = pages_for(sequence.max_len + 2 * sequence.draft_len), self.pages.total
        if need > full:
            raise RequestError(
                f"This request needs {need} KV pages (prompt {sequence.prompt_len} tokens, answer up to "
                f"{sequence.max_len - sequence.prompt_len}); the server has {full}. Ask for fewer tokens, or start the "
                "server with more --kv-gb.",
                param="max_tokens",
            )
        if len(self.waiting) >= self.max_waiting + self.max_num_seqs - len(self.running):
            raise QueueFullError(f"{len(self.waiting)} requests are waiting already; try again later.")
        self.waiting.append(sequence)

    def schedule(self) -> Plan:
        """Choose this step's work, reserving every page it can write to."""
        for sequence in sorted(self.running, key=lambda s: s.rank):
            if sequence.phase is Phase.DECODE and not self._reserve(sequence, sequence.reserve):
                self._preempt(sequence)  # _reserve preempted all behind it: it is the last, and waits its turn
        window = tuple(s for s in self.running if s.phase is Phase.DECODE)
        rows = sum(1 + len(s.drafts) for s in window)
        budget = max(self.max_num_batched_tokens - rows, 1)
        chunks: list[Chunk] = []
        for sequence in sorted((s for s in self.running if s.phase is Phase.PREFILL), key=lambda s: s.rank):
            if budget > 0:
                budget -= self._chunk(sequence, budget, chunks)
        self.waiting.sort(key=lambda s: s.rank)
        while budget > 0 and self.waiting and len(self.running) < self.max_num_seqs and self.slots.n_free:
            sequence = self.waiting[0]
            if pages_for(len(sequence.tokens) + 2 * sequence.draft_len) > self.pages.n_free:
                break  # in order: nobody behind it overtakes
            self.waiting.pop(0)
            sequence.phase, sequence.slot = Phase.PREFILL, self.slots.take(1)[0]
            sequence.pages = self.pages.take(pages_for(len(sequence.tokens) + 2 * sequence.draft_len))
            self.running.append(sequence)
            budget -= self._chunk(sequence, budget, chunks)
        return Plan(tuple(chunks), window)

    def finish(self, sequence: Sequence) -> None:
        """Free everything the sequence holds, wherever it stands."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is not Phase.FINISHED:
            self.running.remove(sequence)
            self._release(sequence)
        sequence.phase = Phase.FINISHED

    def check(self) -> None:
        """Assert that pages and slots are each owned once, and that every sequence is where its phase says."""
        self.pages.check(chain.from_iterable(s.pages for s in self.running))
        self.slots.check(s.slot for s in self.running)
        for s in self.waiting:
            assert s.phase is Phase.WAITING and not s.pages and not s.slot and s.computed == 0, s
        for s in self.running:
            assert s.phase in (Phase.PREFILL, Phase.DECODE), s
            assert s.computed <= len(s.tokens) and pages_for(s.computed) <= len(s.pages), s
            assert s.phase is Phase.PREFILL or s.computed == len(s.tokens) - 1, s

    def _chunk(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        n = min(budget, len(sequence.tokens) - sequence.computed)
        chunks.append(Chunk(sequence, sequence.computed, n))
        return n

    def _reserve(self, sequence: Sequence, n_tokens: int) -> bool:
        """Give the sequence pages for `n_tokens`, preempting those behind it. False: not even so."""
        need = pages_for(n_tokens) - len(sequence.pages)
        while need > self.pages.n_free:
            behind = [s for s in self.running if s.rank > sequence.rank]
            if not behind:
                return False
            self._preempt(max(behind, key=lambda s: s.rank))
        sequence.pages += self.pages.take(max(need, 0))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting with all its tokens; it will be prefilled again and goes on where it was."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.phase, sequence.computed, sequence.pending, sequence.drafts = Phase.WAITING, 0, 0, []
        self.waiting.append(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.pages.give(sequence.pages)
        self.slots.give([sequence.slot])
        sequence.pages, sequence.slot = [], 0
