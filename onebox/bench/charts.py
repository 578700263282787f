"""Charts as SVG text: bars with spread, and points on logarithmic axes. Values in, one self-contained picture out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, ROW, LEFT, RIGHT, TOP = 900, 26, 250, 160, 58
HEIGHT, MARGIN = 420, 64
COLOURS = ("#2f6fab", "#c2571a", "#3b8a4e", "#8a4fa3", "#8a6d1f", "#4a4a4a")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.title{font-weight:600;font-size:15px}.grid{stroke:#ddd}"
    ".axis{stroke:#888}.spread{stroke:#222;stroke-width:1.5}"
)


@dataclass(frozen=True)
class Bar:
    """A value with its lowest and highest; `note` stands behind it."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Point:
    """A place above 0 on both axes, in a named series."""

    label: str
    x: float
    y: float
    series: str = ""


def bars(title: str, unit: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars from 0, one below the other, a line through the spread of each."""
    highest = max((max(b.value, b.high or 0.0) for b in rows), default=0.0) or 1.0
    ticks = steps(highest)
    room = WIDTH - LEFT - RIGHT

    def at(value: float) -> float:
        return LEFT + value / ticks[-1] * room

    def parts() -> Iterator[str]:
        bottom = TOP + ROW * len(rows)
        for tick in ticks:
            yield line(at(tick), TOP - 6, at(tick), bottom, "grid")
            yield text(at(tick), bottom + 18, f"{tick:g}", "middle")
        for i, bar in enumerate(rows):
            y = TOP + i * ROW
            yield text(LEFT - 8, y + 17, bar.label, "end")
            width = at(bar.value) - LEFT
            yield f'<rect x="{LEFT}" y="{y + 4}" width="{width:.1f}" height="{ROW - 8}" fill="{COLOURS[0]}"/>'
            end = at(bar.value)
            if bar.low is not None and bar.high is not None:
                yield line(at(bar.low), y + ROW / 2, at(bar.high), y + ROW / 2, "spread")
                yield from (line(at(v), y + 8, at(v), y + ROW - 8, "spread") for v in (bar.low, bar.high))
                end = max(end, at(bar.high))
            yield text(end + 8, y + 17, f"{bar.value:.4g} {bar.note}".strip())
        yield text(LEFT + room / 2, bottom + 38, unit, "middle")

    return svg(title, TOP + ROW * len(rows) + 50, parts())


def points(title: str, x_unit: str, y_unit: str, found: Sequence[Point], roof: float | None = None) -> str:
    """Points on two logarithmic axes. `roof`: a line y = x / roof, below which nothing can be."""
    xs, ys = decades([p.x for p in found]), decades([p.y for p in found])
    width, height = WIDTH - 2 * MARGIN - RIGHT - 70, HEIGHT - TOP - MARGIN
    height_of = float(HEIGHT)
    names = list(dict.fromkeys(p.series for p in found))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - xs[0]) / (xs[-1] - xs[0])
        up = (math.log10(y) - ys[0]) / (ys[-1] - ys[0])
        return 2 * MARGIN + across * width, TOP + (1 - up) * height

    def parts() -> Iterator[str]:
        for d in xs:
            x, _ = place(10.0**d, 10.0 ** ys[0])
            yield line(x, TOP, x, TOP + height, "grid")
            yield text(x, TOP + height + 18, f"{10.0**d:g}", "middle")
        for d in ys:
            _, y = place(10.0 ** xs[0], 10.0**d)
            yield line(2 * MARGIN, y, 2 * MARGIN + width, y, "grid")
            yield text(2 * MARGIN - 8, y + 4, f"{10.0**d:g}", "end")
        if roof is not None:
            low = max(10.0 ** xs[0], roof * 10.0 ** ys[0])
            high = min(10.0 ** xs[-1], roof * 10.0 ** ys[-1])
            if low < high:
                a, b = place(low, low / roof), place(high, high / roof)
                yield line(*a, *b, "axis")
                yield text(b[0] - 6, b[1] + 16, "roof", "end")
        marks: list[tuple[float, float, list[int]]] = []  # where, and the numbers of the points that stand there
        for number, p in enumerate(found, 1):
            x, y = place(p.x, p.y)
            colour = COLOURS[names.index(p.series) % len(COLOURS)]
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>'
            near = next((m for m in marks if abs(m[0] - x) < 16 and abs(m[1] - y) < 12), None)
            if near is None:
                marks.append((x, y, [number]))
            else:
                near[2].append(number)
            key = f"{number}  {p.label}"
            yield f'<text x="{WIDTH - RIGHT - 40}" y="{TOP + 17 * number}" style="fill:{colour}">{escape(key)}</text>'
        for x, y, numbers in marks:
            yield text(x, y - 9, ", ".join(map(str, numbers)), "middle")
        yield text(2 * MARGIN + width / 2, height_of - 20, x_unit, "middle")
        yield text(2 * MARGIN, TOP - 8, y_unit)
        for i, name in enumerate(names if len(names) > 1 else ()):
            at = TOP + 17 * (len(found) + 2 + i)
            yield f'<circle cx="{WIDTH - RIGHT - 36}" cy="{at - 4}" r="4.5" fill="{COLOURS[i % len(COLOURS)]}"/>'
            yield text(WIDTH - RIGHT - 26, at, name)

    return svg(title, max(height_of, TOP + 17 * (len(found) + 3 + len(names))), parts())


def steps(highest: float) -> list[float]:
    """Round numbers from 0 to at least `highest`."""
    unit = 10.0 ** math.floor(math.log10(highest))
    unit = next(u for u in (unit / 5, unit / 2, unit, 2 * unit) if highest / u <= 6)
    return [unit * i for i in range(math.ceil(highest / unit - 1e-9) + 1)]


def decades(values: Sequence[float]) -> list[int]:
    """Powers of ten around values above 0, two at least."""
    low = math.floor(math.log10(min(values, default=1.0)))
    return list(range(low, max(math.ceil(math.log10(max(values, default=1.0))), low + 1) + 1))


def svg(title: str, height: float, parts: Iterator[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" '
        f'role="img" aria-label="{escape(title, quote=True)}">\n<style>{STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{text(12, 22, title, css="title")}\n{body}\n</svg>\n'
    )


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def text(x: float, y: float, words: str, anchor: str = "start", css: str = "") -> str:
    kind = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'
