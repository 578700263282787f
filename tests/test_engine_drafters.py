"""Drafters and draft lengths: what they propose, when they stop, and that the text never depends on them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from onebox import cli
from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.engine.sequence import Sequence
from onebox.engine.speculate import DraftLengths, News, PromptLookup
from onebox.errors import ConfigError
from onebox.ledger import BUILDS, SHAPES
from onebox.request import Output, Request, SamplingParams
from tests.twins import make_twin

BIG = SHAPES["qwen3.5-122b-a10b"]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("twin")
    make_twin(folder)
    return str(folder)


def sequence(tokens: list[int], k: int = 3, max_len: int = 10_000) -> Sequence:
    request = Request("r", tuple(tokens), SamplingParams(max_tokens=64))
    return Sequence(request=request, arrival=0, seed=0, draft_len=k, stop_ids=frozenset(), max_len=max_len)


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1]),  # the latest of equal matches
        ([7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2], [3, 9, 8]),  # the longest match before the latest
        ([5, 6, 5, 6], [5, 6, 5]),  # a text that repeats itself goes on doing so
        ([3, 3, 3], [3, 3, 3]),
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_prompt_lookup_proposes_what_followed_last_time(tokens: list[int], want: list[int]) -> None:
    s = sequence(tokens)
    drafter = PromptLookup(longest=4, shortest=2)
    drafter.draft([News(s, 1, None)])  # type: ignore[arg-type]
    assert s.drafts == want


def test_prompt_lookup_follows_a_growing_text_as_a_fresh_one_would() -> None:
    rng = random.Random(0)
    s, growing = sequence([1, 2, 1]), PromptLookup()
    for _ in range(300):
        s.tokens += [rng.randrange(4) for _ in range(rng.randint(1, 3))]
        assert growing.continuation(s) == PromptLookup().continuation(s)
    assert sequence([1, 2, 1, 2], max_len=5).n_drafts == 0  # none past the last token that may be emitted
    assert PromptLookup().continuation(sequence([1, 2, 1, 2], max_len=6)) == [1]


def said(engine: Engine, requests: list[Request]) -> tuple[dict[str, list[int]], dict[str, Output]]:
    tokens: dict[str, list[int]] = {r.id: [] for r in requests}
    last: dict[str, Output] = {}
    for r in requests:
        engine.add(r)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.tokens
            last[output.request_id] = output
        engine.scheduler.check()
    return tokens, last


def questions(**params: Any) -> list[Request]:
    rng = random.Random(2)
    options = {"temperature": 0.0, **params}
    phrase = [rng.randrange(3, 300) for _ in range(12)]
    prompts = [tuple(phrase * 4 + [rng.randrange(3, 300) for _ in range(i)] + phrase[:3]) for i in range(6)]
    return [
        Request(str(i), p, SamplingParams(max_tokens=40, ignore_eos=True, **options)) for i, p in enumerate(prompts)
    ]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}], ids=["greedy", "sampled"])
def test_text_is_the_same_for_every_drafter_and_every_length(twin: str, params: dict[str, Any]) -> None:
    asked = questions(**params)
    want, _ = said(Engine(EngineConfig(model=twin, draft_len=0)), asked)
    for options in (
        {"draft_method": "ngram", "draft_len": 3, "lookup_min": 1},
        {"draft_method": "ngram", "draft_len": 4, "lookup_min": 1, "adaptive_drafts": True},
        {"draft_len": 3, "adaptive_drafts": True},
    ):
        engine = Engine(EngineConfig(model=twin, max_num_seqs=4, **options))  # type: ignore[arg-type]
        got, last = said(engine, asked)
        assert got == want, options
        assert sum(o.drafted for o in last.values()) == engine.stats().drafted_tokens > 0


def test_prompt_lookup_needs_no_mtp_head_and_a_repeated_prompt_is_still_a_hit(twin: str) -> None:
    engine = Engine(EngineConfig(model=twin, draft_method="ngram"))
    assert engine.runner.model.mtp is None and engine.draft_len == 2
    asked = [Request(str(i), tuple([5, 6, 7, 8] * 30), SamplingParams(max_tokens=8, temperature=0.0)) for i in (0, 1)]
    first, _ = said(engine, asked[:1])
    again, last = said(engine, asked[1:])
    assert first["0"] == again["1"] and last["1"].cached_tokens == 119


def test_drafts_stop_where_the_ledger_says_that_they_do_not_pay() -> None:
    """A draft of the 122B adds 49 % of a plain step's bytes alone, 63 % for 4 requests, 12 % for 64."""
    lengths = DraftLengths(BIG, BUILDS["hybrid"], 4, mtp=True)

    def mean(batch: int, kept: float) -> float:
        sequences = [sequence([1] * 500, k=4) for _ in range(batch)]
        for s in sequences:
            lengths._kept[s] = [kept] * 4
        lengths.choose(sequences)
        return sum(s.draft_now for s in sequences) / batch

    assert mean(1, 0.55) == 1 and mean(4, 0.55) == mean(8, 0.55) == 0 and mean(64, 0.55) >= 2
    assert mean(1, 0.95) == mean(4, 0.95) == 4 and mean(1, 0.05) == mean(64, 0.02) == 0


