"""The five prompts by which the published stack was timed, with answers checked where they can be.

One request at a time, thinking on, greedy; tokens a second of whole answers, prompt included, as published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

EMPLOYEES = 10
FACTORS = 7823, 4519


@dataclass(frozen=True)
class Prompt:
    """A question, the most tokens of its answer, and what a right answer passes (None: nobody can say)."""

    name: str
    text: str
    max_tokens: int
    right: Callable[[str], bool] | None = None


def product_is_right(answer: str) -> bool:
    """Whether the product stands in the answer, with or without marks between its thousands."""
    digits = re.sub(r"(?<=\d)[,. _'](?=\d{3})", "", answer)
    return str(FACTORS[0] * FACTORS[1]) in re.findall(r"\d+", digits)


def json_is_right(answer: str) -> bool:
    """Whether the answer holds a JSON list of EMPLOYEES objects (bare, fenced, or in an object) with the same keys."""
    decoder = json.JSONDecoder()
    for found in re.finditer(r"[\[{]", answer):
        try:
            value, _ = decoder.raw_decode(answer, found.start())
        except ValueError:
            continue
        lists = [value] if isinstance(value, list) else list(value.values())
        for rows in lists:
            if isinstance(rows, list) and len(rows) == EMPLOYEES and all(isinstance(r, dict) and r for r in rows):
                return len({frozenset(r) for r in rows}) == 1
    return False


FIVE_PROMPTS = (
    Prompt("question", "What are the main differences between TCP and UDP, and when is each the better choice?", 256),
    Prompt(
        "code", "Write a Python function that searches a sorted list by bisection, with a docstring and tests.", 512
    ),
    Prompt(
        "json",
        f"Give a JSON array of {EMPLOYEES} employees, each with name, age, department, salary and e-mail. Only JSON.",
        1024,
        json_is_right,
    ),
    Prompt("product", f"What is {FACTORS[0]} * {FACTORS[1]}? Only the number.", 64, product_is_right),
    Prompt("long code", "Write a complete red-black tree in Python with insertion, deletion and search.", 2048),
)
