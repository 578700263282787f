"""What every API of the server shares: which model, what prompt, how much room, and the run of a request's answers.

Takes prompts and parameters, gives AnswerDeltas. Knows the engine and the text layer, no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from onebox.engine.client import EngineClient
from onebox.errors import ContextLengthError, EngineUnavailableError, ModelNotFoundError, OneboxError, RequestError
from onebox.request import Request
from onebox.server.chat import Answer, AnswerDelta, Message, Tokenizer, normalize_messages, prompt_thinking
from onebox.server.intake import Intake
from onebox.server.metrics import Metrics
from onebox.server.parsers import THINK_END, AnswerParser, Thinking

log = logging.getLogger(__name__)

Phase = Literal["starting", "ready", "draining", "failed"]
LONG_TEXT = 20_000  # characters; encoding more than this leaves the event loop (about 5 ms)
LONG_CHAT = 200  # messages and tools; rendering more leaves the event loop
FIRST_LOOK = 2**20  # characters; of a longer prompt the beginning may already be too long


@dataclass(frozen=True)
class Prompt:
    """A prompt as the engine takes it, and how its answer begins."""

    ids: tuple[int, ...]
    thinking: Thinking = "closed"
    turn_ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Steering:
    """What an answer is made to do beyond its grammar: think no longer than a budget.

    The closing tag is put into the answer and the engine goes on from there; the prefix cache makes that cheap.
    """

    thinking_budget: int  # tokens

    def due(self, answer: Answer) -> bool:
        """Whether thinking must be closed now."""
        assert answer.parser is not None
        return answer.parser.thinking and answer.usage.reasoning_tokens >= self.thinking_budget


@dataclass(frozen=True)
class Job:
    """One answer to produce: what the engine runs, what turns its tokens into text, and how it is steered."""

    request: Request
    answer: Answer
    steering: Steering | None = None


class Service:
    """One engine, one tokenizer, and the names they are served under.

    `defaults` are sampling parameters a body may leave out (the model's generation_config.json). `reasoning` splits
    thinking from the answer; `tools` reads tool calls. Raises RequestError for what a caller got wrong.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        served_names: Sequence[str],
        *,
        defaults: Mapping[str, Any] | None = None,
        reasoning: bool = True,
        tools: bool = True,
        template_options: Mapping[str, Any] | None = None,
        intake: Intake | None = None,
    ) -> None:
        if not served_names:
            raise ValueError("served_names is empty")
        self.engine = engine
        self.tokenizer = tokenizer
        self.served_names = tuple(served_names)
        self.defaults = dict(defaults or {})
        self.reasoning = reasoning
        self.tools = tools
        self.template_options = dict(template_options or {})
        self.intake = intake or Intake()
        self.metrics = Metrics(engine, self.served_names[0], self.intake.savings)
        self.created = int(time.time())
        self.phase: Phase = "starting"
        self.detail = "engine"  # what the current phase is busy with
        self.failure: OneboxError | None = None
        self.active = 0  # answers under way
        self._began_s = time.monotonic()
        self._started_s: float | None = None

    def start_s(self) -> float:
        """Seconds the start took, or has taken so far."""
        return round((self._started_s or time.monotonic()) - self._began_s, 3)

    async def start(self) -> None:
        """Starts the engine. A failure is kept in `failure` and raised."""
        try:
            await self.engine.start()
        except OneboxError as e:
            self.phase, self.failure, self.detail = "failed", e, str(e)
            raise
        except Exception as e:
            log.exception("the engine did not start")
            self.failure = EngineUnavailableError(f"The engine did not start: {type(e).__name__}: {e}")
            self.phase, self.detail = "failed", str(self.failure)
            raise self.failure from e
        self.phase, self.detail, self._started_s = "ready", "", time.monotonic()

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and waits until those under way are answered, `timeout_s` at most."""
        self.phase, self.detail = "draining", "shutting down"
        end = time.monotonic() + timeout_s
        while self.active and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def ready(self) -> bool:
        return self.phase == "ready" and self.engine.alive()

    def check_ready(self) -> None:
        if self.phase != "ready":
            raise EngineUnavailableError(f"The server is {self.phase} ({self.detail}); try again later.")
        if not self.engine.alive():
            raise EngineUnavailableError(f"The engine is not ready: {self.engine.health().detail}; try again later.")

    def model_name(self, asked: str | None) -> str:
        """The served name a request means. Raises ModelNotFoundError."""
        if not asked:
            return self.served_names[0]
        if asked not in self.served_names:
            raise ModelNotFoundError(
                f"The model '{asked[:200]}' does not exist here. Served: {', '.join(self.served_names)}.", param="model"
            )
        return asked

    async def encode(self, text: str) -> list[int]:
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(self.tokenizer.encode, text)
        return self.tokenizer.encode(text)

    async def encode_prompt(self, text: str, *, param: str) -> tuple[int, ...]:
        """Ids of a prompt. Raises ContextLengthError as soon as it is known to be too long: megabytes take seconds."""
        limit, look = self.engine.info.max_model_len, FIRST_LOOK
        while look < len(text):
            n = len(await self.encode(text[:look]))
            if n > 1.01 * limit + 100:  # where a text is cut, its last tokens may differ
                raise ContextLengthError(
                    f"This model's maximum context length is {limit} tokens, but the first {look} of {len(text)} "
                    f"characters of the prompt have {n} tokens. Shorten the prompt.",
                    param=param,
                )
            look *= 4
        return tuple(await self.encode(text))

    async def text_prompt(self, prompt: str | Sequence[int], *, param: str) -> Prompt:
        """A prompt of text or token ids. Raises RequestError for an id the model does not have."""
        if isinstance(prompt, str):
            return Prompt(await self.encode_prompt(prompt, param=param))
        vocab = self.engine.info.vocab
        for i in prompt:
            if not 0 <= i < vocab:
                raise RequestError(f"'{param}' holds token {i}; ids are 0 to {vocab - 1}.", param=param)
        return Prompt(tuple(prompt))

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> Prompt:
        """The prompt of a chat in the model's template."""

        def render() -> str:
            return self.tokenizer.render(
                normalize_messages(messages),
                tools=tools,
                options={**self.template_options, **(options or {})},
                add_generation_prompt=add_generation_prompt,
                continue_final=continue_final,
            )

        text = await asyncio.to_thread(render) if len(messages) + len(tools) > LONG_CHAT else render()
        ids = await self.encode_prompt(text, param="messages")
        return Prompt(ids, prompt_thinking(text), self.tokenizer.turn_ends(ids))

    def room(self, n_prompt: int, asked: int | None, *, param: str = "messages") -> int:
        """Tokens the answer may have: what is asked (None: no limit), or what the context leaves if that is less.

        Raises ContextLengthError when the prompt leaves no room at all.
        """
        limit = self.engine.info.max_model_len
        if n_prompt >= limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens, but the prompt has {n_prompt} tokens"
                f"{' and leaves none for the answer' if n_prompt == limit else ''}. Shorten the prompt.",
                param=param,
            )
        return min(limit - n_prompt, asked or limit)

    def parser(self, thinking: Thinking, tools: Sequence[Mapping[str, Any]], *, held: bool) -> AnswerParser:
        """`held`: a grammar says what follows thinking, and so what is thinking and where calls may stand."""
        if not self.reasoning or (held and thinking == "unknown"):
            thinking = "closed"
        return AnswerParser(
            thinking=thinking, tools=tools if self.tools and tools else None, calls_in_thinking=not held
        )

    async def run(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, AnswerDelta], None]:
        """Deltas of all jobs as they come, each with its job's index. Closing the iterator cancels what still runs.

        Raises QueueFullError, ContextLengthError or EngineUnavailableError of the first job that fails.
        """
        if len(jobs) == 1:
            async with aclosing(self._answer(jobs[0])) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return
        queue: asyncio.Queue[tuple[int, AnswerDelta] | Exception | None] = asyncio.Queue(maxsize=4 * len(jobs))

        async def pump(index: int, job: Job) -> None:
            try:
                async with aclosing(self._answer(job)) as deltas:
                    async for delta in deltas:
                        await queue.put((index, delta))
                await queue.put(None)
            except Exception as e:
                await queue.put(e)

        tasks = [asyncio.create_task(pump(i, job)) for i, job in enumerate(jobs)]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, job: Job) -> AsyncGenerator[AnswerDelta, None]:
        self.active += 1
        record = self.metrics.begin(len(job.request.prompt))
        try:
            request, answer = job.request, job.answer
            if job.steering is not None:
                answer.pause_at = job.steering.due
                answer.paused = job.steering.due(answer)
            while True:
                if answer.paused:
                    room = job.request.params.max_tokens - len(answer.taken)
                    forced = self.tokenizer.encode(f"\n{THINK_END}\n\n")
                    delta = answer.force(forced[: max(room, 0)], "length" if len(forced) >= room else None)
                    yield delta
                    if answer.done:
                        break
                    request = continued(job.request, answer.taken)
                async with aclosing(cast(Any, self.engine.generate(request))) as outputs:
                    async for output in outputs:
                        delta = answer.push(output)
                        record.step(answer.usage)
                        if not delta.empty:
                            yield delta
                        if answer.done or answer.paused:
                            break
                    else:
                        raise EngineUnavailableError("The engine ended this answer without a reason.")
                if answer.done:
                    break
            record.finish(str(delta.finish_reason), answer.usage)
        except Exception:
            record.finish("error", job.answer.usage)
            raise
        finally:
            self.active -= 1
            record.finish("abort", job.answer.usage)  # unless finished above: the caller went away


def continued(request: Request, taken: Sequence[int]) -> Request:
    """The request that goes on after thinking was closed for it. At least one token is left to generate."""
    params, grammar = request.params, request.grammar
    left = max(1, params.max_tokens - len(taken))
    return replace(
        request,
        id=f"{request.id}-{len(taken)}",
        prompt=(*request.prompt, *taken),
        grammar=None if grammar is None else replace(grammar, start_after=None),
        params=replace(params, max_tokens=left, min_tokens=min(left, max(0, params.min_tokens - len(taken)))),
    )


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
