"""Public fakes: an engine that says what a script tells it to, for tests of what stands around an engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
        came_s = time.monotonic()
        try:
            await self._slots.acquire()
        finally:
            self._count(waiting=-1)
        self._count(running=1, slots_free=-1, prompt_tokens=len(request.prompt))
        ended, admitted_s = False, time.monotonic()
        try:
            await asyncio.sleep(self.prefill_s)
            async for output in self._outputs(request):
                ended = output.finish_reason is not None
                yield replace(output, waited_s=admitted_s - came_s)
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


@dataclass(frozen=True)
class Reply:
    """What a ScriptedServer answers: (seconds to wait, tokens) an event. `usage` says how tokens can be counted.

    `status` other than 200 refuses; `cut_after` events the connection is closed, or an error object sent with `error`.
    """

    events: Sequence[tuple[float, int]] = ()
    usage: Literal["ids", "continuous", "final", "none"] = "continuous"
    accepted: int | None = None
    rejected: int = 0
    status: int = 200
    cut_after: int | None = None
    error: str | None = None


@dataclass
class Stamps:
    """When a ScriptedServer got one request and when it sent what, by time.perf_counter."""

    received_s: float
    body: Mapping[str, Any]
    sent: list[tuple[float, int]] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.sent[0][0] - self.received_s


class ScriptedServer:
    """An OpenAI-compatible HTTP server of known latencies, for tests of what measures servers.

    `script(i, body)` is the Reply to the i-th generating request. A token is one word, of a prompt and of an answer.
    `metrics` is what GET /metrics answers; `refused` fields are answered with 400.
    """

    def __init__(self, script: Callable[[int, Mapping[str, Any]], Reply], *, refused: Sequence[str] = ()) -> None:
        self.script, self.refused = script, set(refused)
        self.stamps: list[Stamps] = []
        self.metrics = ""
        self.open, self.most_open = 0, 0
        self.url = ""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> ScriptedServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = next((int(v) for n, _, v in _headers(head) if n == "content-length"), 0)
            body = json.loads(await reader.readexactly(length)) if length else {}
            received_s, path = time.perf_counter(), head.split()[1]
            if path.endswith("/models"):
                self._whole(writer, 200, json.dumps({"data": [{"id": "scripted"}]}))
            elif path == "/metrics":
                self._whole(writer, 200, self.metrics)
            elif not path.endswith("/completions"):
                self._whole(writer, 404, json.dumps({"error": {"message": f"no {path}"}}))
            elif unknown := sorted(self.refused & {*body, *(body.get("stream_options") or {})}):
                self._whole(writer, 400, json.dumps({"error": {"message": f"Unsupported field {unknown[0]!r}"}}))
            else:
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                try:
                    await self._generate(writer, Stamps(received_s, body))
                finally:
                    self.open -= 1
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _whole(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(text.encode())}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + text.encode())

    async def _generate(self, writer: asyncio.StreamWriter, stamps: Stamps) -> None:
        reply = self.script(len(self.stamps), stamps.body)
        self.stamps.append(stamps)
        if reply.status != 200:
            self._whole(writer, reply.status, json.dumps({"error": {"message": "scripted refusal"}}))
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        chat = "messages" in stamps.body
        prompt = str([m["content"] for m in stamps.body["messages"]] if chat else stamps.body["prompt"])
        limit = int(stamps.body["max_tokens"])
        options = stamps.body.get("stream_options") or {}
        given = 0

        def usage() -> dict[str, Any]:
            made: dict[str, Any] = {"prompt_tokens": len(prompt.split()), "completion_tokens": given}
            if reply.accepted is not None:
                drafts = {"accepted_prediction_tokens": reply.accepted, "rejected_prediction_tokens": reply.rejected}
                made["completion_tokens_details"] = drafts
            return made

        def send(**event: Any) -> None:
            writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        if chat:
            send(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        for i, (wait_s, n) in enumerate(reply.events):
            if given >= limit:
                break
            await asyncio.sleep(wait_s)
            if reply.cut_after == i:
                if reply.error is not None:
                    send(error={"message": reply.error})
                return
            n = min(n, limit - given)
            given += n
            text = "word " * n
            choice: dict[str, Any] = {
                "index": 0,
                "finish_reason": None,
                **({"delta": {"content": text}} if chat else {"text": text}),
            }
            if reply.usage == "ids" and stamps.body.get("return_token_ids"):
                choice["token_ids"] = list(range(n))
            continuous = reply.usage == "continuous" and options.get("continuous_usage_stats")
            send(choices=[choice], **({"usage": usage()} if continuous else {}))
            stamps.sent.append((time.perf_counter(), n))
            await writer.drain()
        last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        send(choices=[{"index": 0, "finish_reason": "length" if given >= limit else "stop", **last}])
        if reply.usage != "none" and options.get("include_usage"):
            send(choices=[], usage=usage())
        writer.write(b"data: [DONE]\n\n")


def _headers(head: str) -> list[tuple[str, str, str]]:
    return [(n.strip().lower(), c, v.strip()) for n, c, v in (line.partition(":") for line in head.split("\r\n")[1:])]
