"""Text on both sides of the engine: messages -> template -> ids, and ids -> text deltas. No web imports.

The engine never sees text, so stop strings are found here and the caller then closes the engine's iterator.
"""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RustTokenizer

from onebox.errors import CheckpointError, EngineUnavailableError, RequestError
from onebox.request import FinishReason, Output, TokenLogprob
from onebox.server.parsers import AnswerParser, CallDelta, Events, Thinking, utf8_value

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TURN_START = "<|im_start|>"
BILLING_LINE = "x-anthropic-billing-header:"
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")

Message = Mapping[str, Any]


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level BPE vocabulary (GPT-2's table), inverted."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(shown)]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


class Tokenizer:
    """Byte-level BPE of a checkpoint folder, and its chat template.

    Reads tokenizer.json, tokenizer_config.json and chat_template.jinja (or the template inside the config). Raises
    CheckpointError naming the file that is missing or unreadable.
    """

    def __init__(
        self, rust: RustTokenizer, *, template: str | None = None, tokens: Mapping[str, str] | None = None
    ) -> None:
        self.rust = rust
        self.file: str | None = None  # the tokenizer.json it was read from
        self.template_text = template
        self.template_tokens = dict(tokens or {})  # bos_token and so on, as the template may name them
        self.special_ids = frozenset(i for i, t in rust.get_added_tokens_decoder().items() if t.special)
        self.token_bytes = self._read_token_bytes()
        self.turn_start = rust.token_to_id(TURN_START)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{file}: not found; a served folder needs its tokenizer.json beside the weights.")
        try:
            rust = RustTokenizer.from_file(str(file))
        except Exception as e:  # tokenizers raises bare Exception
            raise CheckpointError(f"{file}: not a readable tokenizer ({e}); copy it again from the source.") from e
        config = read_json(folder / "tokenizer_config.json")
        named = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
        tokens = {k: v for k, v in named.items() if isinstance(v, str)}
        made = cls(rust, template=find_template(folder, config), tokens=tokens)
        made.file = str(file)
        return made

    @property
    def n_ids(self) -> int:
        """Ids the tokenizer knows; the model's vocabulary may be padded beyond."""
        return len(self.token_bytes)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; the names of special tokens inside it become those tokens."""
        # of its ways to encode the one that always leaves other threads running
        return self.rust.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of `ids`, bytes that are no UTF-8 replaced."""
        kept = (i for i in ids if not (skip_special and i in self.special_ids))
        return b"".join(map(self.bytes_of, kept)).decode("utf-8", "replace")

    def bytes_of(self, token: int) -> bytes:
        """Bytes a token stands for; empty beyond the tokenizer's ids."""
        return self.token_bytes[token] if 0 <= token < len(self.token_bytes) else b""

    @cached_property
    def template(self) -> jinja2.Template:
        if self.template_text is None:
            raise RequestError("This model has no chat template; use /v1/completions.", param="messages")
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        env.filters["tojson"] = template_json
        env.globals["raise_exception"] = refuse_in_template
        env.globals["strftime_now"] = lambda form: time.strftime(form)
        try:
            return env.from_string(self.template_text)
        except jinja2.TemplateSyntaxError as e:
            raise RequestError(f"The chat template does not parse: line {e.lineno}: {e.message}.", param=None) from e

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt the template makes of normalised messages. `options` are template variables (enable_thinking).

        `continue_final` ends the prompt inside the last message, so that the answer goes on from it.
        Raises RequestError with the template's own words when it refuses.
        """
        if continue_final:
            add_generation_prompt = False
        try:
            text = self.template.render(
                {
                    **self.template_tokens,
                    "messages": messages,
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                    **(options or {}),
                }
            )
        except jinja2.TemplateError as e:
            raise RequestError(f"The chat template refused the messages: {e}", param="messages") from e
        except (TypeError, ValueError, AttributeError, RecursionError) as e:
            raise RequestError(f"The chat template failed on these messages: {e}", param="messages") from e
        if continue_final:
            last = str(messages[-1].get("content") or "").strip()
            at = text.rfind(last) if last else -1
            if at < 0:
                raise RequestError("'continue_final_message' needs a last message with text.", param="messages")
            text = text[: at + len(last)]
        return text

    def turn_ends(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Prompt lengths where a later request is likely to part from this one: after the head, before the answer."""
        starts = [i for i, t in enumerate(ids) if t == self.turn_start]
        return tuple(sorted({starts[1], starts[-1]})) if len(starts) > 1 else ()

    def _read_token_bytes(self) -> list[bytes]:
        alphabet = byte_alphabet()
        added = self.rust.get_added_tokens_decoder()
        vocab = self.rust.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocab.values(), default=-1) + 1)
        for text, i in vocab.items():
            if i in added:
                table[i] = added[i].content.encode()
            else:
                try:
                    table[i] = bytes([alphabet[c] for c in text])
                except KeyError as e:
                    raise CheckpointError(
                        f"tokenizer.json: token {i} ({text!r}) is not byte-level BPE, the only form read."
                    ) from e
        return table


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, empty when there is no such file. Raises CheckpointError when it does not parse."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as e:
        raise CheckpointError(f"{file}: not valid JSON ({e}); copy it again from the source.") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, found {type(value).__name__}.")
    return value


