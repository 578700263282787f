"""Answer recall after compression on NaturalQuestions documents: does a gold answer string survive?

Takes the lost-in-the-middle oracle file (one question, its answers and gold passage a line); builds N-document contexts
with distractors drawn from other questions and the gold at the first, middle or last place; prints JSON lines.

    python tools/compare_llmlingua/recall.py oracle_dev.jsonl.gz --questions 300
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections.abc import Callable

from onebox.prompt import Compressor
from onebox.prompt.budget import counter_of

count = counter_of(None)


def contexts(path: str, n: int, documents: int) -> list[tuple[str, list[str], list[str]]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rng = random.Random(0)
    found = []
    for index, row in enumerate(rng.sample(rows, n)):
        others = [r for r in rng.sample(rows, documents + 4) if r["question"] != row["question"]][: documents - 1]
        texts = [f"{r['ctxs'][0]['title']}\n{r['ctxs'][0]['text']}" for r in others]
        place = (0, documents // 2, documents - 1)[index % 3]
        texts.insert(place, f"{row['ctxs'][0]['title']}\n{row['ctxs'][0]['text']}")
        found.append((row["question"], row["answers"], texts))
    return found


def ours(question: str | None) -> Callable[[list[str], int], str]:
    compressor = Compressor()
    return lambda texts, target: (
        compressor.compress(documents=texts, question=question, target_tokens=target, append_question=False).text
    )


def truncation(texts: list[str], target: int) -> str:
    return cut("\n\n".join(texts).split(" "), target)


def random_dropping(texts: list[str], target: int) -> str:
    words = "\n\n".join(texts).split(" ")
    order = list(range(len(words)))
    random.Random(len(words)).shuffle(order)
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        text = " ".join(words[i] for i in sorted(order[:middle]))
        low, high = (middle, high) if count(text) <= target else (low, middle - 1)
    return " ".join(words[i] for i in sorted(order[:low]))


def cut(words: list[str], target: int) -> str:
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(" ".join(words[:middle])) <= target else (low, middle - 1)
    return " ".join(words[:low])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--questions", type=int, default=300)
    options = parser.parse_args()
    for documents in (10, 20):
        cases = contexts(options.path, options.questions, documents)
        for name in ("auto, question", "auto, no question", "random", "truncation"):
            for ratio in (2, 4, 8):
                hits, errors, started = 0, [], time.perf_counter()
                for question, answers, texts in cases:
                    target = count("\n\n".join(texts)) // ratio
                    method = {
                        "auto, question": ours(question),
                        "auto, no question": ours(None),
                        "random": random_dropping,
                        "truncation": truncation,
                    }[name]
                    text = method(texts, target)
                    flat = " ".join(text.lower().split())
                    hits += any(answer.lower() in flat for answer in answers)
                    errors.append(count(text) / target - 1)
                record = {
                    "bench": "prompt_recall",
                    "data": "nq_open",
                    "documents": documents,
                    "method": name,
                    "ratio": ratio,
                    "recall": round(hits / len(cases), 4),
                    "n": len(cases),
                    "budget_error_min": round(min(errors), 4),
                    "budget_error_max": round(max(errors), 4),
                    "seconds_a_prompt": round((time.perf_counter() - started) / len(cases), 4),
                }
                print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
