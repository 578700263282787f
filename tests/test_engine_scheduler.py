"""Who runs in a step, and how much of it."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine

from onebox.engine.scheduler import Plan
from onebox.engine.sequence import Phase
from onebox.errors import QueueFullError, RequestError


def rows(plan: Plan) -> dict[str, int]:
    return {c.sequence.request.id: c.n for c in plan.prefill}


def test_a_long_prompt_leaves_half_of_the_budget_to_short_ones() -> None:
    engine = FakeEngine(n_pages=100, n_snapshots=0, budget=200)
    engine.add([1] * 3000)
    engine.add([2] * 150)
    assert rows(engine.step()) == {"1": 200}
    assert rows(engine.step()) == {"1": 100, "2": 100}
    assert rows(engine.step()) == {"1": 150, "2": 50}


def test_a_prompt_alone_gets_the_whole_budget() -> None:
    engine = FakeEngine(n_pages=100, budget=200)
    engine.add([1] * 3000)
    assert rows(engine.step()) == {"1": 200}
    assert rows(engine.step()) == {"1": 200}


def test_the_budget_cuts_prompts_at_multiples_of_the_grain_unless_nobody_would_move() -> None:
    engine = FakeEngine(n_pages=100, n_snapshots=0, budget=200, grain=64)
    engine.add([1] * 300)
    assert [rows(engine.step())["1"] for _ in range(2)] == [192, 108]
    small = FakeEngine(n_pages=100, n_snapshots=0, budget=16, grain=64)
    small.add([1] * 40)
    assert [rows(small.step())["1"] for _ in range(3)] == [16, 16, 8]


def test_a_short_prompt_behind_two_long_ones_does_not_wait_for_either() -> None:
    engine = FakeEngine(n_pages=100, n_snapshots=0, budget=100)
    engine.add([1] * 1000)
    engine.add([2] * 600)
    for _ in range(3):
        engine.step()
    engine.add([3] * 30)
    assert rows(engine.step()) == {"1": 50, "3": 30, "2": 20}


def test_lower_priority_numbers_are_admitted_first_then_earlier_arrivals() -> None:
    engine = FakeEngine(n_slots=2)
    engine.add([1], priority=1)
    engine.add([2], priority=0)
    engine.add([3], priority=0)
    assert set(rows(engine.step())) == {"2", "3"}


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    engine = FakeEngine(n_pages=5, n_snapshots=0)
    engine.add([1] * 150, 100)
    engine.step()
    engine.add([2] * 280, 8)
    engine.add([3], 8)
    plan = engine.step()
    assert plan.prefill == () and len(plan.window) == 1
    engine.run()
    assert len(engine.done) == 3


def test_the_latest_arrival_of_the_lowest_priority_is_preempted() -> None:
    engine = FakeEngine(n_pages=6, n_slots=3, n_snapshots=0)
    first, urgent, last = (
        engine.add([1] * 120, 100),
        engine.add([2] * 120, 100, priority=-1),
        engine.add([3] * 120, 100),
    )
    while not engine.scheduler.preemptions:
        plan = engine.step()
    assert plan.preempted == (last,) and last.phase is Phase.WAITING and first.phase is urgent.phase is Phase.DECODE
    engine.run()
    assert len(engine.done) == 3


def test_a_full_queue_is_refused_with_a_time_to_come_back() -> None:
    engine = FakeEngine(n_slots=1, max_waiting=2)
    for i in range(3):
        engine.add([i])
    with pytest.raises(QueueFullError) as e:
        engine.add([9])
    assert e.value.status == 429 and e.value.retry_after_s >= 1


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(RequestError, match=r"needs 6 KV pages \(prompt 300 tokens, .* 50\); the server has 4"):
        FakeEngine(n_pages=4).add([1] * 300, 50)


def test_zero_accepted_rows_are_an_ordinary_step() -> None:
    engine = FakeEngine(draft_len=2)
    s = engine.add([1, 2, 3], 20)
    engine.step()
    engine.step()
    plan = engine.scheduler.schedule()
    engine.device.run(plan)
    engine.device.forward(s, [s.tokens[-1], *s.drafts], window=True)
    s.verified(0, [])
    engine.scheduler.settle(plan.sequences)
    engine.scheduler.check()
    assert s.pending == 0
    engine.run()
    assert s.output == FakeEngine().ask([1, 2, 3], 20).output


def test_a_sequence_cancelled_inside_a_step_leaves_when_the_step_is_settled() -> None:
    engine = FakeEngine()
    s = engine.add([1] * 100, 50)
    engine.step()
    plan = engine.scheduler.schedule()
    assert not engine.scheduler.cancel(s) and s.slot
    engine.scheduler.settle(plan.sequences)
    assert s.phase is Phase.FINISHED and not s.slot and not engine.scheduler.running


def test_more_sequences_than_slots_are_not_run() -> None:
    engine = FakeEngine(n_slots=2)
    engine.scheduler.max_num_seqs = 2
    for i in range(5):
        engine.add([i], 5)
    assert len(engine.step().prefill) == 2


def test_accepted_rows_behind_a_stop_are_not_kept_with_the_finished_sequence() -> None:
    engine = FakeEngine(draft_len=3, hit_rate=1.0)
    s = engine.add([1] * 100, 50)
    while s.phase is not Phase.DECODE or not s.drafts:
        engine.step()
    plan = engine.scheduler.schedule()
    engine.device.run(plan)
    targets = engine.device.forward(s, [s.tokens[-1], *s.drafts], window=True)
    s.computed, s.pending = s.computed + 4, 4
    s.tokens += targets[:1]  # the second was a stop token
    engine.scheduler.finish(s)
    engine.scheduler.settle(plan.sequences)
    del engine.live[s.request.id]
    assert engine.ask([*s.tokens, 7]).cached_tokens == len(s.tokens)
    engine.close()
