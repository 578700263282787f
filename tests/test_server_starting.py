"""A start that is told: which lines, where to, and graphs before the first request."""

from __future__ import annotations

import asyncio
import io
import logging
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest
from serving import TINY, app_of, saying

from onebox.config import EngineConfig
from onebox.engine.client import Health, StartClock
from onebox.engine.engine import load_engine
from onebox.engine.thread import ThreadEngine
from onebox.server.serve import ServeOptions, in_background
from onebox.server.starting import Phases, told

CONFIG = EngineConfig(str(TINY), device="cpu", max_num_seqs=2, max_model_len=512)


def loading(phase: str, seconds: float, progress: float | None = None, took: Any = ()) -> Health:
    return Health("starting", "", phase, progress, seconds, took)


def test_a_phase_is_told_once_it_is_over_and_a_long_one_meanwhile() -> None:
    phases = Phases(every_s=10)
    libraries = ("libraries", 3.04)
    healths = [
        loading("libraries", 3.0),
        loading("read weights", 9.0, 0.1, (libraries,)),
        loading("read weights", 11.0, 0.25, (libraries,)),
        loading("read weights", 13.0, 0.3, (libraries,)),
        loading("read weights", 21.4, 0.5, (libraries,)),
        loading("self-check", 1.0, None, (libraries, ("read weights", 40.0))),
        Health("ready", took=(libraries, ("read weights", 40.0), ("self-check", 2.0))),
        Health("ready", took=(libraries, ("read weights", 40.0), ("self-check", 2.0))),
    ]
    assert [[line for line, _ in phases.lines(h)] for h in healths] == [
        [],
        ["libraries: 3.0 s"],
        ["read weights: 25%, 11 s so far"],
        [],
        ["read weights: 50%, 21 s so far"],
        ["read weights: 40.0 s"],
        ["self-check: 2.0 s"],
        [],
    ]


def test_a_clock_times_each_phase_and_knows_its_share() -> None:
    clock = StartClock("libraries")
    assert (clock.phase, clock.share) == ("libraries", None)
    clock("read weights", 1, 4)
    clock("read weights", 2, 4)
    assert (clock.phase, clock.share, [p for p, _ in clock.took]) == ("read weights", 0.5, ["libraries"])
    clock.end()
    assert [p for p, _ in clock.took] == ["libraries", "read weights"]
    assert all(0 <= s < 5 for _, s in clock.took)


def test_ready_tells_the_phase_its_share_its_seconds_and_those_before() -> None:
    engine = saying("x", phases=(("read weights", 0.3), ("self-check", 0.3)))

    async def run() -> list[dict[str, Any]]:
        app = app_of(engine, on_start=lambda _: None)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                seen = []
                while not seen or seen[-1]["status"] != "ready":
                    answer = await client.get("/health/ready")
                    seen.append(answer.json())
                    assert (answer.status_code == 200) == (seen[-1]["status"] == "ready")
                    await asyncio.sleep(0.02)
                return seen

    seen = asyncio.run(run())
    during = [s for s in seen if s.get("phase") == "self-check"][-1]
    assert 0 <= during["progress"] < 1 and during["phase_seconds"] > 0
    assert [p["phase"] for p in during["phases"]] == ["process", "read weights"]
    assert during["phases"][1]["seconds"] >= 0.3
    assert "phase" not in seen[-1] and [p["phase"] for p in seen[-1]["phases"]][1:] == ["read weights", "self-check"]
    assert seen[-1]["seconds"] >= 0.6
    assert all(a["seconds"] <= b["seconds"] for a, b in pairwise(seen))


def test_the_log_has_the_phases_with_their_figures(caplog: pytest.LogCaptureFixture) -> None:
    engine = saying("x", phases=(("read weights", 0.3),))
    lines: list[str] = []
    with (
        caplog.at_level(logging.INFO, "onebox.start"),
        in_background(ServeOptions(CONFIG, port=0, drain_s=1), lambda _: engine, say=lines.append),
    ):
        pass
    found = [r for r in caplog.records if r.name == "onebox.start"]
    assert [r.__dict__["phase"] for r in found] == ["process", "read weights"]
    assert found[1].__dict__["seconds"] >= 0.3
    assert lines[-1].startswith("ready in")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_and_keeps_a_line_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, steps = Terminal(), iter([loading("read weights", 1.0, 0.4)] * 3)
    done = Health("ready", took=(("read weights", 1.2),))
    end_s = time.monotonic() + 20
    with told(lambda: next(steps, done), stream=stream):
        while not ("40%" in stream.getvalue() and "1.2 s" in stream.getvalue()) and time.monotonic() < end_s:
            time.sleep(0.05)
    shown = stream.getvalue()
    assert "read weights" in shown and "40%" in shown
    assert "  read weights: 1.2 s" in shown


# A real engine


def test_a_thread_engine_tells_its_phases_and_starts_with_nothing_counted() -> None:
    async def main() -> None:
        engine = ThreadEngine(CONFIG)
        task = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        assert engine.health().status == "starting" and engine.health().phase in ("libraries", "plan")
        await task
        health = engine.health()
        assert [p for p, _ in health.took] == ["libraries", "plan", "read weights", "self-check", "allocate memory"]
        stats = engine.stats()
        assert (stats.steps, stats.finished, stats.prompt_tokens, stats.pages_cached) == (0, 0, 0, 0)
        assert stats.pages_free == stats.pages_total and not any(stats.prefix.values())
        await engine.stop()

    asyncio.run(main())


def test_graphs_are_made_before_the_first_request() -> None:
    config = EngineConfig(str(TINY), device="cpu", max_num_seqs=3, max_model_len=256, cuda_graphs=True)
    heard: list[tuple[str, int, int]] = []
    engine = load_engine(config, lambda *told: heard.append(told))
    assert engine.captured is not None
    assert len(engine.captured._graphs) == 9  # 1, 2 and 3 answers, in three ways of sampling
    assert ("capture", 0, 9) in heard and heard[-1][0] == "capture"
