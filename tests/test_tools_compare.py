"""The side-by-side script on a toy set: cases, what counts as surviving, workers over pipes, rows of the table."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onebox.prompt.budget import counter_of
from tools.compare_llmlingua import __main__ as compare
from tools.compare_llmlingua import cases as sets
from tools.compare_llmlingua.baselines import BASELINES

SUBJECTS = ["ports", "bakeries", "glaciers", "choirs", "orchards", "mines", "canals", "lighthouses", "mills", "markets"]
ROOT = Path(__file__).parent.parent
REFERENCE = """
import json, sys
print(json.dumps({"ready": True, "versions": {"llmlingua": "a stand-in"}}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if job["target"] < 20:
        print(json.dumps({"error": "ValueError: too short", "seconds": 1.0, "cpu_seconds": 1.0}), flush=True)
    else:
        print(json.dumps({"text": job["documents"][0], "seconds": 1.0, "cpu_seconds": 1.0}), flush=True)
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "nq_open").mkdir()
    with gzip.open(tmp_path / "nq_open" / "oracle_dev.jsonl.gz", "wt", encoding="utf-8") as file:
        for index in range(20):
            subject = f"{SUBJECTS[index % 10]}{index}"
            text = f"The {subject} of the old valley were counted by clerk {index}. They were {1000 + index} in all."
            row = {"question": f"How many {subject} were there?", "answers": [f"{1000 + index}"]}
            file.write(json.dumps({**row, "ctxs": [{"title": subject.title(), "text": text}]}) + "\n")
    (tmp_path / "qmsum").mkdir()
    turns = [{"speaker": "Chair", "content": f"we talked about item {i} at some length today"} for i in range(60)]
    turns[31] = {"speaker": "Ada", "content": "the turquoise casing costs fourteen euros without batteries"}
    query = {"query": "What does the casing cost?", "answer": "14", "relevant_text_span": [["31", "31"]]}
    meeting = {"meeting_transcripts": turns, "specific_query_list": [query]}
    (tmp_path / "qmsum" / "val.jsonl").write_text(json.dumps(meeting) + "\n")
    (tmp_path / "gsm8k").mkdir()
    with (tmp_path / "gsm8k" / "test.jsonl").open("w") as file:
        for n in range(12):
            row = {
                "question": f"Ada has {n} pears and buys 2. How many?",
                "answer": f"{n}+2=<<{n}+2={n + 2}>>\n#### {n + 2}",
            }
            file.write(json.dumps(row) + "\n")
    return tmp_path


def test_cases_hold_their_gold_where_they_say(data: Path) -> None:
    for name in ("nq10", "qmsum", "gsm8k"):
        for case in sets.load(name, data, 3, len, tokens=2000):
            assert (
                sets.recall(case, case.text) == sets.whole(case, case.text) == 1 and sets.broken(case, case.text) == 0
            )
            assert sets.recall(case, "") == sets.whole(case, "") == 0
    places = [[c.units[0] == d for d in c.documents].index(True) for c in sets.load("nq10", data, 3, len)]
    assert places == [0, 5, 9]
    for name in ("nq10", "gsm8k"):
        assert sets.load(name, data, 5, len)[:2] == sets.load(name, data, 2, len)
    [meeting] = sets.load("qmsum", data, 9, len, tokens=2000)
    assert ["turquoise"] in meeting.gold and ["length"] not in meeting.gold and len(meeting.text) < 2200
    assert all(len(case.documents) == 8 and len(case.gold) == 8 for case in sets.load("gsm8k", data, 3, len))


def test_an_answer_survives_as_whole_words_only() -> None:
    case = sets.Case("one", ["The answer is 12 pears."], "?", [["12"], ["pears", "fruit"]], ["The answer is 12 pears."])
    assert sets.recall(case, "the  ANSWER is 12 pears") == 1.0 and sets.recall(case, "3124 fruit") == 0.5
    assert sets.whole(case, "x the answer\nis 12 pears. y") == 1.0
    assert sets.broken(case, "answer 1 pears") == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", list(BASELINES))
@pytest.mark.parametrize("question", ["How many glaciers2 were there?", None])
def test_baselines_stay_under_the_target_and_use_it(data: Path, name: str, question: str | None) -> None:
    count = counter_of(None)
    [case] = sets.load("nq10", data, 1, count)
    for ratio in (2, 4):
        target = count(case.text) // ratio
        text = BASELINES[name](case.documents, question, target, count)
        assert 0.6 * target <= count(text) <= target


def test_the_script_asks_both_sides_and_makes_rows(data: Path, tmp_path: Path) -> None:
    items, out, reference = tmp_path / "items.jsonl", tmp_path / "rows.jsonl", tmp_path / "reference.py"
    reference.write_text(REFERENCE)
    count = counter_of(None)
    ours = compare.Worker([sys.executable, "-m", "tools.compare_llmlingua.ours", "none", "float32", "1"], 1)
    stand_in = compare.Worker([sys.executable, str(reference)], 1)
    assert stand_in.versions == {"llmlingua": "a stand-in"} and "python" in ours.versions
    methods = ["reference LongLLMLingua", "ours auto", "ours auto, no question", "BM25 documents", "truncation"]
    done: set[tuple[str, str, int]] = set()
    try:
        for name in ("nq10", "gsm8k"):
            for item in compare.measure(
                compare.Sides(ours, stand_in, count), name, sets.load(name, data, 2, count), methods, done
            ):
                compare.record.append(items, item)
                done.add((item["case"], item["method"], item["ratio"]))
        again = list(
            compare.measure(compare.Sides(None, None, count), "nq10", sets.load("nq10", data, 2, count), methods, done)
        )
        assert not again  # what is done is not asked anew
    finally:
        ours.close()
        stand_in.close()
    found, _ = compare.read_items(items)
    table: dict[Any, dict[str, Any]] = {(row["set"], row["method"], row["ratio"]): row for row in compare.rows(found)}
    assert len(found) == 2 * 2 * 3 * len(methods) and len(table) == 2 * 3 * len(methods)
    auto = table["nq10", "ours auto", 4]
    assert auto["recall"] == 1.0 and auto["n"] == 2 and -0.1 < auto["budget_error_min"] <= auto["budget_error_max"] <= 0
    assert auto["speedup_long"] == pytest.approx(1.0 / auto["median_s"], rel=0.02)
    assert table["nq10", "reference LongLLMLingua", 2]["recall"] == 0.5  # the first document, which is gold in one case
    failed = sum(table["gsm8k", "reference LongLLMLingua", ratio]["failed"] for ratio in (2, 4, 8))
    assert failed == sum("error" in item and item["set"] == "gsm8k" for item in found)
    run = [sys.executable, "-m", "tools.compare_llmlingua", "table", str(items), "--out", str(out)]
    printed = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "| ours auto |" in printed and len(out.read_text().splitlines()) == len(table)
