"""Labelled words -> a token classifier that `ClassifierScorer` loads: an encoder with two labels, drop and keep."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from onebox.errors import PromptError
from tools.fitting import auc

_IGNORED = -100


def encode(tokenizer: Any, row: dict[str, Any], max_tokens: int) -> tuple[list[int], list[int]]:
    """Token ids, and the word each token belongs to (-1: special tokens). What does not fit is cut."""
    text = " ".join(row["words"])
    bounds = np.cumsum([len(word) + 1 for word in row["words"]])
    found = tokenizer(text, return_offsets_mapping=True, truncation=True, max_length=max_tokens)
    words = [-1 if a == b else int(np.searchsorted(bounds, a, side="right")) for a, b in found["offset_mapping"]]
    return list(found["input_ids"]), words


def batches(
    rows: list[dict[str, Any]], tokenizer: Any, size: int, max_tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[list[int]]]]:
    """ids, mask, labels [B, T] and the word of each token; rows of like length together."""
    encoded = sorted(((*encode(tokenizer, row, max_tokens), row) for row in rows), key=lambda item: len(item[0]))
    out = []
    for at in range(0, len(encoded), size):
        part = encoded[at : at + size]
        longest = len(part[-1][0])
        ids = torch.tensor([ids + [tokenizer.pad_token_id or 0] * (longest - len(ids)) for ids, _, _ in part])
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _, _ in part])
        labels = torch.tensor(
            [
                [row["labels"][w] if w >= 0 else _IGNORED for w in words] + [_IGNORED] * (longest - len(words))
                for _, words, row in part
            ]
        )
        out.append((ids, mask, labels, [words for _, words, _ in part]))
    return out


def load(encoder: str | Path, *, freeze: int = 0) -> tuple[Any, Any]:
    """The encoder with a fresh head; its embeddings and first `freeze` layers do not learn."""
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    labels = {0: "drop", 1: "keep"}
    model = AutoModelForTokenClassification.from_pretrained(
        encoder,
        num_labels=2,
        id2label=labels,
        label2id={name: at for at, name in labels.items()},
        trust_remote_code=False,
    )
    if freeze:
        for parameter in model.base_model.embeddings.parameters():
            parameter.requires_grad_(False)
        for layer in model.base_model.encoder.layer[:freeze]:
            for parameter in layer.parameters():
                parameter.requires_grad_(False)
    return model, tokenizer


def train(
    rows: list[dict[str, Any]],
    encoder: str | Path,
    out: Path,
    *,
    epochs: int = 4,
    rate: float = 1e-4,
    batch: int = 8,
    freeze: int = 0,
    held_out: float = 0.2,
    max_tokens: int = 320,
    seed: int = 0,
) -> list[dict[str, float]]:
    """Trains, keeps the epoch with the best AUC over words of held-out rows in `out`, gives a line an epoch. The same
    seed gives the same model; rows of one source (the id before `/`) are never on both sides."""
    sources = sorted({str(row["id"]).split("/")[0] for row in rows})
    if len(sources) < 2 or not any(any(row["labels"]) for row in rows):
        raise PromptError(f"train: {len(rows)} rows of {len(sources)} sources; needs two sources and words to keep")
    random.Random(seed).shuffle(sources)
    outside = set(sources[: max(1, int(len(sources) * held_out))])
    learn = [row for row in rows if str(row["id"]).split("/")[0] not in outside]
    check = [row for row in rows if str(row["id"]).split("/")[0] in outside]
    found, best = [], -1.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, tokenizer = load(encoder, freeze=freeze)
        model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
        steps = batches(learn, tokenizer, batch, max_tokens)
        schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.1, total_iters=epochs * len(steps))
        for epoch in range(epochs):
            random.Random(seed + epoch).shuffle(steps)
            model.train()
            total = 0.0
            for ids, mask, labels, _ in steps:
                logits = model(input_ids=ids, attention_mask=mask).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
                total += float(loss.detach())
            line = {"epoch": epoch, "loss": total / len(steps), **score(model, tokenizer, check, batch, max_tokens)}
            found.append(line)
            if line["auc"] > best:
                best = line["auc"]
                model.save_pretrained(out)
                tokenizer.save_pretrained(out)
    return found


def score(model: Any, tokenizer: Any, rows: list[dict[str, Any]], batch: int, max_tokens: int) -> dict[str, float]:
    """AUC and accuracy over words; a word's probability is the mean of its tokens'."""
    model.eval()
    values, truths = [], []
    for ids, mask, labels, words in batches(rows, tokenizer, batch, max_tokens):
        with torch.inference_mode():
            keep = model(input_ids=ids, attention_mask=mask).logits.softmax(-1)[..., 1]
        for row, owner in enumerate(words):
            at = np.array(owner)
            for word in range(max(owner) + 1):
                inside = np.flatnonzero(at == word)
                if len(inside):
                    values.append(float(keep[row, inside].mean()))
                    truths.append(int(labels[row, inside[0]]))
    scores, truth = np.array(values), np.array(truths)
    area = auc(scores, truth)
    return {"auc": 0.5 if area is None else area, "accuracy": float(((scores >= 0.5) == truth).mean())}