def find_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    value = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        value = {t.get("name"): t.get("template") for t in value}.get("default")
    return value if isinstance(value, str) else None


def template_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    """JSON as chat templates expect it: plain, not escaped for HTML as jinja's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def refuse_in_template(message: str) -> None:
    raise jinja2.TemplateError(message)


# Messages in


def content_text(content: Any, *, param: str) -> str:
    """Text of a message's content: a string, or parts joined. Raises RequestError for a part that is not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"'{param}' must be a string or a list of parts.", param=param)
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS:
            raise RequestError(
                f"'{param}[{i}]' has type {kind!r}: this server reads text only (no images, audio or files).",
                param=f"{param}[{i}].type",
            )
        text = next((part[name] for name in ("text", "refusal", "thinking") if part.get(name) is not None), None)
        if not isinstance(text, str):
            raise RequestError(f"'{param}[{i}].text' must be a string.", param=f"{param}[{i}].text")
        texts.append(text)
    return "".join(texts)


def normalize_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them.

    System and developer messages, wherever they stand, are merged into one at the head (templates refuse any other);
    content parts are joined; arguments of earlier tool calls become mappings; either name of the reasoning field is
    read. Raises RequestError naming the message.
    """
    system: list[str] = []
    rest: list[dict[str, Any]] = []
    for i, m in enumerate(messages):
        role = m.get("role")
        if m.get("content") is None and role in ("system", "developer", "user"):
            raise RequestError(f"'messages[{i}].content' is missing.", param=f"messages[{i}].content")
        text = content_text(m.get("content"), param=f"messages[{i}].content")
        if role in ("system", "developer"):
            if text := without_billing_line(text):
                system.append(text)
        elif role in ("tool", "function"):
            rest.append({"role": "tool", "content": text})
        elif role == "user":
            rest.append({"role": "user", "content": text})
        elif role == "assistant":
            rest.append(assistant_message(m, text, param=f"messages[{i}]"))
        else:
            raise RequestError(
                f"'messages[{i}].role' is {role!r}; known: system, developer, user, assistant, tool.",
                param=f"messages[{i}].role",
            )
    if not rest and not system:
        raise RequestError("'messages' is empty.", param="messages")
    return [{"role": "system", "content": "\n\n".join(system)}, *rest] if system else rest


def assistant_message(m: Message, text: str, *, param: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    reasoning = m.get("reasoning_content") or m.get("reasoning")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    calls = m.get("tool_calls") or []
    if calls:
        message["tool_calls"] = [history_call(c, param=f"{param}.tool_calls[{j}]") for j, c in enumerate(calls)]
    return message


def history_call(call: Any, *, param: str) -> dict[str, Any]:
    """One earlier tool call with its arguments as a mapping. Arguments that are no JSON object are kept as they are
    under one key: refusing them would refuse every later turn of that chat."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"'{param}.function.name' is missing.", param=f"{param}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = utf8_value(json.loads(arguments)) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    if not isinstance(arguments, Mapping):
        arguments = {} if arguments is None else {"arguments": arguments}
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


