"""Serving results for people: one run as a table, and two files side by side."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from onebox.errors import ConfigError

HIGHEST = 1e30
# (name, path in a line, whether more is better)
METRICS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("output tok/s", ("output_tok_s",), True),
    ("tok/s of a stream", ("stream_tok_s",), True),
    ("first token p50, ms", ("ttft_ms", "p50"), False),
    ("first token p99, ms", ("ttft_ms", "p99"), False),
    ("later turns' first token p50, ms", ("later_turn_ttft_ms", "p50"), False),
    ("between tokens p50, ms", ("itl_ms", "p50"), False),
    ("between tokens p99, ms", ("itl_ms", "p99"), False),
    ("between events p99, ms", ("event_gap_ms", "p99"), False),
    ("whole answer p50, ms", ("e2e_ms", "p50"), False),
    ("drafts kept", ("acceptance", "share"), True),
    ("prompt from cache", ("cached_share",), True),
    ("goodput, requests/s", ("goodput", "requests_s"), True),
    ("failed", ("failed",), False),
)


def read(path: Path, bench: str = "serve") -> list[dict[str, Any]]:
    """Lines of one kind of a results file. Raises ConfigError."""
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: not a file of JSON lines ({e}).") from e
    found = [line for line in lines if isinstance(line, dict) and line.get("bench") == bench]
    for line in found:
        if not isinstance(line.get("scenario"), str) or not isinstance(line.get("rate") or 0, int | float):
            raise ConfigError(f"{path}: a line without a scenario, or with a rate that is no number.")
    if not found:
        raise ConfigError(f"{path} has no line of the bench {bench!r}.")
    return found


def value(line: Mapping[str, Any], path: Sequence[str]) -> float | None:
    found: Any = line
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, (int, float)) and abs(found) < HIGHEST else None  # NaN is none either


def number(x: float | None) -> str:
    """Four significant digits."""
    if x is None:
        return "-"
    return f"{x:.4g}" if abs(x) < 10_000 else f"{x:,.0f}"


def pairs(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """For each scenario in both: (title, rows of (metric, A, B, B / A, better)); medians over the lines of a scenario.

    Lines belong together when scenario, endpoint, arrival and lengths are the same. Raises ConfigError for none.
    """

    def keyed(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
        made: dict[str, list[Mapping[str, Any]]] = {}
        for line in lines:
            load = {n: line.get(n) for n in ("scenario", "endpoint", "arrival", "rate", "concurrency", "asked")}
            made.setdefault(json.dumps(load, sort_keys=True), []).append(line)
        return made

    left, right = keyed(a), keyed(b)
    found = []
    for key in left:
        if key not in right:
            continue
        rows: list[tuple[Any, ...]] = []
        for name, path, more in METRICS:
            sides = [[v for v in (value(line, path) for line in part[key]) if v is not None] for part in (left, right)]
            if not all(sides):
                continue
            x, y = (statistics.median(side) for side in sides)
            ratio = y / x if x else None
            better = None if x == y else "B" if (y > x) is more else "A"
            rows.append((name, x, y, ratio, better))
        load = json.loads(key)
        how = f"{load['rate']:g} a second" if load["rate"] else f"{load['concurrency'] or '-'} at a time"
        runs = f"{len(left[key])} and {len(right[key])} runs"
        found.append((f"{load['scenario']}, {load['endpoint'] or '-'}, {how} ({runs}, medians)", rows))
    if not found:
        raise ConfigError("the two files have no scenario of the same load in common.")
    return found


def show(line: Mapping[str, Any], stream: TextIO) -> None:
    """One run."""
    console, table = _table(stream, ("", "mean", "p50", "p90", "p99"))
    failed = f"{line['failed']} of {line['requests']} failed" if line["failed"] else f"{line['requests']} requests"
    console.print(f"{line['scenario']} on {line['model']}, {line['arrival']} arrivals: {failed}", style="bold")
    spreads = [
        ("first token, ms", line["ttft_ms"]),
        ("between tokens, ms", line["itl_ms"]),
        ("between events, ms", line["event_gap_ms"]),
        ("whole answer, ms", line["e2e_ms"]),
        ("first token of later turns, ms", line.get("later_turn_ttft_ms")),
    ]
    for group, found in (line.get("groups") or {}).items():
        spreads += [(f"{group}: first token, ms", found["ttft_ms"]), (f"{group}: between tokens, ms", found["itl_ms"])]
    for name, spread in spreads:
        if spread:
            table.add_row(name, *(number(spread[p]) for p in ("mean", "p50", "p90", "p99")))
    console.print(table)
    said = [
        f"{number(line['output_tok_s'])} output tok/s, {number(line['total_tok_s'])} with prompts, "
        f"{number(line['stream_tok_s'])} tok/s in a stream, {line['requests_s']:g} requests/s",
        f"{line['input_tokens']} prompt tokens a request ({line['cached_share']:.0%} from cache), "
        f"{line['tokens_per_event']:g} tokens an event, counted by {line['tokens_counted_by'] or 'nothing'}",
    ]
    if kept := line.get("acceptance"):
        at = f", by position {kept['kept_at']}" if kept.get("kept_at") else ""
        said.append(f"{kept['share']:.1%} of {kept['drafted']} drafts kept (by {kept['by']}){at}")
    if good := line.get("goodput"):
        said.append(f"goodput {good['requests_s']:g} requests/s, {good['share']:.1%} within {good['slo_ms']} ms")
    for text in said:
        console.print(text, soft_wrap=True)
    for kind, n in line["failures"].items():
        console.print(f"failed: {n} x {kind}: {line['failure_examples'][kind]}", style="red", soft_wrap=True)


def show_pairs(found: Sequence[tuple[str, Sequence[tuple[Any, ...]]]], names: Sequence[str], stream: TextIO) -> None:
    """Two files side by side."""
    for title, rows in found:
        console, table = _table(stream, ("", f"A {names[0]}", f"B {names[1]}", "B / A", "better"))
        console.print(title, style="bold")
        for name, x, y, ratio, better in rows:
            table.add_row(name, number(x), number(y), number(ratio), better or "=")
        console.print(table)


def _table(stream: TextIO, columns: Sequence[str]) -> tuple[Any, Any]:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return Console(file=stream, width=None if stream.isatty() else 110, highlight=False), table
