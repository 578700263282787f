"""Prompts on their way in: guard, then compression, in a worker process. Takes messages or text and what a body asks
for, gives messages or text to go on with and a Report; the details are kept as a trace.

Both are arithmetic of milliseconds to minutes. A process, not a thread, so that the event loop keeps its interpreter
lock, and so that work whose client hung up, or that takes too long, ends at once: the process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import anyio
import msgspec
from anyio import BrokenWorkerProcess, CapacityLimiter, to_process

from onebox.errors import (
    BlockedError,
    ConfigError,
    EngineUnavailableError,
    NotServedError,
    OneboxError,
    PromptError,
    QueueFullError,
    RequestError,
)
from onebox.server.owners import owner
from onebox.server.protocol import CompressMethod, CompressOptions, GuardPolicy
from onebox.server.traces import Traces

if TYPE_CHECKING:
    from onebox.prompt import CompressedPrompt, Compressor
    from onebox.prompt.security import Guard

log = logging.getLogger(__name__)

N_PROCESSES = 2
MAX_WAITING = 64
TIMEOUT_S = 60.0
DEFAULT_RATE = 0.5
encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class IntakeOptions:
    """What is done when a body does not say. `compress_over` in tokens: longer prompts are shortened to it.

    `scorer` is the folder or id of the model that methods other than auto score with; llmlingua2 must have one, for the
    others it is the bundled model if not given.
    """

    compress_over: int | None = None
    method: CompressMethod = "auto"
    scorer: str | None = None
    guard: GuardPolicy | None = None
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        def check(ok: bool, flag: str, want: str, got: object) -> None:
            if not ok:
                raise ConfigError(f"{flag} must be {want}, got {got!r}.")

        over = self.compress_over
        check(over is None or over >= 1, "--compress-over", "a number of tokens above 0", over)
        methods, policies = get_args(CompressMethod), get_args(GuardPolicy)
        check(self.method in methods, "--compress-method", f"one of {', '.join(methods)}", self.method)
        check(self.guard is None or self.guard in policies, "--guard", f"one of {', '.join(policies)}", self.guard)
        if needs_scorer(self.method) and not self.scorer:
            raise ConfigError(f"--compress-method {self.method} needs --compress-model, a token classifier.")


def needs_scorer(method: CompressMethod) -> bool:
    """Whether no model that comes with the package can do it."""
    return method == "llmlingua2"


@dataclass(frozen=True)
class Task:
    """One prompt for a worker: plain values, so that it can be sent. Exactly one of messages, documents, prompt."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    documents: list[str] | None = None
    instruction: str | None = None
    compress: dict[str, Any] | None = None  # fields of CompressOptions
    guard: GuardPolicy | None = None
    best_effort: bool = False  # whether the target may be passed where protected text alone is longer
    scorer: str | None = None
    tokenizer: str | None = None  # a tokenizer.json to count with; None: the bundled one


@dataclass(frozen=True)
class Done:
    """What a worker made of a Task. `error` in place of all else when the library refused."""

    messages: list[dict[str, Any]] | None = None
    text: str = ""
    compression: dict[str, Any] | None = None
    guard: dict[str, Any] | None = None
    trace: bytes = b"{}"
    error: tuple[Literal["missing", "refused"], str] | None = None


@dataclass(frozen=True)
class Report:
    """What a response's usage says of compression and guard: figures, and where the details are."""

    trace_id: str
    compression: Mapping[str, Any] | None = None  # method, status, tokens_before, tokens_after
    guard: Mapping[str, Any] | None = None  # policy, action, flagged, score

    def usage(self) -> dict[str, Any]:
        parts = {"trace_id": self.trace_id, "compression": self.compression, "guard": self.guard}
        return {"onebox": {name: part for name, part in parts.items() if part is not None}}

    def headers(self) -> dict[str, str]:
        headers = {"X-Onebox-Trace": self.trace_id}
        if (c := self.compression) is not None:
            headers["X-Onebox-Compression"] = f"{c['tokens_before']} -> {c['tokens_after']} tokens, {c['status']}"
        if (g := self.guard) is not None:
            headers["X-Onebox-Guard"] = f"{g['action']}, score {g['score']}"
        return headers


@dataclass
class Savings:
    """Totals since start, for the metrics."""

    compressed: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    seconds: float = 0.0
    abandoned: int = 0  # ended because the client hung up or the time was over
    guarded: dict[str, int] = field(default_factory=dict)  # by action