def without_billing_line(text: str) -> str:
    """Claude Code opens its system text with a line that changes every call; it would end every shared prefix."""
    if not text.startswith(BILLING_LINE):
        return text
    return text.partition("\n")[2].lstrip("\n")


def prompt_thinking(prompt: str) -> Thinking:
    """Whether the answer to a rendered prompt begins inside thinking, outside it, or may open it itself."""
    tail = prompt.rpartition(TURN_START)[2]
    opened, closed = tail.rfind("<think>"), tail.rfind("</think>")
    if opened < 0 and closed < 0:
        return "unknown"
    return "open" if opened > closed else "closed"


# Text out


class Detokenizer:
    """Ids -> text, one by one. A UTF-8 character split over tokens comes out whole, with its last token."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._bytes = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self._skip or not 0 <= token < len(self._bytes):
            return ""
        return self._decoder.decode(self._bytes[token])

    def finish(self) -> str:
        """What an unfinished character leaves: one replacement character, or nothing."""
        return self._decoder.decode(b"", True)


class StopMatcher:
    """Finds the first stop string in a stream of text, wherever chunks are cut.

    First means ending first; of two that end together, the one that began earlier. Text that may yet turn out to be
    the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._longest = max(map(len, stops), default=0)

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is certain to stand before any stop string, and the stop string once it is found."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(text.find(s) + len(s), -len(s), s) for s in self._stops if s in text]
        if found:
            end, _, stop = min(found)
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-n:]
            if any(s.startswith(tail) for s in self._stops):
                return n
        return 0


@dataclass(frozen=True)
class AnswerDelta:
    """What one engine step adds to an answer. `tokens` and `logprobs` are those whose text is released here."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    offsets: tuple[int, ...] = ()  # where each token's text begins in the answer's text, in characters
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it

    @property
    def empty(self) -> bool:
        return not (self.reasoning or self.content or self.calls or self.tokens or self.finish_reason)


@dataclass
class AnswerUsage:
    """Token counts of one answer so far. `completion_tokens` leaves out the end-of-text token."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    waited_s: float = 0.0  # in the engine's queue


