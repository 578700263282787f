"""Rankers that need no causal model. Take a question and documents, give a relevance for each, higher is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onebox.errors import PromptError
from onebox.prompt.scoring import words


class Bm25Ranker:
    """BM25+ by rank-bm25, on stemmed words."""

    name = "bm25"

    def rank(self, question: str, documents: Sequence[str]) -> Sequence[float]:
        try:
            from rank_bm25 import BM25Plus
        except ModuleNotFoundError as e:
            raise PromptError(
                "Ranking by a question needs rank-bm25; install it with: pip install 'onebox[prompt]'"
            ) from e

        corpus = [words(document) or [""] for document in documents]
        return [float(score) for score in BM25Plus(corpus).get_scores(words(question))]


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
