"""OpenAI's responses API: items in, translated to a chat; a response object or its stream events out. No web imports.

A stored response keeps its whole conversation as items, so that `previous_response_id` continues it. Tools of types
other than function (agents send them) are left out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from threading import Lock
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from onebox.errors import ConfigError, NotFoundError, RequestError, StoreError
from onebox.server.answers import Service, new_id
from onebox.server.chat import AnswerDelta
from onebox.server.completions import Run, prepare_chat
from onebox.server.owners import owner
from onebox.server.protocol import ChatBody, IntakeFields, Objects, RequestBody, rename, translated

log = logging.getLogger(__name__)

Event = dict[str, Any]
Item = dict[str, Any]
STATUS: Mapping[str, str] = {"stop": "completed", "length": "incomplete"}
KEPT_RESPONSES = 10_000
KEPT_BYTES = 512 * 2**20
LOCKED_S = 2.0  # how long another process may hold a file of responses
encode_json = msgspec.json.Encoder().encode


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    format: TextFormat | None = None


class ResponsesBody(RequestBody, IntakeFields):
    """POST /v1/responses."""

    refused: ClassVar[Mapping[str, str]] = {
        "background": "ask with stream and keep the connection.",
        "conversation": "send previous_response_id.",
        "prompt": "send the prompt's text.",
        "context_management": "send a shorter input.",
    }
    without_effect = frozenset(
        {
            "include",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "stream_options",
            "client_metadata",
            "max_tool_calls",
        }
    )

    model: str | None = None
    input: str | Objects
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    stream: bool | None = False
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    tools: Objects | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    reasoning: dict[str, Any] | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def items(self) -> list[Item]:
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return list(self.input)

    def chat_body(self, items: Sequence[Item]) -> ChatBody:
        """The chat that says the same; `items` end with this body's. Raises RequestError naming the field."""
        if self.top_logprobs:
            raise RequestError("'top_logprobs' is not served here; use chat completions.", param="top_logprobs")
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = [chat_tool(t) for t in self.tools or () if t.get("type") == "function"]
        choice: Any = self.tool_choice
        if isinstance(choice, dict):
            if choice.get("type") != "function":
                raise RequestError("'tool_choice' must be auto, none, required or a function.", param="tool_choice")
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        form = self.text.format if self.text and self.text.format else TextFormat()
        if form.type == "json_schema" and form.schema_ is None:
            raise RequestError("'text.format.schema' is missing.", param="text.format.schema")
        fields = {
            "response_format": {"type": form.type, "json_schema": {"schema": form.schema_}},
            "model": self.model,
            "messages": [*messages, *item_messages(items, len(items) - len(self.items()))],
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "tools": tools or None,
            "tool_choice": choice if tools else None,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "chat_template_kwargs": self.chat_template_kwargs,
            "compress": self.compress,
            "guard": self.guard,
        }
        return translated(ChatBody, fields)


def text_format(body: ResponsesBody) -> dict[str, Any]:
    form = body.text.format if body.text else None
    return form.model_dump(by_alias=True, exclude_unset=True) if form else {"type": "text"}


def chat_names(body: ResponsesBody, items: Sequence[Item]) -> dict[str, str]:
    """Fields of the chat body by their names here. `items`: those before this body's, then its own."""
    names = {
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "max_tokens": "max_output_tokens",
    }
    functions = (i for i, tool in enumerate(body.tools or ()) if tool.get("type") == "function")
    names |= {f"tools[{i}].function": f"tools[{place}]" for i, place in enumerate(functions)}
    item_messages(items, len(items) - len(body.items()), names, 1 if body.instructions else 0)
    return names | {"messages": "input"}


def chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    fields = ("name", "description", "parameters")
    return {"type": "function", "function": {k: tool[k] for k in fields if tool.get(k) is not None}}


