"""LLMLingua-2 (arXiv 2403.12968): the probability that a token is kept, by any token classifier of transformers.

Chunks end at sentences and are batched by length; a short text costs its own length. Scores of all chunks are on one
scale, so that one threshold serves the whole prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from onebox.prompt.causal import open_pretrained
from onebox.prompt.scoring import TokenScores, readable

_ENDS = frozenset(".!?。！？…؟।\n")


class ClassifierScorer:
    """`label` is found in the config (`keep`, `preserve`, otherwise label 1), never in the model's name.

    `chunk` tokens are read at once, at most as many as the model has positions for. Safe to use from several threads.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, name: str = "classifier", batch_tokens: int = 4096, chunk: int = 512
    ) -> None:
        self.model, self.tokenizer, self.name, self.batch_tokens = model, tokenizer, name, batch_tokens
        labels = {str(label).lower(): int(index) for index, label in model.config.id2label.items()}
        self.label = next((labels[name] for name in ("keep", "preserve") if name in labels), 1)
        # RoBERTa's kin count positions from pad + 1, so two of them are not for tokens
        self.window = min(int(getattr(model.config, "max_position_embeddings", 512)), chunk + 2) - 4
        self.head = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
        self.tail = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
        self._lock = threading.Lock()  # a fast tokenizer may not be borrowed twice at a time

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> ClassifierScorer:
        """A model by id or folder; further options are transformers'."""
        from transformers import AutoModelForTokenClassification, AutoTokenizer

        model = open_pretrained(AutoModelForTokenClassification, path, **options).eval()
        own = {key: options[key] for key in ("revision",) if key in options}
        return cls(model, open_pretrained(AutoTokenizer, path, **own), name=str(path))

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]:
        chunks: list[tuple[int, int, list[int]]] = []
        spans, found = [], []
        for index, text in enumerate(texts):
            with self._lock:
                encoded = self.tokenizer(
                    readable(text),
                    add_special_tokens=False,
                    return_offsets_mapping=True,
                    split_special_tokens=True,
                    verbose=False,
                )
            ids = list(encoded["input_ids"])
            offsets = [(int(a), int(b)) for a, b in encoded["offset_mapping"]]
            spans.append(offsets)
            found.append(np.zeros(len(ids)))
            chunks += [(index, begin, ids[begin:end]) for begin, end in self._cuts(text, offsets)]
        chunks.sort(key=lambda chunk: len(chunk[2]))
        at = 0
        while at < len(chunks):
            batch = [chunks[at]]
            at += 1
            while at < len(chunks) and (len(chunks[at][2]) + 2) * (len(batch) + 1) <= self.batch_tokens:
                batch.append(chunks[at])
                at += 1
            for (index, begin, ids), keep in zip(batch, self._keep([ids for _, _, ids in batch]), strict=True):
                found[index][begin : begin + len(ids)] = keep
        return [TokenScores.of(offsets, scores) for offsets, scores in zip(spans, found, strict=True)]

    def _cuts(self, text: str, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Token ranges of at most a window; each but the last ends at a sentence where one ends in its second half."""
        cuts, begin = [], 0
        while begin < len(offsets):
            end = min(begin + self.window, len(offsets))
            if end < len(offsets):
                ends = (
                    at
                    for at in range(end, begin + self.window // 2, -1)
                    if not _ENDS.isdisjoint(text[offsets[at - 1][0] : offsets[at][0]])
                )
                end = next(ends, end)
            cuts.append((begin, end))
            begin = end
        return cuts

    def _keep(self, rows: list[list[int]]) -> list[np.ndarray]:
        import torch

        head = [] if self.head is None else [self.head]
        tail = [] if self.tail is None else [self.tail]
        longest = max(len(row) for row in rows) + len(head) + len(tail)
        pad = self.tokenizer.pad_token_id or 0
        padded = [[*head, *row, *tail] + [pad] * (longest - len(head) - len(row) - len(tail)) for row in rows]
        held = [len(head) + len(row) + len(tail) for row in rows]
        ids = torch.tensor(padded, device=self.model.device)
        mask = torch.tensor([[1] * n + [0] * (longest - n) for n in held], device=ids.device)
        with torch.inference_mode():
            logits = self.model(input_ids=ids, attention_mask=mask).logits
        keep = logits.float().softmax(-1)[..., self.label].cpu().numpy()
        return [keep[row, len(head) : len(head) + len(ids_)] for row, ids_ in enumerate(rows)]
