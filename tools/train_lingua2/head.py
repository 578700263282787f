"""Labelled words -> a linear head on an encoder's lower layers: seconds to train, 2 kB, read by `KeepScorer`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from onebox.errors import PromptError
from onebox.prompt.classifier import Encoder, digest
from tools.fitting import auc, fit


def word_states(rows: list[dict[str, Any]], encoder: Encoder) -> list[np.ndarray]:
    """[words, layers x width] of each row: the mean over the tokens of a word."""
    found = []
    for row, (spans, states) in zip(rows, encoder.tokens([" ".join(row["words"]) for row in rows]), strict=True):
        bounds = np.cumsum([len(word) + 1 for word in row["words"]])
        owner = np.searchsorted(bounds, spans[:, 0], side="right").clip(0, len(bounds) - 1)
        total = np.zeros((len(bounds), states.shape[1]), dtype=np.float32)
        np.add.at(total, owner, states)
        found.append(total / np.maximum(np.bincount(owner, minlength=len(bounds)), 1)[:, None])
    return found


def train_head(
    rows: list[dict[str, Any]],
    encoder: Path,
    out: Path,
    *,
    layers: tuple[int, ...] = (2,),
    penalty: float = 1e-3,
    held_out: float = 0.2,
    seed: int = 0,
) -> float:
    """Fits on all sources but the held-out ones, whose AUC it gives, then writes a head. Raises PromptError."""
    sources = sorted({str(row["id"]).split("/")[0] for row in rows})
    if len(sources) < 2 or not any(any(row["labels"]) for row in rows):
        raise PromptError(f"head: {len(rows)} rows of {len(sources)} sources; needs two sources and words to keep")
    random.Random(seed).shuffle(sources)
    outside = set(sources[: max(1, int(len(sources) * held_out))])
    states = word_states(rows, Encoder(encoder, layers=layers))
    away = np.concatenate([np.full(len(row["words"]), str(row["id"]).split("/")[0] in outside) for row in rows])
    x, y = np.concatenate(states), np.concatenate([np.array(row["labels"]) for row in rows])
    weight, bias = fit(x[~away], y[~away], np.ones(int((~away).sum())), penalty)
    about = {"kind": "importance", "layers": ",".join(map(str, layers)), "encoder": digest(encoder)}
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file({"weight": weight, "bias": np.array([bias], dtype=np.float32)}, str(out), about)
    return auc(x[away] @ weight + bias, y[away]) or 0.5
