"""`onebox compress FILE --out OUT`: each row once and in its place, whatever ends the run; other columns untouched."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onebox import cli
from onebox.errors import ConfigError
from onebox.prompt import Compressor, bulk
from onebox.prompt.bulk import Made, Settings, compress_file, in_here

TEXT = "The lighthouse of Varrow was kept by Ines Okafor. Ships came by every day. The tea was cold. "
HALF = Settings(rate=0.5)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(bulk, "PART_ROWS", 8)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in rows), "utf-8")
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def texts(n: int) -> list[dict[str, Any]]:
    return [{"id": i, "prompt": f"Row {i}. {TEXT}", "tags": [i, {"a": None}]} for i in range(n)]


def command(*argv: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["compress", *map(str, argv)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_each_row_comes_out_in_its_place_with_what_else_it_had(tmp_path):
    source, out = write(tmp_path / "in.jsonl", [*texts(20), ""]), tmp_path / "out.jsonl"
    assert command(source, "--out", out, "--rate", "0.4") == 0
    found = rows_of(out)
    assert [row["id"] for row in found] == list(range(20)) and all(
        row["tags"] == [row["id"], {"a": None}] for row in found
    )
    for row, given in zip(found, texts(20), strict=True):
        done = Compressor().compress(given["prompt"], rate=0.4)
        assert (row["prompt"], row["tokens"], row["original_tokens"]) == (done.text, done.tokens, done.original_tokens)
    assert [path.name for path in tmp_path.iterdir() if path not in (source, out)] == []


def test_a_rows_question_goes_before_the_one_of_all(tmp_path):
    asked = [{"prompt": TEXT * 4, "question": "Who kept the lighthouse?"}, {"prompt": TEXT * 4}]
    source, out = write(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    assert command(source, "--out", out, "--rate", "0.2", "--question", "Was the tea cold?") == 0
    own, common = rows_of(out)
    assert "Ines Okafor" in own["prompt"] and "tea" in common["prompt"] and own["prompt"] != common["prompt"]


def test_rows_without_a_text_are_told_and_stay(tmp_path, capsys):
    bad = ["{", [1], {"prompt": 3}, {"prompt": "ok " * 40}, {"id": 7}, {"prompt": "\ud800 alone"}]
    source, out = write(tmp_path / "in.jsonl", bad), tmp_path / "out.jsonl"
    assert command(source, "--out", out) == 3
    found = rows_of(out)
    assert len(found) == 6 and ["error" in row for row in found] == [True, True, True, False, True, True]
    assert found[0]["error"].startswith("line 1 is not JSON") and found[1]["row"] == [1] and found[4]["id"] == 7
    assert "5 rows have an error" in capsys.readouterr().err


def test_parquet_keeps_the_types_of_other_columns(tmp_path):
    n = 20
    table = pa.table(
        {
            "id": pa.array(range(n), pa.int16()),
            "text": pa.array([f"Row {i}. {TEXT}" if i != 3 else None for i in range(n)], pa.large_string()),
            "tags": pa.array([[i] * (i % 3) for i in range(n)], pa.list_(pa.int8())),
            "kind": pa.array(["a", "b"] * 10).dictionary_encode(),
        }
    )
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(table, source, row_group_size=6)
    assert command(source, "--out", out, "--column", "text", "--rate", "0.5") == 3
    made = pq.read_table(out)
    assert made.num_rows == n and made.column_names == [
        "id",
        "text",
        "tags",
        "kind",
        "tokens",
        "original_tokens",
        "error",
    ]
    kept = ["id", "tags", "kind"]
    assert made.select(kept).to_pylist() == table.select(kept).to_pylist()
    assert [made.schema.field(name).type for name in (*kept, "text")] == [
        table.schema.field(name).type for name in (*kept, "text")
    ]
    rows = made.to_pylist()
    assert rows[3]["text"] is None and rows[3]["error"] == "no text in this row"
    assert rows[4]["text"] == Compressor().compress(f"Row 4. {TEXT}", rate=0.5).text and rows[4]["error"] is None


class Cut(Exception):
    pass


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_ended_early_it_goes_on_and_does_nothing_twice(tmp_path, suffix):
    source, out = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    if suffix == ".jsonl":
        write(source, texts(50))
    else:
        pq.write_table(pa.table({"id": range(50), "prompt": [row["prompt"] for row in texts(50)]}), source)
    asked: list[int] = []

    def until(n: int):
        def work(parts):
            for done, (number, made) in enumerate(shuffled(in_here(HALF)(parts))):
                if done == n:
                    raise Cut
                asked.append(number)
                yield number, made

        return work

    def shuffled(parts):
        found = list(parts)
        random.Random(1).shuffle(found)
        return found

    for n in (2, 3):
        with pytest.raises(Cut):
            compress_file(source, out, HALF, until(n), lambda _: None)
        assert not out.exists()
    (out.with_name(f"{out.name}.parts") / f"00000009{suffix}.new").write_bytes(b"torn")
    assert compress_file(source, out, HALF, until(99), lambda _: None) == 0
    assert sorted(asked) == list(range(7))
    found = rows_of(out) if suffix == ".jsonl" else pq.read_table(out).to_pylist()
    assert [row["id"] for row in found] == list(range(50)) and all(row["tokens"] for row in found)


def test_a_part_that_is_told_twice_counts_once(tmp_path):
    source, out = write(tmp_path / "in.jsonl", texts(8)), tmp_path / "out.jsonl"

    def work(parts):
        for number, found in parts:
            yield number, [Made("x", 1, 2)] * len(found)
            yield number, [Made("y", 1, 2)] * len(found)

    compress_file(source, out, HALF, work, lambda _: None)
    assert [row["prompt"] for row in rows_of(out)] == ["x"] * 8


def test_another_input_or_other_settings_do_not_go_on_with_the_parts(tmp_path):
    source, out = write(tmp_path / "in.jsonl", texts(20)), tmp_path / "out.jsonl"
    with pytest.raises(ConfigError, match=r"lacks 00000000.jsonl; run it again"):
        compress_file(source, out, HALF, lambda parts: [], lambda _: None)
    with pytest.raises(ConfigError, match="other settings"):
        compress_file(source, out, Settings(rate=0.4), in_here(Settings(rate=0.4)), lambda _: None)
    write(source, texts(21))
    with pytest.raises(ConfigError, match="another input"):
        compress_file(source, out, HALF, in_here(HALF), lambda _: None)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["none.jsonl", "--out", "o.jsonl"], "none.jsonl: cannot be read"),
        (["in.jsonl", "--out", "in.jsonl"], "cannot be input and output at once"),
        (["in.jsonl", "--out", "there.jsonl"], "is there already"),
        (["in.jsonl", "--out", "o.parquet"], "must be of one kind"),
        (["in.txt", "--out", "o.jsonl"], "must end in .jsonl or .parquet"),
        (["-", "--out", "o.jsonl"], "must end in .jsonl or .parquet"),
        (["in.jsonl", "--out", "no/o.jsonl"], "no/o.jsonl.parts: No such file"),
        (["in.jsonl", "--column", "text"], "--column is for files of rows"),
        (["in.jsonl", "--ray", "local"], "--ray is for files of rows"),
        (["in.jsonl", "--out", "o.jsonl", "--html", "x.html"], "--html draws one prompt"),
        (["empty.jsonl", "--out", "o.jsonl"], "has no rows"),
        (["wrong.parquet", "--out", "o.parquet"], "is no Parquet file"),
        (["in.parquet", "--out", "o.parquet"], "no column 'prompt'; it has id, tokens"),
        (["in.parquet", "--out", "o.parquet", "--column", "id"], "no text in column 'id'"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, argv, says):
    monkeypatch.chdir(tmp_path)
    for name in ("in.jsonl", "there.jsonl", "in.txt"):
        write(tmp_path / name, texts(1))
    write(tmp_path / "empty.jsonl", [""])
    write(tmp_path / "wrong.parquet", ["no"])
    pq.write_table(pa.table({"id": [1], "tokens": [1]}), tmp_path / "in.parquet")
    assert command(*argv) == 1
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err and err.count("\n") == 1
