"""Propose drafts and verify them against the target. Takes logits of a window's rows, gives the tokens that stand.

Each row draws the target's own token with position-keyed noise; drafts are kept while they equal it, and the first
row that differs supplies the next token. So the output is exactly what the target alone would have drawn with the same
seed, for any drafter and any k: greedy and sampled alike.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from onebox.engine.grammar import mask_logits
from onebox.engine.sampler import SamplingRows, penalize, sample
from onebox.engine.sequence import Sequence
from onebox.ledger import Build, step_bytes
from onebox.spec import Spec


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


class News(NamedTuple):
    """The `n` newest tokens of a sequence and the hidden states of the positions before them."""

    sequence: Sequence
    n: int
    hidden: Tensor  # [n, H]


class Drafter(Protocol):
    """Whoever proposes the next tokens; what it proposes changes speed alone."""

    def draft(self, news: Seq[News]) -> None:
        """Fill `drafts` of each sequence, with `n_drafts` tokens at most."""


class PromptLookup:
    """Drafts what followed the newest tokens where they last stood in the same text (Saxena, prompt lookup decoding).

    The longest match of `shortest` to `longest` tokens wins, then the latest. No model and no memory on the device.
    """

    CANDIDATES = 32  # latest places that are compared

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.longest, self.shortest = longest, shortest
        self._places: WeakKeyDictionary[Sequence, Places] = WeakKeyDictionary()

    def draft(self, news: Seq[News]) -> None:
        for s, _, _ in news:
            s.drafts = self.continuation(s)

    def continuation(self, s: Sequence) -> list[int]:
        if not s.n_drafts:
            return []
        places = self._places.setdefault(s, Places(self.shortest))
        places.read(s.tokens)
        start = places.after(s.tokens, self.longest, self.CANDIDATES)
        text = list(s.tokens[start : start + s.n_drafts]) if start else []
        while text and len(text) < s.n_drafts:  # the match ends where the text does: it repeats itself from there
            text.append((s.tokens[start:] + text)[len(text)])
        return text


@dataclass
class Places:
    """Where each run of `width` tokens of a growing text ends, oldest first; the last token's own run left out."""

    width: int
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    seen: int = 0

    def read(self, tokens: list[int]) -> None:
        """Take in what the text has grown by."""
        for end in range(max(self.seen, self.width), len(tokens)):
            self.ends.setdefault(tuple(tokens[end - self.width : end]), []).append(end)
        self.seen = max(self.seen, len(tokens))

    def after(self, tokens: list[int], longest: int, candidates: int) -> int:
        """Where the text went on after the best match of its own end; 0 without one."""
        best, best_length = 0, 0
        for end in reversed(self.ends.get(tuple(tokens[-self.width :]), [])[-candidates:]):
            n = self.width
            while n < longest and n < end and tokens[end - n - 1] == tokens[-n - 1]:
                n += 1
            if n > best_length:
                best, best_length = end, n
        return best


class DraftLengths:
    """How many drafts each request's next window carries, by what was kept of its drafts and what rows cost.

    A further draft of a request is worth it while the tokens that it is expected to give, over the bytes that it adds
    to the step, are no fewer than the whole step gives a byte. In a mixture of experts a row brings experts of its own,
    so drafts cost most for a few requests together (122B: 63 % of a plain step each at 4), and less again once most
    experts are met anyway.
    """

    PRIOR = 0.7  # share of first drafts kept, before any was seen
    MEMORY = 0.9  # weight of the past at each new observation
    PROBE_EVERY = 16  # windows without drafts, after which one is tried

    def __init__(self, spec: Spec, build: Build, most: int, *, mtp: bool) -> None:
        self.spec, self.build, self.most, self.mtp = spec, build, most, mtp
        self._kept: WeakKeyDictionary[Sequence, list[float]] = WeakKeyDictionary()
        self._idle: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._costs: dict[tuple[int, int], list[float]] = {}

    def observe(self, s: Sequence, n_drafts: int, n_kept: int) -> None:
        """A window of `s` had `n_drafts` drafts, of which the first `n_kept` were kept."""
        share = self._kept.setdefault(s, [self.PRIOR] * self.most)
        for i in range(min(n_kept + 1, n_drafts)):
            share[i] += (1 - self.MEMORY) * ((i < n_kept) - share[i])

    def choose(self, sequences: Seq[Sequence]) -> None:
        """Set `draft_now` of every sequence that decodes."""
        if not sequences:
            return
        batch, context = len(sequences), sum(len(s.tokens) for s in sequences) // len(sequences)
        costs = self.costs(batch, context)
        reach = dict.fromkeys(sequences, 1.0)
        length = dict.fromkeys(sequences, 0)
        tokens = float(batch)
        for k in range(1, self.most + 1):
            rate, added = tokens / costs[k - 1], (costs[k] - costs[k - 1]) / batch
            for s in sequences:
                if length[s] == k - 1 and s.draft_len >= k:
                    reach[s] *= self._kept.get(s, [self.PRIOR] * self.most)[k - 1]
                    if reach[s] >= rate * added:
                        length[s] = k
                        tokens += reach[s]
        for s in sequences:
            idle = 0 if length[s] else self._idle.get(s, 0) + 1
            if idle >= self.PROBE_EVERY:
                idle, length[s] = 0, min(1, s.draft_len)
            self._idle[s] = idle
            s.draft_now = length[s]

    def costs(self, batch: int, context: int) -> list[float]:
        """Bytes of a step of `batch` sequences with 0..most drafts each."""
        key = batch, context // 256
        if key not in self._costs:
            steps = [step_bytes(self.spec, self.build, batch=batch, context=context, k=k) for k in range(self.most + 1)]
            self._costs[key] = [s.total - (0.0 if self.mtp else s.mtp + s.draft_head) for s in steps]
        return self._costs[key]
