"""Chunks with their compression -> a label a word, and which chunks to trust (LLMLingua-2, sections 3.2 and 3.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tools.train_lingua2.windows import stem


def align(words: list[str], kept: list[str], *, window: int = 150) -> list[int]:
    """1 for each word of a text that stands in its compression. Each kept word takes the nearest free word with the
    same stem within `window` words of where the last one was found, forward first: a teacher may inflect and reorder.
    """
    stems = [stem(word) or word for word in words]
    places: dict[str, list[int]] = {}
    for at, value in enumerate(stems):
        places.setdefault(value, []).append(at)
    labels = [0] * len(words)
    last = -1
    for word in kept:
        free = [at for at in places.get(stem(word) or word, ()) if not labels[at] and abs(at - last) <= window]
        if free:
            at = min(free, key=lambda at: (at <= last, abs(at - last)))
            labels[at] = 1
            last = at
    return labels


def measures(words: list[str], kept: list[str], labels: list[int]) -> dict[str, float]:
    """rate: kept over given words. variation: share of kept words that the text does not have. gap: share of the text's
    words that the compression has somewhere, less the share labelled: high where the labels missed matches."""
    text, short = {stem(word) for word in words}, Counter(stem(word) for word in kept)
    missing = sum(n for word, n in short.items() if word not in text)
    hits = sum(stem(word) in short for word in words)
    return {
        "rate": len(kept) / max(1, len(words)),
        "variation": missing / max(1, len(kept)),
        "gap": (hits - sum(labels)) / max(1, len(words)),
    }


def label(rows: Iterable[dict[str, Any]], *, window: int = 150) -> list[dict[str, Any]]:
    """{"id", "text", "compressed"} -> {"id", "words", "labels", "rate", "variation", "gap"}."""
    found = []
    for row in rows:
        words, kept = row["text"].split(), row["compressed"].split()
        labels = align(words, kept, window=window)
        found.append({"id": row["id"], "words": words, "labels": labels, **measures(words, kept, labels)})
    return found


def trusted(
    rows: list[dict[str, Any]], *, variation_share: float = 0.05, gap_share: float = 0.1
) -> list[dict[str, Any]]:
    """Without the worst share by variation, then of the rest without the worst by gap; order is kept."""
    for key, share in (("variation", variation_share), ("gap", gap_share)):
        n = int(len(rows) * share)
        worst = {id(row) for row in sorted(rows, key=lambda row: -row[key])[:n]}
        rows = [row for row in rows if id(row) not in worst]
    return rows


def from_signals(rows: Iterable[dict[str, Any]], *, surprising: float, answered: bool) -> list[dict[str, Any]]:
    """Labels without a teacher, from windows with `surprisal`: the share `surprising` of each window's words with the
    highest surprisal and, with `answered`, the words of evidence that people used in their answers."""
    found = []
    for row in rows:
        order = sorted(range(len(row["words"])), key=lambda at: -row["surprisal"][at])
        labels = [0] * len(order)
        for at in order[: int(len(order) * surprising)]:
            labels[at] = 1
        if answered:
            labels = [max(a, b) for a, b in zip(labels, row["answer"], strict=True)]
        found.append({"id": row["id"], "words": row["words"], "labels": labels})
    return found
