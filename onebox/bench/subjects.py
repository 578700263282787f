"""What is asked for answers: an engine in this process, or any OpenAI-compatible server. Messages in, a Reply out.

Answers are greedy and without thinking. Both kinds tell how much of the prompt came from a cache, when the first token
came, and, where it can be known, the bytes that are kept for later requests.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import openai

from onebox.engine.engine import Engine
from onebox.errors import ConfigError
from onebox.request import Request, SamplingParams
from onebox.server.chat import Tokenizer

Message = Mapping[str, str]


@dataclass(frozen=True)
class Reply:
    """One answer. Times in seconds from the request on; `cached_tokens` of the prompt were not computed again."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    ttft_s: float
    total_s: float


class Subject(Protocol):
    """What is asked."""

    name: str
    max_context: int | None  # tokens of prompt and answer; None: not known

    def ask(self, messages: Sequence[Message], max_tokens: int) -> Reply:
        """One greedy answer. Raises OneboxError when there is none."""

    def held_bytes(self) -> int | None:
        """Bytes of KV pages and state snapshots that stand for requests to come; None: not known."""


class EngineSubject:
    """An engine of this process, one request at a time."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, name: str) -> None:
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.max_context: int | None = engine.max_model_len
        self._asked = 0

    def ask(self, messages: Sequence[Message], max_tokens: int) -> Reply:
        ids = tuple(self.tokenizer.encode(self.tokenizer.render(messages, options={"enable_thinking": False})))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        begun_s, first_s = time.perf_counter(), 0.0
        request = Request(f"ask-{self._asked}", ids, params, snapshot_at=self.tokenizer.turn_ends(ids))
        self.engine.add(request)
        self._asked += 1
        tokens: list[int] = []
        cached = 0
        while self.engine.has_work:
            for output in self.engine.step():
                if output.finish_reason == "error":
                    raise ConfigError(f"{self.name}: the engine gave an answer up: {output.error}.")
                if not first_s and (output.tokens or output.finish_reason):
                    first_s = time.perf_counter() - begun_s
                tokens += output.tokens
                cached = output.cached_tokens
        text = self.tokenizer.decode(tokens, skip_special=True)
        return Reply(text, len(ids), cached, len(tokens), first_s, time.perf_counter() - begun_s)

    def held_bytes(self) -> int | None:
        stats, plan = self.engine.stats(), self.engine.plan
        page, snapshot = plan.kv / (1 + plan.n_pages), plan.snapshots / (1 + plan.n_snapshots)
        states = stats.snapshots_total - stats.snapshots_free + stats.host_snapshots_total - stats.host_snapshots_free
        return round((stats.pages_total - stats.pages_free) * page + states * snapshot)


class ScriptedSubject:
    """Answers with `script(messages)`, at once: for tests of what asks. Keeps what it was asked."""

    name, max_context = "scripted", None

    def __init__(self, script: Callable[[Sequence[Message]], str]) -> None:
        self.script = script
        self.asked: list[list[Message]] = []

    def ask(self, messages: Sequence[Message], max_tokens: int) -> Reply:
        self.asked.append(list(messages))
        return Reply(self.script(messages), 1, 0, 1, 0.0, 0.0)

    def held_bytes(self) -> int | None:
        return None


class UrlSubject:
    """A server at `url` (with or without /v1). `model` None: the first it lists. Raises ConfigError."""

    def __init__(self, url: str, *, model: str | None = None, api_key: str = "none", timeout_s: float = 3600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=timeout_s)
        self._headers = {"Authorization": f"Bearer {api_key}"}
        try:
            listed = self.client.models.list().data
        except openai.OpenAIError as e:
            raise ConfigError(f"{self.url}/v1/models: {e}; is a server running there?") from e
        if model is None and not listed:
            raise ConfigError(f"{self.url} lists no model; name one with --model.")
        self.name = model or listed[0].id
        of_name = next((m for m in listed if m.id == self.name), None)
        found = getattr(of_name, "max_model_len", None)
        self.max_context = found if isinstance(found, int) else None
        self._unit: tuple[float, float] | None = self._units()

    def ask(self, messages: Sequence[Message], max_tokens: int) -> Reply:
        begun_s, first_s = time.perf_counter(), 0.0
        text, usage = "", None
        create: Any = self.client.chat.completions.create
        try:
            stream = create(
                model=self.name,
                messages=list(messages),
                max_tokens=max_tokens,
                temperature=0.0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"chat_template_kwargs": {"enable_thinking": False}},
            )
            for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    said = choice.delta.content or getattr(choice.delta, "reasoning_content", None)
                    if said and not first_s:
                        first_s = time.perf_counter() - begun_s
                    text += choice.delta.content or ""
        except openai.OpenAIError as e:
            raise ConfigError(f"{self.url}: {e}") from e
        total_s = time.perf_counter() - begun_s
        if usage is None:
            raise ConfigError(f"{self.url}: no usage in the stream; this needs stream_options.include_usage.")
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens if details else 0) or 0
        return Reply(text, usage.prompt_tokens, cached, usage.completion_tokens, first_s or total_s, total_s)

    def held_bytes(self) -> int | None:
        """What an onebox server's metrics say; None of another server."""
        if self._unit is None:
            return None
        try:
            metrics = httpx.get(f"{self.url}/metrics", headers=self._headers, timeout=10).text
        except httpx.HTTPError:
            return None
        pages = metric(metrics, "onebox:kv_pages_cached")
        states = [metric(metrics, name) for name in ("onebox:snapshots", "onebox:host_snapshots")]
        if pages is None:
            return None
        return round(pages * self._unit[0] + sum(n or 0.0 for n in states) * self._unit[1])

    def _units(self) -> tuple[float, float] | None:
        """Bytes of a page and of a snapshot, from an onebox server's memory plan."""
        try:
            answer = httpx.get(f"{self.url}/v1/onebox/plan", headers=self._headers, timeout=10)
            plan = answer.json()
            sizes = plan["bytes"]
            return sizes["kv_pages"] / (1 + plan["pages"]), sizes["snapshots"] / (1 + plan["snapshots"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None


def metric(text: str, name: str) -> float | None:
    """A gauge in Prometheus' text format, labels or not."""
    found = re.search(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else None
