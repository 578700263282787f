"""Texts -> chunks with what a teacher model keeps of them, by any OpenAI-compatible server.

The teacher may only delete words; no rate is asked for (LLMLingua-2, arXiv 2403.12968, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

INSTRUCTION = (
    "You shorten texts. Delete words that a reader can do without and keep everything that carries information. "
    "Delete only: do not change, reorder, abbreviate or add any word or sign. Answer with the shortened text alone."
)
_ENDS = (".", "!", "?", "。", "！", "？")


class Teacher(Protocol):
    """The part of `openai.OpenAI` that is used."""

    @property
    def chat(self) -> Any: ...


def chunks(text: str, max_words: int) -> Iterator[str]:
    """Pieces of at most `max_words` words that end with a sentence or line where one ends in their second half."""
    words = text.replace("\n", " \n ").split(" ")
    words = [word for word in words if word]
    at = 0
    while at < len(words):
        stop = min(at + max_words, len(words))
        if stop < len(words):
            ends = [i for i in range(at + max_words // 2, stop) if words[i] == "\n" or words[i].endswith(_ENDS)]
            stop = ends[-1] + 1 if ends else stop
        chunk = " ".join(words[at:stop]).strip()
        if chunk:
            yield chunk
        at = stop


def teach(
    rows: Iterable[dict[str, Any]], teacher: Teacher, model: str, *, max_words: int = 380, temperature: float = 0.0
) -> Iterator[dict[str, Any]]:
    """Rows {"id", "text"} -> {"id", "text", "compressed"}, one a chunk; an empty answer is left out."""
    for row in rows:
        for number, chunk in enumerate(chunks(row["text"], max_words)):
            answer = teacher.chat.completions.create(
                model=model,
                temperature=temperature,
                messages=[{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": chunk}],
            )
            compressed = (answer.choices[0].message.content or "").strip()
            if compressed:
                yield {"id": f"{row['id']}/{number}", "text": chunk, "compressed": compressed}
