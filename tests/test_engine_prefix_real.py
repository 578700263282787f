"""The prefix cache over a real model: a warm answer equals a cold one, whatever was shared, evicted or drafted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from onebox.bench.reuse import first_token_times
from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.request import Output, Request, SamplingParams
from tests.twins import make_twin

PAGE_GB = 64 * 2 * 2 * 2 * 32 * 4 / 1e9  # main layer and drafter, K and V, two heads of 32, fp32


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("twin")
    make_twin(folder)
    return str(folder)


def text(n: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 300) for _ in range(n))


def ask(engine: Engine, prompts: list[tuple[int, ...]], max_tokens: int = 12) -> list[tuple[list[int], Output]]:
    """Answer all prompts together; gives tokens and the last Output of each."""
    said: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    last: dict[str, Output] = {}
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, params))
    while engine.has_work:
        for output in engine.step():
            said[output.request_id] += output.tokens
            last[output.request_id] = output
        engine.scheduler.check()
    return [(said[str(i)], last[str(i)]) for i in range(len(prompts))]


def cold(twin: str, prompt: tuple[int, ...], max_tokens: int = 12) -> list[int]:
    return ask(Engine(EngineConfig(model=twin, draft_len=0, prefix_caching=False)), [prompt], max_tokens)[0][0]


@pytest.mark.parametrize("k", range(5))
def test_a_repeated_prompt_of_any_length_is_a_hit_and_says_the_same(twin: str, k: int) -> None:
    engine = Engine(EngineConfig(model=twin, draft_len=k))
    for n in (65, 127, 128, 129, 200):
        prompt = text(n, seed=n)
        want = cold(twin, prompt)
        first, again = (ask(engine, [prompt])[0] for _ in range(2))
        assert first[0] == want and first[1].cached_tokens == 0
        assert again[0] == want and again[1].cached_tokens == n - 1


def test_drafts_after_a_hit_are_as_good_as_cold_ones(twin: str) -> None:
    """The drafter's entries of a restored prefix are those of a cold run: acceptance is the same to the draft."""
    prompt = text(150)
    engine = Engine(EngineConfig(model=twin, draft_len=3))
    first, again = (ask(engine, [prompt], 60)[0] for _ in range(2))
    assert again[1].cached_tokens == 149
    assert (first[1].drafted, first[1].accepted_per_pos) == (again[1].drafted, again[1].accepted_per_pos)


def test_a_chat_goes_on_from_its_own_answers(twin: str) -> None:
    engine = Engine(EngineConfig(model=twin, draft_len=2))
    history, before = text(100), 1
    for turn in range(6):
        want = cold(twin, history, 20)
        answer, last = ask(engine, [history], 20)[0]
        assert answer == want
        assert last.cached_tokens >= before - 1  # all but the last token, which was never fed
        before = len(history) + len(answer)
        history = (*history, *answer, *text(30, seed=turn))


@pytest.mark.parametrize("at", [70, 128, 137])
def test_the_third_to_diverge_at_a_point_hits_there(twin: str, at: int) -> None:
    engine = Engine(EngineConfig(model=twin, draft_len=2))
    prompts = [(*text(at), 290 + i, *text(60, seed=i)) for i in (1, 2, 3)]
    results = [ask(engine, [p])[0] for p in prompts]
    assert [tokens for tokens, _ in results] == [cold(twin, p) for p in prompts]
    assert results[2][1].cached_tokens == at


