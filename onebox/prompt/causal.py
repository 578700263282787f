"""Surprisal under a causal language model of transformers: in batches of like length, or along a chain that keeps its
keys and values. Special tokens in a text are text."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from onebox.errors import PromptError
from onebox.prompt.scoring import TokenScores, readable
from onebox.prompt.surprisal import Chain, PlainChain, SurprisalScorer, Window

_LOGITS = 64_000_000  # logits alive at once, 256 MB in fp32, however large the vocabulary
_PADDED = 1.15  # a batch's tokens over the real ones among them, at most


def open_pretrained(auto: Any, path: str, **options: Any) -> Any:
    """A transformers model or tokenizer by id or folder. Never runs code that comes with it."""
    try:
        return auto.from_pretrained(path, trust_remote_code=False, **options)
    except (OSError, ValueError, ImportError) as e:
        reason = str(e).strip().splitlines() or [type(e).__name__]
        raise PromptError(f"model {path!r}: cannot be opened ({reason[0]}); give a folder or an id") from e


class CausalScorer(SurprisalScorer):
    """`window` tokens are read at once. Safe to use from several threads."""

    def __init__(
        self, model: Any, tokenizer: Any, *, name: str = "causal", window: int = 512, batch_tokens: int = 2048
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        limit = getattr(model.config, "max_position_embeddings", None) or window
        self.window = min(window, int(limit))
        vocabulary = getattr(model.config, "vocab_size", None) or len(tokenizer)
        self.batch_tokens = max(self.window, min(batch_tokens, _LOGITS // int(vocabulary)))
        ends = [tokenizer.bos_token_id, tokenizer.eos_token_id]
        # what GPT-2's heirs were trained to start a text with, whatever their chat format calls its beginning
        ends.insert(0, tokenizer.get_vocab().get("<|endoftext|>"))
        self.first = next((int(i) for i in ends if i is not None), 0)
        self._lock = threading.Lock()  # a fast tokenizer may not be borrowed twice at a time

    @classmethod
    def from_pretrained(cls, path: str, *, window: int = 512, **options: Any) -> CausalScorer:
        """A model by id, folder or GGUF file; `dtype=`, `quantization_config=` and the like are passed on."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if path.endswith(".gguf"):
            folder, _, file = path.rpartition("/")
            path, options = folder or ".", {**options, "gguf_file": file}
        model = open_pretrained(AutoModelForCausalLM, path, **options).eval()
        own = {key: options[key] for key in ("gguf_file", "revision") if key in options}
        return cls(model, open_pretrained(AutoTokenizer, path, **own), name=str(path), window=window)

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        with self._lock:
            encoded = self.tokenizer(
                readable(text),
                add_special_tokens=False,
                return_offsets_mapping=True,
                split_special_tokens=True,
                verbose=False,
            )
        return list(encoded["input_ids"]), [(int(a), int(b)) for a, b in encoded["offset_mapping"]]

    def losses(self, windows: Sequence[Window]) -> list[np.ndarray]:
        found: list[np.ndarray] = [np.zeros(0)] * len(windows)
        order = sorted(range(len(windows)), key=lambda at: len(windows[at].ids))
        position = 0
        while position < len(order):
            batch, real = [order[position]], len(windows[order[position]].ids)
            position += 1
            while position < len(order):
                length = len(windows[order[position]].ids)
                padded = length * (len(batch) + 1)
                if padded > self.batch_tokens or padded > (real + length) * _PADDED:
                    break
                batch.append(order[position])
                real += length
                position += 1
            for at, nats in zip(batch, self._batch([windows[at] for at in batch]), strict=True):
                found[at] = nats
        return found

    def _batch(self, windows: Sequence[Window]) -> list[np.ndarray]:
        import torch

        longest = len(windows[-1].ids)
        ids = torch.tensor([w.ids + [0] * (longest - len(w.ids)) for w in windows], device=self.model.device)
        mask = torch.tensor([[1] * len(w.ids) + [0] * (longest - len(w.ids)) for w in windows], device=ids.device)
        needed = longest - min(window.context for window in windows) + 1  # logits only where something is scored
        with torch.inference_mode():
            logits = self.model(input_ids=ids, attention_mask=mask, logits_to_keep=needed, use_cache=False).logits
        skipped = longest - logits.shape[1]  # models that know no logits_to_keep give all
        out = []
        for row, window in enumerate(windows):
            n = len(window.ids) - window.context
            out.append(nats_of(logits[row, window.context - 1 - skipped :][:n], window.ids[window.context :]))
        return out

    def chain(self, prefix: str) -> Chain:
        types = set(getattr(self.model.config, "layer_types", None) or ["full_attention"])
        known = inspect.signature(self.model.forward).parameters
        argument = next((name for name in ("cache", "past_key_values") if name in known), None)  # by version
        if types != {"full_attention"} or argument is None:
            return PlainChain(self, prefix)  # a recurrent state cannot be wound back
        return _CachedChain(self, prefix, argument)


def nats_of(logits: Any, ids: Sequence[int]) -> np.ndarray:
    """logits [n, V] and the ids they predict -> nats [n]."""
    import torch

    target = torch.tensor(ids, device=logits.device)
    rows = 4 if logits.device.type == "cpu" else max(len(ids), 1)  # fp32 rows of a large vocabulary that stay in cache
    found = [
        torch.logsumexp(part.float(), -1) - part.gather(-1, aim[:, None])[:, 0].float()
        for part, aim in zip(logits.split(rows), target.split(rows), strict=True)
    ]
    nats: np.ndarray = torch.cat(found).cpu().numpy()
    return nats


class _CachedChain:
    """Keys and values of what was committed; a stretch that was only read is cropped away again."""

    def __init__(self, scorer: CausalScorer, prefix: str, argument: str) -> None:
        self.scorer, self.argument = scorer, argument
        self.head = [scorer.first or 0, *scorer.encode(prefix)[0][-scorer.window // 2 :]]
        self.committed: list[int] = []
        self._rebuild([])

    def _rebuild(self, tail: list[int]) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache()
        self.committed = tail
        self.last = self._forward([*self.head, *tail])[-1:]

    def _forward(self, ids: list[int]) -> Any:
        import torch

        rows = torch.tensor([ids], device=self.scorer.model.device)
        with torch.inference_mode():
            out = self.scorer.model(input_ids=rows, use_cache=True, **{self.argument: self.cache})
        return out.logits[0]

    def read(self, text: str) -> TokenScores:
        import torch

        ids, offsets = self.scorer.encode(text)
        if not ids:
            return TokenScores.of([], np.zeros(0))
        logits = self._forward(ids)
        self.cache.crop(-len(ids))
        return TokenScores.of(offsets, nats_of(torch.cat([self.last, logits[:-1]]), ids))

    def commit(self, text: str) -> None:
        ids = self.scorer.encode(text)[0]
        if not ids:
            return
        if len(self.head) + len(self.committed) + len(ids) > self.scorer.window:
            # as far as the context goes: its beginning and its latest half stay, the middle is forgotten
            self._rebuild([*self.committed, *ids][-max(1, self.scorer.window - len(self.head)) // 2 :])
            return
        self.last = self._forward(ids)[-1:]
        self.committed += ids
