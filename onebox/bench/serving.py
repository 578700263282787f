"""Serving scenarios against any OpenAI-compatible server: first token, time between tokens, goodput, failures.

A scenario is a set of sessions (a session is one request, or the turns of a chat), an arrival process and lengths. The
client is one asyncio process: it reads some thousands of events a second; for a faster server, run several.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import httpx
import numpy as np

from onebox.bench.record import rounded
from onebox.bench.stream import Answer, Dialect, Failure, ask
from onebox.bench.stream import Counter as TokenCounter
from onebox.errors import ConfigError

Endpoint = Literal["chat", "completions"]
PERCENTILES = (50, 90, 99)
PER_POSITION = "accepted_tokens_per_pos"
_WORDS = (
    "river stone garden winter market window letter summer engine paper mountain village silver coffee bridge history "
    "evening forest island doctor music captain bottle station weather number kitchen morning farmer ladder planet "
    "travel answer copper blanket harbour teacher lantern orchard compass valley meadow thunder whistle anchor basket "
    "candle dragon feather glacier hammer insect jungle kettle lemon mirror needle oyster pepper quarry ribbon saddle "
    "tunnel umbrella velvet walnut yellow zebra account balance chapter decide either follow gather happen inside "
    "journey known little measure nothing open people quiet return simple together under value water across before "
    "carry describe every family great hundred important just keep learn made near often place question right small"
)
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True)
class Scenario:
    """Lengths in tokens. `shared` tokens begin every prompt alike; later turns add `input_tokens` each.

    `prefill_tokens` above 0 adds a second kind of request beside the first: long prompts with short answers, one after
    the other, that the decoding ones have to live with.
    """

    name: str
    what: str
    sessions: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    shared: int = 0
    turns: int = 1
    prefill_tokens: int = 0


SCENARIOS = {
    s.name: s
    for s in (
        Scenario("single", "one stream, 512 in, 512 out", 10, 1, 512, 512),
        Scenario("c32", "32 at a time, 1024 in, 512 out", 128, 32, 1024, 512),
        Scenario("long-output", "4 at a time, 512 in, 4096 out", 8, 4, 512, 4096),
        Scenario("shared-prefix", "32 requests, 8 at a time, 2048 shared tokens", 32, 8, 256, 256, shared=2048),
        Scenario("agent", "4 chats of 10 turns, context grows by 512 a turn", 4, 4, 512, 128, shared=1024, turns=10),
        Scenario("mixed", "4 decoding 256 in, 1024 out, beside prompts of 8192", 8, 4, 256, 1024, prefill_tokens=8192),
    )
}


@dataclass(frozen=True)
class Slo:
    """Milliseconds that a request must keep: to the first token, a token on average, in all. None: not asked."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft:2000,itl:50,e2e:60000`. Raises ConfigError."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition(":")
            try:
                found[name] = float(value)
            except ValueError as e:
                raise ConfigError(f"--slo: {part!r} is not NAME:MILLISECONDS.") from e
            if name not in ("ttft", "itl", "e2e") or not found[name] > 0:
                raise ConfigError(f"--slo: {part!r} is not known; give ttft, itl or e2e with milliseconds above 0.")
        return cls(**found)

    def kept(self, a: Answer) -> bool:
        if a.failure is not None:
            return False
        pairs = ((self.ttft, a.ttft_s), (self.itl, a.tpot_s), (self.e2e, a.e2e_s))
        return all(limit is None or value is None or 1e3 * value <= limit for limit, value in pairs)

    def __str__(self) -> str:
        return ",".join(f"{n}:{v:g}" for n, v in vars(self).items() if v is not None)


@dataclass(frozen=True)
class Target:
    """A server and how it is asked."""

    url: str  # without /v1
    model: str
    endpoint: Endpoint = "chat"
    api_key: str | None = None
    timeout_s: float = 600.0
    thinking: bool = True
    dialect: Dialect = field(default_factory=Dialect)
    count: TokenCounter | None = None

    @property
    def path(self) -> str:
        return f"{self.url}/v1/" + ("chat/completions" if self.endpoint == "chat" else "completions")

    def client(self) -> httpx.AsyncClient:
        headers = {"Accept-Encoding": "identity"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(self.timeout_s, connect=10), limits=limits)

    def body(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> dict[str, Any]:
        made: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0}
        if self.endpoint == "completions":
            return made | {"prompt": "\n\n".join(m["content"] for m in messages)}
        if not self.thinking:
            made["chat_template_kwargs"] = {"enable_thinking": False}
        return made | {"messages": list(messages)}

    async def ask(
        self, client: httpx.AsyncClient, messages: Sequence[Mapping[str, str]], max_tokens: int, *, full: bool = True
    ) -> Answer:
        body = self.body(messages, max_tokens)
        return await ask(client, self.path, body, self.dialect, count=self.count, full_length=full)


