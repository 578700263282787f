"""What is compressed, and what should survive. Takes the data files; gives cases: documents, a question, gold units.

nq10, nq20   NaturalQuestions: the gold passage first, in the middle or last among passages of other questions
qmsum        turns of a QMSum meeting around the lines that answer a query, 2,000 tokens; qmsum4000: 4,000
gsm8k        eight solved problems before a ninth
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

Count = Callable[[str], int]
_WORD = regex.compile(r"[\p{L}\p{N}]+(?:['’.,][\p{L}\p{N}]+)*")


@dataclass(frozen=True)
class Case:
    """`gold`: groups of strings; a group survives with any one of them. `units`: passages that would survive whole."""

    name: str
    documents: list[str]
    question: str
    gold: list[list[str]]
    units: list[str]

    @property
    def text(self) -> str:
        return "\n\n".join(self.documents)


def flat(text: str) -> str:
    return " ".join(text.lower().split())


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def recall(case: Case, output: str) -> float:
    """Share of gold groups of which a string stands in the output as whole words, case and white space aside."""
    there = flat(output)

    def stands(answer: str) -> bool:
        return bool(regex.search(rf"(?<![\p{{L}}\p{{N}}]){regex.escape(flat(answer))}(?![\p{{L}}\p{{N}}])", there))

    return sum(any(stands(answer) for answer in group) for group in case.gold) / len(case.gold)


def whole(case: Case, output: str) -> float:
    """Share of gold units that stand in the output word for word."""
    there = flat(output)
    return sum(flat(unit) in there for unit in case.units) / len(case.units)


def broken(case: Case, output: str) -> float:
    """Share of the output's words and numbers that the input does not have: pieces of words, damaged numbers."""
    known, found = set(words(case.text)), words(output)
    return sum(word not in known for word in found) / max(len(found), 1)


def natural_questions(path: Path, n: int, documents: int) -> list[Case]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    cases = []
    for index, row in enumerate(rows[at] for at in order[:n]):  # more cases begin with the same ones
        drawn = random.Random(index).sample(rows, documents + 4)
        others = [other for other in drawn if other["question"] != row["question"]][: documents - 1]
        texts = [_passage(other) for other in others]
        place = (0, documents // 2, documents - 1)[index % 3]
        texts.insert(place, _passage(row))
        cases.append(Case(f"nq{documents}/{index}", texts, row["question"], [row["answers"]], [_passage(row)]))
    return cases


def _passage(row: dict[str, Any]) -> str:
    return f"{row['ctxs'][0]['title']}\n{row['ctxs'][0]['text']}"


def meetings(path: Path, n: int, count: Count, tokens: int) -> list[Case]:
    """Windows of about `tokens` (0: whole meetings). Queries whose evidence is at most an eighth of that, so that all
    of it could survive at 8x; gold: the words that stand in the evidence and nowhere else in the window."""
    rng = random.Random(0)
    found = []
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    for index, row in enumerate(rows):
        turns = [f"{turn['speaker']}: {turn['content']}" for turn in row["meeting_transcripts"]]
        for query in row["specific_query_list"]:
            lines = sorted(
                {
                    at
                    for first, last in query["relevant_text_span"]
                    for at in range(int(first), min(int(last) + 1, len(turns)))
                }
            )
            if lines:
                found.append((index, turns, query["query"], lines))
    rng.shuffle(found)
    cases: list[Case] = []
    for index, turns, query, lines in found:
        if len(cases) == n:
            break
        sizes = [count(turn) for turn in turns]
        first, past = lines[0], lines[-1] + 1
        bound = tokens or sum(sizes)
        if sum(sizes[at] for at in lines) > bound / 8 or sum(sizes[first:past]) > bound:
            continue
        room = bound - sum(sizes[first:past])
        ahead = rng.randint(0, room)
        while first > 0 and sizes[first - 1] <= ahead:
            first -= 1
            ahead -= sizes[first]
            room -= sizes[first]
        while past < len(turns) and sizes[past] <= room:
            room -= sizes[past]
            past += 1
        window = turns[first:past]
        elsewhere = set(words(" ".join(turns[at] for at in range(first, past) if at not in lines)))
        evidence = [turns[at] for at in lines]
        own = sorted({word for word in words(" ".join(evidence)) if word not in elsewhere and len(word) > 2})
        if len(own) >= 4:
            cases.append(
                Case(
                    f"qmsum{'' if tokens == 2000 else tokens}/{index}/{len(cases)}",
                    window,
                    query,
                    [[word] for word in own],
                    evidence,
                )
            )
    return cases


def problems(path: Path, n: int, shots: int = 8) -> list[Case]:
    """gold: "The answer is N" of each demonstration; units: the demonstrations."""
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rng = random.Random(0)
    cases = []
    for index in range(n):
        *drawn, asked = rng.sample(rows, shots + 1)
        shown, gold = [], []
        for row in drawn:
            steps, _, answer = row["answer"].partition("\n####")
            steps = regex.sub(r"<<.*?>>", "", steps)
            shown.append(
                f"Question: {row['question']}\nLet's think step by step\n{steps}\nThe answer is {answer.strip()}"
            )
            gold.append([f"The answer is {answer.strip()}"])
        cases.append(Case(f"gsm8k/{index}", shown, asked["question"], gold, shown))
    return cases


def load(name: str, data: Path, n: int, count: Count, tokens: int = 2000) -> list[Case]:
    """Cases of one set; `data` holds nq_open/oracle_dev.jsonl.gz, qmsum/val.jsonl and gsm8k/test.jsonl."""
    if name in ("nq10", "nq20"):
        return natural_questions(data / "nq_open" / "oracle_dev.jsonl.gz", n, int(name[2:]))
    if name == "qmsum":
        return meetings(data / "qmsum" / "val.jsonl", n, count, tokens)
    if name == "qmsum4000":
        return meetings(data / "qmsum" / "val.jsonl", n, count, 4000)
    if name == "qmsum_whole":
        return meetings(data / "qmsum" / "val.jsonl", n, count, 0)
    if name == "gsm8k":
        return problems(data / "gsm8k" / "test.jsonl", n)
    raise SystemExit(f"set {name!r}: unknown; use nq10, nq20, qmsum, qmsum4000, qmsum_whole or gsm8k")
