"""Anthropic's messages API: a body in, translated to a chat; a message or its stream events out. No web imports.

Thinking is off unless asked for, as in that API. Tools without an input schema (run by the service they come from) are
left out. `input_tokens` leaves out what was read from the cache, as that API counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from onebox.errors import RequestError
from onebox.server.answers import Service, new_id
from onebox.server.chat import AnswerDelta
from onebox.server.completions import Run, chat_prompt, chosen_tools, gather, prepare_chat
from onebox.server.parsers import CallDelta, utf8_value
from onebox.server.protocol import (
    MAX_MESSAGES,
    ChatBody,
    ChatMessage,
    IntakeFields,
    Objects,
    RequestBody,
    Strings,
    rename,
    translated,
)

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
SIGNATURE = "onebox"  # clients send thinking back with its signature; nothing here needs to check it

Event = tuple[str, dict[str, Any]]


class Thinking(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None


class OutputFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    """`effort` changes nothing here."""

    model_config = ConfigDict(extra="allow")

    format: OutputFormat | None = None


class ToolChoice(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class CountBody(RequestBody):
    """POST /v1/messages/count_tokens."""

    refused: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "this server calls no tools.",
        "container": "this server runs no code.",
    }
    without_effect = frozenset(
        {"metadata", "service_tier", "context_management", "betas", "cache_control", "inference_geo"}
    )

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    def sourced(self) -> list[tuple[str, dict[str, Any]]]:
        """The chat messages that say the same, each with the place in this body that it comes from."""
        if isinstance(self.system, str):
            made: list[tuple[str, dict[str, Any]]] = [("system", {"role": "system", "content": self.system})]
        else:
            blocks = enumerate(self.system or ())
            made = [(f"system[{i}]", {"role": "system", "content": [block]}) for i, block in blocks]
        for i, message in enumerate(self.messages):
            made += [(f"messages[{i}].content", m) for m in chat_messages(message, f"messages[{i}]")]
        return made

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors that name a message of the chat name the place in this body instead."""
        try:
            yield
        except RequestError as e:
            if found := re.match(r"messages\[(\d+)\][\w.\[\]]*", e.param or ""):
                source = self.sourced()[int(found[1])][0]
                if found[0].endswith(".role"):
                    source = source.replace(".content", ".role")
                e.args = (re.sub(r"'messages\[\d+\][\w.\[\]]*'", f"'{source}'", str(e), count=1),)
                e.param = source
            else:
                rename(e, self.chat_names())
            raise

    def chat_names(self) -> dict[str, str]:
        """Fields of the chat body by their names here."""
        names = {"stop": "stop_sequences", "thinking_token_budget": "thinking.budget_tokens"}
        names["response_format"] = "output_format" if self.output_format else "output_config.format"
        for i, place in enumerate(i for i, t in enumerate(self.tools or ()) if is_function(t)):
            names[f"tools[{i}].function.parameters"] = f"tools[{place}].input_schema"
            names[f"tools[{i}].function"] = f"tools[{place}]"
        return names

    def chat_fields(self) -> dict[str, Any]:
        """The fields of a chat body that say the same. Raises RequestError naming the field of this body."""
        fields: dict[str, Any] = {"model": self.model, "messages": [message for _, message in self.sourced()]}
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        last = fields["messages"][-1] if fields["messages"] else {}
        if last.get("role") == "assistant" and last.get("content") and not (thinks or last.get("tool_calls")):
            fields["continue_final_message"] = True  # the beginning of the answer, as that API has it
        fields["chat_template_kwargs"] = {"enable_thinking": thinks}
        if thinks and self.thinking is not None:
            fields["thinking_token_budget"] = self.thinking.budget_tokens
        wanted = self.output_format or (self.output_config and self.output_config.format)
        if wanted:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}
        tools = [t for t in self.tools or () if is_function(t)]
        if tools:
            fields["tools"] = [chat_tool(t) for t in tools]
            fields |= chat_choice(self.tool_choice or ToolChoice(type="auto"))
        return fields


class MessagesBody(CountBody, IntakeFields):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Strings | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def chat_body(self) -> ChatBody:
        fields = self.chat_fields() | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "compress": self.compress,
            "guard": self.guard,
        }
        return translated(ChatBody, fields)


def is_function(tool: Mapping[str, Any]) -> bool:
    return isinstance(tool.get("input_schema"), Mapping)


def chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def chat_choice(choice: ToolChoice) -> dict[str, Any]:
    same: dict[str, Any] = {
        "auto": "auto",
        "any": "required",
        "none": "none",
        "tool": {"type": "function", "function": {"name": choice.name}},
    }
    return {"tool_choice": same[choice.type], "parallel_tool_calls": not choice.disable_parallel_tool_use}