@pytest.mark.parametrize("n_pages", [400, 22])
def test_thirty_two_requests_at_eight_with_shared_prefixes_equal_cold_answers(twin: str, n_pages: int) -> None:
    rng = random.Random(5)
    prompts = [text(rng.choice([90, 150]), seed=rng.randrange(3)) + text(rng.randint(1, 40), seed=i) for i in range(32)]
    want = {p: cold(twin, p, 16) for p in prompts}
    engine = Engine(
        EngineConfig(
            model=twin, draft_len=3, max_num_seqs=8, max_model_len=512, kv_gb=n_pages * PAGE_GB * 1.01,
            snapshots=6 if n_pages == 22 else None, snapshot_host_gb=1e-4 if n_pages == 22 else 0.0,
        )
    )  # fmt: skip
    assert engine.scheduler.pages.total == int(n_pages * 1.01)
    for _ in range(2):
        assert [tokens for tokens, _ in ask(engine, prompts, 16)] == [want[p] for p in prompts]
    counts = engine.stats().prefix
    assert counts["hits"] > 0
    if n_pages == 22:
        assert counts["evicted_pages"] > 0
        assert counts["offloaded"] > 0


@pytest.mark.parametrize(("kv", "graphs"), [("auto", False), ("tq4", True)])
def test_prefixes_that_were_in_host_memory_say_the_same(twin: str, kv: str, graphs: bool) -> None:
    """Prompts that take turns in a pool for two of them: with host memory all are hits, and the text is that of a
    pool that holds everything."""
    prompts = [text(140 + 9 * i, seed=i) for i in range(4)]
    options = {"model": twin, "draft_len": 2, "max_num_seqs": 1, "kv_cache_dtype": kv, "cuda_graphs": graphs}
    large = Engine(EngineConfig(**options))  # type: ignore[arg-type]
    want = [ask(large, [p], 12)[0][0] for p in prompts]
    page = large.plan.kv / (1 + large.plan.n_pages)
    small = Engine(
        EngineConfig(**options, max_model_len=256, kv_gb=9.01 * page / 1e9, kv_host_gb=40.01 * page / 1e9, debug=True)  # type: ignore[arg-type]
    )
    assert (small.plan.n_pages, small.plan.n_host_pages) == (9, 40) and small.plan.host_kv == 40 * page
    for turn in range(2):
        for prompt, answer in zip(prompts, want, strict=True):
            got, last = ask(small, [prompt], 12)[0]
            assert got == answer
            assert last.cached_tokens == (len(prompt) - 1 if turn else 0)
    stats = small.stats()
    assert min(stats.prefix[f"{way}_pages"] for way in ("offloaded", "loaded")) >= 8
    assert stats.prefix.get("evicted_snapshots", 0) == 0 and stats.host_pages_total == 40


def test_different_salts_share_nothing(twin: str) -> None:
    engine = Engine(EngineConfig(model=twin, draft_len=2))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    cached = []
    for name, salt in [("a", "x"), ("b", "y"), ("c", "x")]:
        engine.add(Request(name, text(100), params, cache_salt=salt))
        while engine.has_work:
            cached += [o.cached_tokens for o in engine.step() if o.finish_reason]
    assert cached == [0, 0, 99]


def test_a_cancelled_answer_leaves_what_it_computed(twin: str) -> None:
    engine = Engine(EngineConfig(model=twin, draft_len=2))
    prompt = text(130)
    engine.add(Request("x", prompt, SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)))
    said: list[int] = []
    for _ in range(6):
        for output in engine.step():
            said += output.tokens
    engine.cancel("x")
    answer, last = ask(engine, [prompt + tuple(said)])[0]
    assert last.cached_tokens == len(prompt) + len(said) - 1
    assert answer == cold(twin, prompt + tuple(said))


def test_the_bundled_model_hits_and_says_the_same() -> None:
    tiny = str(Path(__file__).parent.parent / "onebox" / "models" / "tiny")
    engine = Engine(EngineConfig(model=tiny, draft_len=2))
    first, again = (ask(engine, [text(300)], 20)[0] for _ in range(2))
    assert again[0] == first[0] == cold(tiny, text(300), 20)
    assert again[1].cached_tokens == 299


