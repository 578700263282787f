"""`onebox bench report`: result lines -> tables and charts. A line that cannot be believed is refused by name.

    onebox bench report                                   # results/*.jsonl -> docs/results.md, docs/images/results
    onebox bench report --check                           # only look at the lines
    onebox bench report --html report.html                # one page with everything in it

Every line must say which benchmark, commit, command, device and versions it is of; its numbers must be finite, shares
from 0 to 1, and a figure with its lowest and highest must lie between them. A ladder or a decode step must have them.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebox.bench import values
from onebox.bench.charts import Bar, Point, bars, points
from onebox.errors import ConfigError

SHARES = ("roof_share", "acceptance", "recall", "top1", "same_text", "top1_agreement", "right", "gain_share")
TEXTS = ("model", "shape", "build", "rung", "kv", "scenario", "server", "task", "mode")
ABOVE_0 = ("tok_s", "ms_per_step", "bytes_per_step", "copy_tb_s", "weight_bytes", "batch")
NEEDED = {  # what tables and charts cannot do without
    "ladder": ("rung", "tok_s", "ms_per_step"),
    "decode": ("batch", "ms_per_step"),
    "quality": ("model",),
    "serve": ("scenario",),
}
ROOF = ("bytes_per_step", "ms_per_step", "copy_tb_s")  # of a line with a share of the roof
RATIO = ("median", "low", "high")
HIGHEST = 1e30
SPREAD = {"ladder": "tok_s", "decode": "ms_per_step"}  # figures that must come with a spread
SHOWN = 20  # rows of a table; the file has the rest
COLUMNS: dict[str, tuple[str, ...]] = {
    "ladder": (
        "rung", "tok_s", "tok_s_low", "tok_s_high", "x_below", "roof_share", "ttft_ms", "ttft_again_ms", "weight_mb",
        "kl", "top1", "perplexity", "recall", "acceptance", "same_text",
    ),
    "decode": ("shape", "kv", "batch", "context", "k", "ms_per_step", "ms_low", "ms_high", "tok_s", "roof_share"),
    "engine": ("model", "build", "batch", "k", "forced_acceptance", "ms_per_step", "tokens_per_step", "tok_s"),
    "quality": ("build", "kv", "kl", "top1", "perplexity", "reference_perplexity", "weight_mb", "reach"),
    "drafters": ("drafter", "chats", "batch", "tok_s", "tokens_per_step", "acceptance", "same_text"),
    "serve": (
        "scenario", "server", "arrival", "rate", "concurrency", "requests", "failed", "output_tok_s", "ttft_ms",
        "itl_ms", "cached_share", "acceptance", "goodput",
    ),
    "scbench": (
        "task", "mode", "options", "score", "by_turn", "later_cached_share", "first_ttft_ms", "later_ttft_ms",
        "held_bytes", "same_answers", "same_with_and_without_cache",
    ),
    "sparse-search": (
        "mode", "length", "budget", "sparse_from", "kl", "top1", "perplexity_ratio", "needles", "key_values", "items",
    ),
    "http_overhead": ("streams", "rate", "endpoint", "tok_s", "events_s", "gap_ms"),
    "reuse": ("prompt", "cold_ttft_ms", "warm_ttft_ms", "share", "same_token"),
    "kernel": ("kernel", "shape", "batch", "us", "floor_us", "share"),
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A result and where it stands."""

    file: str
    number: int
    record: dict[str, Any]