def item_text(item: Mapping[str, Any]) -> str:
    """Text of a reasoning item: its content, or else its summary."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        return ""
    return "".join(str(p.get("text", "")) for p in parts if isinstance(p, Mapping))


def item_messages(
    items: Sequence[Item], stored: int = 0, names: dict[str, str] | None = None, first: int = 0
) -> list[dict[str, Any]]:
    """Items as chat messages: reasoning, text and calls of one turn make one assistant message.

    `names` is told, for each part of the messages, which are to follow `first` others, the name it has in a body that
    lacks the first `stored` items.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None

    def assistant() -> dict[str, Any]:
        nonlocal turn
        if turn is None:
            turn = {"role": "assistant", "content": [], "tool_calls": []}
            messages.append(turn)
        return turn

    def tell(part: str, name: str, n: int) -> None:
        if names is not None:
            names[f"messages[{first + n}]{part}"] = name

    for i, item in enumerate(items, -stored):
        kind = item.get("type", "message")
        if kind == "reasoning":
            turn = None
            assistant()["reasoning_content"] = item_text(item)
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input")}
            function = {"name": item.get("name"), "arguments": arguments}
            calls = assistant()["tool_calls"]
            tell(f".tool_calls[{len(calls)}].function", f"input[{i}]", len(messages) - 1)
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            turn = None
            tell(".content", f"input[{i}].output", len(messages))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "message":
            content = item.get("content")
            if item.get("role") == "assistant":
                if turn is not None and turn["tool_calls"]:
                    turn = None
                parts = content if isinstance(content, list) else [content or ""]
                before = assistant()["content"]
                for j in range(len(parts)):
                    tell(f".content[{len(before) + j}]", f"input[{i}].content[{j}]", len(messages) - 1)
                before += parts
            else:
                turn = None
                tell("", f"input[{i}]", len(messages))
                messages.append({"role": item.get("role"), "content": content})
        else:
            raise RequestError(f"'input[{i}]' has type {kind!r}, which is not served.", param=f"input[{i}].type")
    return messages


class Store:
    """Responses by id in SQLite, each with its conversation and its owner, who alone finds it.

    The oldest are dropped beyond KEPT_RESPONSES, and beyond KEPT_BYTES: a conversation is kept anew with every response
    that continues it.

    A file outlives the server. Raises ConfigError for one that cannot be used. Every method may be called from any
    thread, and raises StoreError when the file fails meanwhile (full, locked, read-only).
    """

    def __init__(self, path: str = ":memory:", *, max_bytes: int = KEPT_BYTES) -> None:
        self.path, self.max_bytes = path, max_bytes
        self._lock = Lock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=LOCKED_S)
            # a response is lost by a power cut at most, never by a crash of the server
            self._db.execute("pragma journal_mode = wal").fetchall()
            self._db.execute("pragma synchronous = normal")
            columns = "n integer primary key, id unique, response, items, owner"
            self._db.execute(f"create table if not exists responses ({columns})")
            if "owner" not in [row[1] for row in self._db.execute("pragma table_info(responses)")]:
                self._db.execute("alter table responses add column owner default ''")
            rows = self._db.execute("select n, length(response) + length(items) from responses order by n")
            self._sizes: dict[int, int] = dict(rows.fetchall())
            self._bytes = sum(self._sizes.values())
        except sqlite3.Error as e:
            raise ConfigError(f"--response-store {path}: {e}; name a file that can be written.") from e

    def put(self, response: Mapping[str, Any], items: Sequence[Item], owner: str = "") -> None:
        row = (response["id"], encode_json(response), encode_json(items), owner)
        with self._using() as db:
            n = db.execute("insert into responses (id, response, items, owner) values (?, ?, ?, ?)", row).lastrowid
            assert n is not None
            self._sizes[n] = len(row[1]) + len(row[2])
            self._bytes += self._sizes[n]
            while len(self._sizes) > KEPT_RESPONSES or (self._bytes > self.max_bytes and len(self._sizes) > 1):
                self._drop(db, next(iter(self._sizes)))

    def get(self, id: str, owner: str = "") -> tuple[dict[str, Any], list[Item]]:
        """A response and its conversation. Raises NotFoundError."""
        with self._using() as db:
            _, response, items = self._row(db, id, owner)
        return json.loads(response), json.loads(items)

    def delete(self, id: str, owner: str = "") -> None:
        """Raises NotFoundError."""
        with self._using() as db:
            self._drop(db, self._row(db, id, owner)[0])

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _row(self, db: sqlite3.Connection, id: str, owner: str) -> tuple[int, bytes | str, bytes | str]:
        query = "select n, response, items from responses where id = ? and owner = ?"
        row = db.execute(query, (id, owner)).fetchone()
        if row is None:
            raise NotFoundError(f"No stored response '{id[:100]}'.", param="response_id")
        n, response, items = row
        return n, response, items

    def _drop(self, db: sqlite3.Connection, n: int) -> None:
        db.execute("delete from responses where n = ?", (n,))
        self._bytes -= self._sizes.pop(n, 0)

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._db
            except sqlite3.Error as e:
                raise StoreError(f"The store of responses failed: {e}.") from e