def test_twenty_chats_share_a_900_token_system_prompt_from_the_second_on(twin: str) -> None:
    engine = Engine(EngineConfig(model=twin, draft_len=2))
    system, cached = text(900), []
    for i in range(20):
        prompt = system + text(40, seed=1 + i)
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        engine.add(Request(str(i), prompt, params, snapshot_at=(900,)))
        said: list[int] = []
        while engine.has_work:
            for output in engine.step():
                said += output.tokens
                if output.finish_reason:
                    cached.append(output.cached_tokens)
        if i in (0, 1, 19):
            assert said == cold(twin, prompt, 8)
    assert cached == [0] + [900] * 19


def test_prompts_diverging_at_777_share_the_snapshot_below_it_and_the_third_hits_at_777(twin: str) -> None:
    engine = Engine(EngineConfig(model=twin, draft_len=2, snapshot_every=500))
    prompts = [(*text(777), 290 + i, *text(120, seed=i)) for i in (1, 2, 3)]
    results = [ask(engine, [p])[0] for p in prompts]
    assert [tokens for tokens, _ in results] == [cold(twin, p) for p in prompts]
    assert [last.cached_tokens for _, last in results] == [0, 500, 777]


@pytest.mark.parametrize(
    ("chunk", "k"),
    [(512, 0), (512, 3), (16, 3), *(pytest.param(n, k, marks=pytest.mark.slow) for n in (1, 16) for k in (0, 1, 2, 4))],
)
def test_prompts_around_page_edges_say_the_same_in_any_chunks_cold_and_warm_with_seven_others(
    twin: str, chunk: int, k: int
) -> None:
    prompts = [text(n, seed=n) for n in (63, 64, 65, 127, 128, 129, 191, 193)]
    engine = Engine(EngineConfig(model=twin, draft_len=k, max_num_seqs=8, max_num_batched_tokens=chunk))
    want = [cold(twin, p) for p in prompts]
    first, again = (ask(engine, prompts) for _ in range(2))
    assert [tokens for tokens, _ in first] == want
    assert [tokens for tokens, _ in again] == want
    assert [last.cached_tokens for _, last in again] == [0, 0] + [len(p) - 1 for p in prompts[2:]]


@pytest.mark.slow
def test_a_30_turn_chat_to_6000_tokens_with_aborts_hits_95_percent_on_the_bundled_model() -> None:
    tiny = str(Path(__file__).parent.parent / "onebox" / "models" / "tiny")
    engine, rng = Engine(EngineConfig(model=tiny, draft_len=2)), random.Random(4)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    history: tuple[int, ...] = tuple(rng.randrange(3, 8000) for _ in range(100))
    before, reusable, hits = 0, 0, 0
    for turn in range(30):
        history += tuple(rng.randrange(3, 8000) for _ in range(180))
        engine.add(Request(str(turn), history, params, snapshot_at=(len(history),)))
        said, cached, steps = list[int](), 0, 0
        while engine.has_work:
            for output in engine.step():
                said, cached = [*said, *output.tokens], output.cached_tokens
            steps += 1
            if turn % 3 == 2 and len(said) >= 8:
                engine.cancel(str(turn))
        if turn:
            reusable, hits = reusable + min(before, len(history) - 1), hits + cached
        history += tuple(said)
        before = len(history) - 1  # the last token was never fed
    assert len(history) > 6000
    assert hits >= 0.95 * reusable, f"{hits} of {reusable}"
    whole = Engine(EngineConfig(model=tiny, draft_len=0, prefix_caching=False))
    warm, plain = (ask(e, [history], 12)[0][0] for e in (engine, whole))
    assert warm == plain


@pytest.mark.slow
def test_a_repeated_prompt_of_4000_tokens_has_its_first_token_in_a_tenth_of_the_time() -> None:
    tiny = str(Path(__file__).parent.parent / "onebox" / "models" / "tiny")
    cold_s, warm_s, same = first_token_times(Engine(EngineConfig(model=tiny, draft_len=2)), 4000, repeats=2)
    assert same
    assert warm_s < 0.1 * cold_s, f"{warm_s:.3f} s against {cold_s:.3f} s"