def read(folder: Path) -> tuple[list[Line], list[str]]:
    """Every line of every file, and what is wrong with which. Raises ConfigError for a folder without any."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise ConfigError(f"{folder}: no .jsonl file; name a folder of results with --results.")
    lines, wrong = [], []
    for path in files:
        try:
            rows = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            wrong.append(f"{path.name}: cannot be read ({e})")
            continue
        for number, row in enumerate(rows, 1):
            if not row.strip():
                continue
            name = f"{path.name}, line {number}"
            try:
                record = json.loads(row)
            except ValueError as e:
                wrong.append(f"{name}: not JSON ({e})")
                continue
            if not isinstance(record, dict):
                wrong.append(f"{name}: not a JSON object")
                continue
            wrong += [f"{name}: {what}" for what in faults(record)]
            lines.append(Line(path.name, number, record))
    return lines, wrong


def faults(record: dict[str, Any]) -> Iterator[str]:
    """What keeps a line from being believed."""
    for name in ("bench", "commit", "command", "device"):
        if not isinstance(record.get(name), str) or not record[name].strip():
            yield f"no {name}"
    if not record.get("versions") or not isinstance(record["versions"], dict):
        yield "no versions"
    commit = record.get("commit")
    if isinstance(commit, str) and commit.strip() and not re.fullmatch(r"[0-9a-f]{7,40}\+?", commit):
        yield f"commit {commit!r} is none"
    for word in str(record.get("command", "")).split():
        value = word.partition("=")[2] if word.startswith("-") else word
        if value.startswith(("/", "~")):
            yield f"the command names a folder of a machine: {value}"
    figures = True
    for name, value in flat(record):
        if is_number(value) and not abs(value) <= HIGHEST:
            yield f"{name} is {value:g}" if isinstance(value, float) else f"{name} is no figure"
            figures = False
        elif name in SHARES and is_number(value) and not 0 <= value <= 1:
            yield f"{name} {value:g} is no share"
        elif name == "repeats" and (not is_number(value) or value < 1):
            yield f"repeats is {value}"
    yield from kind_faults(record)
    if figures:
        yield from spread_faults(record)


def kind_faults(record: dict[str, Any]) -> Iterator[str]:
    """A field that is missing, or of a kind that tables and charts cannot show: of another version, or by hand."""
    needed = NEEDED.get(str(record.get("bench")), ()) + (ROOF if record.get("roof_share") else ())
    yield from (f"no {name}" for name in dict.fromkeys(needed) if record.get(name) in (None, ""))
    for name in TEXTS:
        if record.get(name) is not None and not isinstance(record[name], str):
            yield f"{name} is no text"
    for name in (*ABOVE_0, "kl", "roof_share"):
        value, least = record.get(name), 0 if name in ABOVE_0 else -HIGHEST
        if value is not None and not (is_number(value) and value > least):
            yield f"{name} is no number" + (" above 0" if name in ABOVE_0 else "")
    ratio = record.get("tok_s_over_below")
    if ratio is not None and not (isinstance(ratio, dict) and all(map(is_number, map(ratio.get, RATIO)))):
        yield f"tok_s_over_below has no {', '.join(RATIO)}"
    for name in ("ttft_ms", "itl_ms", "gap_ms"):
        found = record.get(name)
        if isinstance(found, dict) and not all(is_number(v) and v >= 0 for v in found.values()):
            yield f"{name} has a percentile that is no number, 0 or more"
        elif record.get("bench") == "serve" and found is not None and not isinstance(found, dict):
            yield f"{name} has no percentiles"


def spread_faults(record: dict[str, Any]) -> Iterator[str]:
    """A figure outside its own spread, or one that must have a spread and has none."""
    asked = SPREAD.get(str(record.get("bench")))
    if asked is not None and (record.get("repeats") is None or spread_of(record, asked) is None):
        yield f"{asked} has no spread"
    for name, value in record.items():
        if is_number(value) and (found := spread_of(record, name)) is not None and not found[0] <= value <= found[1]:
            yield f"{name} {value:g} is not between {found[0]:g} and {found[1]:g}"


def spread_of(record: dict[str, Any], name: str) -> tuple[float, float] | None:
    """Lowest and highest of a figure: NAME_low and NAME_high, of milliseconds a step also ms_low and ms_high."""
    for stem in (name, "ms" if name == "ms_per_step" else name):
        low, high = record.get(f"{stem}_low"), record.get(f"{stem}_high")
        if is_number(low) and is_number(high):
            return float(record[f"{stem}_low"]), float(record[f"{stem}_high"])
    return None


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with the name that it stands under."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from flat(inner, name)
    else:
        yield name, value


def shown(record: dict[str, Any], column: str) -> str:
    """A cell: a figure, or what stands for it."""
    if column == "weight_mb":
        return f"{record['weight_bytes'] / 1e6:.1f}" if record.get("weight_bytes") else "-"
    if column == "x_below":
        ratio = record.get("tok_s_over_below")
        return f"{ratio['median']:.3g} ({ratio['low']:.3g} to {ratio['high']:.3g})" if ratio else "-"
    value = record.get(column)
    if value is None or value == []:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v:g}" if is_number(v) else f"{k} {v}" for k, v in value.items())
    if isinstance(value, list):
        return " / ".join(f"{v:g}" if is_number(v) else str(v) for v in value)
    return str(value).replace("|", "/")


def groups(lines: Sequence[Line]) -> dict[tuple[str, str, str], list[Line]]:
    """Lines by benchmark, model or shape, and device."""
    found: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines:
        r = line.record
        key = (str(r["bench"]), str(r.get("model") or r.get("shape") or "-"), str(r["device"]))
        found.setdefault(key, []).append(line)
    return found


def charts(lines: Sequence[Line]) -> dict[str, str]:
    """SVG text by file name."""
    made: dict[str, str] = {}
    for (bench, model, device), rows in groups(lines).items():
        records = [line.record for line in rows]
        if bench == "ladder":
            newest = list({r["rung"]: r for r in records}.values())
            newest.sort(key=lambda r: r.get("number", 0))
            where = f"{model}, {device}"
            made[f"ladder-{plain(model)}-{plain(device)}.svg"] = bars(
                f"Ladder of {where}", "tokens a second, one chat", [ladder_bar(r) for r in newest]
            )
    quality = [line.record for line in lines if line.record["bench"] == "quality"]
    seen = [r for r in quality if r.get("weight_bytes") and (r.get("kl") or 0) > 0]
    if seen:
        newest = list({(r["model"], r.get("build"), r.get("kv")): r for r in seen}.values())
        made["quality.svg"] = points(
            "Quality against bytes", "MB of weights", "KL to the 16-bit original, nats a token",
            [Point(build_of(r), r["weight_bytes"] / 1e6, r["kl"], r["model"]) for r in newest],
        )  # fmt: skip
    steps = [r for line in lines if (r := line.record).get("roof_share") and r["bench"] in ("decode", "ladder")]
    for device in dict.fromkeys(str(r["device"]) for r in steps):
        here = [r for r in steps if r["device"] == device]
        copy = here[-1]["copy_tb_s"]
        made[f"roofline-{plain(device)}.svg"] = points(
            f"Steps under the roof of {device}, {copy:g} TB/s", "GB a step", "milliseconds a step",
            [
                Point(
                    str(r.get("rung") or f"batch {r.get('batch', '-')}"), r["bytes_per_step"] / 1e9,
                    r["ms_per_step"], str(r.get("model") or r.get("shape")),
                )
                for r in here
            ],
            roof=copy,
        )  # fmt: skip
    served = [line.record for line in lines if line.record["bench"] == "serve"]
    for name, title in (("ttft_ms", "First token"), ("itl_ms", "Between tokens")):
        newest = list({(r["scenario"], r.get("server"), r["device"]): r for r in served if r.get(name)}.values())
        if newest:
            made[f"serving-{plain(title)}.svg"] = bars(
                f"{title} by scenario", "milliseconds", [bar for r in newest for bar in percentile_bars(r, name)]
            )
    delays = [line.record for line in lines if isinstance(line.record.get("gap_ms"), dict)]
    if delays:
        rows_of = [
            Bar(f"{r.get('endpoint', '-')}, {r.get('streams', '-')} streams, {p}", r["gap_ms"][p])
            for r in delays[-4:]
            for p in ("p50", "p99")
            if p in r["gap_ms"]
        ]
        made["gaps.svg"] = bars("Between events of a stream, engine that costs nothing", "milliseconds", rows_of)
    return made


def ladder_bar(record: dict[str, Any]) -> Bar:
    ratio = record.get("tok_s_over_below")
    return Bar(
        record["rung"], record["tok_s"], record["tok_s_low"], record["tok_s_high"],
        f"x {ratio['median']:.2f}" if ratio else "",
    )  # fmt: skip


def build_of(record: dict[str, Any]) -> str:
    """A build by its name, and the format of its KV pages where that was chosen."""
    kv = record.get("kv")
    return str(record.get("build") or "-") + (f", {kv} KV" if kv and kv != "auto" else "")


def percentile_bars(record: dict[str, Any], name: str) -> Iterator[Bar]:
    """A bar a percentile of one serving line."""
    server = f", {record['server']}" if record.get("server") else ""
    for p, value in record[name].items():
        if p != "mean":
            yield Bar(f"{record['scenario']}{server}, {p}", value)


def plain(words: str) -> str:
    """Words as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def markdown(lines: Sequence[Line], pictures: Sequence[str], folder: str = "images/results") -> str:
    """The tables, one a benchmark, model and device, each with its commands."""
    out = [
        "# Results",
        "",
        "Made by `onebox bench report` from the lines in `results/`; not edited by hand. A commit with + had",
        f"changes that were not committed. A table shows {SHOWN} lines at most, the newest; the file has all of them.",
        "",
    ]
    out += [f"![{name.removesuffix('.svg')}]({folder}/{name})" for name in pictures]
    for (bench, model, device), rows in sorted(groups(lines).items()):
        columns = COLUMNS.get(bench) or general(rows)
        columns = tuple(c for c in columns if any(shown(line.record, c) != "-" for line in rows))
        newest = rows[-SHOWN:]
        files = ", ".join(f"`results/{name}`" for name in dict.fromkeys(line.file for line in rows))
        out += ["", f"## {bench}: {model}, {device}" if model != "-" else f"## {bench}: {device}", ""]
        out += [f"{len(rows)} lines of {files}.", "", "| " + " | ".join((*columns, "commit")) + " |"]
        out += ["|" + "---|" * (len(columns) + 1)]
        for line in newest:
            cells = [shown(line.record, c) for c in columns]
            out.append("| " + " | ".join((*cells, line.record["commit"])) + " |")
        commands = list(dict.fromkeys(" ".join(line.record["command"].split()) for line in newest))
        out += ["", *(f"    {command}" for command in commands[-6:])]
    return "\n".join(out) + "\n"


