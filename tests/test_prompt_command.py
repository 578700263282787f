"""`onebox compress` as a shell sees it: pipes, terminals, JSON lines, exit statuses; the bundled model as scorer."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import BertConfig, BertForTokenClassification

from onebox import cli
from onebox.prompt import ClassifierScorer, Compressor
from onebox.prompt.bundled import bundled_scorer
from tests.test_prompt_methods import OTHERS, PROSE, wordpiece

COMPRESS = [sys.executable, "-m", "onebox.cli", "compress"]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["compress", *args])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_standard_input_goes_to_standard_output_and_nothing_else_does() -> None:
    done = subprocess.run([*COMPRESS, "-", "--rate", "0.5"], input=PROSE.encode(), capture_output=True, check=True)
    assert done.stdout.decode() == Compressor().compress(PROSE, rate=0.5).text
    assert b"compressed, by auto (statistics)" in done.stderr


def test_a_terminal_gets_a_newline_between_text_and_summary() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([*COMPRESS, "-"], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        assert process.stdin is not None
        process.stdin.write(PROSE.strip().encode())
        process.stdin.close()
        shown = b""
        try:
            while chunk := os.read(ours, 4096):
                shown += chunk
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    lines = shown.decode().replace("\r", "").strip().split("\n")
    assert lines[-1].split()[1] == "->" and lines[-2].strip() and "->" not in lines[-2]


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": PROSE * 20, "id": i}) + "\n" for i in range(40)))
    done = subprocess.run(
        f"{sys.executable} -m onebox.cli compress {file} --jsonl | head -n 1",
        shell=True,
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["id"] == 0 and b"Traceback" not in done.stderr


def test_json_lines_are_compressed_one_by_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": PROSE, "id": 1}) + "\n\n" + json.dumps({"prompt": OTHERS[0], "id": 2}) + "\n")
    status, out, err = run(capsys, str(file), "--jsonl", "--rate", "0.5")
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [row["id"] for row in rows] == [1, 2] and "2 prompts" in err
    assert all(row["tokens"] <= 0.5 * row["original_tokens"] for row in rows)


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["{file}", "--rate", "2"], 1, "rate"),
        (["{file}", "--method", "magic"], 1, "method"),
        (["{file}", "--method", "llmlingua2"], 1, "--model"),
        (["{file}", "--method", "llmlingua2", "--model", "/nowhere"], 1, "/nowhere"),
        (["{file}", "--html", "/nowhere/x.html"], 1, "--html"),
        (["{file}", "--jsonl"], 1, "line 1"),
        (["{file}", "--jsonl", "--html", "x.html"], 1, "--html"),
        (["/nowhere"], 1, "/nowhere"),
        (["{file}", "--speed", "9"], 2, "--speed"),
    ],
)
def test_mistakes_are_one_line_and_a_status(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str], status: int, said: str
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(PROSE)
    code, out, err = run(capsys, *[arg.format(file=file) for arg in args])
    assert code == status and said in err and len(err.strip().splitlines()) == 1
    assert out in ("", Compressor().compress(PROSE, rate=0.5).text)


def test_the_summary_says_what_protected_spans_take(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("```\n" + "x = 1\n" * 30 + "```\n" + PROSE)
    status, out, err = run(capsys, str(file), "--rate", "0.1")
    assert status == 0 and "x = 1\n" * 30 in out and "protected spans alone take" in err


def test_the_bundled_model_scores_prompts_without_a_download(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(PROSE)
    status, out, err = run(capsys, str(file), "--rate", "0.5", "--method", "llmlingua")
    assert status == 0 and "the bundled model" in err
    assert 0 < len(out) < 0.75 * len(PROSE)


def test_the_bundled_models_surprisal_is_lower_for_prose_than_for_its_words_in_disorder() -> None:
    scorer = bundled_scorer()
    shuffled = " ".join(np.random.default_rng(0).permutation(PROSE.split()))
    together = scorer.score([PROSE, shuffled, "a <|endoftext|> b"])
    plain, disorder = (float(found.scores.mean()) for found in together[:2])
    assert plain + 0.3 < disorder and len(together[2].scores) > 4
    alone = scorer.score([PROSE])[0]
    np.testing.assert_allclose(together[0].scores, alone.scores, atol=1e-3)


def test_ten_tokens_take_less_than_fifty_milliseconds_of_a_core_with_a_classifier_of_minilm_size() -> None:
    tokenizer: Any = wordpiece()
    config = BertConfig(
        vocab_size=30_522,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        num_labels=2,
    )
    model = BertForTokenClassification(config).eval()
    compressor = Compressor("llmlingua2", scorer=ClassifierScorer(model, tokenizer))
    text = "The harbour was rebuilt in 1887 after the storm"
    compressor.compress(text, rate=0.5)
    best = min(_seconds(compressor, text) for _ in range(12))
    assert best < 0.05


def _seconds(compressor: Compressor, text: str) -> float:
    started = time.process_time()
    compressor.compress(text, rate=0.5)
    return time.process_time() - started