class Responses:
    """The API over one service and one store."""

    def __init__(self, service: Service, store: Store) -> None:
        self.service = service
        self.store = store
        self.running: dict[str, bool] = {}  # id of a response under way -> whether it was cancelled
        self._owners: dict[str, str] = {}  # of those

    async def prepare(self, body: ResponsesBody) -> tuple[Run, list[Item]]:
        """The run, and the conversation's items so far. Raises RequestError for all that can be refused."""
        self.service.check_ready()
        items: list[Item] = []
        if body.previous_response_id:
            try:
                items = (await asyncio.to_thread(self.store.get, body.previous_response_id, owner.get()))[1]
            except NotFoundError as e:
                raise RequestError(str(e), param="previous_response_id") from e
        items = [*items, *body.items()]
        try:
            run = await prepare_chat(self.service, body.chat_body(items))
        except RequestError as e:
            if e.param is not None and not e.param.startswith("input["):
                rename(e, chat_names(body, items))
            raise
        for job in run.jobs:
            if job.answer.constrained_by == "response_format":
                job.answer.constrained_by = "text.format"
        return replace(run, id=new_id("resp").replace("-", "_")), items

    async def _stored(self, response: Mapping[str, Any], items: Sequence[Item]) -> dict[str, Any]:
        """Keeps a response. A finished answer is never lost to its store: what it says of itself then is given."""
        try:
            await asyncio.to_thread(self.store.put, response, items, owner.get())
        except StoreError as e:
            log.error("response %s is not stored: %s", response["id"], e)
            return {"store": False, "warnings": [f"Not stored: {e} It cannot be continued by its id."]}
        return {}

    async def cancel(self, id: str) -> None:
        """Ends a response under way after its current step. Raises RequestError when it is over."""
        if self._owners.get(id) != owner.get():
            await asyncio.to_thread(self.store.get, id, owner.get())
            raise RequestError(f"Response '{id[:100]}' is over already.", param="response_id")
        self.running[id] = True

    async def whole(self, body: ResponsesBody, run: Run, items: list[Item]) -> dict[str, Any]:
        response: dict[str, Any] = {}
        async with aclosing(self.stream(body, run, items)) as events:
            async for event in events:
                response = event.get("response", response)
        return response

    async def stream(self, body: ResponsesBody, run: Run, items: list[Item]) -> AsyncGenerator[Event, None]:
        """Events in that API's order; the last has the finished response, which is then stored."""
        output, number, begun = Output(), 0, False
        self.running[run.id], self._owners[run.id] = False, owner.get()

        def numbered(event: Event) -> Event:
            nonlocal number
            number += 1
            return {**event, "sequence_number": number - 1}

        try:
            status, reason = "completed", "stop"
            async with aclosing(self.service.run(run.jobs)) as deltas:
                async for _, delta in deltas:
                    if not begun:
                        begun = True
                        for kind in ("response.created", "response.in_progress"):
                            yield numbered({"type": kind, "response": response_json(body, run, [], "in_progress")})
                    for event in output.add(delta):
                        yield numbered(event)
                    reason = delta.finish_reason or reason
                    if self.running[run.id]:
                        status = "cancelled"
                        break
            if status != "cancelled":
                status = STATUS[reason]
            for event in output.close("completed" if status == "completed" else "incomplete"):
                yield numbered(event)
            response = response_json(body, run, output.items, status)
            if body.store is not False:
                response |= await self._stored(response, [*items, *output.items])
            kind = "response.completed" if status in ("completed", "cancelled") else "response.incomplete"
            yield numbered({"type": kind, "response": response})
        finally:
            self.running.pop(run.id, None)
            self._owners.pop(run.id, None)


