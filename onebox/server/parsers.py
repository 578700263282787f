"""What a model's text means: thinking, visible text, tool calls. A pure state machine over text deltas.

The same text gives the same events however it is cut: whatever may yet become a tag is held back, and nothing is
taken back once given. Reads Qwen3.5's function form

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

and the older `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. A value is what stands between the newline
after its opening tag and the newline before its closing tag, to the byte; its JSON type is the tool schema's. A closing
tag counts only where the form goes on after it, so a value may quote tags.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

REASONING_PARSERS = ("qwen3",)
TOOL_PARSERS = ("qwen3_coder", "qwen3_xml", "hermes")

Thinking = Literal["open", "closed", "unknown"]
State = Literal["start", "thinking", "content", "json", "body", "value", "after"]

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
NAME = re.compile(r"[\w.:/-]{1,128}\Z")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class CallDelta:
    """A part of tool call `index`: its id and name once, then pieces of its arguments' JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class Events:
    """What some text turned out to mean."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


@dataclass(frozen=True)
class Opening:
    """A tool call's opening tags: length in the text, and the function's name (None: the JSON form)."""

    length: int
    name: str | None


def starts(text: str, literal: str) -> bool | None:
    """Whether `text` begins with `literal`; None while it is too short to tell."""
    if text.startswith(literal):
        return True
    return None if literal.startswith(text) else False


def read_function(text: str) -> Opening | Literal[False] | None:
    """`<function=NAME>` at the beginning of `text`; None while it is too short to tell."""
    begins = starts(text, FUNCTION)
    if not begins:
        return begins
    name, closed, _ = text[len(FUNCTION) :].partition(">")
    if not closed:
        return None if not name or NAME.match(name) else False
    return Opening(len(FUNCTION) + len(name) + 1, name) if NAME.match(name) else False


def read_opening(text: str) -> Opening | Literal[False] | None:
    """`<tool_call>` and what must follow it at the beginning of `text`; None while it is too short to tell."""
    begins = starts(text, CALL)
    if not begins:
        return begins
    inner = text[len(CALL) :].lstrip()
    skipped = len(text) - len(inner)
    if not inner:
        return None
    if inner[0] == "{":
        return Opening(skipped, None)
    function = read_function(inner)
    return Opening(skipped + function.length, function.name) if function else function


class AnswerParser:
    """Text deltas -> Events.

    `thinking` says where the prompt left off: inside thinking ("open"), outside ("closed"), or nowhere ("unknown": a
    leading `<think>` opens it). `tools` are OpenAI function tools; None leaves tool calls alone, as text. A call is
    read inside thinking too, when its function is a known one, unless `calls_in_thinking` is false.
    """

    def __init__(
        self,
        *,
        thinking: Thinking = "closed",
        tools: Sequence[Mapping[str, Any]] | None = None,
        calls_in_thinking: bool = True,
    ) -> None:
        first: dict[Thinking, State] = {"open": "thinking", "closed": "content", "unknown": "start"}
        self._state: State = first[thinking]
        self._outer: State = "content"  # where a finished call returns to
        self._schemas = None if tools is None else dict(map(tool_schema, tools))
        self._calls_in_thinking = calls_in_thinking
        self._buffer = ""
        self._trim = self._state == "thinking"  # leading white space of the coming text is not part of it
        self._line_start = True
        self._n_calls = 0
        self._n_closed = 0
        self._schema: Mapping[str, Any] = {}  # of the call being read
        self._keys: list[str] = []
        self._skip_value = False
        self._types: frozenset[str] = frozenset()
        self._value_open = False  # the opening quote of a streamed string is out
        self._value_start = False  # the newline after the opening tag is still to come

    @property
    def thinking(self) -> bool:
        return self._state == "thinking" or (self._state != "content" and self._outer == "thinking")

    @property
    def n_calls(self) -> int:
        """Calls begun."""
        return self._n_calls

    @property
    def n_closed(self) -> int:
        """Calls whose arguments are complete."""
        return self._n_closed

    def expect_no_call(self) -> None:
        """What comes is text, whatever it spells."""
        self._schemas = None

    def push(self, text: str, events: Events) -> None:
        """Reads `text`, adding what is now certain to `events`."""
        self._buffer += text
        self._run(events, last=False, truncated=False)

    def finish(self, events: Events, *, truncated: bool = False) -> None:
        """The text is over. A call cut by the token limit (`truncated`) keeps its arguments cut, so that no client
        takes them for whole; one the model merely failed to close is closed."""
        self._run(events, last=True, truncated=truncated)

    def _run(self, events: Events, *, last: bool, truncated: bool) -> None:
        steps = {
            "start": self._start,
            "thinking": self._text,
            "content": self._text,
            "json": self._json,
            "body": self._body,
            "value": self._value,
            "after": self._after,
        }
        while steps[self._state](events, last):
            pass
        if last and self._state in ("body", "value") and not truncated:
            self._close_value(events)
            self._close_arguments(events)

    # Each step reads from the front of the buffer and says whether another step may get further.

    def _start(self, events: Events, last: bool) -> bool:
        text = self._buffer.lstrip()
        begins = starts(text, THINK)
        if begins is None and not last:
            return False
        if begins:
            self._buffer, self._state, self._trim = text[len(THINK) :], "thinking", True
        else:
            self._state = "content"
        return True

    def _text(self, events: Events, last: bool) -> bool:
        if self._trim:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return False
            self._trim = False
        text, thinking = self._buffer, self._state == "thinking"
        for at in positions(text, "<") if thinking or self._schemas is not None else ():
            if thinking:
                ends = starts(text[at:], THINK_END)
                if ends:
                    self._emit(text[:at].rstrip(), events)
                    self._buffer, self._state, self._trim = text[at + len(THINK_END) :], "content", True
                    return True
                if ends is None and not last:
                    return self._hold(at, events)
            opening = self._opening(text, at)
            if opening:
                self._emit(text[:at].rstrip(), events)
                self._outer = self._state
                if opening.name is None:
                    self._buffer, self._state = text[at:], "json"
                else:
                    self._buffer = text[at + opening.length :]
                    self._open_call(opening.name, events)
                return True
            if opening is None and not last:
                return self._hold(at, events)
        if last:
            self._emit(text, events)
            self._buffer = ""
            return False
        return self._hold(len(text), events)

    def _opening(self, text: str, at: int) -> Opening | Literal[False] | None:
        if self._schemas is None or (self._state == "thinking" and not self._calls_in_thinking):
            return False
        opening = read_opening(text[at:])
        if opening is False:
            # The model sometimes leaves <tool_call> out; a known function at the start of a line is still a call.
            before = text[:at].rstrip(" ")
            if not (before.endswith("\n") or (not before and self._line_start)):
                return False
            opening = read_function(text[at:])
            return opening if not opening or opening.name in self._schemas else False
        if opening and opening.name is not None and self._state == "thinking" and opening.name not in self._schemas:
            return False
        return opening

    def _hold(self, at: int, events: Events) -> bool:
        """Gives the text before `at`, keeping white space that a tag may turn out to follow."""
        plain = self._state == "content" and self._schemas is None
        n = at if plain else len(self._buffer[:at].rstrip())
        self._emit(self._buffer[:n], events)
        self._buffer = self._buffer[n:]
        return False

    def _emit(self, text: str, events: Events) -> None:
        if not text:
            return
        self._line_start = text.endswith("\n")
        if self._state == "thinking":
            events.reasoning += text
        else:
            events.content += text

    def _json(self, events: Events, last: bool) -> bool:
        body = self._buffer[len(CALL) :]
        for at in positions(body, CALL_END):
            if call := self._json_call(body[:at]):
                return self._give_json_call(call, body[at + len(CALL_END) :], events)
        if not last:
            return False
        if call := self._json_call(body):
            return self._give_json_call(call, "", events)
        self._state = self._outer
        self._emit(self._buffer, events)
        self._buffer = ""
        return False

    def _json_call(self, text: str) -> tuple[str, str] | None:
        try:
            call = utf8_value(json.loads(text, parse_constant=refuse_constant))
            name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
            if not isinstance(arguments, str):
                arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            return None
        if not isinstance(name, str) or not NAME.match(name):
            return None
        if self._outer == "thinking" and name not in (self._schemas or {}):
            return None
        return name, arguments

    def _give_json_call(self, call: tuple[str, str], rest: str, events: Events) -> bool:
        events.calls.append(CallDelta(self._n_calls, new_call_id(), call[0]))
        events.calls.append(CallDelta(self._n_calls, arguments=call[1]))
        self._n_calls += 1
        self._n_closed += 1
        self._buffer, self._state, self._trim = rest, self._outer, True
        return True

    def _open_call(self, name: str, events: Events) -> None:
        self._state, self._keys = "body", []
        self._schema = (self._schemas or {}).get(name, {})
        events.calls.append(CallDelta(self._n_calls, new_call_id(), name))
        self._n_calls += 1

    def _arguments(self, text: str, events: Events) -> None:
        """Adds to the current call's arguments, in one delta for a run of text."""
        index = self._n_calls - 1
        if events.calls and events.calls[-1].index == index and events.calls[-1].name is None:
            events.calls[-1] = CallDelta(index, arguments=events.calls[-1].arguments + text)
        else:
            events.calls.append(CallDelta(index, arguments=text))

    def _body(self, events: Events, last: bool) -> bool:
        text = self._buffer = self._buffer.lstrip()
        if not text:
            return False
        if starts(text, PARAMETER):
            key, closed, rest = text[len(PARAMETER) :].partition(">")
            if not closed:
                return False
            self._open_value(key, events)
            self._buffer = rest
            return True
        if starts(text, FUNCTION_END):
            self._buffer, self._state = text[len(FUNCTION_END) :], "after"
            self._close_arguments(events)
            return True
        if starts(text, CALL_END):
            self._state = "after"
            self._close_arguments(events)
            return True
        if not last and any(starts(text, tag) is None for tag in (PARAMETER, FUNCTION_END, CALL_END)):
            return False
        # Text where only tags may stand belongs to no argument.
        at = text.find("<", 1)
        self._buffer = text[at:] if at > 0 else ""
        return at > 0

    def _open_value(self, key: str, events: Events) -> None:
        key = key.strip().strip("\"'")
        self._state, self._value_start, self._value_open = "value", True, False
        self._skip_value = key in self._keys  # a repeated key would make JSON of two meanings: the first counts
        if self._skip_value:
            return
        known = self._schema.get("properties")
        self._types = value_types(known.get(key) if isinstance(known, Mapping) else None, self._schema)
        self._arguments(("{" if not self._keys else ", ") + json.dumps(key, ensure_ascii=False) + ": ", events)
        self._keys.append(key)

    def _value(self, events: Events, last: bool) -> bool:
        if self._value_start:
            if not self._buffer and not last:
                return False
            self._buffer = self._buffer.removeprefix("\n")
            self._value_start = False
        text = self._buffer
        for at in positions(text, "<"):
            length = value_end(text[at:], last=last, after_newline=text[:at].endswith("\n"))
            if length is None:
                self._stream_value(at, events)
                return False
            if length is not False:
                self._buffer = text[:at]
                self._close_value(events)
                self._buffer = text[at + length :]
                self._state = "body"
                return True
        if not last:
            self._stream_value(len(text), events)
        return False

    def _stream_value(self, at: int, events: Events) -> None:
        """Gives the part of a string value before `at`, less a newline that may belong to the closing tag."""
        if self._types != {"string"} or self._skip_value:
            return
        n = at - 1 if self._buffer[:at].endswith("\n") else at
        if n > 0:
            quote = "" if self._value_open else '"'
            self._arguments(quote + json_inside(self._buffer[:n]), events)
            self._value_open = True
            self._buffer = self._buffer[n:]

    def _close_value(self, events: Events) -> None:
        """The buffer is the rest of the value and nothing else."""
        if self._state != "value":
            return
        text = self._buffer.removesuffix("\n")
        self._buffer, self._state = "", "body"
        if self._skip_value:
            return
        if self._types == {"string"}:
            self._arguments(("" if self._value_open else '"') + json_inside(text) + '"', events)
        else:
            self._arguments(typed_json(text, self._types), events)

    def _close_arguments(self, events: Events) -> None:
        self._arguments("}" if self._keys else "{}", events)
        self._n_closed += 1

    def _after(self, events: Events, last: bool) -> bool:
        text = self._buffer.lstrip()
        if starts(text, CALL_END) is None and not last:
            return False
        function = read_function(text)  # another function inside the same <tool_call>
        if function is None and not last:
            return False
        if function:
            assert function.name is not None
            self._buffer = text[function.length :]
            self._open_call(function.name, events)
            return True
        self._buffer = text.removeprefix(CALL_END)
        self._state, self._trim, self._line_start = self._outer, True, True
        return True