class Intake:
    """Guard and compression for one server."""

    def __init__(
        self, options: IntakeOptions | None = None, *, traces: Traces | None = None, tokenizer: str | None = None
    ) -> None:
        self.options = options or IntakeOptions()
        self.traces = traces or Traces()
        self.savings = Savings()
        self._tokenizer = tokenizer
        self._limiter: CapacityLimiter | None = None

    async def warm(self) -> None:
        """Loads what the server's own compression and guard need, so that the first prompt does not wait for it."""
        if self.wanted(None, None):
            with contextlib.suppress(RequestError):  # what is wrong is told to the first prompt
                await self._run(self._task(None, None, prompt="A first prompt."))

    def wanted(self, compress: CompressOptions | bool | None, guard: GuardPolicy | Literal[False] | None) -> bool:
        """Whether a prompt has to be looked at at all."""
        return self._asked(compress) is not None or self._policy(guard) is not None

    async def messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        compress: CompressOptions | bool | None,
        guard: GuardPolicy | Literal[False] | None,
    ) -> tuple[list[dict[str, Any]], Report]:
        """Messages to go on with. Raises BlockedError, QueueFullError, or RequestError for what cannot be done."""
        done, report = await self._work(self._task(compress, guard, messages=[dict(m) for m in messages]))
        assert done.messages is not None
        return done.messages, report

    async def text(
        self,
        prompt: str,
        compress: CompressOptions | bool | None,
        guard: GuardPolicy | Literal[False] | None,
    ) -> tuple[str, Report]:
        """As `messages`, for a plain prompt: a guard can judge it, but has no place to put a note."""
        done, report = await self._work(self._task(compress, guard, prompt=prompt))
        return done.text, report

    async def compress(self, options: CompressOptions, **source: Any) -> tuple[Done, Report]:
        """One compression by itself, with no more than the server's scorer taken from its defaults."""
        return await self._work(self._task(options, False, **source))

    async def guard(self, policy: GuardPolicy, **source: Any) -> tuple[Done, Report]:
        """One verdict by itself; `block` reports, and raises nothing."""
        return await self._work(self._task(False, policy, **source), refuse=False)

    def _asked(self, compress: CompressOptions | bool | None) -> dict[str, Any] | None:
        options = self.options
        if compress is False or (compress is None and options.compress_over is None):
            return None
        given = compress.model_dump(exclude_none=True) if isinstance(compress, CompressOptions) else {}
        asked: dict[str, Any] = {"method": options.method, **given}
        if not {"rate", "target_tokens", "over_tokens"} & set(asked):
            asked |= {"over_tokens": options.compress_over} if options.compress_over else {"rate": DEFAULT_RATE}
        if needs_scorer(asked["method"]) and not options.scorer:
            raise RequestError(
                f"'compress.method' {asked['method']!r} needs a server started with --compress-model; others do not.",
                param="compress.method",
            )
        return asked

    def _policy(self, guard: GuardPolicy | Literal[False] | None) -> GuardPolicy | None:
        return None if guard is False else guard or self.options.guard

    def _task(
        self, compress: CompressOptions | bool | None, guard: GuardPolicy | Literal[False] | None, **source: Any
    ) -> Task:
        return Task(
            compress=self._asked(compress),
            guard=self._policy(guard),
            best_effort=not isinstance(compress, CompressOptions),
            scorer=self.options.scorer,
            tokenizer=self._tokenizer,
            **source,
        )

    async def _work(self, task: Task, *, refuse: bool = True) -> tuple[Done, Report]:
        begun_s = time.perf_counter()
        done = await self._run(task)
        self.savings.seconds += time.perf_counter() - begun_s
        return done, self._report(done, refuse=refuse)

    async def _run(self, task: Task) -> Done:
        if self._limiter is None:
            self._limiter = CapacityLimiter(N_PROCESSES)  # belongs to the running event loop
        if self._limiter.statistics().tasks_waiting >= MAX_WAITING:
            raise QueueFullError(f"{MAX_WAITING} prompts wait to be compressed or guarded; try again later.")
        savings = self.savings
        try:
            with anyio.fail_after(self.options.timeout_s):
                done = await to_process.run_sync(work, task, cancellable=True, limiter=self._limiter)
        except TimeoutError as e:
            savings.abandoned += 1
            raise EngineUnavailableError(
                f"Compression or guard took longer than {self.options.timeout_s:g} s; send a shorter prompt, or "
                "'compress': false."
            ) from e
        except asyncio.CancelledError:
            savings.abandoned += 1
            raise
        except BrokenWorkerProcess as e:
            log.error("a compression worker ended by itself: %s", e)
            raise EngineUnavailableError("The process that compresses prompts ended by itself; try again.") from e
        if done.error is not None:
            raise (
                NotServedError(done.error[1])
                if done.error[0] == "missing"
                else RequestError(done.error[1], param="compress" if task.compress else "guard")
            )
        return done

    def _report(self, done: Done, *, refuse: bool) -> Report:
        report = Report(f"trace-{uuid.uuid4().hex}", done.compression, done.guard)
        trace = done.trace.replace(b"{", b'{"id":"%s",' % report.trace_id.encode(), 1)
        self.traces.put(report.trace_id, trace, owner.get())
        savings = self.savings
        if (c := done.compression) is not None:
            savings.compressed += c["status"] == "compressed"
            savings.tokens_before += c["tokens_before"]
            savings.tokens_after += c["tokens_after"]
        if (g := done.guard) is not None:
            savings.guarded[g["action"]] = savings.guarded.get(g["action"], 0) + 1
            if refuse and g["action"] == "block":
                raise BlockedError(
                    f"The guard refused this prompt: score {g['score']} of at most 1, refused from {g['threshold']}. "
                    f"Details: /v1/onebox/traces/{report.trace_id}.",
                    param="messages",
                )
        return report


