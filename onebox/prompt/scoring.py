"""Scores. Takes texts, gives a score for every character span (higher: keep), and ranks documents for a question.

A scorer may be a language model (surprisal), a token classifier (probability to keep), the engine (a function that
returns prompt log-probabilities) or plain statistics that need no model at all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import regex

from onebox.errors import PromptError

_WORD = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}]|[\p{L}\p{N}\p{M}]+")
_STOP = frozenset(
    [
        "the",
        "a",
        "an",
        "of",
        "in",
        "on",
        "to",
        "is",
        "are",
        "was",
        "were",
        "be",
        "been",
        "who",
        "whom",
        "what",
        "when",
        "where",
        "which",
        "how",
        "why",
        "did",
        "do",
        "does",
        "for",
        "and",
        "or",
        "by",
        "with",
        "from",
        "that",
        "this",
        "these",
        "those",
        "it",
        "its",
        "as",
        "at",
        "has",
        "have",
        "had",
        "he",
        "she",
        "they",
        "we",
        "you",
        "i",
        "his",
        "her",
        "their",
        "our",
        "your",
        "but",
        "if",
        "so",
        "then",
        "than",
        "there",
        "here",
        "s",
        "t",
        "um",
        "uh",
        "der",
        "die",
        "das",
        "und",
        "ist",
        "ein",
        "eine",
        "zu",
        "den",
        "von",
        "mit",
        "les",
        "la",
        "le",
        "et",
        "un",
        "une",
        "est",
    ]
)


@dataclass(frozen=True)
class TokenScores:
    """One score for each half-open span [starts[i], ends[i]) of a text."""

    starts: np.ndarray
    ends: np.ndarray
    scores: np.ndarray


class Scorer(Protocol):
    """Anything that scores spans of texts; `prefixes` are read before each text and not scored."""

    @property
    def name(self) -> str: ...

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]: ...


class Ranker(Protocol):
    """Relevance of each document to a question; higher is better."""

    @property
    def name(self) -> str: ...

    def rank(self, question: str, documents: Sequence[str]) -> Sequence[float]: ...


def words(text: str) -> list[str]:
    """Lower-case words without function words, with English endings cut; unspaced scripts by character."""
    found = (word.lower() for word in _WORD.findall(text))
    return [_stem(word) for word in found if word not in _STOP]


def _stem(word: str) -> str:
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) > len(ending) + 2:
            return word[: -len(ending)]
    return word


class Bm25Ranker:
    """Okapi BM25 by rank-bm25, on stemmed words."""

    name = "bm25"

    def rank(self, question: str, documents: Sequence[str]) -> Sequence[float]:
        try:
            from rank_bm25 import BM25Plus
        except ModuleNotFoundError as e:
            raise PromptError(
                "Ranking by a question needs rank-bm25; install it with: pip install 'onebox[prompt]'"
            ) from e

        corpus = [words(document) or [""] for document in documents]
        return [float(score) for score in BM25Plus(corpus).get_scores(words(question))]


@dataclass(frozen=True)
class CallableRanker:
    """Any function (question, documents) -> scores."""

    function: Callable[[str, Sequence[str]], Sequence[float]]
    name: str = "callable"

    def rank(self, question: str, documents: Sequence[str]) -> Sequence[float]:
        scores = list(self.function(question, documents))
        if len(scores) != len(documents):
            raise PromptError(f"ranker {self.name!r}: gave {len(scores)} scores for {len(documents)} documents")
        return scores


@dataclass(frozen=True)
class LikelihoodRanker:
    """LongLLMLingua's r_k (arXiv 2310.06839): mean log-likelihood of the question after each document, in batches."""

    scorer: Scorer
    restriction: str = " We can get the answer to this question in the given documents."
    name: str = "r_k"

    def rank(self, question: str, documents: Sequence[str]) -> Sequence[float]:
        asked = [question + self.restriction] * len(documents)
        scored = self.scorer.score(asked, prefixes=[document + "\n\n" for document in documents])
        return [-float(score.scores.mean()) if len(score.scores) else -math.inf for score in scored]


class StatisticScorer:
    """Self-information of words from their counts in the texts scored together; needs no model."""

    name = "statistics"

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]:
        counts: Counter[str] = Counter(word.lower() for text in texts for word in _WORD.findall(text))
        total = sum(counts.values()) + 1
        out = []
        for text in texts:
            starts, ends, scores = [], [], []
            for match in _WORD.finditer(text):
                body = match.group()
                score = (
                    0.25
                    if body.lower() in _STOP
                    else math.log(total / counts[body.lower()]) / math.log(total + 1) + 0.3
                )
                if body[0].isupper() or body[0].isdigit():
                    score += 0.5
                starts.append(match.start())
                ends.append(match.end())
                scores.append(score)
            out.append(TokenScores(np.array(starts, int), np.array(ends, int), np.array(scores, float)))
        return out


