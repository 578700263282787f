"""The serving bench against a scripted server: what it reports is what the server stamped, within 5 %."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from onebox import cli
from onebox.bench import command, serving, tables
from onebox.bench.serving import (
    SCENARIOS,
    Lengths,
    Scenario,
    Slo,
    Target,
    Turn,
    acceptance,
    measure_lengths,
    probe,
    run_scenario,
    sessions_of,
    summarise,
)
from onebox.bench.stream import Answer, Dialect, Failure, ask
from onebox.errors import ConfigError
from onebox.testing import Reply, ScriptedServer, Stamps

STEP_S, FIRST_S = 0.04, 0.5
# one to four tokens an event, as speculation gives them
MANY = tuple((STEP_S, n) for n in (1, 3, 2, 4, 1, 1, 3, 2, 3, 4) * 2)
SMALL = Scenario("single", "a small one", sessions=8, concurrency=2, input_tokens=40, output_tokens=48)
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 48}


def reply(**options: Any) -> Reply:
    return Reply(((FIRST_S, 2), *MANY), accepted=28, rejected=7, **options)


def scripted(
    script: Callable[[int, Mapping[str, Any]], Reply], run: Callable[[ScriptedServer], Any], **options: Any
) -> Any:
    async def whole() -> Any:
        async with ScriptedServer(script, **options) as server:
            return await run(server)

    return asyncio.run(whole())


def measured(
    script: Callable[[int, Mapping[str, Any]], Reply], scenario: Scenario = SMALL, **options: Any
) -> tuple[dict[str, Any], list[Stamps]]:
    """A run without warm-up on a probed target, and what the server stamped meanwhile."""

    async def run(server: ScriptedServer) -> Any:
        target = await probe(Target(server.url, "scripted"))
        server.stamps.clear()
        line = await run_scenario(target, scenario, warmup=0, **options)
        return line, server.stamps[2:]  # after the two that measure lengths

    def quick_first(i: int, body: Mapping[str, Any]) -> Reply:
        asked = replace(script(i, body), status=200, cut_after=None)
        first = "about the sea" in str(body) or body["max_tokens"] == 1
        return replace(asked, events=((0.005, 1),)) if first else script(i, body)

    line, stamps = scripted(quick_first, run)
    return line, stamps


@pytest.mark.parametrize("usage", ["ids", "continuous", "final"])
def test_first_token_token_gaps_and_acceptance_are_what_the_server_stamped(usage: Any) -> None:
    line, stamps = measured(lambda i, _: reply(usage=usage))
    assert line["failed"] == 0 and line["requests"] == len(stamps) == 8
    assert line["tokens_counted_by"] == {"ids": "ids", "continuous": "usage", "final": "text"}[usage]
    assert line["output_tokens"] == sum(n for s in stamps for _, n in s.sent) == 8 * 48
    gaps = [(b - a) / n for s in stamps for (a, _), (b, n) in pairwise(s.sent) for _ in range(n)]
    ttft = [s.ttft_s for s in stamps]
    for found, sent in ((line["ttft_ms"], ttft), (line["itl_ms"], gaps)):
        assert found["mean"] == pytest.approx(1e3 * statistics.mean(sent), rel=0.05)
        assert found["p50"] == pytest.approx(1e3 * float(np.percentile(sent, 50)), rel=0.05)
    # and the script itself: 2.4 tokens an event, an event each 40 ms
    assert line["itl_ms"]["mean"] >= 1e3 * STEP_S / 2.45
    assert line["tokens_per_event"] == pytest.approx(48 / len(stamps[0].sent), rel=1e-3)
    assert line["acceptance"]["share"] == pytest.approx(28 / 35, rel=0.05) and line["acceptance"]["by"] == "usage"


def test_counting_events_as_tokens_would_have_been_wrong_by_more_than_half() -> None:
    line, _ = measured(lambda i, _: reply())
    assert line["event_gap_ms"]["mean"] > 2 * line["itl_ms"]["mean"]


def test_percentiles_follow_a_slow_tail() -> None:
    slow = Reply(((FIRST_S, 1), *((0.02, 1),) * 17, (0.4, 1), (0.4, 1)))
    line, stamps = measured(lambda i, _: slow, Scenario("single", "", 4, 4, 20, 20))
    gaps = [b - a for s in stamps for (a, _), (b, _) in pairwise(s.sent)]
    for p in (50, 90, 99):
        assert line["itl_ms"][f"p{p}"] == pytest.approx(1e3 * float(np.percentile(gaps, p)), rel=0.05)
    assert line["itl_ms"]["p99"] >= 400 > 10 * line["itl_ms"]["p50"]


FAULTS: dict[int, Reply] = {
    1: Reply(status=503),
    2: Reply(((0.01, 1),) * 48, cut_after=5),
    3: Reply(((0.01, 1),) * 48, cut_after=3, error="out of memory"),
    4: Reply(((0.01, 1),) * 30),  # ends by itself though asked to go on
    5: Reply(()),
}


def test_failures_are_counted_by_kind_shown_and_kept_out_of_the_latencies() -> None:
    line, _ = measured(lambda i, _: FAULTS.get(i - 3, reply()), slo=Slo(ttft=60_000))
    assert line["failures"] == {"HTTP 503": 1, "cut": 1, "error": 1, "short": 1, "empty": 1}
    assert line["failed"] == 5 and line["requests"] == 8
    assert "out of memory" in line["failure_examples"]["error"]
    assert "30 of 48" in line["failure_examples"]["short"]
    assert line["output_tokens"] == 3 * 48 and line["ttft_ms"]["p50"] >= 1e3 * FIRST_S
    assert line["goodput"]["share"] == pytest.approx(3 / 8)


def test_a_dead_port_and_a_silent_server_are_failures_with_names() -> None:
    async def dead(_: ScriptedServer) -> Answer:
        target = Target("http://127.0.0.1:9", "x")
        async with target.client() as client:
            return await ask(client, target.path, BODY, Dialect())

    async def silent(server: ScriptedServer) -> Answer:
        target = Target(server.url, "x", timeout_s=0.2)
        async with target.client() as client:
            return await ask(client, target.path, BODY, Dialect())

    gone = scripted(lambda i, _: reply(), dead).failure
    slow = scripted(lambda i, _: Reply(((5.0, 1),)), silent).failure
    assert gone is not None and gone.kind == "connect"
    assert slow is not None and slow.kind == "timeout"


def test_goodput_counts_requests_within_every_bound() -> None:
    quick, late = reply(), Reply(((3 * FIRST_S, 48),))
    slo = Slo(ttft=1e3 * 2 * FIRST_S)
    line, _ = measured(lambda i, _: late if i % 2 else quick, Scenario("single", "", 8, 8, 20, 48), slo=slo)
    assert line["goodput"]["share"] == 0.5 and line["failed"] == 0
    assert line["goodput"]["requests_s"] == pytest.approx(4 / line["wall_s"], rel=0.01)


def test_a_closed_loop_keeps_as_many_open_as_it_has_clients() -> None:
    async def run(server: ScriptedServer) -> int:
        target = await probe(Target(server.url, "scripted"))
        server.most_open = 0
        await run_scenario(target, Scenario("single", "", 9, 3, 20, 4), warmup=0)
        return server.most_open

    assert scripted(lambda i, _: Reply(((0.05, 2),) * 4), run) == 3


def test_poisson_arrivals_come_at_their_times_whatever_is_still_open() -> None:
    n, rate = 30, 60.0
    line, stamps = measured(lambda i, _: Reply(((0.3, 4),)), Scenario("single", "", n, 1, 20, 4), rate=rate, seed=3)
    starts = sorted(s.received_s for s in stamps)
    assert line["arrival"] == "poisson" and line["rate"] == rate and "concurrency" not in line
    gaps = [b - a for a, b in pairwise(starts)]
    assert len(starts) == n and sum(gaps) < 4 * n / rate < n * 0.3  # a closed loop of one would take n * 0.3 s
    assert min(gaps) < 0.4 / rate and max(gaps) > 1.6 / rate  # exponential, not even


def test_warm_up_runs_before_and_is_not_counted() -> None:
    async def run(server: ScriptedServer) -> tuple[dict[str, Any], int]:
        target = await probe(Target(server.url, "scripted"))
        server.stamps.clear()
        line = await run_scenario(target, Scenario("single", "", 3, 2, 20, 40), warmup=5)
        return line, len(server.stamps)

    line, seen = scripted(lambda i, _: Reply(((0.01, 8),) * 5), run)
    assert seen == 2 + 5 + 3 and line["requests"] == 3 and line["warmup"] == 5


def test_prompts_have_the_lengths_asked_for_by_the_servers_own_count() -> None:
    line, stamps = measured(lambda i, _: Reply(((0.01, 8),)), Scenario("single", "", 4, 4, 300, 8))
    assert line["prompt_lengths"] == "measured" and line["input_tokens"] == pytest.approx(300, abs=3)
    texts = [s.body["messages"][-1]["content"] for s in stamps]
    assert len({t[:12] for t in texts}) == 4  # nobody's prompt is in a prefix cache


def test_shared_prefixes_chats_and_mixed_loads_are_what_their_names_say() -> None:
    lengths = Lengths(0, 1, exact=True)
    shared = sessions_of(Scenario("s", "", 3, 1, 10, 4, shared=50), lengths, seed=1)
    assert len({s.system for s in shared}) == 1 and len(shared[0].system.split()) == 50
    mixed = sessions_of(SCENARIOS["mixed"], lengths, seed=1)
    assert [s.group for s in mixed].count("prefill") == 4 and [s.group for s in mixed].count("decode") == 8
    line, stamps = measured(lambda i, _: Reply(((0.01, 8),)), Scenario("agent", "", 2, 2, 10, 8, shared=20, turns=3))
    sizes = sorted(len(s.body["messages"]) for s in stamps)
    assert sizes == [2, 2, 4, 4, 6, 6] and line["requests"] == 6
    assert stamps[-1].body["messages"][2] == {"role": "assistant", "content": "word " * 8}
    assert line["later_turn_ttft_ms"]["p50"] > 0
    line, _ = measured(lambda i, _: Reply(((0.01, 4),) * 4), Scenario("mixed", "", 4, 2, 10, 16, prefill_tokens=90))
    assert line["groups"]["prefill"]["requests"] == 2 and line["groups"]["decode"]["requests"] == 4


@pytest.mark.parametrize(
    ("refused", "want", "counted"),
    [
        ([], Dialect(), "usage"),
        (["return_token_ids"], Dialect(token_ids=False), "usage"),
        (["return_token_ids", "continuous_usage_stats"], Dialect(token_ids=False, continuous_usage=False), "text"),
        (["ignore_eos"], Dialect(token_ids=False, continuous_usage=False, ignore_eos=False), "text"),
    ],
)
def test_a_server_that_refuses_a_field_is_asked_without_it(refused: list[str], want: Dialect, counted: str) -> None:
    async def run(server: ScriptedServer) -> tuple[Dialect, str]:
        target = await probe(Target(server.url, "scripted"))
        async with target.client() as client:
            answer = await target.ask(client, BODY["messages"], 48)  # type: ignore[arg-type]
        return target.dialect, answer.counted_by

    assert scripted(lambda i, _: reply(), run, refused=refused) == (want, counted)


def test_without_usage_a_tokenizer_counts_and_without_one_events_are_said_to_be_counted() -> None:
    async def run(server: ScriptedServer) -> list[tuple[str, int]]:
        found = []
        for count in (None, lambda text: len(text.split())):
            target = Target(server.url, "scripted", count=count)
            async with target.client() as client:
                answer = await target.ask(client, BODY["messages"], 48)  # type: ignore[arg-type]
            found.append((answer.counted_by, answer.tokens))
        return found

    assert scripted(lambda i, _: reply(usage="none"), run) == [("events", 21), ("tokenizer", 48)]


def test_acceptance_falls_back_on_the_servers_counters_and_has_positions() -> None:
    text = "\n".join(
        f'vllm:spec_decode_num_{name}{{model_name="m",engine="0"{label}}} {{{key}}}'
        for name, label, key in (
            ("drafts_total", "", "w"),
            ("draft_tokens_total", "", "d"),
            ("accepted_tokens_total", "", "a"),
            ("accepted_tokens_per_pos_total", ',position="0"', "p0"),
            ("accepted_tokens_per_pos_total", ',position="1"', "p1"),
        )
    )

    def counters(**values: float) -> str:
        made = text
        for name, value in values.items():
            made = made.replace(f"{{{name}}}", str(value))
        return made

    async def run(server: ScriptedServer) -> dict[str, Any]:
        target = await probe(Target(server.url, "scripted"))
        await measure_lengths(target, 0)
        server.stamps.clear()
        return await run_scenario(target, Scenario("single", "", 2, 1, 20, 48), warmup=0)

    def script(i: int, _: Mapping[str, Any]) -> Reply:
        if i == 3:
            holder[0].metrics = counters(w=110.0, d=220.0, a=150.0, p0=95.0, p1=65.0)
        return Reply(((0.01, 8),) * 6)

    holder: list[ScriptedServer] = []

    async def kept(server: ScriptedServer) -> dict[str, Any]:
        holder.append(server)
        server.metrics = counters(w=10.0, d=20.0, a=10.0, p0=5.0, p1=5.0)
        return await run(server)

    found = scripted(script, kept)["acceptance"]
    assert found == {"share": 0.7, "drafted": 200, "by": "metrics", "tokens_per_step": 2.4, "kept_at": [0.9, 0.6]}
    assert acceptance([], {}, {}) is None


def test_tokens_that_came_together_share_the_time_since_the_event_before() -> None:
    answer = Answer(0.0, 1.0, ((0.5, 3), (0.8, 3), (1.0, 1)), "ids")
    assert answer.token_gaps_s() == pytest.approx([0.1, 0.1, 0.1, 0.2])
    assert answer.event_gaps_s() == pytest.approx([0.3, 0.2])
    assert answer.tpot_s == pytest.approx(0.5 / 4) and answer.tokens == 7 and answer.ttft_s == 0.5
    assert Answer(0, 1, ((0.5, 3),), "ids").tpot_s is None


def test_a_run_in_which_everything_failed_has_a_table_and_no_figures() -> None:
    line = summarise(
        [Turn(Answer(0, 1, (), "events", failure=Failure("connect", "refused")), 0, "requests")], Slo(ttft=1)
    )
    assert line["failed"] == 1 and line["ttft_ms"] == {} and line["goodput"]["share"] == 0


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "speed:3", "ttft:0", "ttft:nan"])
def test_an_slo_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        Slo.parse(text)


@contextlib.contextmanager
def in_thread(script: Callable[[int, Mapping[str, Any]], Reply]) -> Iterator[ScriptedServer]:
    """The scripted server on a loop of its own, for the command line."""
    server, loop = ScriptedServer(script), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as e:
        cli.main(["bench", "serve", *argv])
    return int(e.value.code or 0)


def test_the_command_measures_prints_a_table_and_appends_a_line_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.jsonl"
    argv = [
        "--scenario",
        "single",
        "--requests",
        "3",
        "--output-tokens",
        "24",
        "--input-tokens",
        "30",
        "--repeats",
        "2",
    ]
    with in_thread(lambda i, _: Reply(((0.02, 2),) * 12, accepted=12, rejected=3)) as server:
        argv += ["--url", server.url + "/v1", "--slo", "ttft:60000", "--api-key", "secret", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["/opt/bin/onebox", "bench", "serve", *argv])
        assert run(*argv) == 0
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert len(lines) == 2 and [line["seed"] for line in lines] == [0, 1]
    for line in lines:
        assert line["bench"] == "serve" and line["requests"] == 3 and line["failed"] == 0 and line["commit"]
        assert line["command"].startswith("onebox bench serve --scenario single") and "secret" not in json.dumps(line)
    shown = capsys.readouterr().out
    for part in ("first token, ms", "between tokens, ms", "80.0% of 45 drafts kept", "goodput", "2 tokens an event"):
        assert part in shown, part


def test_compare_puts_medians_of_the_same_load_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(name: str, rates: list[float], **more: Any) -> str:
        load = {"bench": "serve", "scenario": "c32", "endpoint": "chat", "arrival": "closed", "concurrency": 32}
        lines = [load | {"asked": {"input": 1}, "output_tok_s": r, "itl_ms": {"p50": 1e3 / r}, **more} for r in rates]
        (tmp_path / name).write_text("\n".join(json.dumps(line) for line in lines), "utf-8")
        return str(tmp_path / name)

    a, b = write("vllm.jsonl", [90, 100, 130]), write("ours.jsonl", [200, 210])
    assert run("--compare", a, b) == 0
    shown = capsys.readouterr().out
    [row] = [line.split() for line in shown.splitlines() if "output tok/s" in line]
    assert row[2:] == ["100", "205", "2.05", "B"]
    assert "3 and 2 runs, medians" in shown and "A vllm" in shown and "B ours" in shown
    other = write("other.jsonl", [1], asked={"input": 2})
    with pytest.raises(ConfigError, match="no scenario of the same load"):
        tables.pairs(tables.read(Path(a)), tables.read(Path(other)))


FEW = ["--requests", "3", "--output-tokens", "8", "--input-tokens", "20", "--warmup", "0"]


def test_a_server_that_dies_in_the_middle_leaves_its_failures_in_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def alive_for(n: int) -> Callable[[int, Mapping[str, Any]], Reply]:
        return lambda i, _: Reply(((0.0, 1),) * 8) if i < n else Reply(status=503)

    out = tmp_path / "a.jsonl"
    monkeypatch.setattr(sys, "argv", ["onebox", "bench", "serve"])
    with in_thread(alive_for(4)) as server:  # a probe, two lengths, one request
        assert run("--url", server.url, "--out", str(out), *FEW) == 0
    [line] = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert (line["requests"], line["failed"], line["failures"]) == (3, 2, {"HTTP 503": 2})
    assert "2 of 3 failed" in capsys.readouterr().out
    with in_thread(alive_for(3)) as server:
        assert run("--url", server.url, "--out", str(out), *FEW) == 1
    assert "single: all 3 requests failed: HTTP 503" in capsys.readouterr().err
    assert len(out.read_text("utf-8").splitlines()) == 2


def test_ctrl_c_keeps_the_lines_of_runs_that_were_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = serving.run_scenario, list[int]()

    async def second_is_interrupted(*args: Any, **options: Any) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return await real(*args, **options)

    out = tmp_path / "a.jsonl"
    monkeypatch.setattr(serving, "run_scenario", second_is_interrupted)
    monkeypatch.setattr(sys, "argv", ["onebox", "bench", "serve"])
    with in_thread(lambda i, _: Reply(((0.0, 1),) * 8)) as server:
        assert run("--url", server.url, "--repeats", "3", "--out", str(out), *FEW) == 130
    assert len(out.read_text("utf-8").splitlines()) == 1


def test_lines_of_other_versions_are_compared_by_what_they_have_or_refused(tmp_path: Path) -> None:
    def file(**fields: Any) -> Path:
        (tmp_path / "x.jsonl").write_text(json.dumps({"bench": "serve", **fields}), "utf-8")
        return tmp_path / "x.jsonl"

    odd: tuple[dict[str, Any], ...] = ({}, {"scenario": 3}, {"scenario": "c32", "rate": "fast"})
    for fields in odd:
        with pytest.raises(ConfigError, match="without a scenario"):
            tables.read(file(**fields))
    old = tables.read(file(scenario="c32", output_tok_s=float("nan"), itl_ms=[1], failed=2))
    [(title, rows)] = tables.pairs(old, old)
    assert title.startswith("c32, -, - at a time") and [r[0] for r in rows] == ["failed"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--scenario", "c64"], "Known: single, c32"),
        (["--url", "http://127.0.0.1:9"], "no server answers"),
        (["--endpoint", "embeddings"], "--endpoint"),
        (["--rate", "-1"], "--rate"),
        (["--rate", "1", "--concurrency", "2"], "give one"),
        (["--requests", "0"], "--requests must be at least 1, got 0"),
        (["--shared-tokens", "-1"], "--shared-tokens must be at least 0"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--warmup", "-1"], "--warmup must be at least 0"),
        (["--timeout", "nan"], "--timeout must be above 0"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--compare", "/no/a", "/no/b"], "/no/a"),
        (["--prompts", "/no/file"], "/no/file"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) in (1, 2)
    [err] = capsys.readouterr().err.splitlines()
    assert err.startswith("onebox: error:") and says in err


@pytest.mark.parametrize(
    ("status", "says"), [(401, "is the key right"), (503, "it is starting"), (404, "OpenAI-compatible")]
)
def test_a_server_that_lists_no_models_is_told_by_its_status(
    status: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(url: str, **_: Any) -> httpx.Response:
        return httpx.Response(status, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", answered)
    with pytest.raises(ConfigError, match=says):
        command._server("http://127.0.0.1:9", None, None)


def test_the_scenarios_are_listed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0
    shown = capsys.readouterr().out
    assert list(SCENARIOS) == ["single", "c32", "long-output", "shared-prefix", "agent", "mixed"]
    assert all(name in shown for name in SCENARIOS)
