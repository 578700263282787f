"""Random engines, random requests, arrivals, cancels and chats: every answer is what the request gets alone.

What may change an answer is its own parameters, the KV page format and sparse prefill; nothing else may: drafts,
drafters, chunks, company, preemption, prefix cache, snapshots. One seed is one engine and its whole life. Sparse heads
go by the last rows of what is prefilled at once, so with them nothing is cached or preempted here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.kernels.sparse_attention_ref import HeadPattern
from onebox.model.sparse import write_table
from onebox.request import Output, Request, SamplingParams
from tests.twins import make_twin

VOCAB, EOS, LONGEST = 300, 2, 700
FAST, SLOW = range(6), range(6, 126)
TABLE = "sparse.json"


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("twin")
    make_twin(folder, max_positions=4096)
    head = HeadPattern("vertical_slash", columns=16, pages=2)
    write_table([[head] * 4], folder / TABLE)
    return str(folder)


@dataclass
class Life:
    """One engine's random life."""

    rng: random.Random
    model: str
    config: EngineConfig = field(init=False)
    bases: list[tuple[int, ...]] = field(init=False)
    got: dict[str, list[Output]] = field(default_factory=dict)
    asked: dict[str, Request] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        rng = self.rng
        self.config = EngineConfig(model=self.model, **{**self._freedom(), **self._numbers()})
        self.bases = [tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, LONGEST))) for _ in range(3)]

    def _numbers(self) -> dict[str, Any]:
        """What may change answers."""
        rng = self.rng
        options: dict[str, Any] = {"kv_cache_dtype": rng.choice(["auto", "auto", "fp8", "k8v4", "tq4", "tq2.5"])}
        if rng.random() < 0.25:
            table = rng.choice([None, f"{self.model}/{TABLE}"])
            options |= {"prefill_attention": "minference", "sparse_from": 0, "sparse_table": table}
            options |= {"prefix_caching": False, "kv_gb": None}
        return options

    def _freedom(self) -> dict[str, Any]:
        """What may not."""
        rng = self.rng
        return {
            "draft_len": rng.randint(0, 4),
            "draft_method": rng.choice(["mtp", "mtp", "ngram"]),
            "adaptive_drafts": rng.random() < 0.3,
            "draft_vocab": rng.choice([None, None, 1, 64, 1000]),
            "max_num_seqs": rng.choice([1, 2, 3, 8]),
            "max_num_batched_tokens": rng.choice([2048, 4096]),
            "max_model_len": 1024,
            "kv_gb": rng.choice([None, 32 * 64 * 2 * 2 * 2 * 32 * 4 / 1e9]),
            "prefix_caching": rng.random() < 0.85,
            "snapshot_every": rng.choice([64, 100, 2048]),
            "snapshots": rng.choice([None, 0, 1, 3]),
            "snapshot_host_gb": rng.choice([0.0, 0.001]),
        }

    def request(self, name: str) -> Request:
        """A new prompt, a shared beginning, or a chat that goes on after an answer."""
        rng, done = self.rng, [n for n, o in self.got.items() if o and o[-1].finish_reason]
        base = rng.choice(self.bases)
        kind = rng.random()
        if kind < 0.3 and done:
            before = rng.choice(done)
            prompt = self.asked[before].prompt + tuple(said(self.got[before]))
        elif kind < 0.7:
            prompt = base[: rng.randint(1, len(base))]
        else:
            prompt = base
        prompt += tuple(rng.randrange(3, VOCAB) for _ in range(rng.choice([0, 1, 5, 64])))
        prompt = prompt[:900] or (5,)
        return Request(name, prompt, self.params())

    def params(self) -> SamplingParams:
        rng = self.rng
        sampled: dict[str, Any] = {"temperature": 0.0}
        if rng.random() < 0.5:
            sampled = {
                "temperature": rng.choice([0.3, 1.0, 1.7]),
                "seed": rng.randrange(1000),
                "top_k": rng.choice([0, 1, 20]),
                "top_p": rng.choice([1.0, 0.9]),
                "min_p": rng.choice([0.0, 0.05]),
            }
        n = rng.choice([1, 2, 7, 30])
        return SamplingParams(
            max_tokens=n,
            min_tokens=rng.choice([0, 0, min(n, 3)]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice([(), (), (7, 8, 9, 10, 11, 12)]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.0, 1.0]),
            frequency_penalty=rng.choice([0.0, 0.0, -0.5]),
            logit_bias=rng.choice([(), (), ((5, 100.0),), ((5, -100.0), (6, 3.0))]),
            logprobs=rng.choice([None, None, 0, 3]),
            **sampled,
        )

    def live(self, n: int) -> None:
        """Ask `n` requests at random moments, cancel some, and let the rest finish; the books are right all along."""
        engine, rng, waiting = Engine(self.config), self.rng, [f"r{i}" for i in range(n)]
        while waiting or engine.has_work:
            while waiting and (rng.random() < 0.4 or not engine.has_work):
                name = waiting.pop(0)
                self.asked[name], self.got[name] = self.request(name), []
                engine.add(self.asked[name])
            running = [n for n, o in self.got.items() if not (o and o[-1].finish_reason) and n not in self.cancelled]
            if running and rng.random() < 0.05:
                name = rng.choice(running)
                self.cancelled.add(name)
                engine.cancel(name)
            for output in engine.step():
                assert output.request_id not in self.cancelled or output.finish_reason
                self.got[output.request_id].append(output)
            engine.scheduler.check()
        scheduler = engine.scheduler
        assert scheduler.pages.n_free + scheduler.prefix.n_idle == scheduler.pages.total
        assert scheduler.slots.n_free == scheduler.slots.total


def said(outputs: list[Output]) -> list[int]:
    return [t for o in outputs for t in o.tokens]


def alone(engine: Engine, request: Request) -> list[Output]:
    engine.add(request)
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def live_and_compare(seed: int, twin: str, n: int) -> None:
    life = Life(random.Random(seed), twin)
    life.live(n)
    plain = EngineConfig(model=twin, draft_len=0, prefix_caching=False, max_num_seqs=1, max_model_len=1024)
    numbers = ("kv_cache_dtype", "prefill_attention", "sparse_from", "sparse_table")
    engine = Engine(replace(plain, **{name: getattr(life.config, name) for name in numbers}))
    for name, request in life.asked.items():
        want = alone(engine, request)
        got = life.got[name]
        if name in life.cancelled:
            assert said(got) == said(want)[: len(said(got))], (seed, name, life.config)
            continue
        assert said(got) == said(want), (seed, name, life.config, request.params)
        assert got[-1].finish_reason == want[-1].finish_reason
        told, expected = ([p.logprob for o in outputs for p in o.logprobs or ()] for outputs in (got, want))
        assert told == pytest.approx(expected, abs=1e-3), (seed, name)


@pytest.mark.parametrize("seed", FAST)
def test_every_answer_is_what_the_request_gets_alone(twin: str, seed: int) -> None:
    live_and_compare(seed, twin, 8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW)
def test_every_answer_is_what_the_request_gets_alone_many_lives(twin: str, seed: int) -> None:
    live_and_compare(seed, twin, 14)
