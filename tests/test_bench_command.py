"""`onebox bench`: every benchmark by name, and command lines that say nothing about the machine's folders."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from onebox import cli
from onebox.bench import command
from onebox.bench.record import command_line, portable

ROOT = Path(__file__).parent.parent


def test_help_lists_every_benchmark_on_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(["bench", "--help"])
    assert e.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for name, text in command.MODULES.items():
        assert any(line.split()[:1] == [name] and text in line for line in lines), name


@pytest.mark.parametrize("name", command.MODULES)
def test_a_benchmark_answers_help_under_its_name(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["onebox"])
    with pytest.raises(SystemExit) as e:
        cli.main(["bench", name, "--help"])
    assert e.value.code == 0
    assert f"usage: onebox bench {name}" in capsys.readouterr().out


def test_every_module_with_a_main_can_be_reached() -> None:
    with_main = {
        path.stem.replace("_", "-")
        for path in (ROOT / "onebox" / "bench").glob("*.py")
        if "\ndef main(" in path.read_text("utf-8") and hasattr(import_module(f"onebox.bench.{path.stem}"), "main")
    }
    assert with_main <= {c.name for c in command.app.registered_commands}


@pytest.mark.parametrize("argv", [["bench", "nothing"], ["bench", "chat", "--no-such-flag"]])
def test_a_mistake_is_a_code_and_a_line(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["onebox"])
    with pytest.raises(SystemExit) as e:
        cli.main(argv)
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert "error" in err and "Traceback" not in err


TINY = str(ROOT / "onebox" / "models" / "tiny")


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["engine", "--model", "/no/where"], 2, "no such folder"),
        (["kernels", "--batch", "-1"], 2, "--batch: must be at least 1"),
        (["efficiency", "FILE"], 1, "FILE: not a file of JSON lines"),
        (["ladder", "--fp8-from", "x"], 2, "--fp8-from is for builds of a 16-bit MODEL"),
        (["ladder", "--document", "99999999"], 2, "--document: tiny reads 8192 tokens"),
        (["ladder", "--out", "."], 2, "is a folder"),
        (["ladder", "--out", "FILE/x.jsonl"], 2, "is a file, not a folder"),
        (["quality", TINY, "--against", TINY, "--max-kl", "nan"], 2, "--max-kl: must be finite"),
        (["quality", TINY, "--against", TINY, "--min-top1", "2"], 2, "--min-top1: must be from 0 to 1"),
        (["quality", TINY, "--against", TINY, "--window", "-3"], 2, "--window: must be at least 1"),
        (["quality", TINY, "--against", TINY, "--needles", "9000"], 1, "the model reads 8192"),
        (["quality", TINY, "--against", "/no/where"], 2, "no such folder"),
        (["sparse-search", "--needles", "x"], 2, "--needles: must be a whole number"),
        (["sparse-search", "--length", "300", "--prompts", "1", "--needles", "9000"], 1, "the model reads 8192"),
        (["scbench", "--compress-rate", "nan"], 2, "--compress-rate: must be finite"),
        (["chat", TINY, "--questions", "FILE"], 1, "must be JSON lines with a 'question'"),
        (["chat", TINY, "--k", "9"], 2, "--k: must be 0 to 4"),
        (["state", "--model", TINY, "--text", "FILE"], 1, "FILE"),
        (["reuse", "--model", TINY, "--tokens", "99999"], 2, "reads 8192 tokens"),
        (["overhead", "--rate", "nan"], 2, "--rate: must be finite"),
        (["overhead", "--tokens", "-1"], 2, "--tokens: must be at least 1"),
        (["soak", "--seconds", "-1"], 2, "--seconds: must be above 0"),
        (["soak", "--hang-up", "3"], 2, "--hang-up: must be from 0 to 1"),
    ],
)
def test_an_odd_value_is_one_line_before_anything_is_measured(
    argv: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "FILE").write_bytes(b'{"broken": \xff\xfe')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["onebox"])
    with pytest.raises(SystemExit) as e:
        cli.main(["bench", *argv])
    err = [line for line in capsys.readouterr().err.splitlines() if "packed already: weight" not in line]
    assert e.value.code == code and len(err) == 1 and says in err[0], err


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("/somewhere/far/model", "model"),
        ("--text=/somewhere/far/words.txt", "--text=words.txt"),
        ("../beside/model", "model"),
        ("onebox/models/tiny", "onebox/models/tiny"),
        ("--url=http://127.0.0.1:8000/v1", "--url=http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("--batch", "--batch"),
        ("0.9,0.8", "0.9,0.8"),
    ],
)
def test_a_recorded_word_holds_no_folder_of_this_machine(word: str, kept: str) -> None:
    assert portable(word) == kept


def test_a_path_below_here_is_recorded_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert portable(str(tmp_path / "a" / "b")) == "a/b" and portable(str(tmp_path)) == tmp_path.name


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["/opt/x/bin/onebox", "bench", "serve", "--out", "/a/b", "--n", "3"], "onebox bench serve --n 3"),
        (["onebox bench chat", "/a/tiny", "--out=/a/b.jsonl"], "onebox bench chat tiny"),
        (["/a/tools/train.py", "--write", "x", "/a/data"], "python train.py data"),
    ],
)
def test_a_command_line_is_what_one_types(argv: list[str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert command_line() == line
