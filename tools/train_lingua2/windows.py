"""QMSum meetings -> windows of words with what people marked in them.

Takes the data set's files (one meeting a JSON file, or one a line), gives rows {"id", "words", "evidence", "answer"}:
`evidence` 1 where the word stands in a turn that some query names as its evidence, `answer` 1 where it also occurs,
up to inflection, in that query's written answer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_MARK = re.compile(r"\{[^{}]*\}")  # {vocalsound}, {disfmarker}
_GAP = re.compile(r"\s+([,.?!;:%)\]'])")
_STOP_WORDS = """
a an and are as at be been but by did do does for from had has have he her him his i if in is it its me my no
not of on or our she so than that the their them then there they this those to too us was we were what when
which who will with would you your about also just like very said can could should because more some how all
"""
_STOP = frozenset(_STOP_WORDS.split())


def read_meetings(paths: Iterable[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, meeting) of every JSON file, line of a JSON-lines file, or file of a folder."""
    for path in paths:
        if path.is_dir():
            yield from read_meetings(sorted(path.glob("*.json*")))
        elif path.suffix == ".jsonl":
            for number, line in enumerate(path.read_text("utf-8").splitlines()):
                yield f"{path.stem}-{number}", json.loads(line)
        else:
            yield path.stem, json.loads(path.read_text("utf-8"))


def clean(text: str) -> str:
    """Speech as it would be typed: no sound marks, no space before punctuation."""
    return _GAP.sub(r"\1", " ".join(_MARK.sub(" ", text).split()))


def stem(word: str) -> str:
    """A word without case, edge punctuation and common English endings."""
    word = re.sub(r"^\W+|\W+$", "", word.casefold())
    for ending in ("ations", "ation", "ings", "ing", "edly", "ies", "ied", "ers", "er", "ed", "es", "ly", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


def turns(meeting: dict[str, Any]) -> list[str]:
    return [f"{turn['speaker']}: {clean(turn['content'])}" for turn in meeting["meeting_transcripts"]]


def marked(meeting: dict[str, Any]) -> tuple[list[str], list[int], list[int], list[int]]:
    """words, evidence, answer, turn number; all of one length."""
    said = turns(meeting)
    answers: dict[int, set[str]] = {}
    for query in meeting.get("specific_query_list", []):
        kept = {stem(word) for word in query["answer"].split()} - _STOP - {""}
        for first, last in query["relevant_text_span"]:
            for at in range(int(first), min(int(last), len(said) - 1) + 1):
                answers.setdefault(at, set()).update(kept)
    words, evidence, answer, where = [], [], [], []
    for at, text in enumerate(said):
        for word in text.split():
            words.append(word)
            where.append(at)
            evidence.append(int(at in answers))
            answer.append(int(at in answers and stem(word) in answers[at]))
    return words, evidence, answer, where


def windows(paths: Iterable[Path], *, size: int, each: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """`each` windows of `size` words from every meeting, starting at turns near evidence where there is any."""
    rng = random.Random(seed)
    for name, meeting in read_meetings(paths):
        words, evidence, answer, where = marked(meeting)
        if len(words) < size:
            continue
        starts = [i for i in range(len(words) - size) if i == 0 or where[i] != where[i - 1]]
        near = [i for i in starts if any(evidence[i : i + size])] or starts
        for number, start in enumerate(sorted(rng.sample(near, min(each, len(near))))):
            cut = slice(start, start + size)
            yield {
                "id": f"{name}/{number}",
                "words": words[cut],
                "evidence": evidence[cut],
                "answer": answer[cut],
            }
