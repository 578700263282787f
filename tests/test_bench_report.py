"""`onebox bench report`: lines nobody can believe are refused by name; tables and charts show what the rest say."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from onebox import cli
from onebox.bench import report
from onebox.bench.charts import Bar, Point, bars, decades, points, steps
from onebox.errors import ConfigError

ROOT = Path(__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"
GOOD: dict[str, Any] = {
    "bench": "ladder", "model": "m", "number": 1, "rung": "INT4", "tok_s": 50.0, "tok_s_low": 40.0, "tok_s_high": 60.0,
    "repeats": 3, "ms_per_step": 20.0, "ttft_ms": 5.0, "weight_bytes": 2_000_000, "kl": 0.01, "top1": 0.9,
    "roof_share": 0.4, "copy_tb_s": 0.02, "bytes_per_step": 1e8, "commit": "abc1234",
    "command": "onebox bench ladder m", "device": "Some CPU, 2 threads", "versions": {"python": "3.11"},
}  # fmt: skip
RATIO = {"median": 1.25, "low": 1.2, "high": 1.3}
ENVIRONMENT = {name: GOOD[name] for name in ("commit", "command", "device", "versions")}
SERVED: dict[str, Any] = ENVIRONMENT | {
    "bench": "serve", "scenario": "c32", "model": "m", "server": "version 1", "requests": 9, "failed": 0,
    "output_tok_s": 50.0, "ttft_ms": {"mean": 21.0, "p50": 20.0, "p90": 30.0, "p99": 40.0},
    "itl_ms": {"mean": 5.0, "p50": 5.0, "p90": 6.0, "p99": 9.0}, "goodput": {"share": 1.0}, "concurrency": 32,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "ladder": GOOD | {"tok_s_over_below": RATIO, "k": 2, "recall": 1.0},
    "quality": ENVIRONMENT | {
        "bench": "quality", "model": "m", "build": "b", "kv": "fp8", "kl": 0.1, "weight_bytes": 9,
    },
    "decode": ENVIRONMENT | {
        "bench": "decode", "shape": "s", "batch": 1, "repeats": 3, "ms_per_step": 20.0, "ms_low": 19.0, "ms_high": 21.0,
        "roof_share": 0.5, "copy_tb_s": 1.0, "bytes_per_step": 10.0,
    },
    "serve": SERVED,
    "scbench": ENVIRONMENT | {
        "bench": "scbench", "model": "m", "task": "kv", "mode": "multi-turn", "options": {"prefix_caching": "on"},
        "score": 0.5, "by_turn": [0.5, 0.5], "held_bytes": 10, "same_answers": True,
    },
    "http_overhead": ENVIRONMENT | {"bench": "http_overhead", "streams": 2, "gap_ms": {"p50": 1.0, "p99": 2.0}},
}  # fmt: skip


def write(folder: Path, *records: object, name: str = "a.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in records), "utf-8")
    return folder


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"commit": None}, "no commit"),
        ({"commit": "unknown"}, "commit 'unknown' is none"),
        ({"command": " "}, "no command"),
        ({"command": "onebox bench ladder /home/me/m"}, "names a folder of a machine: /home/me/m"),
        ({"command": "onebox bench ladder --text=/home/me/m"}, "names a folder of a machine: /home/me/m"),
        ({"device": ""}, "no device"),
        ({"versions": {}}, "no versions"),
        ({"bench": None}, "no bench"),
        ({"kl": float("nan")}, "kl is nan"),
        ({"reach": [0.5, float("inf")]}, "reach is inf"),
        ({"roof_share": 1.7}, "roof_share 1.7 is no share"),
        ({"top1": -0.1}, "top1 -0.1 is no share"),
        ({"repeats": 0}, "repeats is 0"),
        ({"tok_s": 61.0}, "tok_s 61 is not between 40 and 60"),
        ({"tok_s_low": None}, "tok_s has no spread"),
        ({"repeats": None}, "tok_s has no spread"),
        ({"bench": "decode", "ms_low": 21.0, "ms_high": 22.0}, "ms_per_step 20 is not between 21 and 22"),
    ],
)
def test_a_line_that_cannot_be_believed_is_refused_by_file_and_number(
    tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    folder = write(tmp_path / "results", GOOD, GOOD | changed)
    with pytest.raises(ConfigError) as e:
        report.main(["--results", str(folder), "--check"])
    assert "a.jsonl, line 2: " in str(e.value) and says in str(e.value) and "line 1:" not in str(e.value)


@pytest.mark.parametrize("row", ["{", "[1]", "7"])
def test_what_is_no_object_is_refused(tmp_path: Path, row: str) -> None:
    folder = write(tmp_path / "results", GOOD)
    with (folder / "a.jsonl").open("a") as file:
        file.write(f"\n{row}\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 3: not"):
        report.main(["--results", str(folder), "--check"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_of_another_version_is_refused_by_its_field_or_shown_and_never_breaks_the_page(
    kind: str, tmp_path: Path
) -> None:
    good, shown = KINDS[kind], 0
    odd = (None, "", "x|<b>\n", -1, 0, 10**400, float("nan"), float("inf"), 1e308, [], [1], {}, {"a": 1}, True)
    for name in good:
        for value in ("left out", *odd):
            changed = good | {name: value}
            if value == "left out":
                del changed[name]
            lines, wrong = report.read(write(tmp_path, changed))
            if not wrong:
                pictures = report.charts(lines)
                assert "<h2>" in report.page(lines, pictures) and "##" in report.markdown(lines, list(pictures))
                shown += 1
            else:
                assert all(what.startswith("a.jsonl, line 1: ") and len(what.splitlines()) == 1 for what in wrong)
    assert shown > len(good)


def test_serving_lines_have_percentiles_side_by_side(tmp_path: Path) -> None:
    slow = SERVED | {"server": "version 2", "ttft_ms": {"p50": 200.0, "p99": 400.0}, "itl_ms": {}}
    lines, wrong = report.read(write(tmp_path, SERVED, slow))
    made = report.charts(lines)
    assert not wrong and sorted(made) == ["serving-between-tokens.svg", "serving-first-token.svg"]
    first = made["serving-first-token.svg"]
    assert all(f"c32, version 1, p{p}" in first for p in (50, 90, 99)) and "c32, version 2, p99" in first
    assert "mean" not in first and "version 2" not in made["serving-between-tokens.svg"]


def test_a_refusal_is_one_line_of_the_command_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "results", GOOD | {"device": ""})
    with pytest.raises(SystemExit) as e:
        cli.main(["bench", "report", "--results", str(folder), "--markdown", str(tmp_path / "docs" / "r.md")])
    err = capsys.readouterr().err
    assert e.value.code == 1 and err.count("\n") == 1 and "a.jsonl, line 1: no device" in err
    assert not (tmp_path / "docs").exists()


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.jsonl file"):
        report.main(["--results", str(tmp_path)])


def test_the_lines_of_this_repository_can_be_believed() -> None:
    lines, wrong = report.read(ROOT / "results")
    assert not wrong and len(lines) > 300


def test_tables_charts_and_page_show_what_the_lines_say(tmp_path: Path) -> None:
    second = GOOD | {"rung": "+ <MTP> & more", "number": 2, "tok_s": 55.5, "tok_s_over_below": RATIO}
    quality = GOOD | {"bench": "quality", "build": "int4"}
    folder = write(tmp_path / "results", GOOD, second, quality)
    page = tmp_path / "r.html"
    report.main(["--results", str(folder), "--markdown", str(tmp_path / "docs" / "r.md"), "--html", str(page)])
    text = (tmp_path / "docs" / "r.md").read_text("utf-8")
    assert "## ladder: m, Some CPU, 2 threads" in text and "| 55.5 | 40 | 60 | 1.25 (1.2 to 1.3) |" in text
    assert "    onebox bench ladder m" in text and "abc1234" in text and "| int4 |" in text
    pictures = sorted(p.name for p in (tmp_path / "docs" / "images" / "results").iterdir())
    assert pictures == ["ladder-m-some-cpu-2-threads.svg", "quality.svg", "roofline-some-cpu-2-threads.svg"]
    assert all(f"(images/results/{name})" in text for name in pictures)
    whole = page.read_text("utf-8")
    assert (
        whole.count("<svg") == 3 and "+ &lt;MTP&gt; &amp; more" in whole and "http" not in whole.replace(SVG[1:-1], "")
    )


def test_bars_are_as_long_as_their_values_and_spreads_stand_where_they_are() -> None:
    tree = ET.fromstring(bars("t", "u", [Bar("a", 10.0, 8.0, 12.0), Bar("b & c", 5.0)]))
    whole, half = (
        float(r.attrib["width"]) for r in tree.iter(f"{SVG}rect") if "height" in r.attrib and "x" in r.attrib
    )
    assert whole == pytest.approx(2 * half, abs=0.2)
    spreads = [e for e in tree.iter(f"{SVG}line") if e.attrib["class"] == "spread"]
    across = spreads[0]
    left = next(float(r.attrib["x"]) for r in tree.iter(f"{SVG}rect") if "x" in r.attrib)
    assert (float(across.attrib["x1"]) - left) / whole == pytest.approx(0.8, abs=0.01)
    assert (float(across.attrib["x2"]) - left) / whole == pytest.approx(1.2, abs=0.01)
    assert "b & c" in [e.text for e in tree.iter(f"{SVG}text")]


def test_points_stand_on_their_decades_and_on_the_roof() -> None:
    found = [Point("a", 1.0, 1.0, "s"), Point("b", 10.0, 1.0, "s"), Point("c", 100.0, 10.0, "t")]
    tree = ET.fromstring(points("t", "x", "y", found, roof=10.0))
    a, b, c, *legend = ((float(e.attrib["cx"]), float(e.attrib["cy"])) for e in tree.iter(f"{SVG}circle"))
    assert b[0] - a[0] == pytest.approx(c[0] - b[0], abs=0.2) and a[1] == b[1] > c[1] and len(legend) == 2
    keys = [e.text for e in tree.iter(f"{SVG}text")]
    assert "1  a" in keys and "3  c" in keys and "s" in keys and "t" in keys
    roof = next(e for e in tree.iter(f"{SVG}line") if e.attrib["class"] == "axis")
    assert (float(roof.attrib["x1"]), float(roof.attrib["y1"])) == pytest.approx(b, abs=0.2)
    assert (float(roof.attrib["x2"]), float(roof.attrib["y2"])) == pytest.approx(c, abs=0.2)


def test_points_that_stand_together_share_their_numbers() -> None:
    tree = ET.fromstring(points("t", "x", "y", [Point("a", 5.0, 5.0), Point("b", 5.1, 5.0), Point("c", 1.0, 9.0)]))
    assert {"1, 2", "3"} <= {e.text for e in tree.iter(f"{SVG}text")}


def test_axes_are_round_and_hold_what_is_shown() -> None:
    assert steps(10.0) == [0, 2, 4, 6, 8, 10] and steps(7.3)[-1] >= 7.3 and len(steps(99.0)) <= 7
    assert decades([0.02, 3.0]) == [-2, -1, 0, 1] and decades([1.0]) == [0, 1]


@pytest.mark.browser
@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_the_page_opens_in_chromium_with_every_chart_painted_and_a_clean_console(tmp_path: Path, width: str) -> None:
    import io

    from browser import NARROW, WIDE, Browser
    from PIL import Image

    folder = write(tmp_path / "results", GOOD, GOOD | {"bench": "quality", "build": "int4"}, SERVED)
    page = tmp_path / "r.html"
    report.main(["--results", str(folder), "--markdown", str(tmp_path / "r.md"), "--html", str(page)])
    browser = Browser()
    try:
        browser.open(page.as_uri(), WIDE if width == "wide" else NARROW)
        charts = browser.all("svg")
        assert len(charts) == 5 and not browser.complaints()
        for chart in charts:
            assert chart.is_displayed() and chart.size["height"] > 50
            pixels = Image.open(io.BytesIO(chart.screenshot_as_png)).convert("RGB")
            colours = {colour for _, colour in pixels.getcolors(maxcolors=1 << 20) or ()}
            assert (255, 255, 255) in colours and len(colours) > 20, "an empty chart"
            if width == "wide":  # on a narrow screen a chart scrolls in its own box, and its right part is out of sight
                assert any(b > r + 60 for r, _, b in colours), "no bar or point is painted"
        wide_as_window = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert browser.script(wide_as_window), "the page scrolls sideways"
    finally:
        browser.close()
