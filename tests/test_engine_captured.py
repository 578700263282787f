"""The captured step's arithmetic, run eagerly on a CPU: the text and the drafts of the step by step engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_engine_engine import TINY, assert_free, requests, run, tokens

from onebox.config import EngineConfig
from onebox.engine.captured import Flight, buckets
from onebox.engine.engine import Engine
from onebox.model.cache import Cache
from onebox.model.qwen3_5 import Qwen35
from onebox.request import Batch, Output, Request
from tests.twins import make_twin


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("twin")
    make_twin(folder)
    return str(folder)


class Counting(Engine):
    """Counts the steps that were launched before the one ahead of them was read."""

    ahead = 0

    def _settle_flight(self, flight: Flight, outputs: list[Output]) -> list[Output]:
        outputs = super()._settle_flight(flight, outputs)
        self.ahead += self.flight is not None
        return outputs


def said(config: EngineConfig, asked: list[Request], **changes: object) -> tuple[dict[str, list[Output]], Counting]:
    engine = Counting(replace(config, **changes))  # type: ignore[arg-type]
    return run(engine, asked), engine


def texts(got: dict[str, list[Output]]) -> dict[str, list[int]]:
    return {name: tokens(outputs) for name, outputs in got.items()}


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize("k", range(5))
def test_text_and_drafts_are_those_of_the_eager_step(twin: str, k: int, params: dict[str, float]) -> None:
    asked, config = requests(twin, n=5, **params), EngineConfig(model=twin, draft_len=k, max_num_seqs=5, debug=True)
    want, eager = said(config, asked)
    got, captured = said(config, asked, cuda_graphs=True)
    assert captured.captured is not None and captured.captured._graphs
    assert texts(got) == texts(want)
    assert captured.stats().accepted_tokens == eager.stats().accepted_tokens
    assert captured.stats().steps == eager.stats().steps
    assert captured.ahead > 5, "the host never ran a step behind"


def test_bundled_model_says_the_same_and_keeps_as_many_drafts() -> None:
    asked, config = requests(TINY, n=4, max_tokens=30), EngineConfig(model=TINY, draft_len=3, max_num_seqs=4)
    want, eager = said(config, asked)
    got, captured = said(config, asked, cuda_graphs=True)
    assert texts(got) == texts(want)
    assert captured.stats().accepted_tokens == eager.stats().accepted_tokens > 0


@pytest.mark.parametrize("graphs", [False, True])
def test_a_short_draft_vocabulary_changes_drafts_and_not_the_text(twin: str, graphs: bool) -> None:
    config, asked = EngineConfig(model=twin, draft_len=2, max_num_seqs=3), requests(twin, n=3, max_tokens=12)
    want = texts(said(config, asked, cuda_graphs=graphs)[0])
    short = replace(config, draft_vocab=7, cuda_graphs=graphs)
    engine = Engine(short)
    assert engine.runner.model.draft_logits(torch.zeros(1, engine.runner.model.spec.hidden)).shape[-1] == 7
    assert texts(said(short, asked, cuda_graphs=graphs)[0]) == want


def test_logprobs_stops_and_short_drafts_are_the_same(twin: str) -> None:
    config = EngineConfig(model=twin, draft_len=3, max_num_seqs=4)
    plain, _ = said(config, requests(twin, n=4, max_tokens=9))
    stops = {name: tuple(ids[4:5]) for name, ids in texts(plain).items()}
    asked = [
        replace(r, params=replace(r.params, logprobs=3, stop_token_ids=stops[r.id] if i % 2 else ()), draft_len=i)
        for i, r in enumerate(requests(twin, n=4, max_tokens=9))
    ]
    want, got = said(config, asked)[0], said(config, asked, cuda_graphs=True)[0]
    assert got.keys() == want.keys()
    for name, outputs in want.items():
        assert tokens(got[name]) == tokens(outputs)
        assert got[name][-1].finish_reason == outputs[-1].finish_reason
        a, b = ([p for o in each for p in o.logprobs] for each in (got[name], outputs))
        assert [p.token for p in a] == [p.token for p in b]
        assert all(abs(p.logprob - q.logprob) < 1e-4 for p, q in zip(a, b, strict=True))


def test_a_request_the_device_cannot_choose_for_takes_the_eager_step_and_changes_nobody(twin: str) -> None:
    config, asked = EngineConfig(model=twin, draft_len=2, max_num_seqs=4), requests(twin, n=4)
    odd = replace(asked[1], params=replace(asked[1].params, presence_penalty=0.7, max_tokens=60))
    mixed = [asked[0], odd, *asked[2:]]
    want = said(config, mixed)[0]
    got, engine = said(config, mixed, cuda_graphs=True)
    assert texts(got) == texts(want)
    assert engine.captured is not None and engine.captured._graphs, "the others were in graphs while it was there"
    assert texts(got)["r0"] == texts(said(config, asked)[0])["r0"]


def test_pages_that_come_and_go_reach_the_graph(twin: str) -> None:
    """A pool too small for all: sequences are preempted and come back with other pages."""
    asked = requests(twin, max_tokens=100)
    config = EngineConfig(model=twin, draft_len=3, max_model_len=256, max_num_seqs=16)
    want, _ = said(config, asked)
    small = 12 * 64 * 2 * 2 * 2 * 32 * 4 / 1e9
    got, engine = said(config, asked, kv_gb=small, cuda_graphs=True)
    assert engine.stats().preemptions > 0
    assert texts(got) == texts(want)


@pytest.mark.parametrize(
    ("most", "want"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (16, (1, 2, 4, 8, 16)), (20, (1, 2, 4, 8, 16, 20))]
)
def test_buckets_are_powers_of_two_and_the_most(most: int, want: tuple[int, ...]) -> None:
    assert buckets(most) == want


def test_a_cancelled_request_is_freed_in_the_next_step_and_changes_nobody(twin: str) -> None:
    asked = requests(twin, n=3, max_tokens=60)
    want = texts(said(EngineConfig(model=twin, draft_len=3, max_num_seqs=3), asked)[0])
    engine = Engine(EngineConfig(model=twin, draft_len=3, max_num_seqs=3, cuda_graphs=True, debug=True))
    for r in asked:
        engine.add(r)
    got: dict[str, list[int]] = {r.id: [] for r in asked}
    for i in range(1000):
        if not engine.has_work:
            break
        if i == 8:
            assert engine.flight is not None, "a step is under way"
            engine.cancel("r1")
        for output in engine.step():
            assert i < 8 or output.request_id != "r1"
            got[output.request_id] += output.tokens
        if i == 8:
            assert engine.scheduler.slots.n_free == 1
    assert got["r0"] == want["r0"] and got["r2"] == want["r2"]
    assert_free(engine)


def test_all_cancelled_while_a_step_is_under_way_leaves_nothing(twin: str) -> None:
    engine = Engine(EngineConfig(model=twin, draft_len=2, max_num_seqs=3, cuda_graphs=True, debug=True))
    for r in requests(twin, n=3, max_tokens=60):
        engine.add(r)
    for _ in range(8):
        engine.step()
    assert engine.flight is not None
    for i in range(3):
        engine.cancel(f"r{i}")
    while engine.has_work:
        assert not engine.step()
    assert_free(engine)


def test_requests_that_arrive_while_a_step_is_under_way_say_what_they_say_alone(twin: str) -> None:
    asked = requests(twin, n=6, max_tokens=25)
    want = texts(said(EngineConfig(model=twin, draft_len=2, max_num_seqs=4), asked)[0])
    engine = Engine(EngineConfig(model=twin, draft_len=2, max_num_seqs=4, cuda_graphs=True, debug=True))
    got: dict[str, list[int]] = {r.id: [] for r in asked}
    for i in range(1000):
        if i % 4 == 0 and i // 4 < len(asked):
            engine.add(asked[i // 4])
        for output in engine.step():
            got[output.request_id] += output.tokens
        if i > 24 and not engine.has_work:
            break
    assert got == want
    assert_free(engine)


def test_a_chat_goes_on_from_what_a_captured_answer_left_in_the_cache(twin: str) -> None:
    """Three turns, each on top of the last: states saved after steps that the host was behind of are the right ones."""
    config = EngineConfig(model=twin, draft_len=3, max_num_seqs=2, snapshot_every=64)
    engines = [Engine(config), Engine(replace(config, cuda_graphs=True, debug=True))]
    for turn in range(3):
        answers = []
        for engine in engines:
            history = requests(twin, n=1, max_tokens=90)[0] if turn == 0 else engine.last  # type: ignore[attr-defined]
            got = run(engine, [history])["r0"]
            answers.append((tokens(got), got[-1].cached_tokens))
            more = (*history.prompt, *tokens(got), 5, 6, 7)
            engine.last = replace(history, prompt=more)  # type: ignore[attr-defined]
        assert answers[0] == answers[1]
        assert turn == 0 or answers[1][1] > 0


def test_stops_and_lengths_are_the_same_when_the_device_foresees_them(twin: str) -> None:
    """Ids that do come up as stop ids, a minimum, and answers that end at every length around a window."""
    config = EngineConfig(model=twin, draft_len=3, max_num_seqs=8)
    plain = texts(said(config, requests(twin, n=8, max_tokens=40))[0])
    asked = []
    for i, r in enumerate(requests(twin, n=8, max_tokens=40)):
        stops = tuple(plain[r.id][12 + i : 14 + i])
        asked.append(replace(r, params=replace(r.params, stop_token_ids=stops, max_tokens=30 + i, min_tokens=i % 3)))
    want, got = said(config, asked)[0], said(config, asked, cuda_graphs=True)[0]
    assert texts(got) == texts(want)
    assert [o[-1].finish_reason for o in got.values()] == [o[-1].finish_reason for o in want.values()]
    assert sum(o[-1].finish_reason == "stop" for o in got.values()) > 3


@pytest.mark.parametrize("k", [0, 3])
def test_the_kernels_get_contiguous_index_arrays(twin: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def forward(self: Qwen35, batch: Batch, cache: Cache) -> torch.Tensor:
        if batch.window:
            seen.append([t.is_contiguous() for t in vars(batch).values() if isinstance(t, torch.Tensor)])
        return original(self, batch, cache)

    original = Qwen35.forward
    monkeypatch.setattr(Qwen35, "forward", forward)
    said(EngineConfig(model=twin, draft_len=k, max_num_seqs=4), requests(twin, n=4, max_tokens=6), cuda_graphs=True)
    assert seen and all(all(flags) for flags in seen)
