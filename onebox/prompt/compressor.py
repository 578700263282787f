"""The one contract. Takes a prompt, documents or messages and a rate or a token target; gives a CompressedPrompt.

Deterministic; no global state; the caller's data is never changed.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from onebox.errors import PromptError
from onebox.prompt.budget import Slice, counter_of, select
from onebox.prompt.scoring import Bm25Ranker, LikelihoodRanker, Ranker, Scorer, StatisticScorer, TokenScores
from onebox.prompt.segments import Bonds, Options, Piece, Policy, resolve_policies
from onebox.prompt.structures import pieces_of
from onebox.prompt.trace import Span, Trace

Method = Literal["auto", "llmlingua", "longllmlingua", "llmlingua2"]
Order = Literal["relevance", "original", "two_stage"]
Status = Literal["compressed", "unchanged", "protected"]
_SEPARATOR = "\n\n"
_ROLE_POLICY = {"system": "keep", "developer": "keep", "user": "compress", "assistant": "compress", "tool": "compress"}


@dataclass(frozen=True)
class CompressedPrompt:
    """`status`: `unchanged` if the input already fits, `protected` if protected spans kept the rate from being met."""

    text: str
    messages: list[dict[str, Any]] | None
    tokens: int
    original_tokens: int
    status: Status
    method: str
    trace: Trace

    @property
    def ratio(self) -> float:
        """Output tokens over input tokens; 1.0 for empty input."""
        return self.tokens / self.original_tokens if self.original_tokens else 1.0

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.trace.spans

    @property
    def kept(self) -> tuple[Span, ...]:
        return tuple(span for span in self.trace.spans if span.kept)

    @property
    def dropped(self) -> tuple[Span, ...]:
        return tuple(span for span in self.trace.spans if not span.kept)

    def saved(self, price_per_million: float) -> float:
        """Money saved for one call, in the currency of the price given."""
        return (self.original_tokens - self.tokens) * price_per_million / 1e6


@dataclass(frozen=True)
class _Part:
    text: str
    source: str
    document: bool = False
    protect: bool = False


class Compressor:
    """Compresses by one method.

    auto           question: BM25 over documents or sentences; no question: word statistics. No model needed.
    llmlingua      surprisal under `scorer`, a causal language model.
    longllmlingua  documents ranked by the likelihood of the question, surprisal with and without the question.
    llmlingua2     keep-probability under `scorer`, a token classifier; one threshold for the whole prompt.

    `ranker` and `scorer` replace the method's own. Raises PromptError for options it does not know.
    """

    def __init__(
        self,
        method: Method = "auto",
        *,
        scorer: Scorer | None = None,
        ranker: Ranker | None = None,
        policies: Mapping[str, Policy] | None = None,
        force_tokens: Iterable[str] = (),
        keep_digits: bool = False,
        keep_rules: bool = True,
        order: Order = "relevance",
        dynamic: float = 0.3,
        roles: Mapping[str, str] | None = None,
    ) -> None:
        if method not in get_args(Method):
            raise PromptError(f"method: unknown {method!r}; use one of {', '.join(get_args(Method))}")
        if order not in get_args(Order):
            raise PromptError(f"order: unknown {order!r}; use one of {', '.join(get_args(Order))}")
        if method != "auto" and scorer is None:
            raise PromptError(f"method {method!r}: needs scorer=; or use method='auto', which needs no model")
        for role, policy in (roles or {}).items():
            if policy not in ("keep", "compress"):
                raise PromptError(f"roles[{role!r}]: unknown policy {policy!r}; use keep or compress")
        self.method, self.order, self.dynamic = method, order, dynamic
        self.scorer: Scorer = scorer or StatisticScorer()
        own: Ranker = Bm25Ranker()
        if method == "longllmlingua":
            own = LikelihoodRanker(self.scorer)
        self.ranker = ranker or own
        self.options = Options(resolve_policies(policies), tuple(force_tokens), keep_digits, keep_rules)
        self.roles = {**_ROLE_POLICY, **(roles or {})}

    async def acompress(self, *args: Any, **options: Any) -> CompressedPrompt:
        """`compress` in a worker thread."""
        return await asyncio.to_thread(self.compress, *args, **options)

    def compress_many(self, prompts: Iterable[str], **options: Any) -> list[CompressedPrompt]:
        return [self.compress(prompt, **options) for prompt in prompts]

    def compress(
        self,
        prompt: str | Sequence[str] | Sequence[Mapping[str, Any]] | None = None,
        *,
        documents: Sequence[str] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        question: str | None = None,
        instruction: str | None = None,
        rate: float | None = None,
        target_tokens: int | None = None,
        max_tokens: int | None = None,
        tokenizer: Any | None = None,
        append_question: bool = True,
    ) -> CompressedPrompt:
        """Exactly one of prompt, documents, messages. `rate` is output over input tokens; `target_tokens` is met
        within 5 % and never passed; `max_tokens` alone leaves a prompt that fits as it is.

        The text is instruction, documents and question, each only if given. Raises PromptError.
        """
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            rows: list[Any] = list(prompt)
            if rows and isinstance(rows[0], Mapping):
                messages, prompt = rows, None
            else:
                documents, prompt = rows, None
        if sum(given is not None for given in (prompt, documents, messages)) != 1:
            raise PromptError("compress: give exactly one of prompt, documents, messages")
        if rate is None and target_tokens is None and max_tokens is None:
            raise PromptError("compress: give rate, target_tokens or max_tokens")
        if rate is not None and (target_tokens is not None or not 0 <= rate <= 1):
            raise PromptError(f"compress: rate={rate!r} must lie in [0, 1] and stand without target_tokens")
        for name, value in (("target_tokens", target_tokens), ("max_tokens", max_tokens)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise PromptError(f"{name}: {value!r} is not a count of tokens")
        parts: list[_Part] = []
        places: list[tuple[int, int | None]] = []
        asked = question
        if messages is not None:
            parts, places, asked = self._message_parts(messages, question)
        else:
            if instruction:
                parts.append(_Part(instruction, "instruction", protect=True))
            if documents is not None:
                parts += [_Part(text, f"document {index}", document=True) for index, text in enumerate(documents)]
            else:
                parts.append(_Part(prompt if isinstance(prompt, str) else "", "prompt"))
            if question and append_question:
                parts.append(_Part(question, "question", protect=True))
        for part in parts:
            if not isinstance(part.text, str):
                raise PromptError(f"{part.source}: {type(part.text).__name__} is not text")
        count = counter_of(tokenizer)
        return self._run(parts, asked, rate, target_tokens, max_tokens, count, messages, places)

    def _run(
        self,
        parts: list[_Part],
        question: str | None,
        rate: float | None,
        target: int | None,
        limit: int | None,
        count: Any,
        messages: Sequence[Mapping[str, Any]] | None,
        places: list[tuple[int, int | None]],
    ) -> CompressedPrompt:
        texts = [part.text for part in parts]
        original = _SEPARATOR.join(texts)
        total = count(original)
        budget = min(
            bound
            for bound in (target, limit, None if rate is None else int(rate * total + 1e-9), total)
            if bound is not None
        )
        bonds = Bonds()
        pieces = []
        for part in parts:
            options = self.options
            if part.document or part.source.startswith("tool"):
                options = Options(options.policies, options.force_tokens, options.keep_digits, False)
            row = pieces_of(part.text, bonds, options)
            if part.protect:
                row = [_protected(piece) for piece in row]
            pieces.append(row)
        unchanged = budget >= total
        if unchanged:
            slices: list[Slice] = []
            at = 0
            for index, text in enumerate(texts):
                if index:
                    slices.append(Slice(-1, 0, len(_SEPARATOR), at))
                    at += len(_SEPARATOR)
                slices.append(Slice(index, 0, len(text), at))
                at += len(text)
            kept = tuple(np.ones(len(row), dtype=bool) for row in pieces)
            scores = tuple(np.zeros(len(row)) for row in pieces)
            trace = Trace(
                tuple(texts),
                tuple(p.source for p in parts),
                original,
                tuple(slices),
                tuple(pieces),
                kept,
                scores,
                (None,) * len(parts),
                _SEPARATOR,
            )
            copied = [copy.deepcopy(dict(message)) for message in messages] if messages is not None else None
            return CompressedPrompt(original, copied, total, total, "unchanged", self.method, trace)
        ranks = self._ranks(parts, question)
        priorities, shown = self._priorities(parts, pieces, question, ranks, budget, count)
        order = self._order(parts, ranks) if messages is None else list(range(len(parts)))
        chosen = select(texts, pieces, priorities, order, budget, count, _SEPARATOR)
        if chosen.tokens > budget and (target is not None or limit is not None):
            raise PromptError(
                f"budget: protected spans alone take {chosen.floor_tokens} tokens of {budget}; "
                f"raise the target to {chosen.floor_tokens} or relax policies= and roles="
            )
        status: Status = "compressed" if chosen.tokens <= budget else "protected"
        trace = Trace(
            tuple(texts),
            tuple(p.source for p in parts),
            chosen.text,
            tuple(chosen.slices),
            tuple(pieces),
            tuple(chosen.kept),
            tuple(shown),
            ranks,
            _SEPARATOR,
        )
        rebuilt = _rebuild(messages, places, trace) if messages is not None else None
        return CompressedPrompt(chosen.text, rebuilt, chosen.tokens, total, status, self.method, trace)

    def _message_parts(
        self, messages: Sequence[Mapping[str, Any]], question: str | None
    ) -> tuple[list[_Part], list[tuple[int, int | None]], str | None]:
        parts: list[_Part] = []
        places: list[tuple[int, int | None]] = []
        users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
        for index, message in enumerate(messages):
            role = str(message.get("role"))
            protect = self.roles.get(role, "keep") == "keep" or (bool(users) and index == users[-1])
            content = message.get("content")
            items = content if isinstance(content, list) else [content]
            for position, item in enumerate(items):
                text = item.get("text") if isinstance(item, Mapping) and item.get("type") == "text" else item
                if isinstance(text, str):
                    parts.append(_Part(text, f"{role} {index}", protect=protect))
                    places.append((index, position if isinstance(content, list) else None))
                    if question is None and users and index == users[-1]:
                        question = text
        return parts, places, question

    def _ranks(self, parts: list[_Part], question: str | None) -> tuple[int | None, ...]:
        found: list[int | None] = [None] * len(parts)
        where = [index for index, part in enumerate(parts) if part.document]
        if question and len(where) > 1:
            scores = list(self.ranker.rank(question, [parts[index].text for index in where]))
            best_first = sorted(range(len(where)), key=lambda at: (-scores[at], at))
            for rank, at in enumerate(best_first):
                found[where[at]] = rank
        return tuple(found)

    def _order(self, parts: list[_Part], ranks: tuple[int | None, ...]) -> list[int]:
        order = list(range(len(parts)))
        if self.order == "original" or all(rank is None for rank in ranks):
            return order
        documents = sorted((i for i in order if ranks[i] is not None), key=lambda i: ranks[i] or 0)
        if self.order == "two_stage":
            documents = documents[0::2] + documents[1::2][::-1]
        before = [i for i in order if ranks[i] is None and i < min(documents)]
        return [*before, *documents, *[i for i in order if ranks[i] is None and i not in before]]

    def _priorities(
        self,
        parts: list[_Part],
        pieces: list[list[Piece]],
        question: str | None,
        ranks: tuple[int | None, ...],
        budget: int,
        count: Any,
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """What select() orders by, and the scores the trace shows. Only documents that may stay are scored."""
        worth = list(range(len(parts)))
        if any(rank is not None for rank in ranks):
            room, worth = budget * 2, []
            for index in sorted(range(len(parts)), key=lambda i: -1 if ranks[i] is None else ranks[i] or 0):
                if room > 0 or ranks[index] is None:
                    worth.append(index)
                    room -= count(parts[index].text)
        worth = [index for index in worth if pieces[index] and not parts[index].protect]
        scored = dict(zip(worth, self.scorer.score([parts[i].text for i in worth]), strict=True)) if worth else {}
        if self.method == "longllmlingua" and question and worth:
            given = self.scorer.score([parts[i].text for i in worth], prefixes=[question + "\n\n"] * len(worth))
            for index, conditioned in zip(worth, given, strict=True):
                plain = scored[index]
                scored[index] = TokenScores(plain.starts, plain.ends, plain.scores - conditioned.scores)
        raw = [
            _piece_scores(parts[i].text, pieces[i], scored[i]) if i in scored else np.zeros(len(pieces[i]))
            for i in range(len(parts))
        ]
        everything = np.concatenate([raw[i] for i in worth]) if worth else np.zeros(1)
        low, high = (float(x) for x in np.percentile(everything, [1, 99]))
        documents = sum(rank is not None for rank in ranks)
        out = []
        for index, row in enumerate(pieces):
            value = np.clip((raw[index] - low) / (high - low) if high > low else raw[index] * 0, 0, 1)
            value = value + np.array([piece.weight for piece in row], dtype=float)
            rank = ranks[index]
            if question and self.method == "auto" and len(row):
                value = value + 4 * self._sentence_relevance(parts[index].text, row, question)
            if rank is not None:
                if self.method == "auto" or index not in worth:
                    value = value - 20.0 * rank  # whole documents in order of rank, the last one in part
                else:
                    value = value + self.dynamic * (1 - 2 * rank / max(documents - 1, 1))
            out.append(value)
        return out, raw

    def _sentence_relevance(self, text: str, row: list[Piece], question: str) -> np.ndarray:
        """BM25 of each sentence for the question, in [0, 1], half of it shared with the neighbours."""
        number = np.array([piece.sentence for piece in row])
        ids, at = np.unique(number, return_inverse=True)
        if len(ids) < 2:
            return np.zeros(len(row))
        first = np.searchsorted(at, np.arange(len(ids))) if (np.diff(at) >= 0).all() else None
        if first is None:
            return np.zeros(len(row))
        ends = [*[row[i].start for i in first[1:]], row[-1].end]
        scores = np.array(
            Bm25Ranker().rank(question, [text[row[a].start : b] for a, b in zip(first, ends, strict=True)])
        )
        spread = scores.max() - scores.min()
        scores = (scores - scores.min()) / spread if spread > 0 else scores * 0
        padded = np.pad(scores, 1)
        shared: np.ndarray = np.maximum(scores, 0.5 * np.maximum(padded[:-2], padded[2:]))[at]
        return shared


def _protected(piece: Piece) -> Piece:
    return replace(piece, keep=True, drop=False, rule="protected part")


def _piece_scores(text: str, row: Sequence[Piece], tokens: TokenScores) -> np.ndarray:
    """Mean token score over the characters of each piece; what no token covers counts as the lowest score."""
    cover = np.full(len(text) + 1, float(tokens.scores.min()) if len(tokens.scores) else 0.0)
    for start, end, score in zip(tokens.starts, tokens.ends, tokens.scores, strict=True):
        cover[start:end] = score
    running = np.concatenate([[0.0], np.cumsum(cover)])
    starts = np.array([piece.start for piece in row], dtype=int)
    ends = np.array([piece.end for piece in row], dtype=int)
    found: np.ndarray = (running[ends] - running[starts]) / np.maximum(ends - starts, 1)
    return found


def _rebuild(
    messages: Sequence[Mapping[str, Any]], places: list[tuple[int, int | None]], trace: Trace
) -> list[dict[str, Any]]:
    """The messages with their texts replaced; everything else, tool calls included, is a copy."""
    texts = ["" for _ in trace.parts]
    for item in trace.slices:
        if item.part >= 0:
            texts[item.part] += trace.parts[item.part][item.start : item.end] + item.note
    out = [copy.deepcopy(dict(message)) for message in messages]
    for (index, position), text in zip(places, texts, strict=True):
        if position is None:
            out[index]["content"] = text
        elif isinstance(out[index]["content"][position], dict):
            out[index]["content"][position]["text"] = text
        else:
            out[index]["content"][position] = text
    return out
