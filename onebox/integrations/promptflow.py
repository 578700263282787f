"""Prompt flow: a tool that compresses a prompt, and the entry point (`package_tools`) by which Prompt flow finds it."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from onebox.errors import PromptError
from onebox.prompt import Compressor
from onebox.prompt.command import build_compressor

try:
    from promptflow.core import tool
    from yaml import safe_load
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(
        f"onebox.integrations.promptflow needs Prompt flow ({e}); install it with: pip install 'onebox[promptflow]'",
        name=e.name,
    ) from e


@cache
def _compressor(method: str, model: str) -> Compressor:
    return build_compressor(method, model or None)


@tool
def compress(
    prompt: str | list[Any],
    question: str = "",
    rate: float = 0.5,
    target_tokens: int = 0,
    method: str = "auto",
    model: str = "",
) -> dict[str, Any]:
    """A prompt, or a list of documents, shortened for a question.

    Gives `text`; `documents`, what is left of each in the order given; `tokens`, `original_tokens`, `status`. With
    `target_tokens` above 0, that is what holds instead of `rate`. `model` is the scorer of methods other than auto.
    Raises PromptError.
    """
    if not isinstance(prompt, str) and not all(isinstance(document, str) for document in prompt):
        raise PromptError("prompt: give text, or a list of texts")
    result = _compressor(method, model).compress(
        prompt if isinstance(prompt, str) else None,
        documents=None if isinstance(prompt, str) else list(prompt),
        question=question or None,
        append_question=False,
        rate=None if target_tokens else rate,
        target_tokens=target_tokens or None,
    )
    return {
        "text": result.text,
        "documents": list(result.documents),
        "tokens": result.tokens,
        "original_tokens": result.original_tokens,
        "status": result.status,
    }


def list_package_tools() -> dict[str, Any]:
    """What the entry point gives: identifier -> the tool's YAML."""
    found = safe_load((files("onebox") / "integrations" / "promptflow.yaml").read_text("utf-8"))
    return dict(found)
