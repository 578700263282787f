"""Why each span stayed or went. Takes a finished compression; rebuilds the original, explains, draws a heat map."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from onebox.prompt.budget import Slice
from onebox.prompt.segments import Piece


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


@dataclass(frozen=True)
class Trace:
    parts: tuple[str, ...]
    sources: tuple[str, ...]
    output: str
    slices: tuple[Slice, ...]
    pieces: tuple[Sequence[Piece], ...]
    kept_masks: tuple[np.ndarray, ...]
    scores: tuple[np.ndarray, ...]
    ranks: tuple[int | None, ...]
    separator: str

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        spans = []
        by_part: list[list[Slice]] = [[] for _ in self.parts]
        for item in self.slices:
            if item.part >= 0:
                by_part[item.part].append(item)
        for part, row in enumerate(self.pieces):
            at = 0
            for index, piece in enumerate(row):
                kept = bool(self.kept_masks[part][index])
                out = None
                if kept:
                    while by_part[part][at].end < piece.end:
                        at += 1
                    out = by_part[part][at].out + piece.start - by_part[part][at].start
                rule = piece.rule or ("score above the cut" if kept else "score below the cut")
                score = round(float(self.scores[part][index]), 6)
                body = self.parts[part][piece.start : piece.end]
                spans.append(
                    Span(part, piece.start, piece.end, body, piece.kind, kept, score, rule, self.ranks[part], out)
                )
        return tuple(spans)

    def drops(self) -> list[tuple[int, int, str]]:
        """(part, start, text) of every stretch of the source, whitespace included, that the output lacks."""
        found = []
        for part, text in enumerate(self.parts):
            at = 0
            for item in sorted((s for s in self.slices if s.part == part), key=lambda s: s.start):
                if item.start > at:
                    found.append((part, at, text[at : item.start]))
                at = item.end
            if at < len(text):
                found.append((part, at, text[at:]))
        return found

    def restore(self, output: str | None = None) -> str:
        """The original, rebuilt from the output and the drop list alone."""
        return self.separator.join(restore_parts(self.output if output is None else output, self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        return {
            "sources": list(self.sources),
            "slices": [asdict(item) for item in self.slices],
            "drops": [list(drop) for drop in self.drops()],
            "spans": [{k: v for k, v in asdict(span).items() if k != "text"} for span in self.spans],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def diff(self) -> str:
        """One line a stretch in source order: `  ` kept, `- ` dropped."""
        lines = []
        for part, text in enumerate(self.parts):
            stretches = [(s.start, "  ", text[s.start : s.end]) for s in self.slices if s.part == part and not s.note]
            stretches += [(start, "- ", body) for owner, start, body in self.drops() if owner == part]
            lines += [mark + json.dumps(body, ensure_ascii=False) for _, mark, body in sorted(stretches)]
        return "\n".join(lines)

    def to_html(self) -> str:
        """A page that stands alone: darker means higher score, struck through means dropped, hover gives the reason."""
        rows = []
        for part in range(len(self.parts)):
            spans = [span for span in self.spans if span.part == part]
            top = max((span.score for span in spans), default=1.0)
            low = min((span.score for span in spans), default=0.0)
            cells, at = [], 0
            for span in spans:
                cells.append(html.escape(self.parts[part][at : span.start]))
                heat = (span.score - low) / (top - low) if top > low else 1.0
                reason = f"{span.kind} · {span.rule} · score {span.score:.3f}"
                style = f"background:rgba(217,119,6,{0.08 + 0.5 * heat:.2f})" if span.kept else ""
                tag = "b" if span.kept else "s"
                cells.append(f'<{tag} style="{style}" title="{html.escape(reason)}">{html.escape(span.text)}</{tag}>')
                at = span.end
            rank = self.ranks[part]
            title = self.sources[part] + ("" if rank is None else f" · rank {rank + 1}")
            rows.append(f"<h2>{html.escape(title)}</h2><pre>{''.join(cells)}</pre>")
        return (
            '<!doctype html><meta charset="utf-8"><title>Compression</title><style>'
            "body{font:15px/1.6 system-ui;max-width:60rem;"
            "margin:2rem auto;padding:0 1rem}pre{white-space:pre-wrap;font:inherit}b{font-weight:400;border-radius:3px}"
            "s{color:#9ca3af}h2{font-size:1rem;margin:1.5rem 0 .3rem}</style>"
            "<p>Shaded: kept, darker for a higher score. Struck through: dropped. Hover for the reason.</p>"
            + "".join(rows)
        )

    def recover(self, response: str, *, max_gap: int = 10) -> str:
        """Longest runs of the response that are in the output but not in the source, replaced by the source words
        they came from (LongLLMLingua's subsequence recovery). Text that was never compressed is left alone."""
        words = response.split(" ")
        out: list[str] = []
        index = 0
        while index < len(words):
            for end in range(min(len(words), index + 24), index + 1, -1):
                run = " ".join(words[index:end])
                at = self.output.find(run)
                if at >= 0:
                    original = self._source_of(at, at + len(run), max_gap)
                    out.append(original if original is not None else run)
                    index = end
                    break
            else:
                out.append(words[index])
                index += 1
        return " ".join(out)

    def _source_of(self, start: int, end: int, max_gap: int) -> str | None:
        touched = [s for s in self.slices if s.out < end and s.out + s.end - s.start > start]
        if not touched or len({s.part for s in touched}) > 1 or touched[0].part < 0:
            return None
        gaps = [b.start - a.end for a, b in pairwise(touched)]
        if any(gap > max_gap * 8 for gap in gaps):
            return None
        first, last = touched[0], touched[-1]
        head = first.start + max(0, start - first.out)
        return self.parts[first.part][head : last.start + min(end - last.out, last.end - last.start)]


def restore_parts(output: str, trace: dict[str, Any]) -> list[str]:
    """Original parts from an output and `Trace.to_dict()`."""
    stretches: list[list[tuple[int, str]]] = [[] for _ in trace["sources"]]
    for item in trace["slices"]:
        if item["part"] >= 0:
            stretches[item["part"]].append(
                (item["start"], output[item["out"] : item["out"] + item["end"] - item["start"]])
            )
    for part, start, text in trace["drops"]:
        stretches[part].append((start, text))
    return ["".join(text for _, text in sorted(row)) for row in stretches]
