"""Verify drafts against the target. Takes logits of a window's rows, gives the tokens that stand.

Each row draws the target's own token with position-keyed noise; drafts are kept while they equal it, and the first
row that differs supplies the next token. So the output is exactly what the target alone would have drawn with the same
seed, for any drafter and any k: greedy and sampled alike.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from onebox.engine.grammar import mask_logits
from onebox.engine.sampler import SamplingRows, penalize, sample
from onebox.engine.sequence import Sequence


def choose(logits: Tensor, rows: Seq[tuple[Sequence, list[int]]]) -> list[int]:
    """The target's token for each row of logits [R, V]; a row is (sequence, drafts taken as already said)."""
    params = [s.request.params for s, _ in rows]
    said = [_said(s, drafts) for s, drafts in rows]
    logits = mask_logits(logits, [(s.matcher, drafts) for s, drafts in rows])
    logits = penalize(logits, params, [s.request.prompt for s, _ in rows], said)
    early = [i for i, (s, d) in enumerate(rows) if len(s.tokens) - s.prompt_len + len(d) < params[i].min_tokens]
    if early:
        logits = logits.clone()
        for i in early:
            row, stops = logits[i].clone(), sorted(rows[i][0].stop_ids)
            row[stops] = float("-inf")
            if rows[i][0].matcher is None or row.isfinite().any():  # else the grammar is at its end
                logits[i] = row
    positions = [len(s.tokens) + len(d) for s, d in rows]
    seeds = [s.seed for s, _ in rows]
    chosen: list[int] = sample(logits, SamplingRows.of(params, seeds, positions, logits.device)).tolist()
    return chosen


def _said(sequence: Sequence, drafts: list[int]) -> list[int]:
    """Answer tokens so far, which penalties alone need."""
    p = sequence.request.params
    needed = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
    return sequence.output + drafts if needed else []


def accept(drafts: Seq[int], targets: Seq[int]) -> list[int]:
    """The tokens that stand: drafts as far as they equal the target's, then the target's own next one."""
    n = 0
    while n < len(drafts) and drafts[n] == targets[n]:
        n += 1
    return list(targets[: n + 1])
