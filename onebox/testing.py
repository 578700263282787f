"""Public fakes: an engine that says what a script tells it to, for tests of what stands around an engine."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from onebox.engine.client import MAX_JOINED, EngineInfo, EngineStats, Health, StartClock
from onebox.errors import EngineUnavailableError, OneboxError, QueueFullError
from onebox.request import FinishReason, Output, Request, TokenLogprob

Script = Callable[[Request], Sequence[int]]


class FakeEngine:
    """An EngineClient whose answers are `script(request)`, then the end-of-text token.

    Each step takes `step_s` and gives `tokens_per_step` tokens (1 verified, the rest counted as kept drafts); the first
    comes after `prefill_s`. `paced`: steps go on while their Outputs wait to be read, as those of an engine elsewhere
    do, and what has waited comes as one Output. Beyond `max_num_seqs` requests wait, beyond `max_waiting` they are
    refused. `fail_after` ends each answer with an error after that many tokens; `fail_start` is what start() raises.
    `phases` are those of the start, each with its seconds.
    """

    def __init__(
        self,
        script: Script | Sequence[int],
        *,
        vocab: int,
        eos: int,
        tokens_per_step: int = 1,
        step_s: float = 0.0,
        prefill_s: float = 0.0,
        paced: bool = False,
        max_model_len: int = 8192,
        max_num_seqs: int = 16,
        max_waiting: int = 256,
        fail_after: int | None = None,
        fail_start: OneboxError | None = None,
        phases: Sequence[tuple[str, float]] = (),
    ) -> None:
        self.script: Script = script if callable(script) else lambda _: script
        self.tokens_per_step, self.step_s, self.prefill_s = tokens_per_step, step_s, prefill_s
        self.paced = paced
        self.max_waiting, self.fail_after, self.fail_start = max_waiting, fail_after, fail_start
        self.phases, self._clock = phases, StartClock("process")
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.is_alive = False
        self._info = EngineInfo("fake", "fake", vocab, max_model_len, max_num_seqs, tokens_per_step - 1, (eos,), "cpu")
        self._counts = Counter(slots_total=max_num_seqs, slots_free=max_num_seqs, pages_total=100, pages_free=100)
        self._kept_per_pos = [0] * (tokens_per_step - 1)
        self._slots = asyncio.Semaphore(max_num_seqs)

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def start(self) -> None:
        await asyncio.sleep(0)
        self._clock = StartClock("process")
        for name, seconds in self.phases:
            for i in range(10):
                self._clock(name, i, 10)
                await asyncio.sleep(seconds / 10)
        if self.fail_start is not None:
            raise self.fail_start
        self._clock.end()
        self.is_alive = True

    async def stop(self) -> None:
        self.is_alive = False

    def alive(self) -> bool:
        return self.is_alive

    def health(self) -> Health:
        clock = self._clock
        if self.is_alive:
            return Health("ready", took=clock.took)
        if self.phases:
            return Health("starting", "the engine starts", clock.phase, clock.share, clock.seconds, clock.took)
        return Health("failed", "the engine is stopped")

    def stats(self) -> EngineStats:
        return EngineStats(**self._counts, accepted_per_pos=tuple(self._kept_per_pos), prefix={})

    def _count(self, **changes: int) -> None:
        for name, change in changes.items():
            self._counts[name] += change

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        if not self.is_alive:
            raise EngineUnavailableError("The engine is stopped.")
        if self._slots.locked() and self._counts["waiting"] >= self.max_waiting:
            raise QueueFullError(f"{self._counts['waiting']} requests are waiting; try again later.")
        self.requests.append(request)
        self._count(waiting=1)
        try:
            await self._slots.acquire()
        finally:
            self._count(waiting=-1)
        self._count(running=1, slots_free=-1, prompt_tokens=len(request.prompt))
        ended = False
        try:
            await asyncio.sleep(self.prefill_s)
            async for output in self._outputs(request):
                ended = output.finish_reason is not None
                yield output
        finally:
            self._slots.release()
            self._count(running=-1, slots_free=1, finished=int(ended), cancelled=int(not ended))
            if not ended:
                self.cancelled.append(request.id)

    async def _outputs(self, request: Request) -> AsyncIterator[Output]:
        script, params, given, drafted = list(self.script(request)), request.params, 0, 0
        begun_s, steps_done = time.perf_counter(), 0
        while True:
            behind = self.paced and (time.perf_counter() - begun_s) / self.step_s > steps_done + 1
            await asyncio.sleep(0 if behind else self.step_s)
            due = int((time.perf_counter() - begun_s) / self.step_s) - steps_done if self.paced and self.step_s else 1
            steps = max(1, min(due, MAX_JOINED // self.tokens_per_step))
            steps_done += steps
            end = min(given + steps * self.tokens_per_step, params.max_tokens)
            tokens = tuple(script[given:end])
            stop = next((i for i, t in enumerate(tokens) if t in params.stop_token_ids), None)
            reason: FinishReason | None = None
            stop_token = None
            if stop is not None:
                reason, stop_token, tokens = "stop", tokens[stop], tokens[:stop]
            elif end > len(script):
                reason, stop_token = "stop", self._info.eos_token_ids[0]
            elif end == params.max_tokens:
                reason = "length"
            given += len(tokens)
            drafted += steps * (self.tokens_per_step - 1)
            for i in range(self.tokens_per_step - 1):
                self._kept_per_pos[i] += steps - (reason is not None and i == self.tokens_per_step - 2)
            self._count(draft_windows=steps * (self.tokens_per_step > 1), steps=steps, generated_tokens=len(tokens))
            if self.fail_after is not None and given >= self.fail_after:
                yield Output(request.id, tokens, finish_reason="error", error="scripted failure")
                return
            yield Output(
                request.id,
                tokens,
                logprobs=tuple(self._logprob(t, params.logprobs) for t in tokens)
                if params.logprobs is not None
                else (),
                finish_reason=reason,
                stop_token=stop_token,
                prompt_tokens=len(request.prompt),
                drafted=drafted,
                accepted=max(0, drafted if reason is None else drafted - 1),
                accepted_per_pos=self._kept(drafted, ended=reason is not None),
            )
            if reason is not None:
                return

    def _kept(self, drafted: int, *, ended: bool) -> tuple[int, ...]:
        """Every draft is kept but the very last one."""
        k = self.tokens_per_step - 1
        return tuple(drafted // k - (ended and i == k - 1) for i in range(k))

    @staticmethod
    def _logprob(token: int, n: int) -> TokenLogprob:
        top = tuple((token + i, -0.5 - i) for i in range(n))
        return TokenLogprob(token, -0.5, top)