class CausalScorer:
    """Surprisal in nats under a causal language model of transformers, in batches of like length.

    Texts longer than the window are read in windows that overlap by a quarter. Special tokens in a text are text.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, name: str = "causal", window: int = 512, batch_tokens: int = 2048
    ):
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.window, self.batch_tokens = window, batch_tokens

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> CausalScorer:
        """A model by id or folder; `gguf_file=` is passed on. Never runs code that comes with the model."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **options).eval()
        tokenizer = AutoTokenizer.from_pretrained(path, **{k: v for k, v in options.items() if k == "gguf_file"})
        return cls(model, tokenizer, name=str(path))

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True)
        return list(encoded["input_ids"]), [(int(a), int(b)) for a, b in encoded["offset_mapping"]]

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]:
        import torch

        first = next(
            (i for i in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id) if i is not None), 0
        )  # what a text without prefix follows
        jobs: list[tuple[int, int, list[int], int]] = []  # (text, first token scored, ids, ids of context)
        spans: list[list[tuple[int, int]]] = []
        for index, text in enumerate(texts):
            ids, offsets = self._encode(text)
            spans.append(offsets)
            prefix = self._encode(prefixes[index])[0] if prefixes else []
            if len(prefix) + len(ids) < self.window:
                jobs.append((index, 0, [first, *prefix, *ids], len(prefix) + 1))
                continue
            prefix = prefix[-self.window // 2 :]
            step = (self.window - len(prefix)) * 3 // 4
            for begin in range(0, len(ids), step):
                back = max(0, begin - step // 3)
                chunk = [first, *prefix, *ids[back : begin + step]]
                jobs.append((index, begin, chunk, 1 + len(prefix) + begin - back))
        losses = [np.zeros(len(offsets)) for offsets in spans]
        jobs.sort(key=lambda job: len(job[2]))
        position = 0
        while position < len(jobs):
            batch = [jobs[position]]
            position += 1
            while position < len(jobs) and len(jobs[position][2]) * (len(batch) + 1) <= self.batch_tokens:
                batch.append(jobs[position])
                position += 1
            longest = len(batch[-1][2])
            ids_ = torch.tensor([job[2] + [first] * (longest - len(job[2])) for job in batch])
            mask = torch.tensor([[1] * len(job[2]) + [0] * (longest - len(job[2])) for job in batch])
            needed = longest - min(job[3] for job in batch) + 1  # logits only where something is scored
            with torch.inference_mode():
                logits = self.model(
                    input_ids=ids_.to(self.model.device),
                    attention_mask=mask.to(self.model.device),
                    logits_to_keep=needed,
                    use_cache=False,
                ).logits
            for row, (index, begin, chunk, context) in enumerate(batch):
                n = len(chunk) - context
                rows = logits[row, needed - longest + context - 1 :][:n].float()
                target = torch.tensor(chunk[context:], device=rows.device)
                nats = torch.logsumexp(rows, -1) - rows.gather(-1, target[:, None])[:, 0]
                losses[index][begin : begin + n] = nats.cpu().numpy()
        return [_token_scores(offsets, loss) for offsets, loss in zip(spans, losses, strict=True)]


def _token_scores(offsets: list[tuple[int, int]], scores: np.ndarray) -> TokenScores:
    both = np.array(offsets, dtype=int).reshape(-1, 2)
    return TokenScores(both[:, 0], both[:, 1], scores)


@dataclass(frozen=True)
class EngineScorer:
    """Surprisal from any function that gives log-probabilities of given ids after their predecessors, such as a
    serving engine's prompt log-probabilities. `encode` gives ids and character offsets."""

    prompt_logprobs: Callable[[list[int]], Sequence[float]]  # one value for each id but the first
    encode: Callable[[str], tuple[list[int], list[tuple[int, int]]]]
    name: str = "engine"

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]:
        out = []
        for index, text in enumerate(texts):
            ids, offsets = self.encode(text)
            prefix = self.encode(prefixes[index])[0] if prefixes else []
            values = list(self.prompt_logprobs([*prefix, *ids])) if ids else []
            if not prefix and ids:
                values = [values[0] if values else 0.0, *values]
            out.append(_token_scores(offsets, -np.array(values[-len(ids) :] if ids else [], dtype=float)))
        return out


class ClassifierScorer:
    """Probability that a token is kept, by any token classifier of transformers (LLMLingua-2, arXiv 2403.12968).

    The label is found in the config (`keep`, `preserve`, otherwise label 1); a short text costs its own length.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str = "classifier", batch: int = 16):
        self.model, self.tokenizer, self.name, self.batch = model, tokenizer, name, batch
        labels = {str(label).lower(): int(index) for index, label in model.config.id2label.items()}
        self.label = next((labels[name] for name in ("keep", "preserve") if name in labels), 1)
        self.window = min(int(getattr(model.config, "max_position_embeddings", 512)), 512) - 4

    @classmethod
    def from_pretrained(cls, path: str) -> ClassifierScorer:
        from transformers import AutoModelForTokenClassification, AutoTokenizer

        model = AutoModelForTokenClassification.from_pretrained(path, trust_remote_code=False).eval()
        return cls(model, AutoTokenizer.from_pretrained(path), name=str(path))

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]:
        import torch

        chunks: list[tuple[int, int, list[int]]] = []
        spans, found = [], []
        for index, text in enumerate(texts):
            encoded = self.tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True
            )
            ids = list(encoded["input_ids"])
            spans.append([(int(a), int(b)) for a, b in encoded["offset_mapping"]])
            found.append(np.zeros(len(ids)))
            chunks += [(index, at, ids[at : at + self.window]) for at in range(0, len(ids), self.window)]
        chunks.sort(key=lambda chunk: len(chunk[2]))
        head, tail = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        for at in range(0, len(chunks), self.batch):
            batch = chunks[at : at + self.batch]
            longest = max(len(chunk[2]) for chunk in batch) + 2
            rows = [[head, *chunk[2], tail] for chunk in batch]
            pad = self.tokenizer.pad_token_id or 0
            ids_ = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
            mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
            with torch.inference_mode():
                logits = self.model(
                    input_ids=ids_.to(self.model.device), attention_mask=mask.to(self.model.device)
                ).logits
            keep = logits.float().softmax(-1)[..., self.label].cpu().numpy()
            for row, (index, begin, ids) in enumerate(batch):
                found[index][begin : begin + len(ids)] = keep[row, 1 : 1 + len(ids)]
        return [_token_scores(offsets, scores) for offsets, scores in zip(spans, found, strict=True)]
