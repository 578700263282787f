"""Labelled texts for the guard, from the files that their projects publish. Every set says if it may be trained on.

A row is (text, label): 1 an attempt to take over the model, 0 an ordinary text. Indirect attacks stand inside the
e-mail, table or code they would arrive in.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

Rows = list[tuple[str, int]]


@dataclass(frozen=True)
class Source:
    """`files` are names looked up in the data folder; the set is absent when one is."""

    name: str
    files: tuple[str, ...]
    train: bool
    read: Callable[..., Rows]


def _json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def labelled(path: Path) -> Rows:
    return [(row["text"], int(row["label"])) for row in _lines(path)]


def benign_prompts(path: Path) -> Rows:
    return [(row["prompt"], 0) for row in _json(path)]


def bastion(path: Path) -> Rows:
    return [(row["text"], int(row["label"] == "malicious")) for row in _lines(path)]


def questions(path: Path) -> Rows:
    return [(row["question"], 0) for row in _lines(path)[:400]]


def tasks(path: Path) -> Rows:
    """Instructions alone, and with the input they come with."""
    found = []
    for row in _lines(path):
        given = row["instances"][0]["input"]
        found.append((f"{row['instruction']}\n{given}".strip(), 0))
    return found


def prompts(path: Path) -> Rows:
    return [(" ".join(row["prompt"].split(" ")[:64]), 0) for row in _lines(path)]


def first_turns(path: Path) -> Rows:
    return [(row["turns"][0], 0) for row in _lines(path)]


def jailbreaks(path: Path) -> Rows:
    """The head and the tail of each: where the model is turned, and where it is told what to do."""
    found = []
    for text in _json(path):
        words = text.split()
        found.append((" ".join(words[:60]), 1))
        if len(words) > 120:
            found.append((" ".join(words[-60:]), 1))
    return found


def hijacks(path: Path) -> Rows:
    """Attacks that players wrote against one another's prompts; those that are no words are left out."""
    rows = [row["attack"] for row in _lines(path)]
    rows = [text for text in rows if 5 <= len(text.split()) <= 80 and len(set(text.split())) > len(text.split()) / 2]
    return [(text, 1) for text in dict.fromkeys(rows)][:300]


def written() -> Rows:
    from tools.train_guard.written import attacks, ordinary

    return [(text, 1) for text in attacks(250, 3)] + [(text, 0) for text in ordinary(350, 4)]


def queries(path: Path) -> Rows:
    """What people asked of meetings, and as many pieces of what was said in them."""
    from tools.train_lingua2.windows import read_meetings, turns

    rng, found = random.Random(0), []
    for _, meeting in read_meetings([path]):
        said = turns(meeting)
        asked = [query["query"] for key in ("general_query_list", "specific_query_list") for query in meeting[key]]
        for query in asked[:6]:
            words = " ".join(said[rng.randrange(len(said)) :]).split()
            found += [(query, 0), (" ".join(words[: rng.randint(10, 64)]), 0)]
    return found


def passages(path: Path) -> Rows:
    import gzip

    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][:300]
    return [(row["question"], 0) for row in rows] + [(row["ctxs"][0]["text"], 0) for row in rows]


def contexts(path: Path, size: int) -> list[str]:
    found = []
    for row in _lines(path):
        parts = row["context"] if isinstance(row["context"], list) else [row["context"]]
        for key in ("error", "code"):
            parts = [*parts, *row.get(key, [])]
        words = "\n".join(parts).split(" ")
        found.append(" ".join(words[:size]))
    return found


def inside(*files: Path, size: int = 90, seed: int = 1) -> Rows:
    """Attacks of the first two files at the start, middle or end of contexts of the others, and the contexts alone."""
    texts = [text for rows in _json(files[0]).values() for text in rows]
    code = [text for rows in _json(files[1]).values() for text in rows]
    rng = random.Random(seed)
    carriers = [
        text for path in files[2:] for text in rng.sample(contexts(path, size), min(50, len(contexts(path, size))))
    ]
    found: Rows = [(text, 0) for text in carriers]
    for attack in texts + code:
        carrier = rng.choice(carriers)
        words = carrier.split(" ")
        cut = (0, len(words) // 2, len(words))[rng.randrange(3)]
        found.append((" ".join([*words[:cut], attack, *words[cut:]]).strip(), 1))
    return found


SOURCES = (
    Source("deepset train", ("deepset_train.jsonl",), True, labelled),
    Source(
        "BIPIA train",
        ("bipia_text_attack_train.json", "bipia_code_attack_train.json", "bipia_email_train.jsonl",
         "bipia_table_train.jsonl", "bipia_code_train.jsonl"),
        True,
        partial(inside, size=40),
    ),
    Source("QMSum train", ("qmsum_train",), True, queries),
    Source("self-instruct seeds", ("seed_tasks.jsonl",), True, tasks),
    Source("self-instruct users", ("user_oriented_instructions.jsonl",), True, tasks),
    Source("P3 prompts", ("t0_prompts.jsonl",), True, prompts),
    Source("GSM8K train", ("gsm8k_train.jsonl",), True, questions),
    Source("in-the-wild jailbreaks", ("inthewild_jailbreak_llms.json",), True, jailbreaks),
    Source("written", (), True, written),
    Source("deepset test", ("deepset_test.jsonl",), False, labelled),
    Source(
        "BIPIA test",
        ("bipia_text_attack_test.json", "bipia_code_attack_test.json", "bipia_email_test.jsonl",
         "bipia_table_test.jsonl", "bipia_code_test.jsonl"),
        False,
        inside,
    ),
    Source("bastioncorpus", ("injections.jsonl",), False, bastion),
    Source("NotInject one", ("NotInject_one.json",), False, benign_prompts),
    Source("NotInject two", ("NotInject_two.json",), False, benign_prompts),
    Source("NotInject three", ("NotInject_three.json",), False, benign_prompts),
    Source("Tensor Trust", ("hijacking_robustness_dataset.jsonl",), False, hijacks),
    Source("MT-Bench", ("mt_bench.jsonl",), False, first_turns),
    Source("WildGuard benign", ("wildguard.json",), False, benign_prompts),
    Source("GSM8K test", ("test.jsonl",), False, questions),
    Source("NaturalQuestions", ("oracle_dev.jsonl.gz",), False, passages),
    Source("QMSum validation", ("val.jsonl",), False, queries),
)  # fmt: skip


def load(folders: list[Path], *, train: bool) -> Iterator[tuple[str, Rows]]:
    """(name, rows) of each set for training or for testing whose files lie in one of the folders."""
    for source in SOURCES:
        if source.train != train:
            continue
        paths = [next((folder / name for folder in folders if (folder / name).exists()), None) for name in source.files]
        if all(path is not None for path in paths):
            yield source.name, source.read(*paths)
