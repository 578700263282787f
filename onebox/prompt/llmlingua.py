"""LLMLingua (arXiv 2310.05736): the budget controller, and token-level pruning that reads each segment after what is
left of the ones before it. Takes pieces of texts and a rate; gives scores. The cut itself is budget.py's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onebox.prompt.budget import select
from onebox.prompt.scoring import Scorer, TokenScores
from onebox.prompt.segments import Piece
from onebox.prompt.surprisal import chain_of

INSTRUCTION_RATE, QUESTION_RATE, SEGMENT, COARSE = 0.85, 0.9, 100, 2.0  # the paper's constants
_TOGETHER = 4  # segments; reading what stands before them anew costs less than a forward pass each


def demonstrations_rate(budget: int, fixed: Sequence[tuple[float, int]], tokens: int) -> float:
    """What is left for `tokens` of demonstrations after the (rate, tokens) of instruction and question, in [0, 1]."""
    left = budget - sum(rate * length for rate, length in fixed)
    return min(1.0, max(0.0, left / tokens)) if tokens else 1.0


def shifted(row: Sequence[Piece], by: int) -> list[Piece]:
    """Pieces of a text as pieces of that text without its first `by` characters."""
    return [replace(piece, start=piece.start - by, end=piece.end - by, lead=piece.lead - by) for piece in row]


@dataclass(frozen=True)
class Stretch:
    """Pieces of one text that are scored as one. `rate`: the share of it that later segments follow. With `question`
    every segment follows the question too; with `compare` the score is how much less surprising the question makes a
    piece (contrastive perplexity, arXiv 2310.06839), at twice the work. `known`: surprisal of its first characters
    after nothing, where a ranking has read them already."""

    text: str
    row: Sequence[Piece]
    rate: float
    segment_characters: int
    question: str | None = None
    compare: bool = False
    known: TokenScores | None = None

    @property
    def prefix(self) -> str:
        return f"{self.question}\n\n" if self.question else ""

    def segments(self) -> list[tuple[int, int]]:
        """Half-open ranges of pieces, of like length: a short rest would cost a pass of its own."""
        if not self.row:
            return []
        size = self.row[-1].end - self.row[0].lead
        most = size / max(1, round(size / self.segment_characters))
        found: list[tuple[int, int]] = []
        begin = 0
        for end in range(1, len(self.row) + 1):
            done = end == len(self.row)
            if done or self.row[end].end - self.row[0].lead > most * (len(found) + 1) + 1e-6:
                found.append((begin, end))
                begin = end
        return found

    def cut(self, begin: int, end: int) -> tuple[str, list[Piece]]:
        """Text of pieces [begin, end), and those pieces as its own."""
        left = self.row[begin].lead
        pieces = shifted(self.row[begin:end], left)
        return self.text[left : self.row[end - 1].end], pieces

    def remains(self, begin: int, end: int, scores: np.ndarray) -> str:
        """What later segments follow of this one: its most surprising pieces."""
        text, pieces = self.cut(begin, end)
        kept = select([text], [pieces], [scores], [0], int(self.rate * len(text)), len, "").text
        lead = text[: pieces[0].start]
        return kept if not kept or kept[:1].isspace() else lead + kept


def iterative_scores(
    scorer: Scorer, work: Sequence[Stretch], advanced: Callable[[int], None] = lambda characters: None
) -> list[np.ndarray]:
    """Score of every piece of every stretch: its surprisal after the compressed text before its segment.

    Stretches of a few segments are read together, the n-th segments of all in one batch; a long one is read alone,
    along a chain that keeps what it has read.
    """
    rounds = [stretch.segments() for stretch in work]
    short = [at for at in range(len(work)) if len(rounds[at]) <= _TOGETHER]
    found: list[np.ndarray] = [np.zeros(len(stretch.row)) for stretch in work]
    for at, stretch in enumerate(work):
        if len(rounds[at]) > _TOGETHER:
            found[at] = along_a_chain(scorer, stretch, advanced)
    tails = [""] * len(work)
    for number in range(max((len(rounds[at]) for at in short), default=0)):
        active = [at for at in short if number < len(rounds[at])]
        cuts = {at: work[at].cut(*rounds[at][number]) for at in active}
        asked: list[tuple[int, str]] = []  # stretch, and what stands before its segment
        values: dict[int, list[np.ndarray]] = {at: [] for at in active}
        for at in active:
            one = work[at]
            before = "" if one.compare else one.prefix
            if number == 0 and one.known is not None and not before:
                values[at].append(one.known.of_pieces(cuts[at][1]))
            else:
                asked.append((at, before + tails[at]))
            if one.compare and one.question:
                asked.append((at, one.prefix + tails[at]))
        read = scorer.score([cuts[at][0] for at, _ in asked], prefixes=[prefix for _, prefix in asked])
        for (at, _), scores in zip(asked, read, strict=True):
            values[at].append(scores.of_pieces(cuts[at][1]))
        for at in active:
            begin, end = rounds[at][number]
            scored = values[at][0] - values[at][1] if len(values[at]) > 1 else values[at][0]
            found[at][begin:end] = scored
            if number + 1 < len(rounds[at]):
                tails[at] += work[at].remains(begin, end, scored)
            advanced(len(cuts[at][0]))
    return found


def along_a_chain(
    scorer: Scorer, stretch: Stretch, advanced: Callable[[int], None] = lambda characters: None
) -> np.ndarray:
    """One stretch, segment after segment."""
    chain = chain_of(scorer, "" if stretch.compare else stretch.prefix)
    given = chain_of(scorer, stretch.prefix) if stretch.compare and stretch.question else None
    out = np.zeros(len(stretch.row))
    for begin, end in stretch.segments():
        text, pieces = stretch.cut(begin, end)
        scores = chain.read(text).of_pieces(pieces)
        if given is not None:
            scores = scores - given.read(text).of_pieces(pieces)
        out[begin:end] = scores
        if end < len(stretch.row):
            kept = stretch.remains(begin, end, scores)
            for reader in (chain, given):
                if reader is not None and kept:
                    reader.commit(kept)
        advanced(len(text))
    return out


def quantiles(scores: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Each score as the share of the text that scores lower, over all of it: a scale on which a rate is a threshold."""
    if not scores:
        return []
    flat, weight = np.concatenate([*scores, np.zeros(0)]), np.concatenate([*weights, np.zeros(0)])
    order = np.argsort(flat, kind="stable")
    below = np.zeros(len(flat))
    below[order] = np.cumsum(weight[order]) - weight[order]
    below /= max(float(weight.sum()), 1e-9)
    bounds = np.cumsum([len(row) for row in scores])[:-1]
    return [np.asarray(part) for part in np.split(below, bounds)]