def chat_messages(message: ChatMessage, param: str) -> list[dict[str, Any]]:
    """One message as chat messages: a tool result is a message of its own there."""
    if not isinstance(message.content, list):
        return [{"role": message.role, "content": message.content}]
    out: list[dict[str, Any]] = []
    text: list[Any] = []
    thinking, calls = "", []

    def close() -> None:
        if text:
            out.append({"role": message.role, "content": list(text)})
            text.clear()

    for i, block in enumerate(message.content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            close()
            out.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        elif kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise RequestError(f"'{param}.content[{i}].name' must be a string.", param=f"{param}.content[{i}].name")
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thinking += str(block.get("thinking") or "")
        elif kind == "text":
            text.append(block)
        elif kind != "redacted_thinking":
            raise RequestError(
                f"'{param}.content[{i}]' has type {kind!r}: this server reads text only (no images or documents).",
                param=f"{param}.content[{i}].type",
            )
    if message.role == "assistant":
        whole: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": calls}
        return [whole | ({"reasoning_content": thinking} if thinking else {})]
    close()
    return out


def error_json(e: RequestError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": ERROR_TYPES.get(e.status, "api_error"), "message": str(e)}}


async def prepare(service: Service, body: MessagesBody) -> Run:
    """Raises RequestError for all that can be refused."""
    with body.naming():
        run = await prepare_chat(service, body.chat_body())
    return Run(new_id("msg").replace("-", "_"), run.model, run.prompts, run.jobs, run.n, run.body, report=run.report)


async def count_tokens(service: Service, body: CountBody) -> dict[str, Any]:
    service.check_ready()
    service.model_name(body.model)
    with body.naming():
        chat = translated(ChatBody, body.chat_fields())
        prompt = await chat_prompt(service, chat, chosen_tools(service, chat)[0])
    return {"input_tokens": len(prompt.ids)}


def head(run: Run, content: list[dict[str, Any]], *, reason: str | None, stop: Any) -> dict[str, Any]:
    usage = run.jobs[0].answer.usage
    return {
        "id": run.id,
        "type": "message",
        "role": "assistant",
        "model": run.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop if isinstance(stop, str) else None,
        "usage": {
            "input_tokens": len(run.prompts[0].ids) - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        }
        | run.intake_usage(),
    }


def stop_reason(reason: str | None, stop: Any, *, called: bool) -> str:
    if isinstance(stop, str):
        return "stop_sequence"
    return "tool_use" if called and reason == "stop" else STOP_REASONS[reason or "stop"]


def tool_use(id: str | None, name: str | None, value: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": (id or "").replace("call_", "toolu_"), "name": name, "input": value}


async def response(service: Service, run: Run) -> dict[str, Any]:
    """The message object. Arguments cut off by max_tokens are given as the text there is, under `partial_json`."""
    (whole,) = await gather(service, run.jobs)
    content: list[dict[str, Any]] = []
    if whole.reasoning:
        content.append({"type": "thinking", "thinking": whole.reasoning, "signature": SIGNATURE})
    if whole.content:
        content.append({"type": "text", "text": whole.content})
    for call in whole.calls:
        text = call["function"]["arguments"]
        try:
            value = utf8_value(json.loads(text))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            value = {"partial_json": text}
        content.append(tool_use(call["id"], call["function"]["name"], value))
    reason = stop_reason(whole.finish_reason, whole.stop_reason, called=bool(whole.calls))
    return head(run, content, reason=reason, stop=whole.stop_reason)


class Blocks:
    """Content blocks of a stream: opened by the first delta of their kind, closed by the next kind."""

    def __init__(self) -> None:
        self.index = -1
        self.open: str | None = None
        self.called = False

    def close(self) -> list[Event]:
        if self.open is None:
            return []
        events: list[Event] = []
        if self.open == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        self.open = None
        return [*events, ("content_block_stop", {"index": self.index})]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return "content_block_delta", {"index": self.index, "delta": delta}

    def _start(self, kind: str, block: dict[str, Any]) -> list[Event]:
        events = self.close()
        self.index, self.open = self.index + 1, kind
        return [*events, ("content_block_start", {"index": self.index, "content_block": block})]

    def add(self, delta: AnswerDelta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            if self.open != "thinking":
                events += self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.content:
            if self.open != "text":
                events += self._start("text", {"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": delta.content}))
        for call in delta.calls:
            events += self._call(call)
        return events

    def _call(self, call: CallDelta) -> list[Event]:
        events: list[Event] = []
        if call.name is not None:
            self.called = True
            events += self._start("tool_use", tool_use(call.id, call.name, {}))
        if call.arguments:
            events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return events


async def stream(service: Service, run: Run) -> AsyncGenerator[Event, None]:
    """Named events of a message, in that API's order."""
    blocks, begun = Blocks(), False
    async with aclosing(service.run(run.jobs)) as deltas:
        async for _, delta in deltas:
            if not begun:
                begun = True
                yield "message_start", {"message": head(run, [], reason=None, stop=None)}
            for event in blocks.add(delta):
                yield event
            if delta.finish_reason is not None:
                for event in blocks.close():
                    yield event
                reason = stop_reason(delta.finish_reason, delta.stop_reason, called=blocks.called)
                last = head(run, [], reason=reason, stop=delta.stop_reason)
                change = {"stop_reason": reason, "stop_sequence": last["stop_sequence"]}
                yield "message_delta", {"delta": change, "usage": last["usage"]}
    yield "message_stop", {}
