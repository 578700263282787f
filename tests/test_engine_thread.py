"""The engine in its thread, as a server uses it: many at once, hang-ups, failures, stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.engine.thread import ThreadEngine
from onebox.errors import CheckpointError, ContextLengthError, EngineUnavailableError
from onebox.request import Output, Request, SamplingParams
from tests.twins import make_twin


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("twin")
    make_twin(folder)
    return EngineConfig(model=str(folder), draft_len=2, max_num_seqs=4, prefix_caching=False)


def ask(name: str, max_tokens: int = 20, prompt: tuple[int, ...] = (5, 6, 7)) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


async def collect(outputs: AsyncIterator[Output]) -> list[int]:
    return [t async for o in outputs for t in o.tokens]


def test_many_requests_at_once_get_what_each_gets_alone(config: EngineConfig) -> None:
    async def main() -> None:
        engine = ThreadEngine(config)
        await engine.start()
        alone = await collect(engine.generate(ask("alone")))
        together = await asyncio.gather(*(collect(engine.generate(ask(f"r{i}"))) for i in range(10)))
        assert all(tokens == alone for tokens in together)
        stats = engine.stats()
        assert (stats.finished, stats.running, stats.waiting) == (11, 0, 0)
        await engine.stop()

    asyncio.run(main())


def test_a_closed_stream_frees_its_slot_within_one_step(config: EngineConfig) -> None:
    async def main() -> None:
        engine = ThreadEngine(config)
        await engine.start()
        long = engine.generate(ask("long", max_tokens=900))
        other = asyncio.create_task(collect(engine.generate(ask("other", max_tokens=200))))
        async for _ in long:
            break
        while engine.stats().running < 2:
            await asyncio.sleep(0)
        await long.aclose()  # type: ignore[attr-defined]
        steps = engine.stats().steps
        while engine.stats().cancelled == 0:
            await asyncio.sleep(0)
        assert engine.stats().steps <= steps + 1
        assert len(await other) == 200
        stats = engine.stats()
        assert (stats.slots_free, stats.pages_free) == (stats.slots_total, stats.pages_total)
        await engine.stop()

    asyncio.run(main())


def test_refusals_reach_the_caller_before_any_output(config: EngineConfig) -> None:
    async def main() -> None:
        engine = ThreadEngine(config)
        with pytest.raises(EngineUnavailableError, match="not started"):
            await collect(engine.generate(ask("early")))
        assert not engine.alive()
        await engine.start()
        with pytest.raises(ContextLengthError):
            await collect(engine.generate(ask("r", prompt=tuple([5] * 5000))))
        assert await collect(engine.generate(ask("r")))
        await engine.stop()
        with pytest.raises(EngineUnavailableError, match="stopped"):
            await collect(engine.generate(ask("late")))

    asyncio.run(main())


def test_a_bad_checkpoint_fails_the_start(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(CheckpointError):
        asyncio.run(ThreadEngine(replace(config, model=str(empty))).start())


def test_stop_and_a_failing_step_end_what_is_in_flight(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(end_by_failure: bool) -> None:
        engine = ThreadEngine(config)
        await engine.start()
        stream = engine.generate(ask("r", max_tokens=900))
        async for _ in stream:
            break
        if end_by_failure:

            def fail(self: Engine) -> list[Output]:
                raise RuntimeError("device lost")

            monkeypatch.setattr(Engine, "step", fail)
        else:
            await engine.stop()
        with pytest.raises(EngineUnavailableError, match="failed" if end_by_failure else "stopped"):
            await collect(stream)
        assert not engine.alive()

    asyncio.run(main(False))
    asyncio.run(main(True))


def test_a_step_that_hangs_makes_the_engine_not_alive(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    step = Engine.step

    def slow(self: Engine) -> list[Output]:
        time.sleep(0.6)
        return step(self)

    async def main() -> None:
        engine = ThreadEngine(replace(config, stall_s=0.2))
        await engine.start()
        assert engine.alive()
        monkeypatch.setattr(Engine, "step", slow)
        task = asyncio.create_task(collect(engine.generate(ask("r", max_tokens=1))))
        await asyncio.sleep(0.4)
        assert not engine.alive()
        await task
        await engine.stop()

    asyncio.run(main())


def test_a_slow_reader_gets_what_has_waited_at_once_and_loses_nothing(config: EngineConfig) -> None:
    async def main() -> None:
        engine = ThreadEngine(config)
        await engine.start()
        quick = [o async for o in engine.generate(ask("quick", max_tokens=60))]
        slow = []
        async for output in engine.generate(ask("slow", max_tokens=60)):
            slow.append(output)
            while engine.stats().running:  # all the rest waits by then
                await asyncio.sleep(0.01)
        assert len(slow) <= 3 < len(quick)
        assert [t for o in slow for t in o.tokens] == [t for o in quick for t in o.tokens]
        assert (slow[-1].finish_reason, slow[-1].drafted) == (quick[-1].finish_reason, quick[-1].drafted)
        await engine.stop()

    asyncio.run(main())


def test_acceptance_by_position_adds_up_to_the_drafts_kept(config: EngineConfig) -> None:
    async def main() -> None:
        engine = ThreadEngine(config)
        await engine.start()
        await asyncio.gather(*(collect(engine.generate(ask(f"r{i}", max_tokens=30))) for i in range(3)))
        stats = engine.stats()
        assert sum(stats.accepted_per_pos) == stats.accepted_tokens
        assert len(stats.accepted_per_pos) == 2
        assert stats.accepted_per_pos[0] >= stats.accepted_per_pos[1]
        assert stats.draft_windows <= stats.drafted_tokens <= 2 * stats.draft_windows
        await engine.stop()

    asyncio.run(main())