def general(rows: Sequence[Line]) -> tuple[str, ...]:
    """Columns of a benchmark that has none of its own: what its first line says, in its order."""
    left_out = {"bench", "commit", "command", "device", "versions", "model", "shape", "config", "packages", "stats"}
    return tuple(name for name, v in rows[0].record.items() if name not in left_out and not isinstance(v, dict))[:10]


def page(lines: Sequence[Line], pictures: dict[str, str]) -> str:
    """One HTML page that needs nothing else: charts, then tables."""
    parts = [f"<figure>{svg}</figure>" for svg in pictures.values()]
    for (bench, model, device), rows in sorted(groups(lines).items()):
        columns = tuple(c for c in COLUMNS.get(bench) or general(rows) if any(shown(r.record, c) != "-" for r in rows))
        head = "".join(f"<th>{html.escape(c)}" for c in (*columns, "commit"))
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(shown(r.record, c))}" for c in (*columns, "commit"))
            for r in rows[-SHOWN:]
        )
        title = f"{bench}: {model}, {device}" if model != "-" else f"{bench}: {device}"
        parts.append(f"<h2>{html.escape(title)}</h2><table><tr>{head}{body}</table>")
    style = (
        "body{font:14px system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}"
        "figure{margin:1rem 0;overflow-x:auto}svg{max-width:100%;min-width:40rem;height:auto}"
        "table{border-collapse:collapse;display:block;overflow-x:auto}"
        "td,th{border-bottom:1px solid #ddd;padding:.2rem .6rem;text-align:left;white-space:nowrap}"
    )
    icon = '<link rel="icon" href="data:,">'
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"{icon}<title>onebox results</title><style>{style}</style><h1>Results</h1>{''.join(parts)}</html>\n"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = values.parser(__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="folder of .jsonl files")
    parser.add_argument("--markdown", type=Path, default=Path("docs/results.md"), metavar="FILE")
    parser.add_argument("--charts", type=Path, metavar="DIR", help="left out: images/results beside the Markdown")
    parser.add_argument("--html", type=Path, metavar="FILE", help="one page with everything in it, too")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    lines, wrong = read(args.results)
    if wrong:
        raise ConfigError(f"{len(wrong)} results cannot be believed: " + "; ".join(wrong[:20]))
    if args.check:
        print(f"{len(lines)} lines, nothing wrong")
        return
    pictures = charts(lines)
    folder = args.charts or args.markdown.parent / "images" / "results"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, svg in pictures.items():
            (folder / name).write_text(svg, "utf-8")
        shown_at = Path(*folder.parts[len(args.markdown.parent.parts) :]) if args.charts is None else folder
        args.markdown.write_text(markdown(lines, list(pictures), shown_at.as_posix()), "utf-8")
        if args.html:
            args.html.write_text(page(lines, pictures), "utf-8")
    except OSError as e:
        raise ConfigError(f"{e.filename}: cannot be written ({e.strerror}).") from e
    print(f"{len(lines)} lines -> {args.markdown}, {len(pictures)} charts" + (f", {args.html}" if args.html else ""))


if __name__ == "__main__":
    main()
