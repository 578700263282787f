"""The host side of the engine against a device that notices any wrong page, copy, restore or commit."""

from __future__ import annotations

from random import Random

import pytest
from fake_engine import FakeEngine, answer
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from onebox.engine.scheduler import Plan
from onebox.engine.sequence import Phase, Sequence


def assert_right(engine: FakeEngine) -> None:
    """Every finished request got exactly the closed form's answer."""
    for s in engine.done.values():
        want = answer(s.request.prompt, s.request.params.max_tokens)
        for stop in s.stop_ids:
            want = want[: want.index(stop)] if stop in want else want
        assert s.output == want, s.request.id


@pytest.mark.parametrize("draft_len", [0, 1, 2, 4])
@pytest.mark.parametrize("n_host", [0, 5])
def test_thousands_of_random_steps_keep_every_token_right_and_leak_nothing(draft_len: int, n_host: int) -> None:
    random = Random(draft_len * 10 + n_host)
    engine = FakeEngine(
        n_pages=16, n_slots=5, n_snapshots=6, n_host=n_host, n_host_pages=3 * n_host, draft_len=draft_len, budget=96,
        every=100, seed=draft_len,
    )  # fmt: skip
    stems = [[random.randrange(90) for _ in range(random.choice([127, 128, 129, 193, 250]))] for _ in range(4)]

    def cancel_some(plan: Plan) -> None:
        if random.random() < 0.05 and engine.live:
            engine.cancel(random.choice(list(engine.live.values())))

    engine.between = cancel_some
    for _ in range(2000):
        if random.random() < 0.25 and len(engine.live) < 14:
            stem = random.choice(stems)
            prompt = stem[: random.choice([len(stem), random.randrange(1, 128)])] + [
                random.randrange(3) for _ in range(random.randrange(70))
            ]
            if engine.done and random.random() < 0.3:
                prompt = [*random.choice(list(engine.done.values())).tokens[:400], 7]
            engine.add(
                prompt,
                random.choice([1, 20, 90, 200]),
                priority=random.choice([0, 0, 1]),
                salt=random.choice(["", "", "b"]),
                snapshot_at=(random.randrange(1, 200),),
                stop=random.choice([None, 110]),
            )
        if random.random() < 0.03 and engine.live:
            engine.cancel(random.choice(list(engine.live.values())))
        engine.step()
    engine.run()
    assert_right(engine)
    assert len(engine.done) > 50
    assert engine.scheduler.preemptions > 0 and engine.prefix.counts["hits"] > 10
    assert engine.prefix.counts["evicted_pages"] > 10
    assert bool(n_host) == (engine.prefix.counts["loaded_pages"] > 10)
    engine.close()


def test_32_requests_at_concurrency_8_with_shared_prefixes_all_complete_in_a_pool_that_evicts_continuously() -> None:
    random = Random(1)
    engine = FakeEngine(n_pages=26, n_slots=8, n_snapshots=8, draft_len=3, budget=256, every=128)
    stems = [[random.randrange(90) for _ in range(n)] for n in (200, 333, 128)]
    for i in range(32):
        engine.add(stems[i % 3] + [random.randrange(90) for _ in range(random.randrange(5, 60))], 40)
    engine.run()
    assert len(engine.done) == 32
    assert_right(engine)
    assert engine.prefix.counts["evicted_pages"] >= 10 and engine.prefix.counts["hits"] > 5
    engine.close()


def test_a_30_turn_chat_with_aborts_hits_95_percent_of_what_was_computed_before() -> None:
    random = Random(2)
    engine = FakeEngine(n_pages=200, n_slots=2, n_snapshots=8, n_host=8, draft_len=2, budget=512, every=2048)
    history = [random.randrange(90) for _ in range(100)]
    reusable = hits = 0
    before: list[int] = []
    for turn in range(30):
        history = history + [random.randrange(90) for _ in range(160)]
        s = engine.add(history, 60, snapshot_at=(len(history),))
        if turn % 3 == 2:
            for _ in range(12):
                engine.step()
            computed = s.computed
            engine.cancel(s)
        else:
            engine.run()
            computed = len(s.tokens) - 1
        if turn:
            reusable += min(len(before), len(history) - 1)
            hits += s.cached_tokens
        before = s.tokens[:computed]
        history = list(s.tokens)
    assert len(history) > 6000
    assert hits >= 0.95 * reusable, f"{hits} of {reusable}"
    assert_right(engine)
    engine.close()


def test_every_step_decodes_every_stream_while_a_128k_prompt_is_prefilled() -> None:
    engine = FakeEngine(n_pages=2200, n_slots=5, n_snapshots=0, draft_len=2, budget=2048)
    streams = [engine.add([i, 1, 2], 1000) for i in range(4)]
    for _ in range(2):
        engine.step()
    engine.device.forward = lambda s, tokens, *, window: [1] * len(tokens)  # type: ignore[method-assign]
    long = engine.add([5] * 131_072, 1)
    steps = 0
    while long.phase is not Phase.FINISHED:
        plan = engine.step()
        steps += 1
        assert set(plan.window) == set(streams)
        assert sum(c.n for c in plan.prefill) + sum(3 for _ in plan.window) <= 2048
    assert steps <= 66


def test_a_preempted_request_goes_on_without_repeating_a_token() -> None:
    engine = FakeEngine(n_pages=7, n_slots=2, n_snapshots=4, draft_len=2)
    a, b = engine.add([1] * 100, 200), engine.add([2] * 100, 200)
    engine.run()
    assert engine.scheduler.preemptions >= 1 and {a.request.id, b.request.id} == set(engine.done)
    assert_right(engine)
    engine.close()


@settings(max_examples=25, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))
class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine(
            n_pages=12, n_slots=3, n_snapshots=3, n_host=2, n_host_pages=4, draft_len=2, budget=80, every=70
        )

    @rule(
        stem=st.sampled_from([0, 1]),
        n=st.integers(1, 300),
        own=st.lists(st.integers(0, 2), max_size=3),
        most=st.sampled_from([1, 5, 70]),
        priority=st.integers(0, 1),
        at=st.integers(1, 300),
    )
    def arrive(self, stem: int, n: int, own: list[int], most: int, priority: int, at: int) -> None:
        self.engine.add([stem + i % 50 for i in range(n)] + own, most, priority=priority, snapshot_at=(at,))

    @rule(i=st.integers(0, 100), inside=st.booleans())
    def cancel(self, i: int, inside: bool) -> None:
        if not self.engine.live:
            return
        chosen: Sequence = list(self.engine.live.values())[i % len(self.engine.live)]
        if inside:
            self.engine.between = lambda plan: self.engine.cancel(chosen)
            self.engine.step()
            self.engine.between = lambda plan: None
        else:
            self.engine.cancel(chosen)

    @rule(n=st.integers(1, 5))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.engine.step()

    @invariant()
    def owned_once(self) -> None:
        self.engine.scheduler.check()

    def teardown(self) -> None:
        self.engine.run()
        assert_right(self.engine)
        self.engine.close()


TestEngineMachine = EngineMachine.TestCase
