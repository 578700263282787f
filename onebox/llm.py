"""The offline API: prompts in, whole answers out, batched, in this process. Familiar to users of vLLM's `LLM`."""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from threading import current_thread, main_thread
from types import TracebackType
from typing import Any, TypeAlias

from onebox import request as engine_request
from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.errors import ConfigError, RequestError
from onebox.request import INT64, Output, Request
from onebox.server.chat import Answer, Message, Tokenizer, normalize_messages

Prompt: TypeAlias = str | Sequence[int]


@dataclass(frozen=True)
class SamplingParams(engine_request.SamplingParams):
    """The engine's parameters, and those that need text: how many answers a prompt, and where they stop.

    With a seed, answer i of a prompt uses `seed + i`. `stop` is a string or several; the text ends before it unless
    `include_stop_str_in_output`. Lists and mappings are taken where the engine has tuples.
    """

    n: int = 1
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        bias = self.logit_bias
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "logit_bias", tuple((int(t), float(b)) for t, b in pairs or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "stop", stop)
        super().__post_init__()
        if self.n < 1:
            raise RequestError(f"'n' must be at least 1, got {self.n}.", param="n")
        if not all(isinstance(s, str) and s for s in stop):
            raise RequestError(f"'stop' must be strings that are not empty, got {stop!r}.", param="stop")

    def of_answer(self, index: int) -> engine_request.SamplingParams:
        """What the engine runs for answer `index` of a prompt."""
        values = {f.name: getattr(self, f.name) for f in fields(engine_request.SamplingParams)}
        if self.seed is not None:
            values["seed"] = (self.seed + index + INT64) % (2 * INT64) - INT64
        return engine_request.SamplingParams(**values)


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token, its rank where it is among those reported, and its text."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `logprobs[i]` maps token i and its best alternatives to their log probabilities."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """All answers to one prompt. `prompt` is None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass
class Task:
    """One answer on its way."""

    request: Request
    answer: Answer
    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[engine_request.TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def push(self, output: Output) -> None:
        delta = self.answer.push(output)
        self.text += delta.content
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class LLM:
    """A model in this process. `options` are EngineConfig's fields.

    Use it as a context manager, or call `close`, to free the device. Not thread-safe.
    """

    def __init__(self, model: str, **options: Any) -> None:
        known = {f.name for f in fields(EngineConfig)} - {"model", "single_process", "stall_s"}
        if unknown := set(options) - known:
            raise ConfigError(f"LLM: unknown option {', '.join(sorted(unknown))}. Known: {', '.join(sorted(known))}.")
        config = EngineConfig(model=str(model), **options)
        self.tokenizer = Tokenizer.from_folder(Path(config.model))
        self._engine: Engine | None = Engine(config)
        self._n = 0

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ConfigError("This LLM is closed; make another.")
        return self._engine

    def close(self) -> None:
        """Let go of weights and cache. More than once is fine."""
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: engine_request.SamplingParams | Sequence[engine_request.SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue text or token ids: one RequestOutput a prompt, in order.

        `sampling_params` is one for all or one a prompt. `progress` draws a bar when stderr is a terminal. Ctrl-C ends
        the step under way, cancels what is left and raises KeyboardInterrupt. Raises RequestError for a prompt or
        parameters that cannot be run; nothing is left running then.
        """
        found = list_of_prompts(prompts)
        params = list_of_params(sampling_params, len(found))
        groups = [self._tasks(p, s) for p, s in zip(found, params, strict=True)]
        self._run([task for group in groups for task in group], progress=progress)
        return [
            self._result(prompt if isinstance(prompt, str) else None, group)
            for prompt, group in zip(found, groups, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: engine_request.SamplingParams | Sequence[engine_request.SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, in the model's template. Thinking and tool calls stay in the text."""
        if not messages:
            raise RequestError("'messages' is empty.", param="messages")
        several: Any = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [
            self.tokenizer.render(
                normalize_messages(conversation),
                tools=tools,
                options=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final=continue_final_message,
            )
            for conversation in several
        ]
        return self.generate(prompts, sampling_params, progress=progress)

    def _tasks(self, prompt: Prompt, given: engine_request.SamplingParams) -> list[Task]:
        params = given if isinstance(given, SamplingParams) else as_full(given)
        ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        self._n += 1
        tasks = []
        for i in range(params.n):
            request = Request(f"{self._n - 1}-{i}", ids, params.of_answer(i), snapshot_at=self.tokenizer.turn_ends(ids))
            answer = Answer(
                self.tokenizer,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special=params.skip_special_tokens,
                min_tokens=params.min_tokens,
                stop_token_ids=params.stop_token_ids,
            )
            tasks.append(Task(request, answer, i))
        return tasks

    def _run(self, tasks: Sequence[Task], *, progress: bool) -> None:
        """Step until all are answered. Whatever ends it early, the engine is left with none of them."""
        engine, waiting, running = self.engine, deque(tasks), dict[str, Task]()
        seats = engine.scheduler.max_num_seqs
        seats += min(seats, engine.config.max_waiting)  # the next ones wait in the engine, the rest here
        try:
            with bar(len(tasks), shown=progress and sys.stderr.isatty()) as advance, interruptible() as interrupted:
                while (waiting or running) and not interrupted():
                    while waiting and len(running) < seats:
                        task = waiting.popleft()
                        engine.add(task.request)
                        running[task.request.id] = task
                    for output in engine.step():
                        if output.request_id in running:
                            task = running[output.request_id]
                            if output.refused:
                                raise RequestError(output.error or "The request was refused.")
                            task.push(output)
                            if task.answer.done:
                                engine.cancel(output.request_id)  # a stop string may end it before the engine knows
                                del running[output.request_id]
                            advance(len(output.tokens), task.answer.done)
                if interrupted():
                    raise KeyboardInterrupt
        finally:
            for request_id in running:
                engine.cancel(request_id)

    def _result(self, prompt: str | None, group: Sequence[Task]) -> RequestOutput:
        first = group[0]
        return RequestOutput(
            request_id=first.request.id.partition("-")[0],
            prompt=prompt,
            prompt_token_ids=first.request.prompt,
            outputs=[self._answer(task) for task in group],
            num_cached_tokens=first.answer.usage.cached_tokens,
        )

    def _answer(self, task: Task) -> CompletionOutput:
        wanted = task.request.params.logprobs is not None
        return CompletionOutput(
            index=task.index,
            text=task.text,
            token_ids=tuple(task.tokens),
            finish_reason=task.finish_reason,
            stop_reason=task.stop_reason,
            cumulative_logprob=sum(p.logprob for p in task.logprobs) if wanted else None,
            logprobs=[self._logprobs(p) for p in task.logprobs] if wanted else None,
        )

    def _logprobs(self, p: engine_request.TokenLogprob) -> dict[int, Logprob]:
        ranked = {t: Logprob(v, rank, self.tokenizer.decode([t])) for rank, (t, v) in enumerate(p.top, 1)}
        return {p.token: Logprob(p.logprob, None, self.tokenizer.decode([p.token]))} | ranked


def as_full(given: engine_request.SamplingParams) -> SamplingParams:
    return SamplingParams(**{f.name: getattr(given, f.name) for f in fields(engine_request.SamplingParams)})


def list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as several. Raises RequestError for what is neither text nor ids."""
    several: Any = [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else prompts
    for i, p in enumerate(several):
        ids = isinstance(p, Sequence) and not isinstance(p, str | bytes) and all(isinstance(t, int) for t in p)
        if not (isinstance(p, str) or ids):
            raise RequestError(f"Prompt {i} must be text or a list of token ids, got {p!r:.80}.", param="prompts")
    return list(several)


def list_of_params(
    given: engine_request.SamplingParams | Sequence[engine_request.SamplingParams] | None, n: int
) -> list[engine_request.SamplingParams]:
    if given is None or isinstance(given, engine_request.SamplingParams):
        return [given or SamplingParams()] * n
    if len(given) != n:
        raise RequestError(f"{len(given)} sampling params for {n} prompts; give one, or one a prompt.", param="n")
    return list(given)


@contextmanager
def bar(total: int, *, shown: bool) -> Iterator[Callable[[int, bool], None]]:
    """Called with the tokens of each output, and whether it was an answer's last."""
    if not shown:
        yield lambda tokens, last: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[speed]}"), console=Console(stderr=True)) as shown_bar:
        task, seen = shown_bar.add_task("answers", total=total, speed=""), 0

        def advance(tokens: int, last: bool) -> None:
            nonlocal seen
            seen += tokens
            elapsed_s = shown_bar.tasks[0].elapsed or 0
            shown_bar.update(task, advance=int(last), speed=f"{seen / elapsed_s:.0f} tokens/s" if elapsed_s else "")

        yield advance


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag, so that a step is never left half done; a second one interrupts at once."""
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    caught = False

    def catch(number: int, frame: Any) -> None:
        nonlocal caught
        if caught:
            raise KeyboardInterrupt
        caught = True

    signal.signal(signal.SIGINT, catch)
    try:
        yield lambda: caught
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
