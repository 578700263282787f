"""Bodies of `onebox compress`. Takes text and flags, gives output lines and a summary; opens no models of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from onebox.errors import PromptError
from onebox.prompt.causal import CausalScorer
from onebox.prompt.compressor import CompressedPrompt, Compressor
from onebox.prompt.llmlingua2 import ClassifierScorer
from onebox.prompt.scoring import Scorer


def build_compressor(method: str, model: str | None) -> Compressor:
    """The compressor a command line asks for; `model` is a local folder or an id for the methods that need one."""
    scorer: Scorer | None = None
    if model:
        scorer = (
            ClassifierScorer.from_pretrained(model) if method == "llmlingua2" else CausalScorer.from_pretrained(model)
        )
    elif method in ("llmlingua", "longllmlingua", "llmlingua2"):
        raise PromptError(f"--method {method}: needs --model, a folder or id; --method auto needs none")
    return Compressor(method, scorer=scorer)  # type: ignore[arg-type]  # Compressor refuses unknown names


def compress_text(text: str, compressor: Compressor, **options: Any) -> tuple[CompressedPrompt, str]:
    """The result and one line that sums it up."""
    result = compressor.compress(text, append_question=False, **options)
    scorer = compressor.scorer.name
    how = (
        f"{compressor.method} ({compressor.ranker.name}, {scorer})"
        if options.get("question")
        else f"{compressor.method} ({scorer})"
    )
    return result, f"{result.original_tokens} -> {result.tokens} tokens ({result.ratio:.0%}), {result.status}, by {how}"


def compress_lines(lines: Iterable[str], compressor: Compressor, **options: Any) -> Iterator[str]:
    """One JSON line for each JSON line: `prompt` is compressed, `question` is used, every other field is kept."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise PromptError(f"line {number}: not JSON ({error}); give one object a line") from error
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise PromptError(f'line {number}: no text field \'prompt\'; give objects such as {{"prompt": "..."}}')
        asked = row.get("question") or options.get("question")
        result, _ = compress_text(row["prompt"], compressor, **{**options, "question": asked})
        row |= {"prompt": result.text, "tokens": result.tokens, "original_tokens": result.original_tokens}
        yield json.dumps(row, ensure_ascii=False)


def write_html(result: CompressedPrompt, path: str) -> None:
    try:
        Path(path).write_text(result.trace.to_html(), encoding="utf-8")
    except OSError as error:
        raise PromptError(
            f"--html {path}: cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from error
