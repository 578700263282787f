"""The one contract. Takes a prompt, documents or messages and a rate or a token target; gives a CompressedPrompt.

Deterministic; no global state; the caller's data is never changed; safe to use from several threads.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from onebox.errors import PromptError
from onebox.prompt import llmlingua
from onebox.prompt.budget import Counter, Slice, counter_of, select, settle
from onebox.prompt.longllmlingua import Condition, LikelihoodRanker, Order, order_by_rank, rates_by_rank
from onebox.prompt.messages import ROLE_POLICY, check_roles, copied, message_parts, rebuilt
from onebox.prompt.parts import Part, Progress, Unit, by_sentence, compressible_units, relevance_of_sentences
from onebox.prompt.ranking import Bm25Ranker
from onebox.prompt.recovery import Recovery
from onebox.prompt.scoring import Aggregation, Ranker, Scorer, StatisticScorer, TokenScores, are_turns, readable
from onebox.prompt.segments import Bonds, Options, Piece, Policy, resolve_policies
from onebox.prompt.spans import Span
from onebox.prompt.structures import pieces_of
from onebox.prompt.tags import parse_tags
from onebox.prompt.trace import Trace

Method = Literal["auto", "llmlingua", "longllmlingua", "llmlingua2"]
Level = Literal["token", "sentence"]
Status = Literal["compressed", "unchanged", "protected"]
_SEPARATOR = "\n\n"
_SLAB = 8_000  # characters scored at a time in a long text: bounds memory, and gives progress a step
_REMEMBERED = 1_024  # messages of conversations that may come back
_CONTEXT = 1_000  # characters before a slab that its scorer reads first


@dataclass(frozen=True)
class CompressedPrompt:
    """`status`: `unchanged` if the input already fits, `protected` if protected spans kept the rate from being met;
    they take `floor_tokens`."""

    text: str
    messages: list[dict[str, Any]] | None
    tokens: int
    original_tokens: int
    floor_tokens: int
    status: Status
    method: str
    trace: Trace

    @property
    def ratio(self) -> float:
        """Output tokens over input tokens; 1.0 for empty input."""
        return self.tokens / self.original_tokens if self.original_tokens else 1.0

    @property
    def documents(self) -> tuple[str, ...]:
        """What is left of each part, in the order given."""
        return self.trace.outputs()

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.trace.spans

    @property
    def kept(self) -> tuple[Span, ...]:
        return tuple(span for span in self.trace.spans if span.kept)

    @property
    def dropped(self) -> tuple[Span, ...]:
        return tuple(span for span in self.trace.spans if not span.kept)

    def recover(self, response: str, *, max_gap: int = 10, min_confidence: float = 0.2) -> Recovery:
        """An answer's words back in the words of the original."""
        return self.trace.recover(response, max_gap=max_gap, min_confidence=min_confidence)

    def saved(self, price_per_million: float) -> float:
        """Money saved for one call, in the currency of the price given."""
        return (self.original_tokens - self.tokens) * price_per_million / 1e6


@dataclass(frozen=True)
class _Job:
    """One prompt on its way: everything that is known before anything is scored."""

    parts: list[Part]
    pieces: list[list[Piece]]
    question: str | None
    total: int
    budget: int
    strict: bool  # the budget is a count, not a rate
    count: Counter
    messages: Sequence[Mapping[str, Any]] | None
    places: list[tuple[int, int | None]]
    max_documents: int | None = None


