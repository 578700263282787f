"""The engine over real models: what it says never depends on drafts, company, chunks or preemption."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.engine.graph_runner import GraphRunner
from onebox.errors import ConfigError, ContextLengthError, QueueFullError, RequestError
from onebox.model.sequence import Sequences
from onebox.request import Output, Request, SamplingParams
from tests.twins import make_twin

TINY = str(Path(__file__).parent.parent / "onebox" / "models" / "tiny")


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("twin")
    make_twin(folder)
    return str(folder)


def run(engine: Engine, requests: list[Request]) -> dict[str, list[Output]]:
    """Everything each request got."""
    got: dict[str, list[Output]] = {r.id: [] for r in requests}
    for r in requests:
        engine.add(r)
    while engine.has_work:
        for output in engine.step():
            got[output.request_id].append(output)
        engine.scheduler.check()
    assert_free(engine)
    return got


def assert_free(engine: Engine) -> None:
    """Nobody holds anything but the prefix cache, which could give all of it back."""
    scheduler = engine.scheduler
    scheduler.check()
    assert scheduler.pages.n_free + scheduler.prefix.n_idle == scheduler.pages.total
    assert scheduler.slots.n_free == scheduler.slots.total


def tokens(outputs: list[Output]) -> list[int]:
    return [t for o in outputs for t in o.tokens]


def prompts(n: int, vocab: int, longest: int = 150) -> list[tuple[int, ...]]:
    rng = random.Random(1)
    return [tuple(rng.randrange(3, vocab) for _ in range(rng.randint(1, longest))) for _ in range(n)]


def requests(model: str, n: int = 8, max_tokens: int = 40, **params: float) -> list[Request]:
    vocab = 8000 if model == TINY else 300
    options = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **params})  # type: ignore[arg-type]
    return [Request(f"r{i}", p, options) for i, p in enumerate(prompts(n, vocab))]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_text_is_the_same_for_every_k_alone_and_in_company(twin: str, sampled: bool) -> None:
    params = {"temperature": 0.9, "top_p": 0.95, "seed": 11} if sampled else {}
    asked = requests(twin, **params)
    want = {}
    for r in asked:
        want[r.id] = tokens(run(Engine(EngineConfig(model=twin, draft_len=0)), [r])[r.id])
    for k in range(5):
        got = run(Engine(EngineConfig(model=twin, draft_len=k, max_num_seqs=8)), asked)
        assert {name: tokens(outputs) for name, outputs in got.items()} == want


def test_bundled_model_says_the_same_for_every_k_alone_and_in_a_batch_of_eight() -> None:
    asked = requests(TINY, max_tokens=24)
    alone = tokens(run(Engine(EngineConfig(model=TINY, draft_len=0)), asked[:1])["r0"])
    want = None
    for k in range(4):
        got = {name: tokens(o) for name, o in run(Engine(EngineConfig(model=TINY, draft_len=k)), asked).items()}
        want = want or got
        assert got == want
        assert got["r0"] == alone


@pytest.mark.parametrize("chunk", [1, 16, 512])
def test_text_does_not_depend_on_chunk_size(twin: str, chunk: int) -> None:
    asked = requests(twin, n=3, max_tokens=12)
    want = run(Engine(EngineConfig(model=twin, draft_len=2)), asked)
    got = run(Engine(EngineConfig(model=twin, draft_len=2, max_num_batched_tokens=chunk)), asked)
    assert {n: tokens(o) for n, o in got.items()} == {n: tokens(o) for n, o in want.items()}


def test_preempted_sequences_lose_nothing(twin: str) -> None:
    asked = requests(twin, max_tokens=100)
    want = {n: tokens(o) for n, o in run(Engine(EngineConfig(model=twin, draft_len=3)), asked).items()}
    small = Engine(EngineConfig(model=twin, draft_len=3, max_model_len=256, kv_gb=12 * 64 * 2 * 2 * 2 * 32 * 4 / 1e9))
    got = {n: tokens(o) for n, o in run(small, asked).items()}
    assert small.stats().preemptions > 0
    assert got == want


@pytest.mark.parametrize("mode", ["wrong", "right", "random"])
def test_any_drafter_gives_the_same_text_and_right_counters(
    twin: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(twin, n=4, max_tokens=30)
    want = {n: tokens(o) for n, o in run(Engine(EngineConfig(model=twin, draft_len=0)), asked).items()}
    rng = random.Random(0)

    def choose(self: GraphRunner, logits: torch.Tensor, sequences: list) -> list[int]:  # type: ignore[type-arg]
        drafts = []
        for s in sequences:
            at = len(s.output) + len(s.drafts)
            right = (want[s.request.id] + [0] * 9)[at]
            drafts.append({"right": right, "wrong": (right + 1) % 300, "random": rng.choice([right, 7])}[mode])
        return drafts

    monkeypatch.setattr(GraphRunner, "_choose", choose)
    engine = Engine(EngineConfig(model=twin, draft_len=3))
    got = run(engine, asked)
    assert {n: tokens(o) for n, o in got.items()} == want
    last = [o[-1] for o in got.values()]
    stats = engine.stats()
    assert stats.accepted_tokens == sum(o.accepted for o in last) == sum(sum(o.accepted_per_pos) for o in last)
    assert stats.drafted_tokens == sum(o.drafted for o in last)
    if mode == "wrong":
        assert stats.accepted_tokens == 0
    if mode == "right":
        assert stats.accepted_tokens == stats.drafted_tokens > 0


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_state_after_rejection_equals_a_replay_without_drafts(
    twin: str, accepted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request("r", prompts(1, 300, 70)[0], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    want = tokens(run(Engine(EngineConfig(model=twin, draft_len=0)), [request])["r"])

    def choose(self: GraphRunner, logits: torch.Tensor, sequences: list) -> list[int]:  # type: ignore[type-arg]
        at = [len(s.output) + len(s.drafts) for s in sequences]
        return [
            want[i] if len(s.drafts) < accepted else (want[i] + 1) % 300 for i, s in zip(at, sequences, strict=True)
        ]

    monkeypatch.setattr(GraphRunner, "_choose", choose)
    engine = Engine(EngineConfig(model=twin, draft_len=3))
    engine.add(request)
    for _ in range(3):
        engine.step()
    s = engine.sequences["r"]
    assert s.pending == accepted + 1
    engine.step()  # applies them
    cache, n = engine.runner.cache, s.computed - s.pending
    replay = Sequences(engine.runner.model, 1, 256)
    with torch.inference_mode():
        replay.forward(torch.tensor([s.tokens[:n]]))
    for mine, theirs in zip(cache.gdn, replay.cache.gdn, strict=True):
        assert (mine.s[s.slot] - theirs.s[1]).abs().max() <= 1e-5
        assert (mine.conv[s.slot, :3] - theirs.conv[1, :3]).abs().max() <= 1e-5


def test_stop_ids_end_an_answer_and_are_not_in_it(twin: str) -> None:
    free = requests(twin, n=1, max_tokens=30)[0]
    said = tokens(run(Engine(EngineConfig(model=twin, draft_len=2)), [free])["r0"])
    stop = said[5]
    cut = Request(
        "s", free.prompt, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    )
    outputs = run(Engine(EngineConfig(model=twin, draft_len=2)), [cut])["s"]
    assert tokens(outputs) == said[: said.index(stop)]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("stop", stop)
    late = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,), min_tokens=20)
    for k in (0, 3):
        assert (
            len(tokens(run(Engine(EngineConfig(model=twin, draft_len=k)), [Request("m", free.prompt, late)])["m"]))
            >= 20
        )


def test_penalties_and_bias_hold_inside_a_window(twin: str) -> None:
    params = SamplingParams(
        max_tokens=40, temperature=0.0, ignore_eos=True, frequency_penalty=1.5, presence_penalty=0.5,
        repetition_penalty=1.3, logit_bias=((7, 2.0),),
    )  # fmt: skip
    asked = [Request("p", prompts(1, 300)[0], params)]
    want = tokens(run(Engine(EngineConfig(model=twin, draft_len=0)), asked)["p"])
    assert tokens(run(Engine(EngineConfig(model=twin, draft_len=3)), asked)["p"]) == want
    assert want != tokens(run(Engine(EngineConfig(model=twin, draft_len=0)), requests(twin, n=1))["r0"])


def test_logprobs_are_the_same_with_and_without_drafts(twin: str) -> None:
    asked = requests(twin, n=2, max_tokens=25, logprobs=5)
    plain = run(Engine(EngineConfig(model=twin, draft_len=0)), asked)
    drafted = run(Engine(EngineConfig(model=twin, draft_len=3)), asked)
    for name in plain:
        a = [p for o in plain[name] for p in o.logprobs]
        b = [p for o in drafted[name] for p in o.logprobs]
        assert [p.token for p in a] == [p.token for p in b] and len(a) == 25
        for x, y in zip(a, b, strict=True):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-4) and x.logprob < 0
            assert x.top[0][0] == x.token  # greedy


def test_an_answer_ends_at_the_context_limit(twin: str) -> None:
    for k in (0, 3):
        engine = Engine(EngineConfig(model=twin, draft_len=k, max_model_len=80))
        outputs = run(engine, [Request("r", tuple(range(3, 70)), SamplingParams(max_tokens=500, temperature=0.0))])["r"]
        assert len(tokens(outputs)) <= 13
        assert outputs[-1].finish_reason in ("length", "stop")


def test_cancel_at_any_moment_frees_everything(twin: str) -> None:
    engine = Engine(EngineConfig(model=twin, draft_len=2, max_num_seqs=3, max_num_batched_tokens=32))
    asked = requests(twin, n=8)
    rng = random.Random(3)
    for r in asked:
        engine.add(r)
    for r in rng.sample(asked, 8):
        engine.step()
        engine.cancel(r.id)
        engine.scheduler.check()
    assert not engine.has_work
    assert_free(engine)
    assert engine.stats().cancelled + engine.stats().finished == 8


def test_bad_requests_are_refused_by_name(twin: str) -> None:
    engine = Engine(EngineConfig(model=twin, max_model_len=128, max_num_seqs=1, max_waiting=1))
    for prompt, error, words in [
        ((), RequestError, "no tokens"),
        ((5, 300), RequestError, "300"),
        ((5, -1), RequestError, "-1"),
        (tuple([5] * 128), ContextLengthError, "128"),
    ]:
        with pytest.raises(error, match=words):
            engine.add(Request("x", prompt))
    with pytest.raises(RequestError, match="logit_bias"):
        engine.add(Request("x", (5,), SamplingParams(logit_bias=((300, 1.0),))))
    engine.add(Request("a", (5,)))
    engine.add(Request("b", (5,)))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add(Request("a", (5,)))
    with pytest.raises(QueueFullError):
        engine.add(Request("c", (5,)))


def test_bad_configurations_are_refused_by_name(twin: str) -> None:
    for options, words in [
        ({"max_model_len": 4096}, "1024"),
        ({"kv_gb": 1e-9}, "--kv-gb"),
        ({"device": "cuda"}, "CUDA"),
        ({"draft_len": 9}, "between 0 and 4"),
    ]:
        with pytest.raises(ConfigError, match=words):
            Engine(EngineConfig(model=twin, **options))  # type: ignore[arg-type]


def test_priority_goes_first_and_a_long_prompt_does_not_stop_streams(twin: str) -> None:
    engine = Engine(EngineConfig(model=twin, draft_len=1, max_num_seqs=4, max_num_batched_tokens=16))
    engine.add(Request("stream", (5, 6, 7), SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)))
    engine.step()
    engine.add(Request("long", tuple([9] * 300), SamplingParams(max_tokens=2, temperature=0.0)))
    engine.add(Request("urgent", tuple([8] * 20), SamplingParams(max_tokens=2, temperature=0.0), priority=-1))
    seen: list[str] = []
    while "long" in engine.sequences and "stream" in engine.sequences:
        step = {o.request_id for o in engine.step()}
        assert "stream" in step
        seen += sorted(step - {"stream"})
    assert seen[0] == "urgent"
