"""How much of an attack survives in the extracted intention: attacks placed in e-mails, tables and code, the share of
each attack's words that the quotations hold, against as many words from the head, the tail or a random place."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from onebox.prompt.security import SecurityLingua
from tools.train_guard.data import SOURCES, _json, contexts

Extract = Callable[[str, int], str]


def placed(folders: list[Path], size: int, seed: int = 2) -> list[tuple[str, str]]:
    """(text, attack) for each attack of BIPIA's test files, in a context of `size` words."""
    source = next(source for source in SOURCES if source.name == "BIPIA test")
    paths = [next(folder / name for folder in folders if (folder / name).exists()) for name in source.files]
    attacks = [text for path in paths[:2] for rows in _json(path).values() for text in rows]
    carriers = [text for path in paths[2:] for text in contexts(path, size)]
    rng, found = random.Random(seed), []
    for attack in attacks:
        lines = rng.choice(carriers).split("\n")
        cut = rng.randrange(len(lines) + 1)
        found.append(("\n".join([*lines[:cut], attack, *lines[cut:]]), attack))
    return found


def ours(text: str, n: int) -> str:
    return SecurityLingua(max_words=n).extract_intention(text).text


def head(text: str, n: int) -> str:
    return " ".join(text.split()[:n])


def tail(text: str, n: int) -> str:
    return " ".join(text.split()[-n:])


def anywhere(text: str, n: int) -> str:
    words = text.split()
    start = random.Random(len(text)).randrange(max(1, len(words) - n + 1))
    return " ".join(words[start : start + n])


METHODS: dict[str, Extract] = {"sentences": ours, "head": head, "tail": tail, "random place": anywhere}


def recall(cases: list[tuple[str, str]], max_words: int) -> dict[str, tuple[float, float]]:
    """For each method the share of an attack's words in its extract (at most what fits), and of the text that it keeps;
    means. Every other method gets as many words of a text as ours took."""
    sums = dict.fromkeys(METHODS, (0.0, 0.0))
    for text, attack in cases:
        n = len(ours(text, max_words).split())
        for name, extract in METHODS.items():
            found = extract(text, max_words if name == "sentences" else n).split()
            left, hits = list(found), 0
            for word in attack.split():
                if word in left:
                    left.remove(word)
                    hits += 1
            share, kept = sums[name]
            share += min(1.0, hits / max(1, min(max_words, len(attack.split()))))
            sums[name] = (share, kept + len(found) / max(1, len(text.split())))
    return {name: (share / len(cases), kept / len(cases)) for name, (share, kept) in sums.items()}
