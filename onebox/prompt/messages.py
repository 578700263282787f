"""Chat messages -> parts, and back. Roles, order, names, tool calls and all that is not text stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from onebox.errors import PromptError
from onebox.prompt.parts import Part

ROLE_POLICY: dict[str, str | float] = {
    "system": "keep",
    "developer": "keep",
    "user": "compress",
    "assistant": "compress",
    "tool": "compress",
}


def check_roles(roles: Mapping[str, str | float]) -> None:
    if not isinstance(roles, Mapping):
        raise PromptError(f"roles: {type(roles).__name__} is not a mapping of roles to policies")
    for role, policy in roles.items():
        number = isinstance(policy, (int, float)) and not isinstance(policy, bool)
        if policy not in ("keep", "compress") and not (number and 0 <= policy <= 1):  # type: ignore[operator]
            raise PromptError(f"roles[{role!r}]: unknown policy {policy!r}; use keep, compress, or a rate from 0 to 1")


def message_parts(
    messages: Sequence[Mapping[str, Any]],
    roles: Mapping[str, str | float],
    question: str | None,
    *,
    stable: bool,
) -> tuple[list[Part], list[tuple[int, int | None]], str | None]:
    """Parts, the (message, position in its content) of each, and the question: the last user turn unless one is given.

    The last user turn stays whole. `stable`: every user turn does, since each was once the last, and there is no
    question, so that what becomes of a message never depends on those after it.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise PromptError(f"messages: {type(messages).__name__} is not a list of messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(f"messages[{index}]: {type(message).__name__} is not a message with role and content")
    parts: list[Part] = []
    places: list[tuple[int, int | None]] = []
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    for index, message in enumerate(messages):
        role = str(message.get("role"))
        policy = roles.get(role, "keep")
        last = bool(users) and index == users[-1]
        rate = 1.0 if policy == "keep" or last or (stable and role == "user") else None
        if rate is None and policy != "compress":
            rate = float(policy)
        content = message.get("content")
        items = content if isinstance(content, list) else [content]
        for position, item in enumerate(items):
            text = item.get("text") if isinstance(item, Mapping) and item.get("type") == "text" else item
            if isinstance(text, str):
                parts.append(Part(text, f"{role} {index}", rate=rate))
                places.append((index, position if isinstance(content, list) else None))
                if question is None and last and not stable:
                    question = text
    return parts, places, question


def copied(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [copy.deepcopy(dict(message)) for message in messages]


def rebuilt(
    messages: Sequence[Mapping[str, Any]], places: Sequence[tuple[int, int | None]], texts: Sequence[str]
) -> list[dict[str, Any]]:
    """The messages with their texts replaced."""
    out = copied(messages)
    for (index, position), text in zip(places, texts, strict=True):
        if position is None:
            out[index]["content"] = text
        elif isinstance(out[index]["content"][position], dict):
            out[index]["content"][position]["text"] = text
        else:
            out[index]["content"][position] = text
    return out