class Output:
    """Output items of a response, built from deltas, with the events that tell of each change."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open = False

    def add(self, delta: AnswerDelta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._text("reasoning", delta.reasoning)
        if delta.content:
            events += self._text("message", delta.content)
        for call in delta.calls:
            if call.name is not None:
                item = {"type": "function_call", "id": new_id("fc").replace("-", "_"), "call_id": call.id}
                events += self._start({**item, "name": call.name, "arguments": ""})
            if call.arguments:
                self.items[-1]["arguments"] += call.arguments
                events.append(self._event("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def close(self, status: str = "completed") -> list[Event]:
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = status
        events: list[Event] = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **done))
        else:
            part = item["content"][0]
            extra: Event = {"logprobs": []} if item["type"] == "message" else {}
            kind = part["type"]
            events.append(self._event(f"response.{kind}.done", content_index=0, text=part["text"], **extra))
            events.append(self._event("response.content_part.done", content_index=0, part=dict(part)))
        done_event: Event = {"type": "response.output_item.done", "output_index": len(self.items) - 1}
        return [*events, {**done_event, "item": copied(item)}]

    def _text(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._open or self.items[-1]["type"] != kind:
            part: dict[str, Any]
            if kind == "reasoning":
                part = {"type": "reasoning_text", "text": ""}
                item: Item = {"type": kind, "id": new_id("rs").replace("-", "_"), "summary": []}
            else:
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item = {"type": kind, "id": new_id("msg").replace("-", "_"), "role": "assistant"}
            events += self._start({**item, "content": []})
            self.items[-1]["content"].append(part)
            events.append(self._event("response.content_part.added", content_index=0, part=dict(part)))
        part = self.items[-1]["content"][0]
        part["text"] += text
        extra: Event = {"logprobs": []} if kind == "message" else {}
        return [*events, self._event(f"response.{part['type']}.delta", content_index=0, delta=text, **extra)]

    def _start(self, item: Item) -> list[Event]:
        events = self.close()
        self._open = True
        self.items.append({**item, "status": "in_progress"})
        index = len(self.items) - 1
        added = {"type": "response.output_item.added", "output_index": index, "item": copied(self.items[-1])}
        return [*events, added]

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def copied(item: Item) -> Item:
    """The item as it is now: an event must not change after it was given."""
    copy = dict(item)
    if "content" in copy:
        copy["content"] = [dict(part) for part in copy["content"]]
    return copy


def response_json(body: ResponsesBody, run: Run, output: Sequence[Item], status: str) -> dict[str, Any]:
    params = run.jobs[0].request.params
    usage = run.usage()
    return {
        "id": run.id,
        "object": "response",
        "created_at": run.created,
        "completed_at": None if status == "in_progress" else int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": run.model,
        "output": [copied(item) for item in output],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": body.reasoning or {"effort": None, "summary": None},
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": text_format(body)},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None
        if status == "in_progress"
        else {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        | run.intake_usage(),
        "user": body.user,
    }
