"""An engine without a model: real scheduling over device memory that holds only what it should stand for.

A KV entry is the hash of the tokens up to and with its own; a state is the hash of the tokens in it, beside a window of
rows not yet applied. Each forward asserts that the memory it reads is that of its own tokens, so a wrong page, copy,
restore, commit or snapshot is an assertion at the step that first reads it. The next token follows from the hash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from onebox.engine.pages import PAGE_SIZE, Pool
from onebox.engine.prefix import PrefixCache
from onebox.engine.scheduler import Plan, Scheduler
from onebox.engine.sequence import Phase, Sequence
from onebox.engine.states import (
    CopyPage,
    LoadPage,
    LoadState,
    OffloadPage,
    OffloadState,
    RestoreState,
    SaveState,
    SnapshotSlots,
)
from onebox.request import Request, SamplingParams

EMPTY = 1  # hash of no tokens
VOCAB = 50


def mix(state: int, token: int) -> int:
    return hash((state, token))


def next_token(state: int) -> int:
    return 100 + state % VOCAB


def answer(prompt: tuple[int, ...], n: int) -> list[int]:
    """The `n` tokens that follow a prompt, from nothing but the closed form."""
    state, out = EMPTY, []
    for token in prompt:
        state = mix(state, token)
    for _ in range(n):
        out.append(next_token(state))
        state = mix(state, out[-1])
    return out


class FakeDevice:
    """Pages, slots, snapshots and host slots, all of hashes."""

    def __init__(self, n_pages: int, n_slots: int, n_snapshots: int, n_host: int, n_host_pages: int = 0) -> None:
        self.host_kv = [[0] * PAGE_SIZE for _ in range(1 + n_host_pages)]
        self.kv = [[0] * PAGE_SIZE for _ in range(1 + n_pages)]
        self.state = [EMPTY] * (1 + n_slots)
        self.rows: list[list[int]] = [[] for _ in range(1 + n_slots)]
        self.snapshots = [0] * (1 + n_snapshots)
        self.host = [0] * (1 + n_host)

    def run(self, plan: Plan) -> None:
        for op in plan.ops:
            match op:
                case CopyPage(src, dst):
                    self.kv[dst] = list(self.kv[src])
                case SaveState(slot, commit, snapshot):
                    self.snapshots[snapshot] = self.committed(slot, commit)
                case RestoreState(snapshot, slot):
                    self.state[slot], self.rows[slot] = self.snapshots[snapshot], []
                case OffloadState(snapshot, host):
                    self.host[host], self.snapshots[snapshot] = self.snapshots[snapshot], 0
                case LoadState(host, snapshot):
                    self.snapshots[snapshot], self.host[host] = self.host[host], 0
                case OffloadPage(page, host):
                    self.host_kv[host], self.kv[page] = self.kv[page], [0] * PAGE_SIZE
                case LoadPage(host, page):
                    self.kv[page] = list(self.host_kv[host])

    def committed(self, slot: int, n: int) -> int:
        state = self.state[slot]
        for token in self.rows[slot][:n]:
            state = mix(state, token)
        return state

    def forward(self, s: Sequence, tokens: list[int], *, window: bool) -> list[int]:
        """Rows at positions `s.computed` and up; gives the target's next token of each row."""
        state = EMPTY if s.computed == 0 else self.committed(s.slot, s.pending)
        want = EMPTY
        for i in range(s.computed):
            want = mix(want, s.tokens[i])
            got = self.kv[s.pages[i // PAGE_SIZE]][i % PAGE_SIZE]
            assert got == want, f"{s.request.id}: entry {i} of {s.computed} belongs to other tokens"
        assert state == want, f"{s.request.id}: the state is not that of the first {s.computed} tokens"
        self.state[s.slot], self.rows[s.slot] = state, list(tokens) if window else []
        targets = []
        for i, token in enumerate(tokens, s.computed):
            state = mix(state, token)
            self.kv[s.pages[i // PAGE_SIZE]][i % PAGE_SIZE] = state
            targets.append(next_token(state))
        if not window:
            self.state[s.slot] = state
        return targets

    def draft_ahead(self, s: Sequence) -> None:
        """What a drafter leaves behind: rubbish in every entry that it may write."""
        for i in range(len(s.tokens), len(s.tokens) + s.n_drafts - 1):
            self.kv[s.pages[i // PAGE_SIZE]][i % PAGE_SIZE] = -1


class FakeEngine:
    """The step loop over a FakeDevice. `hit_rate` is how often a draft is right."""

    def __init__(
        self,
        *,
        n_pages: int = 64,
        n_slots: int = 8,
        n_snapshots: int = 16,
        n_host: int = 0,
        n_host_pages: int = 0,
        draft_len: int = 0,
        budget: int = 256,
        grain: int = 1,
        every: int = 0,
        max_waiting: int = 1000,
        hit_rate: float = 0.6,
        seed: int = 0,
    ) -> None:
        pages = Pool(n_pages)
        self.slots = SnapshotSlots(n_snapshots, n_host)
        self.prefix = PrefixCache(pages, self.slots, n_host=n_host_pages)
        self.scheduler = Scheduler(
            pages,
            Pool(n_slots),
            self.prefix,
            max_num_seqs=n_slots,
            max_num_batched_tokens=budget,
            max_waiting=max_waiting,
            snapshot_every=every,
            grain=grain,
        )
        self.device = FakeDevice(n_pages, n_slots, n_snapshots, n_host, n_host_pages)
        self.draft_len, self.hit_rate, self.random = draft_len, hit_rate, Random(seed)
        self.live: dict[str, Sequence] = {}
        self.done: dict[str, Sequence] = {}
        self.computed_rows: Counter[str] = Counter()
        self.between: Callable[[Plan], None] = lambda plan: None  # called inside a step, before anything is settled
        self.n = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        snapshot_at: tuple[int, ...] = (),
        salt: str = "",
        priority: int = 0,
        stop: int | None = None,
    ) -> Sequence:
        self.n += 1
        s = Sequence(
            request=Request(
                id=str(self.n),
                prompt=tuple(prompt),
                params=SamplingParams(max_tokens=max_tokens),
                priority=priority,
                snapshot_at=snapshot_at,
                cache_salt=salt,
            ),
            arrival=self.n,
            seed=0,
            draft_len=self.draft_len,
            stop_ids=frozenset() if stop is None else frozenset({stop}),
            max_len=len(prompt) + max_tokens,
        )
        self.scheduler.add(s)
        self.live[s.request.id] = s
        return s

    def cancel(self, s: Sequence) -> None:
        self.scheduler.cancel(s)
        self.live.pop(s.request.id, None)

    def step(self) -> Plan:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        self.device.run(plan)
        self.between(plan)
        for s in plan.window:
            rows = [s.tokens[-1], *s.drafts]
            targets = self.device.forward(s, rows, window=True)
            n = next((i for i, (d, t) in enumerate(zip(s.drafts, targets, strict=False)) if d != t), len(s.drafts)) + 1
            self._settle(s, n, targets[:n])
        for c in plan.prefill:
            s = c.sequence
            targets = self.device.forward(s, s.tokens[c.start : c.start + c.n], window=False)
            self.computed_rows[s.request.id] += c.n
            last = c.last
            s.prefilled(c.n)
            if last:
                s.phase = Phase.DECODE
                self._settle(s, 0, targets[-1:])
        self.scheduler.settle(plan.sequences)
        self.scheduler.check()
        return plan

    def run(self, most: int = 10_000) -> None:
        """Step until nothing is left."""
        while self.live:
            self.step()
            most -= 1
            assert most, "the engine makes no progress"

    def ask(self, prompt: list[int], max_tokens: int = 8, *, salt: str = "", at: tuple[int, ...] = ()) -> Sequence:
        """Run one request to its end, alone."""
        s = self.add(prompt, max_tokens, salt=salt, snapshot_at=at)
        self.run()
        return s

    def close(self) -> None:
        """Cancel everything, empty the cache, and assert that nothing is held."""
        for s in list(self.live.values()):
            self.cancel(s)
        scheduler = self.scheduler
        assert not scheduler.running and not scheduler.waiting
        assert self.prefix.n_idle == len(self.prefix.pages) - self.prefix.host.total + self.prefix.host.n_free
        assert self.prefix.reclaim(scheduler.pages.total)
        for snapshot in [*self.slots.on_host, *self.slots.on_device]:
            self.slots.drop(snapshot)
        while self.prefix.dead:  # in host memory
            self.prefix._remove(next(iter(self.prefix.dead)))
        scheduler.check()
        assert scheduler.pages.n_free == scheduler.pages.total and scheduler.slots.n_free == scheduler.slots.total
        assert not self.prefix.roots and not self.prefix.pages and self.slots.device.n_free == self.slots.device.total
        assert self.prefix.host.n_free == self.prefix.host.total

    def _settle(self, s: Sequence, n_rows: int, tokens: list[int]) -> None:
        stop = next((i for i, t in enumerate(tokens) if t in s.stop_ids), None)
        tokens = tokens if stop is None else tokens[:stop]
        tokens = tokens[: s.max_len - len(s.tokens)]
        if n_rows:
            s.verified(n_rows, tokens)
        else:
            s.tokens += tokens
        if stop is not None or len(s.tokens) >= s.max_len:
            self.scheduler.finish(s)
            if not s.cancelled:
                self.done[s.request.id] = self.live.pop(s.request.id)
            return
        s.drafts = []
        truth = answer(tuple(s.tokens), s.n_drafts)
        for token in truth:
            s.drafts.append(token if self.random.random() < self.hit_rate else 99)
        self.device.draft_ahead(s)
