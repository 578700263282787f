"""Bodies of `onebox compress`. Takes text and flags, gives output lines and a summary; opens no models of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onebox.errors import PromptError
from onebox.prompt.bundled import bundled_scorer
from onebox.prompt.causal import CausalScorer
from onebox.prompt.compressor import CompressedPrompt, Compressor
from onebox.prompt.llmlingua2 import ClassifierScorer
from onebox.prompt.scoring import Scorer

CAUSAL_METHODS = ("llmlingua", "longllmlingua")


def build_compressor(method: str, model: str | None) -> Compressor:
    """The compressor a command line asks for. `model`: a folder or an id for the methods that need one; left out, the
    causal methods take the bundled model. Raises PromptError when llmlingua2 has none."""
    scorer: Scorer | None = None
    if model:
        scorer = (
            ClassifierScorer.from_pretrained(model) if method == "llmlingua2" else CausalScorer.from_pretrained(model)
        )
    elif method in CAUSAL_METHODS:
        scorer = bundled_scorer()
    elif method == "llmlingua2":
        raise PromptError(f"--method {method}: needs --model, a folder or id of a token classifier")
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
    floor = f" (protected spans alone take {result.floor_tokens})" if result.status == "protected" else ""
    return (
        result,
        f"{result.original_tokens} -> {result.tokens} tokens ({result.ratio:.0%}), {result.status}{floor}, by {how}",
    )


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


@contextmanager
def progress_bar(what: str, total: int, *, from_: int = 2) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr where that is a terminal and the work is long; gives what to tell (done, in all)."""
    if total < from_ or not sys.stderr.isatty():
        yield lambda done, in_all: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, in_all: bar.update(task, completed=done, total=in_all)