# In the worker


def work(task: Task) -> Done:
    """Guard, then compression. Runs in a worker process; what the library refuses comes back as `error`."""
    messages, text = task.messages, task.prompt or ""
    guard: dict[str, Any] | None = None
    compression: dict[str, Any] | None = None
    trace: dict[str, Any] = {"created": int(time.time())}
    try:
        if task.guard is not None:
            verdict = guard_of(task.guard).check(messages if messages is not None else text)
            details = verdict.to_dict()
            guard = {name: details[name] for name in ("policy", "action", "flagged", "score", "threshold")}
            trace["guard"] = details
            if messages is not None:
                messages = verdict.messages
        if task.compress is not None and not (guard and guard["action"] == "block"):
            result = shorten(task, messages, text)
            messages, text = result.messages, result.text
            compression = {
                "method": result.method,
                "status": result.status,
                "tokens_before": result.original_tokens,
                "tokens_after": result.tokens,
            }
            trace["compression"] = compression | result.trace.to_dict()
    except PromptError as e:
        return Done(error=("refused", str(e)))
    except (ImportError, OneboxError) as e:
        return Done(error=("missing", f"{e}" if isinstance(e, OneboxError) else f"Not installed here: {e}."))
    return Done(messages, text, compression, guard, json.dumps(trace, ensure_ascii=False).encode())


def shorten(task: Task, messages: list[dict[str, Any]] | None, text: str) -> CompressedPrompt:
    """The compression a task asks for. Raises PromptError."""
    from onebox.prompt.budget import counter_of

    assert task.compress is not None
    asked, counter = dict(task.compress), counter_of(tokenizer_of(task.tokenizer))
    source: dict[str, Any]
    if messages is not None:
        source, texts = {"messages": messages}, message_texts(messages)
    else:
        texts = task.documents if task.documents is not None else [text]
        source = {"documents": texts} if task.documents is not None else {"prompt": text}
        source["instruction"] = task.instruction
    rate, target, over = asked.get("rate"), asked.get("target_tokens"), asked.get("over_tokens")
    total = counter("\n\n".join(texts))
    if over is not None and total <= over:
        rate, target = 1.0, None
    elif rate is None and target is None:
        target = over
    if target is not None and task.best_effort:  # a rate is approached where protected text takes more
        rate, target = min(1.0, target / max(total, 1)), None
    compressor = compressor_of(asked["method"], task.scorer, tuple(sorted((asked.get("roles") or {}).items())))
    return compressor.compress(
        **source, rate=rate, target_tokens=target, question=asked.get("question"), tokenizer=counter
    )


def message_texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    contents = [m.get("content") for m in messages]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    found = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part for part in parts]
    return [text for text in found if isinstance(text, str)]


@lru_cache(maxsize=8)
def compressor_of(method: CompressMethod, scorer: str | None, roles: tuple[tuple[str, str], ...]) -> Compressor:
    from onebox.prompt import Compressor
    from onebox.prompt.command import build_compressor

    if roles:
        return Compressor(method, scorer=compressor_of(method, scorer, ()).scorer, roles=dict(roles))
    return build_compressor(method, scorer if method != "auto" else None)


@lru_cache(maxsize=2)
def tokenizer_of(file: str | None) -> Any:
    if file is None:
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(file)


@lru_cache(maxsize=4)
def guard_of(policy: GuardPolicy) -> Guard:
    from onebox.prompt.security import Guard

    return Guard(policy)