def positions(text: str, part: str) -> Iterator[int]:
    """Where `part` stands in `text`, from the left."""
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + 1)


def value_end(text: str, *, last: bool, after_newline: bool) -> int | Literal[False] | None:
    """Length of the closing tag that ends a value at the beginning of `text`; None while it is too short to tell.

    `</parameter>` ends one when the next tag of the form follows. `</function>` on a line of its own with
    `</tool_call>` after it ends one whose own closing tag was left out; it is not part of the length.
    """
    begins = starts(text, PARAMETER_END)
    if begins:
        tail = text[len(PARAMETER_END) :].lstrip()
        follows = [starts(tail, tag) for tag in (PARAMETER, FUNCTION_END, CALL_END)]
        if any(follows):
            return len(PARAMETER_END)
        if None in follows:
            return len(PARAMETER_END) if last else None
        return False
    if begins is None and not last:
        return None
    if not after_newline:
        return False
    begins = starts(text, FUNCTION_END)
    if not begins:
        return None if begins is None and not last else False
    ends = starts(text[len(FUNCTION_END) :].lstrip(), CALL_END)
    if ends or (ends is None and last):
        return 0
    return None if ends is None else False


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def json_inside(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def tool_schema(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and parameter schema of an OpenAI function tool, in the chat or the responses form."""
    function = tool.get("function", tool)
    return str(function.get("name")), function.get("parameters") or {}


def value_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """JSON types a property's schema allows; empty when it does not say. `root` holds what a $ref names."""
    if not isinstance(schema, Mapping) or depth > 8:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind, "null"} if schema.get("nullable") is True else {kind})
    if isinstance(kind, Sequence):
        return frozenset(str(k) for k in kind)
    if isinstance(ref := schema.get("$ref"), str):
        target: Any = root
        for part in ref.removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return value_types(target, root, depth + 1)
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(choices, Sequence) and choices:
            each = [value_types(c, root, depth + 1) for c in choices]
            return frozenset().union(*each) if all(each) else frozenset()
    parts = schema.get("allOf")
    for part in parts if isinstance(parts, Sequence) else ():
        if types := value_types(part, root, depth + 1):
            return types
    if "const" in schema:
        return frozenset({json_type(schema["const"])})
    if isinstance(values := schema.get("enum"), Sequence) and values:
        return frozenset(map(json_type, values))
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else frozenset()


