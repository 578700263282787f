"""What survives compression without a question, at equal budgets: gold answers in documents, and the words people used
when they answered about meetings. Every method gets the same target in tokens."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onebox.prompt import Bm25Ranker, Compressor, Scorer, TokenScores
from onebox.prompt.budget import counter_of
from onebox.prompt.security import sentences
from tools.train_lingua2.windows import stem, windows

Method = Callable[[str, int], str]
count = counter_of(None)


@dataclass(frozen=True)
class Case:
    """A text, and `found`: the share of what matters in it that a shorter text still has."""

    text: str
    found: Callable[[str], float]


def documents(path: Path, n: int, *, each: int = 5, seed: int = 0) -> Iterator[Case]:
    """Contexts of `each` passages of NaturalQuestions; one holds the gold answer, which survives or does not."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rng = random.Random(seed)
    for row in rng.sample(rows, n):
        texts = [other["ctxs"][0]["text"] for other in rng.sample(rows, each) if other is not row][: each - 1]
        texts.insert(rng.randrange(each), row["ctxs"][0]["text"])
        answers = [answer.lower() for answer in row["answers"]]

        def found(out: str, answers: list[str] = answers) -> float:
            flat = " ".join(out.lower().split())
            return float(any(answer in flat for answer in answers))

        yield Case("\n\n".join(texts), found)


def meetings(paths: list[Path], n: int, *, size: int = 400, seed: int = 7) -> Iterator[Case]:
    """Windows of meetings; what matters is the words that people's answers share with the evidence."""
    rows = [row for row in windows(paths, size=size, each=3, seed=seed) if sum(row["answer"]) >= 10]
    for row in random.Random(seed).sample(rows, min(n, len(rows))):
        wanted = {stem(word) for word, used in zip(row["words"], row["answer"], strict=True) if used}

        def found(out: str, wanted: set[str] = wanted) -> float:
            return len(wanted & {stem(word) for word in out.split()}) / len(wanted)

        yield Case(" ".join(row["words"]), found)


def fit(units: list[str], order: list[int], target: int, separator: str) -> str:
    """The longest prefix of `order` whose units, back in their places, fit into the target."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        text = separator.join(units[at] for at in sorted(order[:middle]))
        low, high = (middle, high) if count(text) <= target else (low, middle - 1)
    return separator.join(units[at] for at in sorted(order[:low]))


def truncation(text: str, target: int) -> str:
    words = text.split(" ")
    return fit(words, list(range(len(words))), target, " ")


def random_words(text: str, target: int) -> str:
    words = text.split(" ")
    order = list(range(len(words)))
    random.Random(len(words)).shuffle(order)
    return fit(words, order, target, " ")


def bm25_sentences(text: str, target: int) -> str:
    """Sentences by their BM25 for the whole text: the most typical ones first."""
    units = [text[start:end] for start, end in sentences(text)]
    scores = Bm25Ranker(around=0).rank(text, units) if len(units) > 1 else [0.0] * len(units)
    return fit(units, sorted(range(len(units)), key=lambda at: (-scores[at], at)), target, " ")


def by_scorer(scorer: Scorer | None) -> Method:
    """Token pruning of a document by a scorer; None: the word statistics that `auto` uses."""
    compressor = Compressor("llmlingua2", scorer=_Remembered(scorer)) if scorer else Compressor()
    return lambda text, target: compressor.compress(documents=[text], target_tokens=target).text


class _Remembered:
    """A scorer asked once for each text: the ratios differ in the budget alone. Its time is in the first of them."""

    def __init__(self, scorer: Scorer):
        self.scorer, self.name = scorer, scorer.name
        self.seen: dict[tuple[str, str | None], TokenScores] = {}

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]:
        keys = list(zip(texts, prefixes or [None] * len(texts), strict=True))
        for text, prefix in keys:
            if (text, prefix) not in self.seen:
                found = self.scorer.score([text], prefixes=None if prefix is None else [prefix])
                self.seen[text, prefix] = found[0]
        return [self.seen[key] for key in keys]


def compare(cases: list[Case], methods: dict[str, Method], ratios: tuple[int, ...]) -> Iterator[dict[str, object]]:
    for name, method in methods.items():
        for ratio in ratios:
            total, over, started = 0.0, 0, time.perf_counter()
            for case in cases:
                target = count(case.text) // ratio
                out = method(case.text, target)
                total += case.found(out)
                over += count(out) > target
            seconds = (time.perf_counter() - started) / len(cases)
            yield {
                "method": name,
                "ratio": ratio,
                "n": len(cases),
                "recall": round(total / len(cases), 4),
                "over_budget": over,
                "seconds_a_prompt": round(seconds, 4),
            }
