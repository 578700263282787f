"""Rankers that need no causal model. Take a question and documents, give a relevance for each, higher is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onebox.errors import PromptError
from onebox.prompt.scoring import are_turns, words

AROUND = 2000  # characters: how far from a line stands what belongs to it
_AROUND_WEIGHT = 2.0


@dataclass(frozen=True)
class Bm25Ranker:
    """BM25+ by rank-bm25, on stemmed words. `around`: what stands up to so many characters from a document counts too,
    the nearer the more, twice as much in all as the document itself; None: 2,000 for turns of a conversation, whose
    answers spread over several, and 0 for other documents."""

    around: int | None = None
    name: str = "bm25"

    def rank(self, question: str, documents: Sequence[str]) -> Sequence[float]:
        try:
            from rank_bm25 import BM25Plus
        except ModuleNotFoundError as e:
            raise PromptError(
                "Ranking by a question needs rank-bm25; install it with: pip install 'onebox[prompt]'"
            ) from e

        corpus = [words(document) or [""] for document in documents]
        own = BM25Plus(corpus).get_scores(words(question)) if corpus else np.zeros(0)
        around = self.around if self.around is not None else AROUND if are_turns(documents) else 0
        if around and len(own) > 1:
            own = _scaled(own)
            own = own + _AROUND_WEIGHT * _scaled(nearby(own, [len(document) for document in documents], around))
        return [float(score) for score in own]


def nearby(values: np.ndarray, lengths: Sequence[int], reach: float) -> np.ndarray:
    """For each text of a row the sum of all values [n], each less the farther its text stands (by characters, from
    middle to middle), down to nothing at `reach`. By running sums: time and memory grow as n."""
    size = np.asarray(lengths, dtype=float)
    middle = np.cumsum(size) - size / 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    moment = np.concatenate([[0.0], np.cumsum(values * middle)])
    at = np.arange(len(middle))
    first = np.searchsorted(middle, middle - reach, side="right")
    past = np.searchsorted(middle, middle + reach, side="left")
    before, after = total[at + 1] - total[first], total[past] - total[at + 1]
    lag = middle * before - (moment[at + 1] - moment[first])
    lead = (moment[past] - moment[at + 1]) - middle * after
    found: np.ndarray = before + after - (lag + lead) / reach
    return found


def _scaled(scores: np.ndarray) -> np.ndarray:
    spread = float(scores.max() - scores.min())
    return np.asarray((scores - scores.min()) / spread if spread > 0 else scores * 0)


@dataclass(frozen=True)
class CallableRanker:
    """Any function (question, documents) -> scores."""

    function: Callable[[str, Sequence[str]], Sequence[float]]
    name: str = "callable"

    def rank(self, question: str, documents: Sequence[str]) -> Sequence[float]:
        scores = [float(score) for score in self.function(question, documents)]
        if len(scores) != len(documents):
            raise PromptError(f"ranker {self.name!r}: gave {len(scores)} scores for {len(documents)} documents")
        return scores


@dataclass(frozen=True)
class EmbeddingRanker:
    """Cosine of embeddings. `model` is a SentenceTransformer, or anything whose `encode(texts)` gives vectors.

    Some models want their prompts: `query_prompt="query: ", document_prompt="passage: "` for e5.
    """

    model: Any
    query_prompt: str = ""
    document_prompt: str = ""
    name: str = "embeddings"

    @classmethod
    def from_pretrained(cls, path: str, *, query_prompt: str = "", document_prompt: str = "") -> EmbeddingRanker:
        model = _sentence_transformers().SentenceTransformer(path, trust_remote_code=False)
        return cls(model, query_prompt, document_prompt, name=str(path))

    def rank(self, question: str, documents: Sequence[str]) -> Sequence[float]:
        texts = [self.query_prompt + question, *[self.document_prompt + document for document in documents]]
        vectors = np.asarray(self.model.encode(texts), dtype=float)
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return [float(score) for score in vectors[1:] @ vectors[0]]


@dataclass(frozen=True)
class CrossEncoderRanker:
    """Scores of (question, document) pairs. `model` is a CrossEncoder, or anything that has its `predict(pairs)`."""

    model: Any
    name: str = "cross-encoder"

    @classmethod
    def from_pretrained(cls, path: str) -> CrossEncoderRanker:
        return cls(_sentence_transformers().CrossEncoder(path, trust_remote_code=False), name=str(path))

    def rank(self, question: str, documents: Sequence[str]) -> Sequence[float]:
        scores = np.asarray(self.model.predict([(question, document) for document in documents]), dtype=float)
        if scores.shape != (len(documents),):
            raise PromptError(f"ranker {self.name!r}: gave shape {scores.shape} for {len(documents)} documents")
        return [float(score) for score in scores]


def _sentence_transformers() -> Any:
    try:
        import sentence_transformers
    except ModuleNotFoundError as e:
        raise PromptError(
            "Embeddings and cross-encoders need sentence-transformers; install it with: "
            "pip install 'onebox[prompt]' sentence-transformers"
        ) from e
    return sentence_transformers
