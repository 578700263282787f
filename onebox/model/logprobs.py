"""Prompt log-probabilities without an engine: token ids -> how likely each is after those before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onebox.model.qwen3_5 import Qwen35
from onebox.model.sequence import Sequences

_BATCH_TOKENS = 2048


def prompt_logprobs(model: Qwen35, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """For each sequence the natural-log probability of every id but the first, in batches of like length."""
    found: list[list[float]] = [[] for _ in sequences]
    order = sorted((i for i in range(len(sequences)) if len(sequences[i]) > 1), key=lambda i: len(sequences[i]))
    at = 0
    while at < len(order):
        end = at + 1
        while end < len(order) and len(sequences[order[end]]) * (end - at + 1) <= _BATCH_TOKENS:
            end += 1
        batch = order[at:end]
        longest = len(sequences[batch[-1]])
        rows = [[*sequences[i], *[0] * (longest - len(sequences[i]))] for i in batch]  # what follows changes nothing
        tokens = torch.tensor(rows, device=model.device)
        with torch.inference_mode():
            hidden = Sequences(model, len(batch), longest).forward(tokens)
            for row, i in enumerate(batch):
                n = len(sequences[i])
                logits = model.logits(hidden[row, : n - 1]).float()
                target = tokens[row, 1:n, None]
                nats = logits.gather(-1, target)[:, 0] - torch.logsumexp(logits, -1)
                found[i] = nats.tolist()
        at = end
    return found
