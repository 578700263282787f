"""Why each span stayed or went. Takes a finished compression; rebuilds the original, explains, draws a heat map."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from onebox.prompt.budget import Slice
from onebox.prompt.heatmap import page
from onebox.prompt.recovery import Recovery, recover
from onebox.prompt.segments import Piece
from onebox.prompt.spans import Span


@dataclass(frozen=True)
class Trace:
    parts: tuple[str, ...]
    sources: tuple[str, ...]
    output: str
    slices: tuple[Slice, ...]
    pieces: tuple[Sequence[Piece], ...]
    kept_masks: tuple[np.ndarray, ...]
    scores: tuple[np.ndarray, ...]
    ranks: tuple[np.ndarray, ...]  # of each piece: of its document or passage, 0 the most relevant, -1 none
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
                if piece.keep == kept and piece.drop != kept and piece.rule:
                    rule = piece.rule
                else:
                    rule = f"score {'above' if kept else 'below'} the cut" + (f" ({piece.rule})" if piece.rule else "")
                score = round(float(self.scores[part][index]), 6)
                place = int(self.ranks[part][index])
                rank = place if place >= 0 else None
                body = self.parts[part][piece.start : piece.end]
                spans.append(Span(part, piece.start, piece.end, body, piece.kind, kept, score, rule, rank, out))
        return tuple(spans)

    @classmethod
    def joined(cls, traces: Sequence[Trace], sources: Sequence[str], separator: str) -> Trace:
        """Traces of one part each as the trace of all of them, their outputs joined by the separator."""
        output = ""
        slices: list[Slice] = []
        for part, trace in enumerate(traces):
            if slices and trace.output:
                slices.append(Slice(-1, 0, len(separator), len(output)))
                output += separator
            slices += [Slice(part, item.start, item.end, item.out + len(output), item.note) for item in trace.slices]
            output += trace.output
        return cls(
            tuple(trace.parts[0] for trace in traces),
            tuple(sources),
            output,
            tuple(slices),
            tuple(trace.pieces[0] for trace in traces),
            tuple(trace.kept_masks[0] for trace in traces),
            tuple(trace.scores[0] for trace in traces),
            tuple(trace.ranks[0] for trace in traces),
            separator,
        )

    def outputs(self) -> tuple[str, ...]:
        """What is left of each part, in the order of the parts."""
        texts = ["" for _ in self.parts]
        for item in self.slices:
            if item.part >= 0:
                texts[item.part] += self.parts[item.part][item.start : item.end] + item.note
        return tuple(texts)

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
        """A page that stands alone; see heatmap.py."""
        return page(self.parts, self.sources, self.spans)

    def recover(self, response: str, *, max_gap: int = 10, min_confidence: float = 0.2) -> Recovery:
        """An answer's words back in the words of the original; see recovery.py."""
        return recover(response, self.output, self.slices, self.parts, max_gap=max_gap, min_confidence=min_confidence)


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
