"""The engine in its own process: the same answers, hang-ups, refusals; stopped, killed, orphaned, restarted."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import TINY, app_of

from onebox.config import EngineConfig
from onebox.engine import process
from onebox.engine.client import EngineStats, Progress
from onebox.engine.process import Add, Fault, ProcessEngine, added, decode_command, encode, load_engine
from onebox.errors import (
    CheckpointError,
    ContextLengthError,
    EngineUnavailableError,
    OneboxError,
    QueueFullError,
    RequestError,
)
from onebox.request import Grammar, Output, Request, SamplingParams

CONFIG = EngineConfig(model=str(TINY), device="cpu", draft_len=2, max_num_seqs=4, max_model_len=2048, stall_s=30)


def ask(name: str, max_tokens: int = 12, prompt: tuple[int, ...] = (5, 6, 7), **options: Any) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options))


async def collect(outputs: AsyncIterator[Output]) -> list[int]:
    return [t async for o in outputs for t in o.tokens]


async def until(true: Callable[[], bool], timeout_s: float = 60.0) -> float:
    """Seconds until it is true."""
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() - began_s < timeout_s, "it never came true"
        await asyncio.sleep(0.01)
    return time.monotonic() - began_s


def with_engine(
    test: Callable[[ProcessEngine], Awaitable[None]],
    config: EngineConfig = CONFIG,
    make: process.MakeEngine = load_engine,
) -> None:
    async def main() -> None:
        engine = ProcessEngine(config, make=make)
        await engine.start()
        try:
            await test(engine)
        finally:
            await engine.stop()

    asyncio.run(main())


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


async def refuses(engine: ProcessEngine, request: Request, error: type[OneboxError], match: str | None = None) -> None:
    with pytest.raises(error, match=match):
        await collect(engine.generate(request))


def test_requests_at_once_hang_ups_and_bad_ones_leave_the_others_right() -> None:
    async def test(engine: ProcessEngine) -> None:
        alone = await collect(engine.generate(ask("alone")))
        assert len(alone) == 12
        together = await asyncio.gather(*(collect(engine.generate(ask(f"r{i}", max_tokens=4))) for i in range(64)))
        assert all(tokens == alone[:4] for tokens in together)
        assert engine.stats().finished == 65 and engine.stats().running == engine.stats().waiting == 0

        long = engine.generate(ask("long", max_tokens=900))
        other = asyncio.create_task(collect(engine.generate(ask("other", max_tokens=100))))
        async for _ in long:
            break
        await until(lambda: engine.stats().running == 2)
        steps = engine.stats().steps
        await long.aclose()
        await until(lambda: engine.stats().cancelled == 1)
        assert engine.stats().steps <= steps + 3  # one under way, one while the message travels, one to tell
        assert len(await other) == 100
        await until(lambda: engine.stats().slots_free == engine.stats().slots_total)

        await refuses(engine, ask("r", prompt=(5,) * 5000), ContextLengthError)
        await refuses(engine, ask("r", prompt=(2**70,)), RequestError, "cannot be passed")
        await refuses(engine, replace(ask("r"), cache_salt="\ud800"), RequestError, "cannot be passed")
        await refuses(engine, ask("r", prompt=("a",)), RequestError, "cannot run")  # type: ignore[arg-type]
        assert engine._child is not None
        engine._child.commands.send(b"\xc1 no message")
        engine._child.commands.send(encode([1, 2, 3]))
        assert await collect(engine.generate(ask("after"))) == alone
        assert engine.stats().restarts == 0

    with_engine(test)


def test_a_full_queue_is_refused_with_its_own_error() -> None:
    async def test(engine: ProcessEngine) -> None:
        tasks = [asyncio.create_task(collect(engine.generate(ask(f"r{i}", max_tokens=40)))) for i in range(12)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [e for e in done if isinstance(e, BaseException)]
        assert refused and all(isinstance(e, QueueFullError) and e.retry_after_s >= 1 for e in refused)
        assert all(len(tokens) == 40 for tokens in done if not isinstance(tokens, BaseException))

    with_engine(test, replace(CONFIG, max_num_seqs=2, max_waiting=2))


def test_a_killed_child_fails_what_is_in_flight_at_once_and_the_next_one_answers_right() -> None:
    async def test(engine: ProcessEngine) -> None:
        before = await collect(engine.generate(ask("before")))
        generated = engine.stats().generated_tokens
        stream = engine.generate(ask("r", max_tokens=900))
        async for _ in stream:
            break
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(EngineUnavailableError, match="SIGKILL"):
            await collect(stream)
        assert time.monotonic() - began_s < 2
        assert not engine.alive()
        await refuses(engine, ask("meanwhile"), EngineUnavailableError, "restarted")
        await until(engine.alive)
        assert await collect(engine.generate(ask("after"))) == before
        stats = engine.stats()
        assert stats.restarts == 1 and stats.generated_tokens > generated

    with_engine(test)


def test_a_stopped_engine_is_not_ready_within_ten_seconds_fails_its_requests_and_comes_back() -> None:
    """The published scenario, over HTTP."""

    async def main() -> None:
        engine = ProcessEngine(CONFIG)
        app = app_of(engine)  # type: ignore[arg-type]
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=120) as client,
        ):
            body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}

            async def status() -> int:
                return (await client.get("/health/ready")).status_code

            before = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
            long = {**body, "max_tokens": 1500}
            whole = asyncio.create_task(client.post("/v1/completions", json=long))
            streamed = asyncio.create_task(client.post("/v1/completions", json={**long, "stream": True}))
            await until(lambda: engine.stats().running == 2)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSTOP)
            began_s = time.monotonic()
            while await status() == 200:
                assert time.monotonic() - began_s < 10
                await asyncio.sleep(0.1)
            told = (await client.get("/health/ready")).json()
            assert told["status"] == "stalled" and "no sign of life" in told["detail"]
            answer = await whole
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_unavailable"
            assert '"code":"engine_unavailable"' in (await streamed).text
            told = (await client.get("/health/ready")).json()
            assert told["status"] == "restarting" and told["phase"]
            await until(engine.alive)
            assert await status() == 200
            after = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
            assert after == before
            assert (await client.get("/v1/onebox/stats")).json()["restarts"] == 1
            assert "onebox:engine_restarts_total{" in (await client.get("/metrics")).text

    asyncio.run(main())


def test_sigcont_before_the_restart_recovers_without_losing_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SILENT_S", 2.0)

    async def test(engine: ProcessEngine) -> None:
        task = asyncio.create_task(collect(engine.generate(ask("r", max_tokens=300))))
        await until(lambda: engine.stats().running == 1)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        await until(lambda: engine.health().status == "stalled")
        os.kill(engine.pid, signal.SIGCONT)
        await until(engine.alive)
        assert len(await task) == 300 and engine.stats().restarts == 0

    with_engine(test)


def make_hanging(config: EngineConfig, progress: Progress) -> Any:
    """An engine whose step hangs for a prompt that begins with 13."""
    engine = load_engine(config, progress)
    step = engine.step

    def hanging() -> list[Output]:
        if any(s.tokens[0] == 13 for s in engine.sequences.values()):
            time.sleep(60)
        return step()

    engine.step = hanging  # type: ignore[method-assign]
    return engine


def test_a_step_that_hangs_is_a_stall_although_the_heart_beats() -> None:
    async def test(engine: ProcessEngine) -> None:
        await refuses(engine, ask("r", prompt=(13, 6)), EngineUnavailableError, "no progress")
        assert engine.health().status == "restarting"
        await until(engine.alive)
        assert len(await collect(engine.generate(ask("after")))) == 12

    with_engine(test, replace(CONFIG, stall_s=3), make_hanging)


def make_failing(config: EngineConfig, progress: Progress) -> Any:
    """An engine that fails in every step."""
    engine = load_engine(config, progress)

    def step() -> list[Output]:
        raise RuntimeError("device lost")

    engine.step = step  # type: ignore[method-assign]
    return engine


def test_an_engine_that_keeps_dying_stays_down_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_RESTARTS", 1)

    async def test(engine: ProcessEngine) -> None:
        await refuses(engine, ask("r"), EngineUnavailableError, "device lost")
        await until(engine.alive)
        await refuses(engine, ask("r"), EngineUnavailableError, "device lost")
        health = engine.health()
        assert health.status == "failed" and "device lost" in health.detail and "2 times" in health.detail
        await refuses(engine, ask("r"), EngineUnavailableError, "restart the server")

    with_engine(test, make=make_failing)


def test_a_bad_checkpoint_fails_the_start_with_its_own_error(tmp_path: Path) -> None:
    engine = ProcessEngine(replace(CONFIG, model=str(tmp_path / "none")))
    with pytest.raises(CheckpointError, match="none"):
        asyncio.run(engine.start())
    assert not engine.alive()


PHASES = ["libraries", "plan", "read weights", "self-check", "allocate memory"]


def test_loading_tells_its_phases_how_far_it_is_and_their_seconds() -> None:
    async def main() -> None:
        engine = ProcessEngine(CONFIG)
        seen, began_s = set(), time.monotonic()
        task = asyncio.create_task(engine.start())
        while not task.done():
            health = engine.health()
            seen.add(health.phase)
            assert health.progress is None or 0 <= health.progress <= 1
            assert 0 <= health.seconds < 120
            await asyncio.sleep(0.005)
        await task
        health = engine.health()
        assert "process" in seen and health.status == "ready" and health.phase == ""
        assert [phase for phase, _ in health.took] == PHASES
        assert 0.1 < sum(seconds for _, seconds in health.took) <= time.monotonic() - began_s
        assert engine.stats() == replace(engine.stats(), steps=0, finished=0, pages_cached=0, prompt_tokens=0)
        assert engine.stats().slots_free == engine.stats().slots_total
        await engine.stop()

    asyncio.run(main())


ORPHAN = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from test_engine_process import CONFIG, ProcessEngine

async def main():
    engine = ProcessEngine(CONFIG)
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(100)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_killed_parent_leaves_no_orphan(tmp_path: Path, stopped: bool) -> None:
    script = tmp_path / "parent.py"
    script.write_text(ORPHAN.format(tests=str(Path(__file__).parent)))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not gone(child)
        if stopped:
            os.kill(child, signal.SIGSTOP)
        parent.kill()
        parent.wait()
    for _ in range(500):
        if gone(child):
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child outlived its parent")


def test_signals_of_the_group_do_not_reach_the_first_child(tmp_path: Path) -> None:
    """Ctrl-C goes to both; the parent drains, so the child must go on."""
    script = tmp_path / "parent.py"
    script.write_text(ORPHAN.format(tests=str(Path(__file__).parent)))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        for name in (signal.SIGINT, signal.SIGTERM):
            os.kill(child, name)
        blocked = int(re.findall(r"SigBlk:\s*(\w+)", Path(f"/proc/{child}/status").read_text())[0], 16)
        parent.kill()
    assert blocked & 1 << signal.SIGINT - 1 and blocked & 1 << signal.SIGTERM - 1


def test_every_field_of_a_request_crosses_the_wire() -> None:
    params = SamplingParams(
        max_tokens=9, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=-(2**63), presence_penalty=1.0,
        frequency_penalty=-1.0, repetition_penalty=1.5, logit_bias=((3, -5.0),), stop_token_ids=(1, 2), ignore_eos=True,
        min_tokens=2, logprobs=4,
    )  # fmt: skip
    request = Request("a", (1, 2), params, 3, 1, (2,), "salt", Grammar("choice", '["a"]', (7,)))
    for value, plain in ((params, SamplingParams()), (request, Request("", ()))):
        assert all(getattr(value, f.name) != getattr(plain, f.name) for f in fields(plain))
    assert decode_command(encode(Add(request))) == Add(request)


@pytest.mark.parametrize(
    "error",
    [
        QueueFullError("full", retry_after_s=7),
        ContextLengthError("long", param="prompt"),
        CheckpointError("bad"),
        EngineUnavailableError("off"),
    ],
)
def test_errors_cross_the_wire_as_what_they_are(error: OneboxError) -> None:
    again = Fault.of(error).error()
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_counters_go_on_over_a_restart_and_gauges_do_not() -> None:
    before = EngineStats(steps=5, running=3, accepted_per_pos=(4, 1), prefix={"hits": 2})
    now = EngineStats(steps=2, running=1, accepted_per_pos=(1,), prefix={"hits": 1, "lookups": 3})
    total = added(before, now)
    assert (total.steps, total.running, total.accepted_per_pos) == (7, 1, (5, 1))
    assert total.prefix == {"hits": 3, "lookups": 3}
