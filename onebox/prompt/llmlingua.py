"""LLMLingua (arXiv 2310.05736): the budget controller, and token-level pruning that reads each segment after what is
left of the ones before it. Takes pieces of texts and a rate; gives scores. The cut itself is budget.py's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from onebox.prompt.budget import select
from onebox.prompt.scoring import Scorer
from onebox.prompt.segments import Piece
from onebox.prompt.surprisal import chain_of

INSTRUCTION_RATE, QUESTION_RATE, SEGMENT, COARSE = 0.85, 0.9, 100, 2.0  # the paper's constants


def demonstrations_rate(budget: int, fixed: Sequence[tuple[float, int]], tokens: int) -> float:
    """What is left for `tokens` of demonstrations after the (rate, tokens) of instruction and question, in [0, 1]."""
    left = budget - sum(rate * length for rate, length in fixed)
    return min(1.0, max(0.0, left / tokens)) if tokens else 1.0


def iterative_scores(
    scorer: Scorer,
    text: str,
    row: Sequence[Piece],
    rate: float,
    *,
    segment_characters: int,
    question: str | None = None,
    compare: bool = False,
    advanced: Callable[[int], None] = lambda characters: None,
) -> np.ndarray:
    """Score of every piece: its surprisal after the compressed text before its segment.

    A segment's own most surprising pieces, up to `rate` of it, are what later segments follow. With `question` every
    segment follows the question too; with `compare` the score is how much less surprising the question makes a piece
    (contrastive perplexity, arXiv 2310.06839), at twice the work.
    """
    chain = chain_of(scorer, f"{question}\n\n" if question and not compare else "")
    given = chain_of(scorer, f"{question}\n\n") if question and compare else None
    out = np.zeros(len(row))
    begin = 0
    while begin < len(row):
        end = begin + 1
        while end < len(row) and row[end].end - row[begin].lead <= segment_characters:
            end += 1
        left, right = row[begin].lead, row[end - 1].end
        part = [
            replace(piece, start=piece.start - left, end=piece.end - left, lead=piece.lead - left)
            for piece in row[begin:end]
        ]
        stretch = text[left:right]
        scores = chain.read(stretch).of_pieces(part)
        if given is not None:
            scores = scores - given.read(stretch).of_pieces(part)
        out[begin:end] = scores
        if end < len(row):
            kept = select([stretch], [part], [scores], [0], int(rate * len(stretch)), len, "").text
            lead = text[row[begin].lead : row[begin].start]
            for reader in (chain, given):
                if reader is not None and kept:
                    reader.commit(kept if kept[:1].isspace() else lead + kept)
        advanced(right - left)
        begin = end
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
