"""Scores. Takes texts, gives a score for every character span (higher: keep). The two interfaces every method is made
of, scores of tokens as scores of pieces, and the scorer that needs no model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import regex

from onebox.prompt.segments import Piece

Aggregation = Literal["mean", "max", "first"]

_WORD = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}]|[\p{L}\p{N}\p{M}]+")
_STOP = frozenset(
    """the a an of in on to is are was were be been who whom what when where which how why did do does for and or by
    with from that this these those it its as at has have had he she they we you i his her their our your but if so
    then than there here s t um uh der die das und ist ein eine zu den von mit les la le et un une est""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class TokenScores:
    """One score for each half-open span [starts[i], ends[i]) of a text."""

    starts: np.ndarray
    ends: np.ndarray
    scores: np.ndarray

    @classmethod
    def of(cls, offsets: Sequence[tuple[int, int]], scores: np.ndarray) -> TokenScores:
        both = np.array(offsets, dtype=int).reshape(-1, 2)
        return cls(both[:, 0], both[:, 1], np.asarray(scores, dtype=float))

    @classmethod
    def joined(cls, found: Sequence[tuple[int, TokenScores]]) -> TokenScores:
        """Scores of consecutive stretches of one text as scores of that text; each comes with where it starts."""
        if not found:
            return cls(np.zeros(0, int), np.zeros(0, int), np.zeros(0))
        return cls(
            np.concatenate([item.starts + at for at, item in found]),
            np.concatenate([item.ends + at for at, item in found]),
            np.concatenate([item.scores for _, item in found]),
        )

    def of_pieces(self, row: Sequence[Piece], how: Aggregation = "mean") -> np.ndarray:
        """One score a piece: of the tokens that share characters with it, whatever the tokenizer calls a word (a
        WordPiece continuation, a SentencePiece space, a byte of a Chinese character). A piece no token covers gets
        the lowest score."""
        low = float(self.scores.min()) if len(self.scores) else 0.0
        out = np.full(len(row), low)
        if not len(self.scores) or not len(row):
            return out
        starts = np.array([piece.start for piece in row])
        ends = np.array([piece.end for piece in row])
        first = np.searchsorted(np.maximum.accumulate(self.ends), starts, side="right")
        past = np.searchsorted(self.starts, ends, side="left")
        some = past > first
        if how == "first":
            out[some] = self.scores[first[some]]
        elif how == "max":
            out[some] = [float(self.scores[a:b].max()) for a, b in zip(first[some], past[some], strict=True)]
        else:
            running = np.concatenate([[0.0], np.cumsum(self.scores)])
            out[some] = (running[past[some]] - running[first[some]]) / (past[some] - first[some])
        return out


class Scorer(Protocol):
    """Anything that scores spans of texts; `prefixes` are read before each text and not scored."""

    @property
    def name(self) -> str: ...

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]: ...


class Ranker(Protocol):
    """Relevance of each document to a question; higher is better."""

    @property
    def name(self) -> str: ...

    def rank(self, question: str, documents: Sequence[str]) -> Sequence[float]: ...


_LONE = regex.compile("[\ud800-\udfff]")


def readable(text: str) -> str:
    """The text with lone surrogates, which no tokenizer takes, as U+FFFD: as many characters, at the same places."""
    return _LONE.sub("\ufffd", text)


def words(text: str) -> list[str]:
    """Lower-case words without function words, with English endings cut; unspaced scripts by character."""
    found = (word.lower() for word in _WORD.findall(text))
    return [_stem(word) for word in found if word not in _STOP]


def _stem(word: str) -> str:
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) > len(ending) + 2:
            return word[: -len(ending)]
    return word


_SPEAKER = regex.compile(r"\s*([^\n:]{1,40}):\s")
_FEW, _SHORT = 6, 200


def are_turns(texts: Sequence[str]) -> bool:
    """Whether texts are lines of one conversation rather than texts of their own: several, most of them under 200
    characters, or most opened by the name of one of few speakers."""
    if len(texts) < _FEW:
        return False
    lengths = sorted(len(text) for text in texts)
    if lengths[len(texts) // 2] < _SHORT:
        return True
    speakers = [found.group(1) for text in texts if (found := _SPEAKER.match(text))]
    return 2 * len(speakers) > len(texts) and 2 * len(set(speakers)) <= len(speakers)


class StatisticScorer:
    """Needs no model: self-information of words from their counts in the texts scored together; more for names and
    numbers, less for what a text said before, more for how a text begins (what it is about stands there). Turns of a
    conversation are one text: none of them begins anew, and who speaks counts less."""

    name = "statistics"

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]:
        counts: Counter[str] = Counter(word.lower() for text in texts for word in _WORD.findall(text))
        total = sum(counts.values()) + 1
        out = []
        turns = are_turns(texts)
        named = 0.3 if turns else 0.7
        seen: set[str] = set()
        for index, text in enumerate(texts):
            starts, ends, scores = [], [], []
            begins = not turns and (prefixes is None or not prefixes[index])
            seen = seen if turns else set()
            for match in _WORD.finditer(text):
                body = match.group()
                word = body.lower()
                if word in _STOP:
                    score = 0.25
                else:
                    score = math.log(total / counts[word]) / math.log(total + 1) + 0.3
                    score += named if body[0].isupper() or body[0].isdigit() else 0.0
                    score *= 0.4 if word in seen else 1.0
                    seen.add(word)
                if begins:
                    score += 1.5 * math.exp(-match.start() / 150)
                starts.append(match.start())
                ends.append(match.end())
                scores.append(score)
            out.append(TokenScores(np.array(starts, int), np.array(ends, int), np.array(scores, float)))
        return out
