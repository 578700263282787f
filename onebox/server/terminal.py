"""A chat in the terminal: streams answers from a server and says how fast they came and how many drafts were kept."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from rich.console import Console

from onebox.errors import ConfigError


@dataclass(frozen=True)
class Speed:
    """One answer's figures. Times in seconds; drafts are tokens proposed by the drafter."""

    tokens: int
    first_s: float
    decode_s: float
    accepted: int
    drafted: int

    def line(self) -> str:
        rate = f"{(self.tokens - 1) / self.decode_s:.1f} tok/s" if self.tokens > 1 and self.decode_s > 0 else "- tok/s"
        kept = f"{self.accepted / self.drafted:.0%} of {self.drafted} drafts kept" if self.drafted else "no drafts"
        return f"{self.tokens} tokens · first after {self.first_s:.2f} s · {rate} · {kept}"


def reachable(url: str) -> bool:
    """Whether a server answers at `url`."""
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code < 500
    except httpx.HTTPError:
        return False


def first_model(client: openai.OpenAI, url: str) -> str:
    try:
        models = client.models.list().data
    except openai.OpenAIError as e:
        raise ConfigError(f"{url}/v1/models: {e}") from e
    if not models:
        raise ConfigError(f"{url}/v1/models lists no model; name one with --model.")
    return models[0].id


def answer(
    client: openai.OpenAI, model: str, messages: list[Any], console: Console, **params: Any
) -> tuple[str, Speed]:
    """Streams one answer to the console; thinking is dim. Gives the visible text and the answer's speed."""
    begun_s = time.perf_counter()
    first_s: float | None = None
    text, usage = "", None
    create: Any = client.chat.completions.create
    stream = create(model=model, messages=messages, stream=True, stream_options={"include_usage": True}, **params)
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if first_s is None:
                first_s = time.perf_counter() - begun_s
            thought = getattr(choice.delta, "reasoning_content", None) or getattr(choice.delta, "reasoning", None)
            if thought:
                console.print(thought, end="", style="dim", markup=False, highlight=False, soft_wrap=True)
            if choice.delta.content:
                if not text:
                    console.print()
                console.print(choice.delta.content, end="", markup=False, highlight=False, soft_wrap=True)
                text += choice.delta.content
    console.print()
    total_s, first_s = time.perf_counter() - begun_s, first_s or 0.0
    details = usage.completion_tokens_details if usage else None
    accepted = (details.accepted_prediction_tokens if details else 0) or 0
    rejected = (details.rejected_prediction_tokens if details else 0) or 0
    tokens = usage.completion_tokens if usage else 0
    return text, Speed(tokens, first_s, total_s - first_s, accepted, accepted + rejected)


def chat(
    url: str,
    inputs: Iterable[str],
    *,
    model: str | None = None,
    api_key: str = "none",
    system: str | None = None,
    console: Console | None = None,
    **params: Any,
) -> None:
    """A conversation: one answer for each of `inputs`, each followed by its figures. Raises ConfigError."""
    console = console or Console()
    with openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0) as client:
        converse(client, url, inputs, model or first_model(client, url), system, console, params)


def converse(
    client: openai.OpenAI,
    url: str,
    inputs: Iterable[str],
    model: str,
    system: str | None,
    console: Console,
    params: Mapping[str, Any],
) -> None:
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    for line in inputs:
        messages.append({"role": "user", "content": line})
        try:
            text, speed = answer(client, model, messages, console, **params)
        except openai.OpenAIError as e:
            raise ConfigError(f"{url}: {e}") from e
        console.print(speed.line(), style="cyan", highlight=False)
        messages.append({"role": "assistant", "content": text})