@dataclass(frozen=True)
class Lengths:
    """How many words make a prompt: tokens = base + slope * words. `exact` False: the server gave no usage."""

    base: float
    slope: float
    exact: bool

    def words(self, tokens: int) -> int:
        return max(round((tokens - self.base) / self.slope), 1)


@dataclass(frozen=True)
class Session:
    """Prompts of one client, asked one after the other, each with what was said before."""

    turns: tuple[str, ...]
    max_tokens: int
    system: str = ""
    group: str = "requests"


@dataclass(frozen=True)
class Turn:
    """An answer and where it stood."""

    answer: Answer
    turn: int
    group: str


def words(rng: random.Random, n: int) -> str:
    """`n` words that no earlier prompt of another seed begins with."""
    return " ".join(rng.choice(WORDS) for _ in range(n))


def sessions_of(scenario: Scenario, lengths: Lengths, seed: int, texts: Sequence[str] = ()) -> list[Session]:
    """The scenario's sessions; `texts` in place of random words, cut to no length."""
    rng = random.Random(seed)
    shared = words(rng, lengths.words(scenario.shared)) if scenario.shared else ""

    def prompt(i: int, tokens: int) -> str:
        if texts:
            return texts[i % len(texts)]
        return f"{seed}-{i}. {words(rng, lengths.words(tokens))}"

    made = [
        Session(
            tuple(prompt(i * scenario.turns + turn, scenario.input_tokens) for turn in range(scenario.turns)),
            scenario.output_tokens,
            shared,
            "decode" if scenario.prefill_tokens else "requests",
        )
        for i in range(scenario.sessions)
    ]
    if scenario.prefill_tokens:
        n = max(scenario.sessions // 2, 1)
        long = [f"{seed}-p{i}. {words(rng, lengths.words(scenario.prefill_tokens))}" for i in range(n)]
        made += [Session((text,), 16, group="prefill") for text in long]
    return made


async def converse(target: Target, client: httpx.AsyncClient, session: Session, *, full: bool = True) -> list[Turn]:
    """All turns of a session; a failed one ends it."""
    messages = [{"role": "system", "content": session.system}] if session.system else []
    found: list[Turn] = []
    for i, text in enumerate(session.turns):
        messages.append({"role": "user", "content": text})
        answer = await target.ask(client, messages, session.max_tokens, full=full)
        found.append(Turn(answer, i, session.group))
        if answer.failure is not None:
            break
        messages.append({"role": "assistant", "content": answer.text})
    return found


async def run_sessions(
    target: Target,
    sessions: Sequence[Session],
    *,
    concurrency: int,
    rate: float | None = None,
    seed: int = 0,
    full: bool = True,
    done: Callable[[int], None] = lambda n: None,
) -> list[Turn]:
    """Sessions by `concurrency` clients that ask again as soon as they are answered (a closed loop), or by Poisson
    arrivals of `rate` a second, whatever is still open. Prompts of the group `prefill` come one by one beside them.
    """
    found: list[Turn] = []

    async with target.client() as client:

        async def one(session: Session) -> None:
            found.extend(await converse(target, client, session, full=full))
            done(len(found))

        async def worker(queue: list[Session]) -> None:
            while queue:
                await one(queue.pop(0))

        async def arrive(queue: Sequence[Session], rate: float) -> None:
            rng, open_ = random.Random(seed), []
            at_s = time.perf_counter()
            for session in queue:
                at_s += rng.expovariate(rate)
                await asyncio.sleep(max(at_s - time.perf_counter(), 0))
                open_.append(asyncio.create_task(one(session)))
            await asyncio.gather(*open_)

        long = [s for s in sessions if s.group == "prefill"]
        rest = [s for s in sessions if s.group != "prefill"]
        workers = [worker(rest) for _ in range(concurrency)] if rate is None else [arrive(rest, rate)]
        await asyncio.gather(*workers, *([worker(long)] if long else []))
    return found


async def probe(target: Target) -> Target:
    """The target with the most telling dialect that it takes. Raises ConfigError when it answers none."""
    async with target.client() as client:
        hello = [{"role": "user", "content": "Say something about the sea."}]
        first: Failure | None = None
        for dialect in (target.dialect, *target.dialect.less()):
            trial = replace(target, dialect=dialect)
            answer = await trial.ask(client, hello, 4, full=False)
            if answer.failure is None:
                return trial
            first = first or answer.failure
            if answer.failure.kind not in ("HTTP 400", "HTTP 422"):
                break
    assert first is not None
    raise ConfigError(f"{target.path}: no answer to a first request: {first.kind}: {first.message}")


async def measure_lengths(target: Target, seed: int) -> Lengths:
    """Words to tokens of this server's tokenizer, by the usage of two short requests."""
    counts = (32, 288)
    found: list[int] = []
    async with target.client() as client:
        for n in counts:
            text = f"{seed}-w{n}. {words(random.Random(seed + n), n)}"
            answer = await target.ask(client, [{"role": "user", "content": text}], 1, full=False)
            if answer.failure is not None:
                raise ConfigError(f"{target.path}: {answer.failure.kind}: {answer.failure.message}")
            found.append(answer.prompt_tokens)
    if not all(found) or found[1] <= found[0]:
        return Lengths(8, 1.3, exact=False)
    slope = (found[1] - found[0]) / (counts[1] - counts[0])
    return Lengths(found[0] - slope * counts[0], slope, exact=True)


async def spec_counters(target: Target) -> dict[str, float]:
    """Speculation's counters of /metrics, under vLLM's names (ours too); empty where there are none."""
    async with target.client() as client:
        try:
            response = await client.get(f"{target.url}/metrics", timeout=5)
            if response.status_code != 200:
                return {}
            text = response.text
        except httpx.HTTPError:
            return {}
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        bare, _, labels = name.partition("{")
        if not bare.startswith("vllm:spec_decode_num_"):
            continue
        key = bare.removeprefix("vllm:spec_decode_num_").removesuffix("_total")
        if key == PER_POSITION:
            key += labels.partition('position="')[2].partition('"')[0]
        try:
            found[key] = found.get(key, 0.0) + float(value)
        except ValueError:
            continue
    return found


def acceptance(
    answers: Sequence[Answer], before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, Any] | None:
    """Share of drafts kept: by the usage of the answers, else by the server's counters; and by position from those."""
    drafted, accepted = sum(a.drafted for a in answers), sum(a.accepted for a in answers)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    windows = grown.get("drafts", 0.0)
    found: dict[str, Any] = {}
    if drafted:
        found = {"share": rounded(accepted / drafted), "drafted": drafted, "by": "usage"}
    elif made := grown.get("draft_tokens"):
        found = {"share": rounded(grown.get("accepted_tokens", 0.0) / made), "drafted": int(made), "by": "metrics"}
    if windows and found:
        found["tokens_per_step"] = rounded(1 + grown.get("accepted_tokens", 0.0) / windows)
        positions = sorted(int(n.removeprefix(PER_POSITION)) for n in grown if n.startswith(PER_POSITION))
        found["kept_at"] = [rounded(grown[f"{PER_POSITION}{i}"] / windows, 3) for i in positions]
    return found or None


def spread(values_s: Sequence[float]) -> dict[str, float]:
    """Milliseconds: mean and percentiles."""
    if not values_s:
        return {}
    ms = 1e3 * np.asarray(values_s)
    return {"mean": rounded(float(ms.mean()))} | {
        f"p{p}": rounded(float(v)) for p, v in zip(PERCENTILES, np.percentile(ms, PERCENTILES), strict=True)
    }


def latencies(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of answers without a failure."""
    streams = [1 / a.tpot_s for a in answers if a.tpot_s]
    n_events = sum(len(a.events) for a in answers)
    return {
        "ttft_ms": spread([a.ttft_s for a in answers]),
        "itl_ms": spread([g for a in answers for g in a.token_gaps_s()]),
        "event_gap_ms": spread([g for a in answers for g in a.event_gaps_s()]),
        "e2e_ms": spread([a.e2e_s for a in answers]),
        "stream_tok_s": rounded(statistics.median(streams)) if streams else 0.0,
        "tokens_per_event": rounded(sum(a.tokens for a in answers) / n_events) if n_events else 0.0,
    }


def summarise(turns: Sequence[Turn], slo: Slo | None = None) -> dict[str, Any]:
    """Figures of a run. Failures are counted, not averaged: they have no part in latencies, and keep no SLO."""
    answers = [t.answer for t in turns]
    good = [a for a in answers if a.failure is None]
    failures = Counter(a.failure.kind for a in answers if a.failure is not None)
    examples: dict[str, str] = {}
    for a in answers:
        if a.failure is not None:
            examples.setdefault(a.failure.kind, a.failure.message)
    begun = min((a.start_s for a in answers), default=0.0)
    wall_s = max((a.end_s for a in answers), default=0.0) - begun
    tokens, prompts = sum(a.tokens for a in good), sum(a.prompt_tokens for a in good)
    found: dict[str, Any] = {
        "requests": len(answers),
        "failed": sum(failures.values()),
        "failures": dict(failures),
        "failure_examples": examples,
        "wall_s": rounded(wall_s),
        "input_tokens": round(prompts / len(good)) if good else 0,
        "output_tokens": tokens,
        "output_tok_s": rounded(tokens / wall_s) if wall_s else 0.0,
        "total_tok_s": rounded((tokens + prompts) / wall_s) if wall_s else 0.0,
        "requests_s": rounded(len(good) / wall_s) if wall_s else 0.0,
        "cached_share": rounded(sum(a.cached_tokens for a in good) / prompts, 3) if prompts else 0.0,
        "tokens_counted_by": ", ".join(sorted({a.counted_by for a in good})),
        **latencies(good),
    }
    groups = sorted({t.group for t in turns})
    if len(groups) > 1:
        found["groups"] = {
            g: {"requests": sum(t.group == g for t in turns)}
            | latencies([t.answer for t in turns if t.group == g and t.answer.failure is None])
            for g in groups
        }
    if any(t.turn for t in turns):
        later = [t.answer for t in turns if t.turn and t.answer.failure is None]
        first = [t.answer for t in turns if not t.turn and t.answer.failure is None]
        found["first_turn_ttft_ms"], found["later_turn_ttft_ms"] = (
            spread([a.ttft_s for a in part]) for part in (first, later)
        )
    if slo is not None:
        kept = sum(slo.kept(a) for a in answers)
        share = rounded(kept / len(answers), 3) if answers else 0.0
        found["goodput"] = {"slo_ms": str(slo), "requests_s": rounded(kept / wall_s) if wall_s else 0.0, "share": share}
    return found


async def run_scenario(
    target: Target,
    scenario: Scenario,
    *,
    rate: float | None = None,
    warmup: int | None = None,
    seed: int = 0,
    slo: Slo | None = None,
    texts: Sequence[str] = (),
    done: Callable[[int, int], None] = lambda n, of: None,
) -> dict[str, Any]:
    """Warm up, run and summarise one scenario. `target` has been probed."""
    if scenario.turns > 1 and target.endpoint != "chat":
        raise ConfigError(f"scenario {scenario.name} is a chat; leave --endpoint completions out.")
    lengths = Lengths(8, 1.3, exact=False) if texts else await measure_lengths(target, seed)
    n_warm = min(scenario.concurrency, 8) if warmup is None else warmup
    if n_warm:
        short = min(scenario.output_tokens, 16)
        few = replace(scenario, sessions=n_warm, turns=1, output_tokens=short, prefill_tokens=0)
        others = sessions_of(few, lengths, seed + 1_000_003, texts)
        await run_sessions(target, others, concurrency=scenario.concurrency, full=False)
    sessions = sessions_of(scenario, lengths, seed, texts)
    total = sum(len(s.turns) for s in sessions)
    before = await spec_counters(target)
    turns = await run_sessions(
        target,
        sessions,
        concurrency=scenario.concurrency,
        rate=rate,
        seed=seed,
        full=not texts,
        done=lambda n: done(n, total),
    )
    after = await spec_counters(target)
    found = {
        "bench": "serve",
        "scenario": scenario.name,
        "model": target.model,
        "endpoint": target.endpoint,
        "arrival": "closed" if rate is None else "poisson",
        **({"rate": rate} if rate is not None else {"concurrency": scenario.concurrency}),
        "asked": {"input": scenario.input_tokens, "output": scenario.output_tokens, "shared": scenario.shared}
        | ({"turns": scenario.turns} if scenario.turns > 1 else {})
        | ({"prefill": scenario.prefill_tokens} if scenario.prefill_tokens else {}),
        "prompt_lengths": "texts" if texts else "measured" if lengths.exact else "estimated",
        "warmup": n_warm,
        "seed": seed,
        **summarise(turns, slo),
    }
    if (kept := acceptance([t.answer for t in turns if t.answer.failure is None], before, after)) is not None:
        found["acceptance"] = kept
    return found
