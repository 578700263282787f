"""Which sequences run this step, and how many tokens each. Takes sequences, gives a Plan. Knows no tensors.

A step is a queue of device operations, then at most two forwards: a window batch (every decoding sequence: its last
token and its drafts) and a prefill batch (chunks of prompts from what is left of the token budget). Decoding sequences
run in every step, so a long prompt delays them by at most one step of `max_num_batched_tokens` rows; prompts always get
at least one row, so they are never starved either. Half of the prefill budget goes by rank, the other half to the
shortest remaining prompt: a long prompt moves in every step and does not hold up short ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import chain

from onebox.engine.pages import Pool, pages_for
from onebox.engine.prefix import Match, PrefixCache
from onebox.engine.sequence import Phase, Sequence
from onebox.engine.states import DeviceOp, SnapshotSlots
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
    """One step: `ops` in order, then the forwards. A sequence is in at most one of `prefill` and `window`.

    `preempted` went back to waiting and keep their tokens; nothing is asked of the engine for them.
    """

    prefill: tuple[Chunk, ...]
    window: tuple[Sequence, ...]
    ops: tuple[DeviceOp, ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return *self.window, *(c.sequence for c in self.prefill)


class Scheduler:
    """Admits by priority, then arrival; preempts in the reverse order when pages run out, losing nothing but time.

    `schedule`, run the plan, settle each sequence (`Sequence.prefilled`, `Sequence.verified`), `finish` those that are
    over, `settle`. All snapshots are taken in `schedule` and `finish`, where a sequence's numbers are the device's.
    `snapshot_every`: most tokens between two snapshots of one sequence (0: no limit). `grain`: prompts are cut at
    multiples of so many tokens, where the budget cuts them.
    """

    def __init__(
        self,
        pages: Pool,
        slots: Pool,
        prefix: PrefixCache | None = None,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_waiting: int,
        snapshot_every: int = 0,
        grain: int = 1,
    ) -> None:
        self.pages, self.slots = pages, slots
        self.prefix = prefix or PrefixCache(pages, SnapshotSlots(0))
        self.max_num_seqs = min(max_num_seqs, slots.total)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_waiting = max_waiting
        self.snapshot_every = snapshot_every
        self.grain = grain
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._in_step: set[Sequence] = set()
        self._preempted: list[Sequence] = []
        self._blocked: tuple[Sequence, int] | None = None  # who did not fit, into how many pages

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
        self.waiting.sort(key=lambda s: s.rank)

    def schedule(self) -> Plan:
        """Choose this step's work, reserving every page it can write to."""
        assert not any(s.cancelled for s in self._in_step), "a sequence cancelled in the last step was not settled"
        self._preempted = []
        self.running.sort(key=lambda s: s.rank)
        self._take_snapshots()
        for sequence in list(self.running):
            if sequence.phase is Phase.DECODE and not self._reserve(sequence, sequence.reserve):
                self._preempt(sequence)  # _reserve preempted all behind it: it is the last, and waits its turn
        window = tuple(s for s in self.running if s.phase is Phase.DECODE)
        budget = max(self.max_num_batched_tokens - sum(1 + len(s.drafts) for s in window), 1)
        prefill = self._share(budget)
        self._in_step = {*window, *(c.sequence for c in prefill)}
        ops = self.prefix.slots.ops
        plan = Plan(prefill, window, tuple(ops), tuple(self._preempted))
        ops.clear()
        return plan

    def may_run_ahead(self, window: tuple[Sequence, ...], rows: int) -> bool:
        """Whether `schedule` would choose this window again and nothing beside it, after a step of at most `rows` rows.

        If so, pages for the step after that are reserved.
        """
        if self.waiting or len(window) != len(self.running) or not window or self.prefix.slots.ops:
            return False
        if self.snapshot_every and any(s.computed + 2 * rows - s.saved >= self.snapshot_every for s in window):
            return False
        needs = [max(pages_for(s.reserve + rows) - len(s.pages), 0) for s in window]
        if sum(needs) > self.pages.n_free:
            return False  # what the cache would give up may still be copied from
        for s, need in zip(window, needs, strict=True):
            s.pages += self.pages.take(need)
        return True

    def settle(self, sequences: tuple[Sequence, ...]) -> None:
        """End a step: all its sequences have been told what they got. Finishes those cancelled meanwhile."""
        self._in_step.clear()
        for sequence in sequences:
            if sequence.cancelled and sequence.phase is not Phase.FINISHED:
                self.finish(sequence)

    def cancel(self, sequence: Sequence) -> bool:
        """Finish a sequence at any moment. False: it is in the step under way, and goes when that is settled."""
        sequence.cancelled = True
        if sequence in self._in_step:
            return False
        self.finish(sequence)
        return True

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Free everything the sequence holds, wherever it stands; what it computed stays reusable if `keep`.

        Its `computed` and `pending` must be what the device has.
        """
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is not Phase.FINISHED:
            self.running.remove(sequence)
            self._release(sequence, keep=keep)
        sequence.phase = Phase.FINISHED
        self._in_step.discard(sequence)

    def check(self) -> None:
        """Assert that pages and slots are each owned once, and that every sequence is where its phase says."""
        cached = self.prefix.pages
        own = (p for s in self.running for p in s.pages if p not in cached)
        self.pages.check(chain(own, (page for page in cached if page <= self.pages.total)))
        self.slots.check(s.slot for s in self.running)
        self.prefix.check(self.running)
        for s in self.waiting:
            assert s.phase is Phase.WAITING and not s.pages and not s.slot and s.computed == 0 and s.node is None, s
        for s in self.running:
            assert s.phase in (Phase.PREFILL, Phase.DECODE), s
            assert s.computed <= len(s.tokens) and pages_for(s.computed) <= len(s.pages), s
            assert s.phase is Phase.PREFILL or s.computed == len(s.tokens) - 1, s
            assert s.phase is Phase.DECODE or s.pending == 0, s
            assert s.node is None or s.pages[s.node.depth - 1] == s.node.page, s

    def _take_snapshots(self) -> None:
        for s in self.running:
            if s.phase is Phase.PREFILL:
                if s.cuts and s.computed == s.cuts[0]:
                    s.saved = s.cuts.pop(0)
                    self.prefix.save(s)
            elif self.snapshot_every and s.computed - s.saved >= self.snapshot_every:
                s.saved = s.computed
                self.prefix.save(s)

    def _share(self, budget: int) -> tuple[Chunk, ...]:
        """Divide prefill rows: half by rank, then the shortest first, then new ones, then by rank again."""
        rows: dict[Sequence, int] = {}

        def give(sequence: Sequence, most: int) -> None:
            nonlocal budget
            end = sequence.cuts[0] if sequence.cuts else len(sequence.tokens)
            had = rows.get(sequence, 0)
            n = min(most, budget, end - sequence.computed - had)
            if n > 0:
                rows[sequence] = had + n
                budget -= n

        def left(sequence: Sequence) -> int:
            return len(sequence.tokens) - sequence.computed

        ranked = [s for s in self.running if s.phase is Phase.PREFILL]
        if ranked:
            give(ranked[0], max(budget // 2, 1))
            # late, so that it finds what those before it have left in the cache; at once, if it is shorter than they
            while (first := self._first()) and all(left(first) < left(s) for s in ranked) and self._admit():
                ranked.append(self.running[-1])
        for s in sorted(ranked[1:], key=lambda s: (s.request.priority, left(s))):
            give(s, budget)
        while budget > 0 and self._admit():
            ranked.append(self.running[-1])
            give(ranked[-1], budget)
        for s in ranked:
            give(s, budget)
        return tuple(Chunk(s, s.computed, n) for s, n in self._even(rows).items())

    def _even(self, rows: dict[Sequence, int]) -> dict[Sequence, int]:
        """Chunks that the budget cuts short, cut at a multiple of the grain: there a prompt's numbers do not depend on
        where it was cut. One that would be left with nothing waits, unless nobody else moves."""
        found = {}
        for s, n in rows.items():
            end = s.computed + n
            if end < (s.cuts[0] if s.cuts else len(s.tokens)):
                n = max(end - end % self.grain - s.computed, 0)
            if n:
                found[s] = n
        return found or dict(list(rows.items())[:1])

    def _first(self) -> Sequence | None:
        """The first in the queue that is ready."""
        return next((s for s in self.waiting if s.ready), None)

    def _admit(self) -> bool:
        """Give the first in the queue a slot, its cached prefix and pages for all its tokens. Nobody overtakes it."""
        if self._preempted:
            return False  # what was taken from one is not for another
        sequence = self._first()
        if sequence is None:
            return False
        room = self.pages.n_free + self.prefix.n_idle
        if len(self.running) >= self.max_num_seqs or not self.slots.n_free or self._blocked == (sequence, room):
            return False
        match = self.prefix.find(sequence.tokens, sequence.request.cache_salt)
        need = pages_for(len(sequence.tokens) + 2 * sequence.draft_len)
        held = self.prefix.hold(match)
        if not self.prefix.reclaim(need - len(held)):
            self.prefix.let_go(match, held)
            if self.running or match.state is None:
                self._blocked = (sequence, room)
                return False
            match, held = Match(None, match.shared, "no_room"), []  # alone, yet the match itself takes the last page
            if not self.prefix.reclaim(need):
                return False
        self._blocked = None
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.phase, [sequence.slot] = Phase.PREFILL, self.slots.take(1)
        if sequence.waited_s is None:
            sequence.waited_s = time.monotonic() - sequence.came_s
        sequence.pages = held + self.pages.take(need - len(held))
        self.prefix.attach(match, sequence)
        if len(sequence.tokens) == sequence.prompt_len:
            sequence.cached_tokens = sequence.computed
        sequence.saved = sequence.computed
        sequence.cuts = self._cuts(sequence, match.shared)
        return True

    def _cuts(self, sequence: Sequence, shared: int) -> list[int]:
        """Where snapshots are taken on the way, most wanted first: where the request says, where it leaves the known
        prompts, one token before its end (so that the same prompt finds it), and every so often."""
        if not self.prefix.slots.device.total:
            return []
        start, gap, last = sequence.computed, self.prefix.min_tokens, len(sequence.tokens) - 1
        cuts = {n for n in sequence.request.snapshot_at if max(start, gap - 1) < n <= last}
        every = range(start - start % self.snapshot_every, last, self.snapshot_every) if self.snapshot_every else ()
        for n in (shared, last, *every):
            if n - start >= gap and all(abs(n - c) >= gap for c in cuts):
                cuts.add(n)
        return sorted(cuts)

    def _reserve(self, sequence: Sequence, n_tokens: int) -> bool:
        """Give the sequence pages for `n_tokens`, preempting those behind it. False: not even so."""
        if sequence.phase is not Phase.DECODE:
            return True  # preempted by one before it
        need = pages_for(n_tokens) - len(sequence.pages)
        if need <= 0:
            return True
        while not self.prefix.reclaim(need):
            behind = self.running[-1]
            if behind is sequence:
                return False
            self._preempt(behind)
        sequence.pages += self.pages.take(need)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting with all its tokens; it will be prefilled again and goes on where it was."""
        self.running.remove(sequence)
        self._release(sequence, keep=True)
        sequence.phase, sequence.drafts = Phase.WAITING, []
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.rank)
        self._preempted.append(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence, *, keep: bool) -> None:
        surplus = max(sequence.computed - len(sequence.tokens), 0)  # accepted rows behind a stop
        sequence.computed, sequence.pending = sequence.computed - surplus, sequence.pending - surplus
        if keep:
            self.prefix.save(sequence)
        self.prefix.release(sequence.pages)
        self.slots.give([sequence.slot])
        sequence.pages, sequence.slot, sequence.node = [], 0, None
        sequence.computed, sequence.pending, sequence.cuts = 0, 0, []
