"""Surprisal of texts of any length. Takes texts and what gives log-probabilities of token ids; gives nats a token.

A text longer than the window is read in windows that overlap by a quarter; what stands before a text (its prefix) is
read and not scored.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from onebox.errors import PromptError
from onebox.prompt.scoring import Scorer, TokenScores, readable

Encode = Callable[[str], tuple[list[int], list[tuple[int, int]]]]  # ids, and their character offsets


@dataclass(frozen=True)
class Window:
    """Token ids to read at once; only those from `context` on are scored, and stand at `begin` of text `text`."""

    text: int
    begin: int
    ids: list[int]
    context: int


class Chain(Protocol):
    """A text read stretch by stretch: `read` scores the next stretch, `commit` says what of it stays in the context."""

    def read(self, text: str) -> TokenScores: ...

    def commit(self, text: str) -> None: ...


class PlainChain:
    """A chain over any scorer: what was committed, as far as the window goes, is each stretch's prefix."""

    def __init__(self, scorer: Scorer, prefix: str, *, characters: int = 1500) -> None:
        self.scorer, self.prefix, self.tail, self.characters = scorer, prefix, "", characters

    def read(self, text: str) -> TokenScores:
        return self.scorer.score([text], prefixes=[self.prefix + self.tail])[0]

    def commit(self, text: str) -> None:
        self.tail = (self.tail + text)[-self.characters :]


def chain_of(scorer: Scorer, prefix: str) -> Chain:
    """The scorer's own chain where it has one (it keeps what it has read), else a plain one."""
    own = getattr(scorer, "chain", None)
    chain: Chain = own(prefix) if own is not None else PlainChain(scorer, prefix)
    return chain


class SurprisalScorer(ABC):
    """Scores by windows; a subclass says how text becomes ids and how ids get their losses."""

    name: str
    first: int | None  # what a text without prefix follows; None: its first token gets the mean loss of the rest
    window: int

    @abstractmethod
    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...

    @abstractmethod
    def losses(self, windows: Sequence[Window]) -> list[np.ndarray]:
        """Nats of ids[context:] of each window, in the order given."""

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]:
        windows: list[Window] = []
        offsets: list[list[tuple[int, int]]] = []
        for index, text in enumerate(texts):
            ids, spans = self.encode(text)
            offsets.append(spans)
            if ids:
                windows += self._windows(index, ids, self.encode(prefixes[index])[0] if prefixes else [])
        found = [np.zeros(len(spans)) for spans in offsets]
        for window, nats in zip(windows, self.losses(windows), strict=True):
            found[window.text][window.begin : window.begin + len(nats)] = nats
        return [TokenScores.of(spans, nats) for spans, nats in zip(offsets, found, strict=True)]

    def _windows(self, text: int, ids: list[int], prefix: list[int]) -> list[Window]:
        start = [] if self.first is None else [self.first]
        if len(start) + len(prefix) + len(ids) <= self.window:
            return [Window(text, 0, [*start, *prefix, *ids], len(start) + len(prefix))]
        prefix = prefix[-self.window // 2 :]
        step = max(1, (self.window - len(start) - len(prefix)) * 3 // 4)
        found = []
        for begin in range(0, len(ids), step):
            back = max(0, begin - step // 3)
            chunk = [*start, *prefix, *ids[back : begin + step]]
            found.append(Window(text, begin, chunk, len(start) + len(prefix) + begin - back))
        return found


class EngineScorer(SurprisalScorer):
    """Surprisal from a function that takes sequences of ids and gives, for each, the log-probability of every id but
    the first after those before it: an engine's prompt log-probabilities, or an HTTP server's."""

    def __init__(
        self,
        prompt_logprobs: Callable[[list[list[int]]], Sequence[Sequence[float]]],
        encode: Encode,
        *,
        first: int | None = None,
        window: int = 512,
        name: str = "engine",
    ) -> None:
        self.prompt_logprobs, self._encode = prompt_logprobs, encode
        self.first, self.window, self.name = first, window, name
        self._lock = threading.Lock()

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        with self._lock:
            return self._encode(readable(text))

    def losses(self, windows: Sequence[Window]) -> list[np.ndarray]:
        asked = [window for window in windows if len(window.ids) > 1]
        given = list(self.prompt_logprobs([window.ids for window in asked])) if asked else []
        if len(given) != len(asked):
            raise PromptError(f"scorer {self.name!r}: gave {len(given)} answers for {len(asked)} sequences")
        answers = iter(given)
        out = []
        for window in windows:
            nats = -np.array(next(answers) if len(window.ids) > 1 else [], dtype=float)
            if len(nats) != len(window.ids) - 1:
                raise PromptError(
                    f"scorer {self.name!r}: gave {len(nats)} log-probabilities for {len(window.ids)} ids; "
                    "give one for each id but the first"
                )
            if window.context == 0:
                mean = float(nats.mean()) if len(nats) else math.log(2)
                nats = np.concatenate([[mean], nats])
                out.append(nats)
            else:
                out.append(nats[window.context - 1 :])
        return out