def test_each_request_has_the_length_that_its_own_drafts_earn() -> None:
    lengths = DraftLengths(BIG, BUILDS["hybrid"], 3, mtp=True)
    good, bad = sequence([1] * 100), sequence([2] * 100)
    for _ in range(40):
        lengths.observe(good, 3, 3)
        lengths.observe(bad, 3, 0)
    lengths.choose([good, bad])
    assert good.draft_now >= 2 and bad.draft_now == 0
    tried = 0
    for _ in range(lengths.PROBE_EVERY):
        lengths.choose([good, bad])
        tried += bad.draft_now
    assert tried == 1  # now and then, or it could never come back


def test_a_request_never_drafts_more_than_it_asked_for() -> None:
    lengths = DraftLengths(BIG, BUILDS["bf16"], 4, mtp=True)
    s = sequence([1] * 100, k=1)
    for _ in range(50):
        lengths.observe(s, 4, 4)
    lengths.choose([s])
    assert s.draft_now == 1


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('{"method":"mtp","num_speculative_tokens":3}', {"draft_len": 3, "adaptive_drafts": False}),
        ('{"num_speculative_tokens":1,"adaptive":true}', {"draft_len": 1, "adaptive_drafts": True}),
        (
            '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":5,"prompt_lookup_min":3}',
            {"draft_len": 3, "adaptive_drafts": False, "draft_method": "ngram", "lookup_max": 5, "lookup_min": 3},
        ),
        (
            '{"method":"ngram","prompt_lookup_max":1}',
            {"draft_len": 2, "adaptive_drafts": False, "draft_method": "ngram", "lookup_max": 1, "lookup_min": 1},
        ),
    ],
)
def test_a_speculative_config_is_read_as_vllm_writes_it(text: str, want: dict[str, Any]) -> None:
    assert cli.speculation(text) == want
    EngineConfig("m", **want)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"method":"ngram","prompt_lookup_min":5,"prompt_lookup_max":2}', "lookup_max"),
        ('{"method":"ngram","prompt_lookup_min":0}', "lookup_min"),
        ('{"method":"ngram","prompt_lookup_min":"2"}', "prompt_lookup_min"),
        ('{"adaptive":1}', "adaptive"),
        ('{"method":"medusa"}', "medusa"),
    ],
)
def test_a_wrong_speculative_config_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig("m", **cli.speculation(text))


def test_the_bundled_model_says_the_same_with_every_drafter() -> None:
    tiny = str(Path(__file__).parent.parent / "onebox" / "models" / "tiny")
    asked = [Request("q", tuple([11, 12, 13, 14, 15] * 8), SamplingParams(max_tokens=24, temperature=0.7, seed=3))]
    want, _ = said(Engine(EngineConfig(model=tiny, draft_len=0)), asked)
    for options in ({"draft_method": "ngram", "draft_len": 3}, {"draft_len": 3, "adaptive_drafts": True}):
        assert said(Engine(EngineConfig(model=tiny, **options)), asked)[0] == want  # type: ignore[arg-type]
