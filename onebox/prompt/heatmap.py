"""The heat map: spans of a compression -> one HTML page that stands alone. Darker: higher score. Struck through:
dropped. Hover or focus: why."""

from __future__ import annotations

import html
from collections.abc import Sequence

from onebox.prompt.spans import Span

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--paper:#fff;--faint:#8b949e;--line:#d0d7de;--heat:217,119,6;--rule:#0969da}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--faint:#6e7681;--line:#30363d;
--heat:245,158,11;--rule:#58a6ff}}
*{box-sizing:border-box}
body{font:16px/1.75 system-ui,sans-serif;color:var(--ink);background:var(--paper);
max-width:52rem;margin:2rem auto;padding:0 1.25rem}
header{border-bottom:1px solid var(--line);padding-bottom:.75rem;margin-bottom:1rem}
h1{font-size:1.25rem;margin:0 0 .25rem}
h2{font-size:.8rem;font-weight:600;letter-spacing:.02em;color:var(--faint);margin:1.5rem 0 .25rem}
.key span{margin-right:1.25rem;white-space:nowrap}
p{margin:.25rem 0}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:inherit;margin:0}
b{font-weight:400;border-radius:3px;padding:.1em 0}
b.r{border-bottom:2px solid var(--rule)}
s{color:var(--faint);text-decoration-thickness:1px}
"""


def page(parts: Sequence[str], sources: Sequence[str], spans: Sequence[Span]) -> str:
    """Parts of a prompt with their spans in order -> HTML."""
    scores = sorted(span.score for span in spans)
    low, high = (scores[len(scores) // 50], scores[-1 - len(scores) // 50]) if scores else (0.0, 0.0)
    by_part: list[list[Span]] = [[] for _ in parts]
    for span in spans:
        by_part[span.part].append(span)
    rows = []
    for text, source, row in zip(parts, sources, by_part, strict=True):
        cells, at = [], 0
        for span in row:
            cells.append(html.escape(text[at : span.start]))
            cells.append(_cell(span, low, high))
            at = span.end
        cells.append(html.escape(text[at:]))
        ranks = {span.rank for span in row}
        rank = ranks.pop() if len(ranks) == 1 else None
        share = sum(len(span.text) for span in row if span.kept) / max(sum(len(span.text) for span in row), 1)
        title = f"{source}{'' if rank is None else f' · rank {rank + 1}'} · {share:.0%} of the characters kept"
        rows.append(f"<section><h2>{html.escape(title)}</h2><pre>{''.join(cells)}</pre></section>")
    kept = sum(len(span.text) for span in spans if span.kept)
    total = max(sum(len(span.text) for span in spans), 1)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Compression</title><style>{_STYLE}</style><header><h1>{kept / total:.0%} of the characters kept</h1>"
        '<p class="key"><span><b style="background:rgba(var(--heat),.12)">low</b><b style="background:rgba('
        'var(--heat),.34)"> to </b><b style="background:rgba(var(--heat),.56)">high score</b>, kept</span>'
        '<span><b class="r">kept by a rule</b></span><span><s>dropped</s></span><span>Hover for the reason.</span></p>'
        f"</header>{''.join(rows)}</html>"
    )


def _cell(span: Span, low: float, high: float) -> str:
    heat = min(1.0, max(0.0, (span.score - low) / (high - low))) if high > low else 1.0
    reason = f"{'kept' if span.kept else 'dropped'}: {span.rule} · {span.kind} · score {span.score:.3f}"
    if span.rank is not None:
        reason += f" · rank {span.rank + 1}"
    title, body = html.escape(reason), html.escape(span.text)
    if not span.kept:
        return f'<s title="{title}">{body}</s>'
    mark = "" if span.rule.startswith("score") else ' class="r"'
    return f'<b{mark} style="background:rgba(var(--heat),{0.06 + 0.5 * heat:.2f})" title="{title}">{body}</b>'
