"""SCBench: generators held by an independent solver, the paper's scores, the published layout, both modes."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from serving import TINY, app_of, running, saying, tokenizer

from onebox import cli
from onebox.bench import scbench_data
from onebox.bench.record import aligned
from onebox.bench.scbench import compressed, compressor, engine_values, fitted, main, play, summary, variants
from onebox.bench.scbench_data import folder_of, sessions
from onebox.bench.scbench_synthetic import make
from onebox.bench.scbench_tasks import MAX_NEW_TOKENS, TASKS, Answer, Session, Turn, asked_functions, function_in, score
from onebox.bench.subjects import EngineSubject, Message, ScriptedSubject, UrlSubject, metric
from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.errors import ConfigError

MODES = ("multi-turn", "multi-request")


def count(text: str) -> int:
    return len(tokenizer().encode(text))


# ---- a solver that reads the visible text and knows nothing of the generators ---------------------------------------


def find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def chain_of(text: str, value: str) -> str:
    values: dict[str, str] = {}
    for name, right in re.findall(r"^VAR (\w+) = (.+)$", text, re.MULTILINE):
        values[name] = values.get(right.removeprefix("VAR "), right)
    return " and ".join(name for name, v in values.items() if v == value)


def number_of(text: str, question: str) -> str:
    listed = re.search(r"\[([\d, ]+)\]", text)
    if listed is None:
        return ""
    numbers = sorted(int(n) for n in listed[1].split(","))
    if "median" in question:
        return str(statistics.median(numbers))
    ordinals = ["second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"]
    rank = next((i + 1 for i, word in enumerate(ordinals) if f"the {word} " in question), 0)
    return str(numbers[-1 - rank] if "largest" in question else numbers[rank])


def class_of(text: str, word: str) -> str:
    return find(rf"Word: \w*{word[-2:]}\nClass: (\([A-D]\))", text)


def lives(text: str, question: str) -> str:
    asked = re.match(r"Where does (\w+ \w+) (\w+) (.*)\?", question)
    assert asked
    return find(rf"{asked[1]} {asked[2]}e?s {asked[3]} in (\w+)\.", text)


def function_of(text: str, question: str) -> str:
    asked = re.search(r"from (\d+), multiplies every (\w+) by (\d+), and (\w+)(?: .*)? what is above (\d+)", question)
    assert asked
    start, items, factor, how, least = asked.groups()
    for code in re.findall(r"def (?:.+\n)+?    return total", text):
        kept = ("total +=" if how == "adds" else "max(") in code
        if kept and f"= {start}\n" in code and f"{items} * {factor}\n" in code and f"> {least}:" in code:
            return f"Here it is:\n```python\n{code}\n```"
    return ""


def findings(text: str, part: str) -> str:
    body = find(rf"(?s)Part {part}\n(.*?)(?:\n\nPart|\Z)", text)
    return "\n".join(re.findall(r"^Finding: .*$", body, re.MULTILINE))


def solve(text: str, question: str) -> str:
    """What the visible text says; nothing when it does not."""
    question, *options = question.split("\nA. ")
    if key := find(r'value of the key "(.*?)"', question):
        return find(rf'"{key}": "(\d+)"', text)
    if ends := re.search(r'begins with "(\w+)" and ends with "(\w+)"', question):
        return find(rf"\b({ends[1]}\w*{ends[2]})\b", text)
    if value := find(r"assigned the value (\d+)", question):
        return chain_of(text, value)
    if "of the list" in question:
        return number_of(text, question)
    if word := find(r"^Word: (\w+)", question):
        return class_of(text.removesuffix(question), word)
    if name := find(r"问题：(.*)住在", question):
        return find(rf"{name}住在(.*?)。", text)
    if part := find(r"findings of part (\d+)", question):
        return findings(text, part)
    if name := find(r"magic number for (\w+)", question):
        return find(rf"number for {name} is (\d+)", text)
    if question.startswith("Which function"):
        return function_of(text, question)
    town = lives(text, question)
    if options and town:
        return "The answer is: " + find(rf"([A-D])\. {town}", "A. " + options[0])
    return town


def perfect(messages: Sequence[Message]) -> str:
    """Remembers every message."""
    text = "\n\n".join(m["content"] for m in messages if m["role"] == "user")
    return solve(text, messages[-1]["content"].rpartition("\n\n")[2] or messages[-1]["content"])


def amnesiac(contexts: Sequence[str]) -> Callable[[Sequence[Message]], str]:
    """Reads a context once, and never again."""
    seen: set[str] = set()

    def answer(messages: Sequence[Message]) -> str:
        text = "\n\n".join(m["content"] for m in messages if m["role"] == "user")
        for context in contexts:
            if context in text:
                text = text.replace(context, "") if context in seen else text
                seen.add(context)
        return solve(text, messages[-1]["content"].rpartition("\n\n")[2])

    return answer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("task", TASKS)
def test_a_perfect_memory_has_everything_and_an_amnesiac_the_first_question_alone(task: str, mode: str) -> None:
    made = [make(task, 1200, 4, count, seed=7, index=i) for i in range(3)]
    functions = asked_functions(made)
    found = summary([play(ScriptedSubject(perfect), s, mode, functions) for s in made])
    assert found["score"] == 1.0 and found["by_turn"] == [1.0] * 4 and found["questions"] == 12
    forgetful = ScriptedSubject(amnesiac([s.context for s in made]))
    assert summary([play(forgetful, s, mode, functions) for s in made])["by_turn"] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("task", TASKS)
def test_a_made_context_has_the_length_asked_for_and_is_its_seeds_alone(task: str) -> None:
    for length in (800, 4000):
        made = make(task, length, 3, count, seed=1)
        assert 0.9 * length < count(made.context) <= 1.03 * length
        assert made == make(task, length, 3, count, seed=1)
        assert made.context != make(task, length, 3, count, seed=2).context != ""
        assert made.context != make(task, length, 3, count, seed=1, index=1).context
    assert len({turn.question for turn in made.turns}) == 3
    assert all(count(turn.gold) < turn.max_tokens for turn in made.turns)


def test_neighbours_share_one_end_of_the_string_asked_for() -> None:
    made = make("scbench_prefix_suffix", 600, 3, count)
    strings = made.context.split("\n")
    for turn in made.turns:
        first, last = re.findall(r'"(\w+)"', turn.question)
        assert [s for s in strings if s.startswith(first) and s.endswith(last)] == [turn.answer]
        assert sum(s.startswith(first) for s in strings) == sum(s.endswith(last) for s in strings) == 2


@pytest.mark.parametrize(
    ("task", "length", "turns", "says"),
    [
        ("scbench_kv", 100, 30, "too few"),
        ("scbench_summary", 60, 5, "too few"),
        ("scbench_mf", 4000, 40, "40 turns are too many"),
        ("scbench_qa_chn", 4000, 99, "more different names"),
        ("scbench_kv", 1000, 0, "at least 1"),
        ("scbench_books", 1000, 5, "not known"),
    ],
)
def test_what_cannot_be_made_is_refused(task: str, length: int, turns: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(task, length, turns, count)


# ---- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "answer", "said", "expected"),
    [
        ("scbench_kv", "12ab", 'The value is "12ab".', 1),
        ("scbench_kv", "12ab", "12AB", 0),
        ("scbench_prefix_suffix", "pq", "apqb", 1),
        ("scbench_vt", ("AAA", "BBB", "CCC"), "aaa, then CCC", 0.67),
        ("scbench_vt", ("AAA",), "", 0),
        ("scbench_qa_eng", "Blue House", "it was the BLUE house.", 1),
        ("scbench_qa_eng", ("red", "green"), "green", 1),
        ("scbench_qa_chn", "青石镇", "青石镇", 1),
        ("scbench_qa_chn", "青石镇", "他住在青石镇。", 2 * 3 / (6 + 3)),
        ("scbench_qa_chn", "青石镇", "黄沙", 0),
        ("scbench_mf", 42, "It is 42.7", 1),
        ("scbench_mf", 42, "of 100: 42", 0),
        ("scbench_mf", 0.5, "0.5", 1),
        ("scbench_mf", 42, "none", 0),
        ("scbench_many_shot", "(B)", "I say (b)", 1),
        ("scbench_many_shot", "(B)", "(A)", 0),
        ("scbench_passkey", "00123", "the number 00123, not 5", 1),
        ("scbench_passkey", "123", "7123", 0),
        ("scbench_summary", "the cat sat\non the mat", "the cat sat\non the mat", 1),
        ("scbench_summary", "a b c d", "a b", 2 * (2 / 2) * (2 / 4) / (2 / 2 + 2 / 4)),
        ("scbench_summary", "a b", "", 0),
    ],
)
def test_scores(kind: str, answer: Answer, said: str, expected: float) -> None:
    turn = Turn(kind, "?", answer, 10)
    assert score(said, turn, Session("", kind, "", (turn,)), {}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("B", 1),
        ("B. Holbury", 1),
        ("Holbury", 1),
        ("C", 0),
        ("", 0),
        ("the right answer is: B", 1),
        ("the right answer is: C", 0),
        ("the right answer is:", 0),
        ("so it must be B, I think", 1),
        ("so it must be C or B", 0),
        ("no idea", 0),
    ],
)
def test_a_letter_is_read_as_the_paper_does(said: str, expected: float) -> None:
    turn = Turn("scbench_choice_eng", "?", "Holbury", 10, options=("Velford", "Holbury", "Barwick", "Jandale"))
    assert turn.letter == "B"
    assert score(said, turn, Session("", "scbench_choice_eng", "", (turn,)), {}) == expected


CODE = {
    "python": ("import os", "def add(a, b):\n    # sums\n    return a + b"),
    "java": ("class A {", "int add(int a, int b) { return a + b; }"),
    "typescript": ("const x = 1", "function add(a: number, b: number) { return a + b }"),
    "rust": ("use std::io;", "fn add(a: i32, b: i32) -> i32 { a + b }"),
    "cpp": ("#include <x>", "int add(int a, int b) { return a + b; }"),
    "go": ("package main", "func add(a int, b int) int { return a + b }"),
}


@pytest.mark.parametrize("lang", CODE)
def test_a_function_is_found_in_a_code_block(lang: str) -> None:
    before, code = CODE[lang]
    after = "\n}" if lang == "java" else ""
    assert function_in(f"Sure:\n```{lang}\n{before}\n\n{code}{after}\n```\nDone.", lang) == code
    assert function_in(f"```\n{before}\n```\n```\n{code}\n```", lang) in (code, before)
    assert function_in(code, lang) == code
    with pytest.raises(ConfigError, match="cobol"):
        function_in("```\nx\n```", "cobol")


def test_a_function_counts_when_it_is_the_nearest_and_near_enough() -> None:
    one, other = (
        f"def {n}(xs):\n    total = {i}\n    for x in xs:\n        total += x * {i}\n    return total"
        for n, i in (("one", 3), ("other", 8))
    )
    turn = Turn("scbench_repoqa", "?", one, 10, name="one")
    session = Session("", "scbench_repoqa", "", (turn,), "python", "r")
    functions = {"r": {"one": one, "other": other}}
    said = {text: score(text, turn, session, functions) for text in (one, other, f"```python\n{one}\n```", "", "def")}
    assert list(said.values()) == [1, 0, 1, 0, 0]
    assert score(one.replace("3", "4"), turn, session, functions) == 0  # nearest, and below 0.8


# ---- published data --------------------------------------------------------------------------------------------------


def published_row(task: str, number: int) -> dict[str, Any]:
    """A row as the data set of the hub has them."""
    turns: list[dict[str, Any]] = [{"input": f"question {i}", "answer": f"answer {i}"} for i in range(3)]
    row: dict[str, Any] = {"id": number, "context": f"context of {task} {number}", "multi_turns": turns}
    for i, turn in enumerate(turns):
        if task == "scbench_vt":
            turn["answer"] = ["AB", f"C{i}"]
        elif task == "scbench_mf":
            turn["answer"] = 10 + i
            row["context"] = [3, 1, 2]
        elif task == "scbench_choice_eng":
            turn["options"] = ["w", f"answer {i}", "y", "z"]
        elif task == "scbench_summary_with_needles":
            turn["task"] = ("scbench_summary", "scbench_passkey")[i % 2]
        elif task == "scbench_repoqa_and_kv":
            turn["task"] = ("scbench_repoqa", "scbench_kv")[i % 2]
        if task in ("scbench_repoqa", "scbench_repoqa_and_kv"):
            row |= {"lang": "python", "repo": "a/b"}
            turn["name"] = f"f{i}"
    return row


@pytest.mark.parametrize("form", ["parquet", "data jsonl", "jsonl"])
@pytest.mark.parametrize("task", TASKS)
def test_the_published_layout_is_read(tmp_path: Path, task: str, form: str) -> None:
    rows = [published_row(task, i) for i in range(6)]
    if form == "parquet":
        (tmp_path / task).mkdir()
        for part in (0, 1):
            table = pyarrow.Table.from_pylist(rows[3 * part : 3 * part + 3])
            pyarrow.parquet.write_table(table, tmp_path / task / f"test-0000{part}-of-00002.parquet")
    else:
        file = tmp_path / ("data" if form == "data jsonl" else "") / f"{task}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    read = sessions(folder_of(str(tmp_path), (task,)), task, most=5, turns=2)
    assert [s.id for s in read] == ["0", "1", "2", "3", "4"] and {len(s.turns) for s in read} == {2}
    first = read[0]
    assert first.context == ("[3, 1, 2]" if task == "scbench_mf" else f"context of {task} 0")
    kinds = [turn.task for turn in first.turns]
    if task == "scbench_summary_with_needles":
        assert kinds == ["scbench_summary", "scbench_passkey"] and [t.max_tokens for t in first.turns] == [800, 15]
    elif task == "scbench_repoqa_and_kv":
        assert kinds == ["scbench_repoqa", "scbench_kv"] and [t.max_tokens for t in first.turns] == [1024, 80]
    else:
        assert set(kinds) == {task} and {t.max_tokens for t in first.turns} == {MAX_NEW_TOKENS[task]}
    functions = asked_functions(read)
    if "repoqa" not in task:  # the answers above are no code
        found = [score(t.gold, t, first, functions) for t in first.turns]
        assert found == [1.0] * 2 if task != "scbench_summary_with_needles" else found[0] == 1.0
    if task == "scbench_choice_eng":
        assert first.turns[0].question == "question 0\nA. w\nB. answer 0\nC. y\nD. z"


@pytest.mark.parametrize(
    ("task", "change", "says"),
    [
        ("scbench_kv", {"multi_turns": None}, "'multi_turns'"),
        ("scbench_kv", {"multi_turns": [{"input": "x"}]}, "'answer'"),
        ("scbench_mf", {"multi_turns": [{"input": "x", "answer": "many"}]}, "not a number"),
        (
            "scbench_choice_eng",
            {"multi_turns": [{"input": "x", "answer": "q", "options": ["w"]}]},
            "none of the options",
        ),
        (
            "scbench_repoqa_and_kv",
            {"multi_turns": [{"input": "x", "answer": "q", "task": "kv"}]},
            "a turn's task is 'kv'",
        ),
        ("scbench_repoqa", {"lang": None}, "'lang'"),
    ],
)
def test_a_row_of_another_layout_is_refused_by_its_number(
    tmp_path: Path, task: str, change: dict[str, Any], says: str
) -> None:
    rows = [published_row(task, 0), published_row(task, 1) | change]
    (tmp_path / f"{task}.jsonl").write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    with pytest.raises(ConfigError, match=rf"{task}\.jsonl, row 2: .*{says}"):
        sessions(tmp_path, task)


def test_a_folder_without_a_task_and_a_broken_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing of scbench_vt; expected scbench_vt/\*\.parquet"):
        sessions(tmp_path, "scbench_vt")
    (tmp_path / "scbench_vt").mkdir()
    (tmp_path / "scbench_vt" / "test.parquet").write_bytes(b"PAR1 not a table PAR1")
    with pytest.raises(ConfigError, match=r"test\.parquet: not a readable parquet file"):
        sessions(tmp_path, "scbench_vt")
    with pytest.raises(ConfigError, match="no such folder"):
        folder_of(str(tmp_path / "gone"), TASKS)


def test_of_the_hub_only_the_files_of_the_tasks_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def fetch(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert folder_of(scbench_data.HUB, ("scbench_kv", "scbench_vt"), revision="abc") == tmp_path
    assert (asked["repo"], asked["repo_type"], asked["revision"]) == ("microsoft/SCBench", "dataset", "abc")
    assert set(asked["allow_patterns"]) == {
        "scbench_kv/*", "data/scbench_kv.jsonl", "scbench_vt/*", "data/scbench_vt.jsonl",
    }  # fmt: skip

    def fail(repo: str, **options: Any) -> str:
        raise OSError("no route to host\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"microsoft/SCBench: not fetched from the hub \(no route to host\)"):
        folder_of(scbench_data.HUB, ("scbench_kv",))


# ---- modes, contexts, options ----------------------------------------------------------------------------------------


def test_turns_go_on_from_right_answers_and_requests_begin_anew() -> None:
    made = make("scbench_kv", 300, 3, count)
    subject = ScriptedSubject(lambda messages: "wrong")
    play(subject, made, "multi-turn", {})
    assert [len(messages) for messages in subject.asked] == [1, 3, 5]
    contents = [m["content"] for m in subject.asked[2]]
    assert contents[0] == made.opening(made.turns[0].question)
    assert contents[1:] == [made.turns[0].gold, made.turns[1].question, made.turns[1].gold, made.turns[2].question]
    subject = ScriptedSubject(lambda messages: "wrong")
    play(subject, made, "multi-turn", {}, own_answers=True)
    assert [m["content"] for m in subject.asked[2] if m["role"] == "assistant"] == ["wrong", "wrong"]
    subject = ScriptedSubject(lambda messages: "wrong")
    play(subject, made, "multi-request", {})
    assert [[m["content"] for m in messages] for messages in subject.asked] == [
        [made.opening(turn.question)] for turn in made.turns
    ]


def test_a_context_too_long_loses_its_middle() -> None:
    made = make("scbench_kv", 2000, 2, count)
    assert fitted(made, tokenizer(), 10_000) is made
    cut = fitted(made, tokenizer(), 1000)
    n = len(cut.context) // 2 - 8
    assert made.context.startswith(cut.context[:n]) and made.context.endswith(cut.context[-n:])
    assert 600 < count(cut.context) < 1000
    with pytest.raises(ConfigError, match="questions alone take"):
        fitted(made, tokenizer(), 150)


def test_compression_shortens_the_context_before_any_question() -> None:
    made = make("scbench_qa_eng", 800, 2, count)
    short = compressed(
        replace(made, context=made.context + "<|endoftext|>"), compressor("auto", None, 0.5, tokenizer())
    )
    assert 0.3 < count(short.context) / count(made.context) <= 0.5 and short.turns == made.turns
    with pytest.raises(ConfigError, match="compress-rate"):
        compressor("auto", None, 0.0, tokenizer())


def test_engine_options_have_the_types_of_the_config() -> None:
    assert engine_values("prefix_caching", "on,off") == [True, False]
    assert engine_values("draft_len", "0,3") == [0, 3] and engine_values("state_dtype", "bfloat16") == ["bfloat16"]
    for name, text in (("model", "x"), ("no_such", "1"), ("draft_len", "many"), ("prefix_caching", "maybe")):
        with pytest.raises(ConfigError, match=name):
            engine_values(name, text)
    assert list(variants({"a": [1, 2], "b": [3]})) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    assert list(variants({})) == [{}]


# ---- subjects --------------------------------------------------------------------------------------------------------


def test_the_engine_gives_the_same_answers_with_and_without_its_cache_and_says_what_it_kept() -> None:
    made = make("scbench_kv", 400, 3, count, seed=1)
    found = {}
    for cached in (True, False):
        config = EngineConfig(model=str(TINY), device="cpu", max_num_seqs=1, prefix_caching=cached)
        subject = EngineSubject(Engine(config), tokenizer(), "tiny")
        found[cached] = [play(subject, made, mode, {}) for mode in MODES]
    texts = {cached: [a.reply.text for p in played for a in p.answers] for cached, played in found.items()}
    assert texts[True] == texts[False] and all(texts[True])
    on, off = found[True][0], found[False][0]
    assert [a.reply.cached_tokens for a in off.answers] == [0, 0, 0] and off.held == 0
    assert on.answers[1].reply.cached_tokens > 400 and on.held is not None and on.held > 400 * 1000
    first, later = on.answers[0].reply, on.answers[2].reply
    assert later.ttft_s < first.ttft_s and first.ttft_s <= first.total_s and first.prompt_tokens > 400


def test_a_server_is_asked_by_its_url_and_says_tokens_and_cache() -> None:
    with running(app_of(saying("It is 42.", max_model_len=4096))) as url:
        subject = UrlSubject(url + "/v1/")
        assert subject.name == "tiny" and subject.max_context == 4096
        reply = subject.ask([{"role": "user", "content": "What is it?"}], 20)
        assert reply.text == "It is 42." and reply.prompt_tokens > 4 and reply.cached_tokens == 0
        assert reply.tokens == len(tokenizer().encode("It is 42.")) and 0 < reply.ttft_s <= reply.total_s
        assert subject.held_bytes() is None  # the fake has no memory plan
    with pytest.raises(ConfigError, match="is a server running there"):
        UrlSubject("http://127.0.0.1:9")


def test_a_gauge_is_read_with_and_without_labels() -> None:
    text = '# TYPE a gauge\na{model="x"} 12.0\nab 3\nonebox:b 4e1\n'
    assert (metric(text, "a"), metric(text, "onebox:b"), metric(text, "c")) == (12.0, 40.0, None)


def test_the_command_runs_a_server_and_writes_lines_and_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, answers = tmp_path / "scbench.jsonl", tmp_path / "answers.jsonl"
    argv = ["--tasks", "kv,scbench_vt", "--modes", "multi-turn", "--length", "300", "--turns", "2", "--sessions", "1"]
    with running(app_of(saying("It is 42."))) as url:
        main(["--url", url, *argv, "--compress", "none,auto", "--out", str(out), "--answers", str(answers)])
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [(r["task"], r["options"]) for r in lines] == [
        ("scbench_kv", {"compress": "none"}),
        ("scbench_vt", {"compress": "none"}),
        ("scbench_kv", {"compress": "auto"}),
        ("scbench_vt", {"compress": "auto"}),
    ]
    assert all(r["same_answers"] and r["score"] == 0 and r["by_turn"] == [0, 0] for r in lines)
    assert len(answers.read_text("utf-8").splitlines()) == 8
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split()[:3] == ["task", "mode", "with"] and len({len(line) for line in shown}) == 1


@pytest.mark.parametrize(
    ("argv", "says", "code"),
    [
        (["--tasks", "books"], "task 'books' is not known. Known: scbench_kv", 1),
        (["--modes", "one-turn"], "mode 'one-turn' is not known", 1),
        (["--url", "http://127.0.0.1:9", "--prefix-cache", "on"], "the server at --url has its own", 1),
        (["--url", "http://127.0.0.1:9", "--sparse-from", "0"], "the server at --url has its own", 1),
        (["--sparse-from", "0"], "--sparse-from goes with --prefill-attention", 1),
        (["--prefill-attention", "spare"], "prefill_attention must be one of", 1),
        (["--prefill-attention", "dense,minference", "--sparse-table", "nowhere"], "nowhere", 1),
        (["--kv-cache-dtype", "auto,tq9"], "kv_cache_dtype", 1),
        (["--engine", "draft_len"], "must be FIELD=VALUE", 1),
        (["--compress", "llmlingua2"], "needs --model", 1),
        (["--length", "0"], "--length: must be at least 1", 2),
        (["--sessions", "-1"], "--sessions: must be at least 1", 2),
        (["--max-context", "0"], "--max-context: must be at least 1", 2),
        (["--data", "./nowhere"], "no such folder", 1),
        (["/no/such/model"], "tokenizer.json: not found", 1),
    ],
)
def test_mistakes_are_one_line(argv: list[str], says: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(["bench", "scbench", *argv])
    assert e.value.code == code
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


def test_columns_are_aligned() -> None:
    assert aligned([["a", "bb"], ["ccc", "d"]]) == ["a    bb", "ccc   d"]
