"""Baselines without a model. Take documents, a question or none, a token target; give text of at most that length."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import regex
from rank_bm25 import BM25Plus

from onebox.prompt import Bm25Ranker
from tools.compare_llmlingua.cases import Count, words

_SENTENCE = regex.compile(r"[^.!?\n]*(?:[.!?]+|\n|$)\s*")


def most(texts: Sequence[str], order: Sequence[int], target: int, count: Count, join: str) -> str:
    """As many texts as fit, taken by `order`, given in the order of the source."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        fits = count(join.join(texts[at] for at in sorted(order[:middle]))) <= target
        low, high = (middle, high) if fits else (low, middle - 1)
    return join.join(texts[at] for at in sorted(order[:low]))


def random_words(documents: Sequence[str], question: str | None, target: int, count: Count) -> str:
    parts = "\n\n".join(documents).split(" ")
    order = list(range(len(parts)))
    random.Random(len(parts)).shuffle(order)
    return most(parts, order, target, count, " ")


def truncation(documents: Sequence[str], question: str | None, target: int, count: Count) -> str:
    parts = "\n\n".join(documents).split(" ")
    return most(parts, range(len(parts)), target, count, " ")


def bm25_documents(documents: Sequence[str], question: str | None, target: int, count: Count) -> str:
    """Documents by BM25 for the question, best first; the last is cut at a word."""
    scores = Bm25Ranker(around=0).rank(question or "", documents)
    ranked = sorted(range(len(documents)), key=lambda at: (-scores[at], at))
    return truncation([documents[at] for at in ranked], None, target, count)


def bm25_sentences(documents: Sequence[str], question: str | None, target: int, count: Count) -> str:
    """Sentences by BM25 for the question; without one for all words of the text, each once (its centroid)."""
    sentences = [s for s in _SENTENCE.findall("\n\n".join(documents)) if s.strip()]
    corpus = [words(sentence) or [""] for sentence in sentences]
    query = words(question) if question else sorted({word for sentence in corpus for word in sentence})
    scores = BM25Plus(corpus).get_scores(query)
    order = sorted(range(len(sentences)), key=lambda at: (-scores[at], at))
    return most(sentences, order, target, count, "")


BASELINES: dict[str, Callable[[Sequence[str], str | None, int, Count], str]] = {
    "random words": random_words,
    "truncation": truncation,
    "BM25 documents": bm25_documents,
    "BM25 sentences": bm25_sentences,
}
