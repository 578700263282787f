"""What later prompts reuse of earlier ones. Each forward of the fake device asserts that it reads its own tokens."""

from __future__ import annotations

from random import Random

import pytest
from fake_engine import FakeEngine

from onebox.engine.prefix import CachedPage


def tokens(n: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(90) for _ in range(n)]


@pytest.mark.parametrize("n", [65, 127, 128, 129, 191, 192, 193, 527, 528, 529])
def test_a_repeated_prompt_computes_one_token(n: int) -> None:
    engine = FakeEngine()
    engine.ask(tokens(n))
    s = engine.ask(tokens(n))
    assert s.cached_tokens == n - 1 and engine.computed_rows[s.request.id] == 1
    engine.close()


def test_a_repeated_4000_token_prompt_computes_under_10_percent() -> None:
    engine = FakeEngine(n_pages=200, budget=2048, every=2048)
    cold, warm = engine.ask(tokens(4000)), engine.ask(tokens(4000))
    assert engine.computed_rows[warm.request.id] < 0.1 * engine.computed_rows[cold.request.id]


@pytest.mark.parametrize("n", [1, 5, 64])
def test_a_prompt_too_short_to_hit_is_counted_as_such(n: int) -> None:
    engine = FakeEngine()
    engine.ask(tokens(n))
    assert engine.ask(tokens(n)).cached_tokens == 0
    assert engine.prefix.counts["miss_too_short"] == 2 and engine.prefix.counts["hits"] == 0


@pytest.mark.parametrize("draft_len", [0, 1, 3])
def test_the_next_turn_hits_all_but_the_last_token_of_the_answer(draft_len: int) -> None:
    engine = FakeEngine(draft_len=draft_len)
    first = engine.ask(tokens(100), 30)
    second = engine.ask([*first.tokens, *tokens(20, 1)])
    assert second.cached_tokens == len(first.tokens) - 1


def test_the_next_turn_hits_all_of_an_answer_cut_by_a_stop_token() -> None:
    for draft_len in (0, 3):
        engine = FakeEngine(draft_len=draft_len, hit_rate=1.0)
        whole = FakeEngine().ask(tokens(100), 30).output
        first = engine.add(tokens(100), 30, stop=whole[9])
        engine.run()
        assert engine.ask([*first.tokens, *tokens(20, 1)]).cached_tokens >= len(first.tokens) - 1
        engine.close()


def test_a_cancelled_request_leaves_its_computed_prefix_reusable() -> None:
    engine = FakeEngine(budget=100)
    s = engine.add(tokens(1000))
    for _ in range(3):
        engine.step()
    engine.cancel(s)
    assert engine.ask(tokens(1000)).cached_tokens == 300
    engine.close()


def test_a_request_cancelled_inside_a_step_leaves_that_step_reusable() -> None:
    engine = FakeEngine(budget=100)
    s = engine.add(tokens(1000))
    engine.step()
    engine.between = lambda plan: engine.cancel(s)
    engine.step()
    engine.between = lambda plan: None
    assert engine.ask(tokens(1000)).cached_tokens == 200
    engine.close()


def test_a_900_token_system_prompt_is_hit_from_the_second_chat_on() -> None:
    engine = FakeEngine(n_pages=100, n_snapshots=8, budget=2048)
    chats = [engine.ask(tokens(900) + tokens(40, 1 + i), at=(900,)) for i in range(20)]
    assert [s.cached_tokens for s in chats] == [0] + [900] * 19
    assert engine.prefix.counts["hit_tokens"] == 19 * 900


def test_prompts_diverging_at_777_share_up_to_the_snapshot_below_and_the_third_hits_at_777() -> None:
    engine = FakeEngine(n_pages=100, budget=2048, every=256)
    assert engine.ask(tokens(777) + [1] * 300).cached_tokens == 0
    assert engine.ask(tokens(777) + [2] * 300).cached_tokens == 768
    engine = FakeEngine(n_pages=100, budget=2048, every=500)
    engine.ask(tokens(777) + [1] * 300)
    assert engine.ask(tokens(777) + [2] * 300).cached_tokens == 500
    assert engine.ask(tokens(777) + [3] * 300).cached_tokens == 777
    engine.close()


def test_without_a_snapshot_below_the_divergence_the_miss_says_so() -> None:
    engine = FakeEngine(n_pages=100, budget=2048)
    engine.ask(tokens(777) + [1] * 300)
    engine.ask(tokens(777) + [2] * 300)
    assert engine.prefix.counts["miss_no_match"] == 1 and engine.prefix.counts["miss_no_snapshot"] == 1
    assert engine.ask(tokens(777) + [3] * 300).cached_tokens == 777