def json_type(value: Any) -> str:
    """JSON Schema's name for the type of a parsed value; a number without a fraction is an integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def typed_json(text: str, types: frozenset[str]) -> str:
    """JSON text of a value written as plain text, by the types its schema allows (empty: any).

    A type other than string is preferred when the text reads as one; what reads as none of them stays a string, with
    every character kept.
    """
    bare = text.strip()
    if not types or types - {"string"}:
        for candidate in (bare, PYTHON_WORDS.get(bare, "")):
            try:
                value = json.loads(candidate, parse_constant=refuse_constant)
            except (ValueError, RecursionError):
                continue
            kind = json_type(value)
            if kind != "string" and (not types or kind in types or (kind == "integer" and "number" in types)):
                return candidate
        if types & {"object", "array"} and (literal := python_literal(bare)) is not None:
            return literal
    return json.dumps(text, ensure_ascii=False)


def utf8_value(value: Any) -> Any:
    """A JSON value whose texts UTF-8 can say: half of a surrogate pair, as an escape makes it, becomes U+FFFD."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {utf8_value(k): utf8_value(v) for k, v in value.items()}
    return [utf8_value(v) for v in value] if isinstance(value, list) else value


def refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def python_literal(text: str) -> str | None:
    """JSON of a Python dict or list display, a form models fall into; None when it is not one."""
    if len(text) > 100_000 or not text.startswith(("{", "[")):
        return None
    try:
        value = utf8_value(ast.literal_eval(text))
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, dict | list) else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