@dataclass
class Answer:
    """One answer: Outputs of the engine in, deltas of text out, the same text however the tokens are grouped.

    After `done` the caller closes the engine's iterator: a stop string may have ended the answer before the engine
    knows. Tokens after the stop are neither shown nor counted.
    """

    tokenizer: Tokenizer
    parser: AnswerParser | None = None
    stop: Sequence[str] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()  # those asked for; the model's own end of text is no stop reason
    constrained_by: str | None = None  # the field of the body that holds the answer to a grammar
    # beside a grammar: what does not begin with this token after `begins_after` is no call, whatever it spells
    call_token: int | None = None
    begins_after: Sequence[int] = ()
    max_calls: int | None = None  # the answer ends after this many tool calls
    pause_at: Callable[[Answer], bool] | None = None  # asked after each token; see push
    usage: AnswerUsage = field(default_factory=AnswerUsage)
    done: bool = False
    paused: bool = False
    taken: list[int] = field(default_factory=list)  # every token so far, shown or held

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer, skip_special=self.skip_special)
        self._matcher = StopMatcher(self.stop, include=self.include_stop)
        self._decoded = 0  # characters decoded, released or held
        self._released = 0
        self._waiting: list[tuple[int, int, TokenLogprob | None]] = []  # where a token's text begins, token, logprob
        self._drafts_before = (0, 0)  # drafted and accepted by engine requests that are over

    def force(self, tokens: Sequence[int], end: FinishReason | None = None) -> AnswerDelta:
        """Puts tokens into the answer that the model did not choose; their probability is one. Ends a pause."""
        self.paused = False
        self._drafts_before = (self.usage.drafted, self.usage.accepted)
        pause_at, self.pause_at = self.pause_at, None
        delta = self._push(tokens, [TokenLogprob(t, 0.0) for t in tokens], end)
        self.pause_at = pause_at
        return delta

    def push(self, output: Output) -> AnswerDelta:
        """Takes one step's tokens. With `pause_at` true after one of them, or at an end of text while it would still
        come true, the rest is dropped and `paused` set: the caller puts tokens of its own in and asks the engine anew.

        Raises EngineUnavailableError when the engine gave the answer up, RequestError when the request is at fault.
        """
        usage, (drafted, accepted) = self.usage, self._drafts_before
        if not usage.prompt_tokens:  # a later engine request of the same answer finds this one's tokens cached
            usage.prompt_tokens, usage.cached_tokens = output.prompt_tokens, output.cached_tokens
            usage.waited_s = output.waited_s
        usage.drafted, usage.accepted = drafted + output.drafted, accepted + output.accepted
        if output.refused:
            raise RequestError(output.error or "The engine refused this request.", param=self.constrained_by)
        if output.finish_reason in ("error", "cancelled"):
            raise EngineUnavailableError(f"The engine gave this answer up: {output.error or output.finish_reason}.")
        return self._push(output.tokens, output.logprobs, output.finish_reason, output.stop_token)

    def _push(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        end: FinishReason | None = None,
        stop_token: int | None = None,
    ) -> AnswerDelta:
        usage, events, stop = self.usage, Events(), None
        for i, token in enumerate(tokens):
            self.taken.append(token)
            if self.call_token is not None:
                self._look_for_call(token)
            usage.completion_tokens += 1
            if self.parser is not None and self.parser.thinking:
                usage.reasoning_tokens += 1
            self._waiting.append((self._decoded, token, logprobs[i] if logprobs else None))
            text = self._detokenizer.push(token)
            self._decoded += len(text)
            if usage.completion_tokens > self.min_tokens:
                text, stop = self._matcher.push(text)
            self._release(text, events)
            if stop is not None:
                return self._finish(events, "stop", stop)
            if self.max_calls is not None and self.parser is not None and self.parser.n_closed >= self.max_calls:
                return self._finish(events, "stop", None)
            if self.pause_at is not None and self.pause_at(self):
                self.paused = True
                return self._delta(events)
        if end is None:
            return self._delta(events)
        if end == "stop" and self.pause_at is not None and self.parser is not None and self.parser.thinking:
            self.paused = True  # the end came inside thinking, with something still to be put in
            return self._delta(events)
        text = self._detokenizer.finish()
        self._decoded += len(text)
        text, stop = self._matcher.push(text)
        if stop is None:
            text += self._matcher.finish()
        self._release(text, events)
        if stop is not None:
            return self._finish(events, "stop", stop)
        return self._finish(events, end, stop_token if stop_token in self.stop_token_ids else None)

    def _look_for_call(self, token: int) -> None:
        after = tuple(self.begins_after)
        if after:
            if tuple(self.taken[-len(after) :]) == after:
                self.begins_after = ()
        elif token == self.call_token or self.tokenizer.bytes_of(token).strip():
            if token != self.call_token and self.parser is not None:
                self.parser.expect_no_call()
            self.call_token = None

    def _release(self, text: str, events: Events) -> None:
        if not text:
            return
        self._released += len(text)
        if self.parser is None:
            events.content += text
        else:
            self.parser.push(text, events)

    def _finish(self, events: Events, reason: FinishReason, stop: str | int | None) -> AnswerDelta:
        if self.parser is not None:
            self.parser.finish(events, truncated=reason == "length" or isinstance(stop, str))
        self.done = True
        return self._delta(events, reason, stop)

    def _delta(self, events: Events, reason: FinishReason | None = None, stop: str | int | None = None) -> AnswerDelta:
        out = self._waiting
        if (out and out[-1][0] < self._released) or (reason is not None and not isinstance(stop, str)):
            self._waiting = []
        else:
            n = sum(at < self._released for at, _, _ in out)
            out, self._waiting = out[:n], out[n:]
        return AnswerDelta(
            reasoning=events.reasoning,
            content=events.content,
            calls=tuple(events.calls),
            tokens=tuple(t for _, t, _ in out),
            offsets=tuple(at for at, _, _ in out),
            logprobs=tuple(p for _, _, p in out if p is not None),
            finish_reason=reason,
            stop_reason=stop,
        )