def test_another_salt_shares_nothing_and_is_counted() -> None:
    engine = FakeEngine()
    engine.ask(tokens(300), salt="a")
    assert engine.ask(tokens(300), salt="b").cached_tokens == 0
    assert engine.prefix.counts["miss_salt"] == 1
    assert engine.ask(tokens(300), salt="a").cached_tokens == 299


def test_prompts_computed_side_by_side_end_up_on_the_same_pages() -> None:
    engine = FakeEngine(n_pages=40, budget=1024)
    for i in range(4):
        engine.add(tokens(320) + [i] * 70, 4)
    engine.run()
    assert len(engine.prefix.pages) <= 5 + 4 * 3
    engine.close()


def test_a_snapshot_pushed_to_the_host_is_hit_from_there() -> None:
    engine = FakeEngine(n_pages=60, n_snapshots=1, n_host=20, draft_len=2)
    for seed in range(4):
        engine.ask(tokens(200, seed))
    assert engine.prefix.counts["offloaded"] >= 3
    assert [engine.ask(tokens(200, seed)).cached_tokens for seed in range(4)] == [199] * 4
    assert engine.prefix.counts["loaded"] >= 3
    engine.close()


@pytest.mark.parametrize("n", [200, 192])
def test_pages_of_cold_prefixes_are_hit_from_host_memory(n: int) -> None:
    """Eight prompts of four pages in a pool of twelve: without host memory only the last ones are left."""
    for n_host, want in ((0, 0), (40, n - 1)):
        engine = FakeEngine(n_pages=12, n_host_pages=n_host, draft_len=2)
        for seed in range(8):
            engine.ask(tokens(n, seed))
        assert engine.ask(tokens(n)).cached_tokens == want
        counts = engine.prefix.counts
        assert bool(n_host) == bool(counts["offloaded_pages"]) == bool(counts["loaded_pages"])
        engine.close()


def test_the_coldest_prefix_leaves_first_and_a_full_host_drops_its_oldest() -> None:
    engine = FakeEngine(n_pages=12, n_host_pages=4)
    for seed in range(8):
        engine.ask(tokens(200, seed))
    assert engine.prefix.counts["evicted_snapshots"] > 0
    hits = [engine.ask(tokens(200, seed)).cached_tokens for seed in (7, 6)]
    assert hits == [199, 199] and engine.ask(tokens(200, 0)).cached_tokens == 0
    engine.close()


def test_a_shared_beginning_stays_while_ends_are_cold() -> None:
    engine = FakeEngine(n_pages=10, n_host_pages=20)
    stem = tokens(256)
    first = engine.ask(stem + tokens(100, 1), at=(256,))
    beginning = set(range(1, 5))
    for seed in range(4):
        engine.ask(stem + tokens(100, 2 + seed), at=(256,))
        assert beginning <= set(engine.prefix.pages)
    assert engine.prefix.counts["offloaded_pages"] >= 4 and not engine.prefix.counts["loaded_pages"]
    assert engine.ask(list(first.request.prompt)).cached_tokens == 355
    assert engine.prefix.counts["loaded_pages"] == 2, "of which one is its tail"
    engine.close()


def test_pages_that_no_snapshot_needs_are_evicted_before_any_snapshot() -> None:
    engine = FakeEngine(n_pages=20, n_snapshots=1)
    engine.ask(tokens(300, 1))
    last = engine.ask(tokens(300, 2))
    counts = engine.prefix.counts
    before = counts["evicted_snapshots"]
    assert len(engine.prefix.dead) == 1 and engine.prefix.reclaim(14)
    assert counts["evicted_pages"] >= 1 and counts["evicted_snapshots"] == before
    assert engine.ask([*last.tokens, 7], 1).cached_tokens == len(last.tokens) - 1


def test_a_pool_just_large_enough_serves_a_repeat_of_its_own_prompt() -> None:
    engine = FakeEngine(n_pages=4, n_snapshots=4)
    for _ in range(3):
        engine.ask(tokens(250), 6)
    assert len(engine.done) == 3
    engine.close()


def test_without_snapshot_slots_nothing_is_kept() -> None:
    engine = FakeEngine(n_snapshots=0)
    engine.ask(tokens(300))
    assert not engine.prefix.pages and engine.ask(tokens(300)).cached_tokens == 0


def test_check_finds_a_user_that_was_not_counted() -> None:
    engine = FakeEngine()
    engine.ask(tokens(300))
    page, cached = next(iter(engine.prefix.pages.items()))
    engine.prefix.pages[page] = CachedPage(cached.node, cached.n_tails, cached.n_users + 1)
    with pytest.raises(AssertionError):
        engine.prefix.check()
