"""LongLLMLingua (arXiv 2310.06839): documents ranked by a language model, put in order, given rates by their rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from onebox.prompt.scoring import Scorer, TokenScores, are_turns

Condition = Literal["none", "before", "after"]
Order = Literal["auto", "sort", "original", "two_stage"]
RESTRICTION = " We can get the answer to this question in the given documents."
_PASSAGE = 1600  # characters: a longer document is ranked by its best passage of this length
_STRETCH = 600


@dataclass(frozen=True)
class LikelihoodRanker:
    """Relevance by perplexity, all documents in one batch.

    after    likelihood of the question after the document: the paper's r_k, its best
    before   likelihood of the document after the question; with `compare`, how much the question raises it
    none     the document's own perplexity, the most surprising first: LLMLingua's choice of demonstrations
    """

    scorer: Scorer
    condition: Condition = "after"
    compare: bool = False
    restriction: str = RESTRICTION
    name: str = "r_k"

    def rank(self, question: str, documents: Sequence[str]) -> Sequence[float]:
        return self.read(question, documents)[0]

    def read(
        self, question: str, documents: Sequence[str], *, keep: bool = False
    ) -> tuple[list[float], list[TokenScores | None]]:
        """Relevance, and each document's surprisal after nothing as far as its first passage goes, if the ranking reads
        that anyway. With `keep` (condition after) the documents' own tokens are scored as they are read. Turns of a
        conversation are ranked by stretches of about 150 tokens.
        """
        if are_turns(documents):  # what answers a question is seldom one turn
            ranges = together(documents, _STRETCH)
            stretches = ["\n".join(documents[first:past]) for first, past in ranges]
            values = self._read(question, stretches, keep=False)[0]
            spread = [value for (first, past), value in zip(ranges, values, strict=True) for _ in range(first, past)]
            return spread, [None] * len(documents)
        return self._read(question, documents, keep=keep)

    def _read(
        self, question: str, documents: Sequence[str], *, keep: bool
    ) -> tuple[list[float], list[TokenScores | None]]:
        passages = [
            (index, document[at : at + _PASSAGE])
            for index, document in enumerate(documents)
            for at in range(0, max(len(document), 1), _PASSAGE)
        ]
        texts = [text for _, text in passages]
        own: list[TokenScores] = []
        if self.condition == "none":
            own = self.scorer.score(texts)
            values = _means(own)
        elif self.condition == "after":
            asked = question + self.restriction
            if keep:
                joined = self.scorer.score([f"{text}\n\n{asked}" for text in texts])
                own = [_between(scores, 0, len(text)) for text, scores in zip(texts, joined, strict=True)]
                found = [_between(s, len(text) + 2, math.inf) for text, s in zip(texts, joined, strict=True)]
            else:
                found = self.scorer.score([asked] * len(texts), prefixes=[text + "\n\n" for text in texts])
            values = [-x for x in _means(found)]
        else:
            values = [-x for x in _means(self.scorer.score(texts, prefixes=[question + "\n\n"] * len(texts)))]
            if self.compare:
                own = self.scorer.score(texts)
                values = [a + b for a, b in zip(values, _means(own), strict=True)]
        best = [-math.inf] * len(documents)
        first: list[TokenScores | None] = [None] * len(documents)
        for at, ((index, _), value) in enumerate(zip(passages, values, strict=True)):
            best[index] = max(best[index], value if math.isfinite(value) else -math.inf)
            if own and first[index] is None:
                first[index] = own[at]
        return best, first


def together(texts: Sequence[str], characters: int) -> list[tuple[int, int]]:
    """Half-open ranges of consecutive texts of at most `characters`, or of one longer text."""
    found: list[tuple[int, int]] = []
    size = 0
    for at, text in enumerate(texts):
        size += len(text)
        if found and size <= characters:
            found[-1] = (found[-1][0], at + 1)
        else:
            found.append((at, at + 1))
            size = len(text)
    return found


def _between(scores: TokenScores, start: int, end: float) -> TokenScores:
    inside = (scores.starts >= start) & (scores.starts < end)
    return TokenScores(scores.starts[inside], scores.ends[inside], scores.scores[inside])


def _means(scored: Sequence[TokenScores]) -> list[float]:
    return [float(item.scores.mean()) if len(item.scores) else math.nan for item in scored]


def order_by_rank(ranks: Sequence[int], order: Order) -> list[int]:
    """Positions of documents in the output. `two_stage` puts the strong ones at both ends; `auto` is `sort` here."""
    best_first = [int(at) for at in np.argsort(np.array(ranks), kind="stable")]
    if order == "original":
        return list(range(len(ranks)))
    return best_first if order in ("auto", "sort") else best_first[0::2] + best_first[1::2][::-1]


def rates_by_rank(ranks: Sequence[int], rate: float, spread: float) -> list[float]:
    """From rate + spread for the best to rate - spread for the last, in [0, 1]."""
    last = max(max(ranks, default=0), 1)
    return [min(1.0, max(0.0, rate + spread * (1 - 2 * rank / last))) for rank in ranks]