class Compressor:
    """Compresses by one method; `ranker` and `scorer` replace the method's own, in any combination.

    auto           question: BM25 over documents or sentences; no question: word statistics. No model needed.
    llmlingua      surprisal under `scorer`, a causal language model, after what is left of the text before.
    longllmlingua  the same, with documents ranked by the likelihood of the question and the question's influence.
    llmlingua2     keep-probability under `scorer`, a token classifier; one threshold for the whole prompt.

    order              documents in the output: sort (most relevant first), original, two_stage (strong at both ends);
                       auto: sort, and original for turns of a conversation
    dynamic            how far a document's rate may lie above or below the mean by its rank, 0 to 1
    condition          longllmlingua's ranking: after (question after document), before, none
    compare            longllmlingua's scores: contrastive perplexity; off: surprisal after the question
    instruction_rate,  what is kept of instruction and question; None: the paper's 0.85 and 0.9 for the two methods
    question_rate      that are its own, all of it for the others
    level              what goes: token (words and the like) or sentence
    segment            tokens pruned at a time by the causal methods
    coarse             documents are scored, most relevant first, up to this many times the budget
    aggregate          tokens -> pieces: mean, max, first
    force_tokens       strings that always stay; `drop_consecutive` keeps one of several in a row
    keep_digits        numbers always stay, whole
    keep_rules         directives of the prompt's author always stay ("Never mention prices.")
    policies           kind of span -> keep, atomic, inside, drop
    roles              role of message -> keep, compress, or the rate of that role's messages

    Raises PromptError for values it does not know.
    """

    def __init__(
        self,
        method: Method = "auto",
        *,
        scorer: Scorer | None = None,
        ranker: Ranker | None = None,
        policies: Mapping[str, Policy] | None = None,
        force_tokens: Iterable[str] = (),
        drop_consecutive: bool = False,
        keep_digits: bool = False,
        keep_rules: bool = True,
        order: Order = "auto",
        dynamic: float = 0.3,
        condition: Condition = "after",
        compare: bool = True,
        instruction_rate: float | None = None,
        question_rate: float | None = None,
        level: Level = "token",
        segment: int = llmlingua.SEGMENT,
        coarse: float = llmlingua.COARSE,
        aggregate: Aggregation = "mean",
        roles: Mapping[str, str | float] | None = None,
    ) -> None:
        for name, value, known in (
            ("method", method, get_args(Method)),
            ("order", order, get_args(Order)),
            ("condition", condition, get_args(Condition)),
            ("aggregate", aggregate, get_args(Aggregation)),
            ("level", level, get_args(Level)),
        ):
            if value not in known:
                raise PromptError(f"{name}: unknown {value!r}; use one of {', '.join(known)}")
        for name, number in (
            ("dynamic", dynamic),
            ("instruction_rate", instruction_rate),
            ("question_rate", question_rate),
        ):
            if number is not None and not (_is_number(number) and 0 <= number <= 1):
                raise PromptError(f"{name}: {number!r} is not a number from 0 to 1")
        if isinstance(segment, bool) or not isinstance(segment, int) or segment < 1:
            raise PromptError(f"segment: {segment!r} is not a count of tokens")
        if not (_is_number(coarse) and coarse >= 1):
            raise PromptError(f"coarse: {coarse!r} is not a number from 1 up")
        if method != "auto" and scorer is None:
            raise PromptError(f"method {method!r}: needs scorer=; or use method='auto', which needs no model")
        forced = tuple(force_tokens) if isinstance(force_tokens, Iterable) else (force_tokens,)
        if isinstance(force_tokens, str) or not all(isinstance(one, str) for one in forced):
            raise PromptError("force_tokens: give a list of strings")
        for name, given, asked in (("scorer", scorer, "score"), ("ranker", ranker, "rank")):
            if given is not None and not callable(getattr(given, asked, None)):
                raise PromptError(f"{name}: {type(given).__name__} has no method {asked}()")
        check_roles(roles if roles is not None else {})
        self.method, self.order, self.dynamic, self.level = method, order, dynamic, level
        self.scorer: Scorer = scorer or StatisticScorer()
        self.compare, self.segment, self.coarse, self.aggregate = compare, segment, coarse, aggregate
        self.ranker: Ranker = ranker or (
            LikelihoodRanker(self.scorer, condition) if method == "longllmlingua" else Bm25Ranker()
        )
        own = self._causal
        self.instruction_rate = (
            instruction_rate if instruction_rate is not None else llmlingua.INSTRUCTION_RATE if own else 1.0
        )
        self.question_rate = question_rate if question_rate is not None else llmlingua.QUESTION_RATE if own else 1.0
        self.drop_consecutive = drop_consecutive
        self._seen: dict[tuple[str, bool, float, Counter], CompressedPrompt] = {}
        self._lock = threading.Lock()
        self.options = Options(resolve_policies(policies), forced, keep_digits, keep_rules)
        self.roles: dict[str, str | float] = {**ROLE_POLICY, **(roles or {})}

    @property
    def _causal(self) -> bool:
        return self.method in ("llmlingua", "longllmlingua")

    async def acompress(self, *args: Any, **options: Any) -> CompressedPrompt:
        """`compress` in a worker thread."""
        return await asyncio.to_thread(self.compress, *args, **options)

    def compress_many(
        self, prompts: Iterable[str | Sequence[str] | Sequence[Mapping[str, Any]]], **options: Any
    ) -> list[CompressedPrompt]:
        """`compress` for each, with the texts of all prompts scored in the same batches."""
        progress = options.pop("progress", None)
        if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
            raise PromptError(f"compress_many: {type(prompts).__name__} is not a list of prompts")
        check_names(options, progress)
        return self._finish([self._prepare(prompt, **options) for prompt in prompts], progress)

    def compress(
        self,
        prompt: str | Sequence[str] | Sequence[Mapping[str, Any]] | None = None,
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> CompressedPrompt:
        """Exactly one of prompt, documents, messages.

        rate             output over input tokens, approached from below
        target_tokens    met within 5 % and never passed; an error where protected spans alone take more
        max_tokens       an upper bound; alone, it leaves a prompt that fits as it is
        question         what the prompt is for: ranks documents, and stands at the end unless append_question is False
        instruction      stands at the beginning
        tokenizer        what tokens are: tiktoken's, transformers' or tokenizers' object, or a function of text
        keep_documents   indices of documents that are never left out as a whole
        max_documents    at most so many documents, the most relevant ones
        document_rates   for each document its own rate, or None for the prompt's
        tags             read `<llmlingua rate= compress=>` in prompt and documents
        stable           messages one by one, whatever follows them: the prefix of a longer conversation stays the same
        progress         called with characters done and in all

        The text is instruction, documents and question, each only if given. Raises PromptError.
        """
        check_names(options, progress)
        if options.get("stable"):
            return self._stable(self._prepare(prompt, **options), options["rate"])
        return self._finish([self._prepare(prompt, **options)], progress)[0]

    def _stable(self, job: _Job, rate: float) -> CompressedPrompt:
        """Every message as a prompt of its own, and kept for when the conversation comes back longer."""
        results = []
        for part, row in zip(job.parts, job.pieces, strict=True):
            own = rate if part.rate is None else part.rate
            key = (part.text, part.source.partition(" ")[0] == "tool", own, job.count)
            with self._lock:
                known = self._seen.get(key)
            if known is None:
                total = job.count(part.text)
                alone = replace(part, rate=1.0 if own >= 1 else None)
                known = self._finish(
                    [_Job([alone], [row], None, total, int(own * total + 1e-9), False, job.count, None, [])], None
                )[0]
            with self._lock:
                self._seen[key] = known
                while len(self._seen) > _REMEMBERED:
                    del self._seen[next(iter(self._seen))]
            results.append(known)
        trace = Trace.joined([result.trace for result in results], [part.source for part in job.parts], _SEPARATOR)
        tokens = job.count(trace.output)
        floor = sum(result.floor_tokens for result in results)
        over = any(result.status == "protected" for result in results)
        status: Status = "unchanged" if tokens == job.total else "protected" if over else "compressed"
        assert job.messages is not None
        messages = rebuilt(job.messages, job.places, trace.outputs())
        return CompressedPrompt(trace.output, messages, tokens, job.total, floor, status, self.method, trace)

    def _prepare(
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
        keep_documents: Collection[int] = (),
        max_documents: int | None = None,
        document_rates: Sequence[float | None] | None = None,
        tags: bool = False,
        stable: bool = False,
    ) -> _Job:
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            rows: list[Any] = list(prompt)
            if rows and isinstance(rows[0], Mapping):
                messages, prompt = rows, None
            else:
                documents, prompt = rows, None
        if sum(given is not None for given in (prompt, documents, messages)) != 1:
            raise PromptError("compress: give exactly one of prompt, documents, messages")
        check_length(rate, target_tokens, max_tokens)
        count = counter_of(tokenizer)
        parts: list[Part] = []
        places: list[tuple[int, int | None]] = []
        asked = question
        if messages is not None:
            if tags or instruction:
                raise PromptError("messages: tags and instruction= are for prompt and documents; use roles=")
            parts, places, asked = message_parts(messages, self.roles, question, stable=stable)
            if stable and (rate is None or max_tokens is not None or question):
                raise PromptError("stable: each message is compressed by itself; give rate= alone and no question=")
        else:
            if stable:
                raise PromptError("stable: is for messages")
            if instruction:
                parts.append(Part(instruction, "instruction", rate=self.instruction_rate))
            if documents is not None:
                documents = list_of_texts(documents)
                check_documents(keep_documents, max_documents, document_rates)
                rates = list(document_rates) if document_rates is not None else [None] * len(documents)
                if len(rates) != len(documents):
                    raise PromptError(f"document_rates: {len(rates)} for {len(documents)} documents")
                parts += [
                    Part(text, f"document {index}", document=True, wanted=index in keep_documents, rate=own)
                    for index, (text, own) in enumerate(zip(documents, rates, strict=True))
                ]
            else:
                parts.append(Part(prompt if isinstance(prompt, str) else "", "prompt"))
            if question and append_question:
                parts.append(Part(question, "question", rate=self.question_rate))
        for part in parts:
            if not isinstance(part.text, str):
                raise PromptError(f"{part.source}: {type(part.text).__name__} is not text")
        if tags:
            parts = [_untagged(part) if part.rate is None else part for part in parts]
        total = count(_SEPARATOR.join(part.text for part in parts))
        wanted = None
        if rate is not None:
            wanted = int(rate * total + 1e-9)
            if tags or document_rates is not None:  # a rate is for what has none of its own
                wanted += sum(
                    int((own - rate) * count(part.text[start:end]))
                    for part in parts
                    for start, end, own in part.fixed()
                )
        budget = min(bound for bound in (target_tokens, max_tokens, wanted, total) if bound is not None)
        bonds = Bonds()
        pieces = []
        for part in parts:
            trusted = not part.document and not part.source.startswith("tool")
            options = self.options if trusted else replace(self.options, keep_rules=False)
            row = pieces_of(part.text, bonds, options)
            pieces.append(row if self.level == "token" else by_sentence(row))
        strict = target_tokens is not None or max_tokens is not None
        return _Job(parts, pieces, asked, total, max(budget, 0), strict, count, messages, places, max_documents)

    def _finish(self, jobs: list[_Job], progress: Progress | None) -> list[CompressedPrompt]:
        """Scores of all prompts together where the scorer takes them one by one anyway, then each prompt's cut."""
        units = [self._units(job) if job.budget < job.total else [] for job in jobs]
        worth = [(at, unit) for at, row in enumerate(units) for unit in row if unit.worth]
        total = sum(unit.characters for _, unit in worth)
        done = 0

        def advanced(characters: int) -> None:
            nonlocal done
            done += characters
            if progress is not None:
                progress(done, total)

        scores: list[dict[tuple[int, int], np.ndarray]] = [{} for _ in jobs]
        if self._causal:
            stretches = [one for job, row in zip(jobs, units, strict=True) for one in self._stretches(job, row)]
            found = llmlingua.iterative_scores(self.scorer, stretches, advanced)
        else:
            found = self._scored([(jobs[at], unit) for at, unit in worth], advanced)
        for (at, unit), values in zip(worth, found, strict=True):
            scores[at][unit.part, unit.first] = values
        return [
            self._cut(job, row, found_) if job.budget < job.total else _whole(job, self.method)
            for job, row, found_ in zip(jobs, units, scores, strict=True)
        ]

    def _units(self, job: _Job) -> list[Unit]:
        """What is ranked and scored as one: documents, passages of a long prompt, or the whole part."""
        passages = self.method != "auto" and bool(job.question) and job.messages is None
        units = compressible_units(job.parts, job.pieces, passages)
        ranked = [unit for unit in units if unit.ranked]
        if len(ranked) > 1 and (job.question or self._causal):
            texts = [unit.text(job.parts, job.pieces) for unit in ranked]
            ranker = self.ranker if job.question else LikelihoodRanker(self.scorer, "none")
            known: list[TokenScores | None] = [None] * len(texts)
            if isinstance(ranker, LikelihoodRanker) and ranker.scorer is self.scorer:
                # scoring a document as it is ranked costs less than reading it again, if a third of them is kept
                keep = self.compare and 3 * job.budget * self.coarse >= job.total
                relevance, known = ranker.read(job.question or "", texts, keep=keep)
            else:
                relevance = relevance_of(ranker, job.question or "", texts)
            wanted = [job.parts[unit.part].wanted for unit in ranked]
            best_first = sorted(range(len(ranked)), key=lambda at: (not wanted[at], -relevance[at], at))
            room = job.budget * self.coarse
            most = len(ranked) if job.max_documents is None else job.max_documents
            place = {}
            for rank, at in enumerate(best_first):
                stays = wanted[at] or (room > 0 and rank < most)
                place[id(ranked[at])] = replace(ranked[at], rank=rank, worth=stays, known=known[at])
                room -= job.count(texts[at])
            units = [place.get(id(unit), unit) for unit in units]
        return units

    def _scored(self, work: list[tuple[_Job, Unit]], advanced: Callable[[int], None]) -> list[np.ndarray]:
        """Piece scores of units by one scorer call for every slab of text: short texts together, long ones in slabs."""
        texts, prefixes, owners = [], [], []
        for owner, (job, unit) in enumerate(work):
            for left, right in unit.slabs(job.pieces, _SLAB):
                text = job.parts[unit.part].text
                owners.append((owner, left))
                texts.append(text[left:right])
                prefixes.append(text[max(unit.start(job.pieces), left - _CONTEXT) : left])
        found: list[list[tuple[int, TokenScores]]] = [[] for _ in work]
        alone = isinstance(self.scorer, StatisticScorer)  # counts words of one prompt, not of its neighbours
        at = 0
        while at < len(texts):
            end, size, job = at, 0, work[owners[at][0]][0]
            while end < len(texts) and (
                work[owners[end][0]][0] is job if alone else end == at or size + len(texts[end]) <= 2 * _SLAB
            ):
                size += len(texts[end])
                end += 1
            scored = self.scorer.score(texts[at:end], prefixes=prefixes[at:end])
            for (owner, left), scores in zip(owners[at:end], scored, strict=True):
                found[owner].append((left, scores))
            advanced(size)
            at = end
        return [
            TokenScores.joined(row).of_pieces(unit.row(job.pieces), self.aggregate)
            for (job, unit), row in zip(work, found, strict=True)
        ]

    def _stretches(self, job: _Job, units: list[Unit]) -> list[llmlingua.Stretch]:
        """What the causal methods read, each with its rate from what the budget leaves for all of them."""
        long = self.method == "longllmlingua" and bool(job.question)
        worth = [unit for unit in units if unit.worth]
        texts = [unit.text(job.parts, job.pieces) for unit in worth]
        tokens = [max(job.count(text), 1) for text in texts]
        fixed = [(rate, job.count(part.text[start:end])) for part in job.parts for start, end, rate in part.fixed()]
        rate = llmlingua.demonstrations_rate(job.budget, fixed, sum(tokens))
        rates = [rate] * len(worth)
        ranked = [at for at, unit in enumerate(worth) if unit.rank is not None]
        if len(ranked) > 1:
            spread = rates_by_rank([worth[at].rank or 0 for at in ranked], rate, self.dynamic)
            for at, own in zip(ranked, spread, strict=True):
                rates[at] = own
        return [
            llmlingua.Stretch(
                text,
                llmlingua.shifted(unit.row(job.pieces), unit.start(job.pieces)),
                own,
                segment_characters=max(1, round(self.segment * len(text) / n)),
                question=job.question if long else None,
                compare=self.compare and long,
                known=unit.known,
            )
            for unit, text, n, own in zip(worth, texts, tokens, rates, strict=True)
        ]

    def _cut(self, job: _Job, units: list[Unit], scores: dict[tuple[int, int], np.ndarray]) -> CompressedPrompt:
        texts = [part.text for part in job.parts]
        raw = [np.zeros(len(row)) for row in job.pieces]
        ranks = [np.full(len(row), -1) for row in job.pieces]
        for unit in units:
            if unit.rank is not None:
                ranks[unit.part][unit.first : unit.past] = unit.rank
            if (unit.part, unit.first) in scores:
                raw[unit.part][unit.first : unit.past] = scores[unit.part, unit.first]
        priorities = self._priorities(job, units, raw)
        pieces = [list(row) for row in job.pieces]
        for at, part in enumerate(job.parts):
            for start, end, rate in part.fixed():
                inside = [i for i, piece in enumerate(pieces[at]) if piece.start < end and piece.end > start]
                if inside:
                    first, past = inside[0], inside[-1] + 1
                    rule = "protected part" if rate >= 1 else f"rate {rate:g} of its own"
                    pieces[at][first:past] = settle(
                        part.text, pieces[at][first:past], priorities[at][first:past], rate, job.count, rule
                    )
        for unit in units:
            if job.max_documents is not None and unit.ranked and not unit.worth:
                pieces[unit.part] = [
                    replace(piece, keep=False, drop=True, rule="beyond max_documents") for piece in pieces[unit.part]
                ]
        order = self._order(job, units)
        chosen = select(texts, pieces, priorities, order, job.budget, job.count, _SEPARATOR)
        if self.drop_consecutive:
            for _ in range(4):
                marked = _mark_repeats(texts, pieces, chosen.kept, self.options.force_tokens)
                if marked is None:
                    break
                pieces = marked
                chosen = select(texts, pieces, priorities, order, job.budget, job.count, _SEPARATOR)
        if chosen.tokens > job.budget and job.strict:
            raise PromptError(
                f"budget: protected spans alone take {chosen.floor_tokens} tokens of {job.budget}; "
                f"raise the target to {chosen.floor_tokens} or relax policies= and roles="
            )
        status: Status = "compressed" if chosen.tokens <= job.budget else "protected"
        trace = Trace(
            tuple(texts),
            tuple(part.source for part in job.parts),
            chosen.text,
            tuple(chosen.slices),
            tuple(pieces),
            tuple(chosen.kept),
            tuple(raw),
            tuple(ranks),
            _SEPARATOR,
        )
        messages = rebuilt(job.messages, job.places, trace.outputs()) if job.messages is not None else None
        return CompressedPrompt(
            chosen.text, messages, chosen.tokens, job.total, chosen.floor_tokens, status, self.method, trace
        )

    def _order(self, job: _Job, units: list[Unit]) -> list[int]:
        order = list(range(len(job.parts)))
        ranked = [unit for unit in units if unit.rank is not None and job.parts[unit.part].document]
        if job.messages is not None or not ranked or not job.question:
            return order
        turns = are_turns([job.parts[unit.part].text for unit in ranked])
        how = "original" if self.order == "auto" and turns else self.order
        documents = [ranked[at].part for at in order_by_rank([unit.rank or 0 for unit in ranked], how)]
        before = [i for i in order if not job.parts[i].document and i < min(documents)]
        rest = [i for i in order if i not in before and i not in documents]
        return [*before, *documents, *rest]

    def _priorities(self, job: _Job, units: list[Unit], raw: list[np.ndarray]) -> list[np.ndarray]:
        """What the cut orders by: scores of the whole prompt on one scale from 0 to 1, moved by rank and by rules."""
        worth = [unit for unit in units if unit.worth]
        everything = [raw[unit.part][unit.first : unit.past] for unit in worth]
        scaled = [np.zeros(len(row)) for row in raw]
        if self._causal:
            sizes = [
                np.array([piece.end - piece.lead for piece in unit.row(job.pieces)], dtype=float) for unit in worth
            ]
            for unit, values in zip(worth, llmlingua.quantiles(everything, sizes), strict=True):
                scaled[unit.part][unit.first : unit.past] = values
        elif worth:
            flat = np.concatenate([*everything, np.zeros(0)])
            low, high = (float(x) for x in np.percentile(flat, [1, 99])) if len(flat) else (0.0, 0.0)
            for unit, found in zip(worth, everything, strict=True):
                values = (found - low) / (high - low) if high > low else found * 0
                scaled[unit.part][unit.first : unit.past] = np.clip(values, 0, 1)
        out = [
            values + np.array([piece.weight for piece in row], dtype=float)
            for values, row in zip(scaled, job.pieces, strict=True)
        ]
        kept = [unit.rank for unit in worth if unit.rank is not None]
        last = max(len(kept) - 1, 1)
        for unit in units:
            place = slice(unit.first, unit.past)
            text, row = job.parts[unit.part].text, unit.row(job.pieces)
            if job.question and self.method == "auto":
                out[unit.part][place] += 4 * relevance_of_sentences(text, row, job.question)
            if unit.rank is None:
                continue
            if not unit.worth:
                out[unit.part][place] -= 20.0 * (unit.rank + 2)
            elif self.method == "auto":
                out[unit.part][place] -= 20.0 * unit.rank  # whole documents in order of rank, the last one in part
            elif job.question:
                out[unit.part][place] += self.dynamic * (1 - 2 * unit.rank / last)
        return out


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_length(rate: object, target_tokens: object, max_tokens: object) -> None:
    """Raises PromptError unless they say how long the output may be."""
    if rate is None and target_tokens is None and max_tokens is None:
        raise PromptError("compress: give rate, target_tokens or max_tokens")
    if rate is not None and (target_tokens is not None or not _is_number(rate) or not 0 <= rate <= 1):  # type: ignore[operator]
        raise PromptError(f"compress: rate={rate!r} must lie in [0, 1] and stand without target_tokens")
    for name, value in (("target_tokens", target_tokens), ("max_tokens", max_tokens)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise PromptError(f"{name}: {value!r} is not a count of tokens")


def check_names(options: Mapping[str, Any], progress: object) -> None:
    """Raises PromptError for an option of `compress` that does not exist."""
    known = inspect.signature(Compressor._prepare).parameters
    for name in options:
        if name not in known:
            raise PromptError(f"compress: unknown option {name!r}; known: {', '.join(list(known)[1:])}, progress")
    if progress is not None and not callable(progress):
        raise PromptError(f"progress: {type(progress).__name__} is not a function of characters done and in all")


def list_of_texts(documents: object) -> list[str]:
    if isinstance(documents, (str, bytes, Mapping, Set)) or not isinstance(documents, Iterable):
        raise PromptError(f"documents: {type(documents).__name__} is not a list of texts")
    return list(documents)


def check_documents(keep: object, most: object, rates: object) -> None:
    """Raises PromptError unless they are indices, a count and rates."""
    if isinstance(keep, (str, bytes)) or not isinstance(keep, Collection) or not all(_is_count(at) for at in keep):
        raise PromptError(f"keep_documents: {keep!r:.60} is not a list of indices")
    if most is not None and not _is_count(most):
        raise PromptError(f"max_documents: {most!r:.60} is not a count")
    if rates is None:
        return
    if isinstance(rates, (str, bytes)) or not isinstance(rates, Sequence):
        raise PromptError(f"document_rates: {type(rates).__name__} is not a list of rates")
    for at, rate in enumerate(rates):
        if rate is not None and not (_is_number(rate) and 0 <= rate <= 1):
            raise PromptError(f"document_rates[{at}]: {rate!r:.60} is not a number from 0 to 1")


def _is_count(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def relevance_of(ranker: Ranker, question: str, texts: Sequence[str]) -> list[float]:
    """What the ranker says. Raises PromptError unless that is one number a text."""
    try:
        found = [float(score) for score in ranker.rank(readable(question), [readable(text) for text in texts])]
    except (TypeError, ValueError) as e:
        reason = (str(e).splitlines() or [""])[0]
        raise PromptError(f"ranker {ranker.name!r}: gave no list of numbers ({reason})") from e
    if len(found) != len(texts) or any(score != score for score in found):
        what = "a score that is no number" if len(found) == len(texts) else f"{len(found)} scores"
        raise PromptError(f"ranker {ranker.name!r}: gave {what} for {len(texts)} documents")
    return found


def _untagged(part: Part) -> Part:
    text, regions = parse_tags(part.text)
    return replace(part, text=text, regions=regions)


def _whole(job: _Job, method: str) -> CompressedPrompt:
    """The prompt as it is: it fits."""
    slices: list[Slice] = []
    at = 0
    for index, part in enumerate(job.parts):
        if index:
            slices.append(Slice(-1, 0, len(_SEPARATOR), at))
            at += len(_SEPARATOR)
        slices.append(Slice(index, 0, len(part.text), at))
        at += len(part.text)
    text = _SEPARATOR.join(part.text for part in job.parts)
    trace = Trace(
        tuple(part.text for part in job.parts),
        tuple(part.source for part in job.parts),
        text,
        tuple(slices),
        tuple(job.pieces),
        tuple(np.ones(len(row), dtype=bool) for row in job.pieces),
        tuple(np.zeros(len(row)) for row in job.pieces),
        tuple(np.full(len(row), -1) for row in job.pieces),
        _SEPARATOR,
    )
    messages = copied(job.messages) if job.messages is not None else None
    return CompressedPrompt(text, messages, job.total, job.total, 0, "unchanged", method, trace)


def _mark_repeats(
    texts: Sequence[str], pieces: list[list[Piece]], kept: Sequence[np.ndarray], force_tokens: Sequence[str]
) -> list[list[Piece]] | None:
    """Pieces with the later ones of equal forced tokens in a row marked to go; None if there is none."""
    found = False
    out = [list(row) for row in pieces]
    for text, row, mask in zip(texts, out, kept, strict=True):
        before = None
        for at in np.flatnonzero(mask):
            piece = row[at]
            body = text[piece.start : piece.end]
            if body == before and body in force_tokens and not piece.drop:
                row[at] = replace(piece, keep=False, drop=True, rule="repeated forced token")
                found = True
            before = body
    return out if found else None
