"""What was decided about one piece, and why: the value that a trace is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One piece: its part and characters [start, end), what was decided, by which rule, and where it is now."""

    part: int
    start: int
    end: int
    text: str
    kind: str
    kept: bool
    score: float
    rule: str
    rank: int | None
    out: int | None
