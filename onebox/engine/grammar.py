"""Grammars that constrain an answer. Takes a Grammar, gives a Matcher: which tokens may come next, as bits a token.

A constraint begins after the tokens `start_after` (the end of thinking), wherever in a window they land: before them
anything is allowed but the end of the answer, and letters that spell `start_after` in other tokens, which a reader
would take for it. What is allowed never depends on drafts, so neither does the text. llguidance does the matching; a
bare image without it serves everything else.

Text in a grammar is text: where it holds the name of a token such as `<tool_call>`, the name is spelled in letters.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebox.errors import RequestError
from onebox.request import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SOURCE = 400_000  # characters
MAX_CHOICES = 10_000
KEPT = 32  # compiled grammars
# one space, or a line and its indentation: without a bound, a model may write white space until its limit
WHITE_SPACE = r"[ ]|\n[ \t]{0,40}"
GAP = "start: GAP? @answer\nGAP: /\\n{1,2}/\n"  # the lines that models put between thinking and answer


class Spelling:
    """The tokens that would finish spelling a tag in letters, where the tag is a token of its own."""

    def __init__(self, tag: int, table: Seq[bytes]) -> None:
        """`table`: bytes of every token."""
        self._tag, self._text, self._table = tag, table[tag], table
        last = self._text[-1:]
        self._ends = [i for i, b in enumerate(table) if last in b and i != tag]
        self._masks: dict[tuple[int, ...], bytes] = {}

    @property
    def n_tokens(self) -> int:
        """Tokens said last that the tag's beginning may stand in."""
        return len(self._text)

    def without(self, allowed: bytes, said: Seq[int]) -> bytes:
        """`allowed`, always the same mask, less what would finish the tag after the tokens `said`."""
        tail = b"".join(self._table[t] for t in said if 0 <= t < len(self._table))
        begun = tuple(n for n in range(len(self._text)) if tail.endswith(self._text[:n]))
        if begun not in self._masks:
            left = [self._text[n:] for n in begun]
            found = [i for i in self._ends if self._text in self._table[i] or self._table[i].startswith(tuple(left))]
            forbidden = _bits(found, len(allowed))
            self._masks[begun] = bytes(a & ~f for a, f in zip(allowed, forbidden, strict=True)) if found else allowed
        return self._masks[begun]


@lru_cache(maxsize=4)
def spelling(tokenizer: LLTokenizer, tag: int) -> Spelling:
    return Spelling(tag, [tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size)])


class Matcher:
    """What one answer may say next. Holds the tokens said, and those looked at beyond them.

    `ahead` is always drafts: tokens after the last said one, as if they were said. Masks are remembered until `accept`,
    since drafting and verification ask for the same ones. Once `error` is set, nothing is constrained any more: the
    answer must be given up.
    """

    def __init__(
        self,
        grammar: LLMatcher,
        start_after: Seq[int] | None,
        eos: Seq[int],
        vocab: int,
        spelling: Spelling | None = None,
    ) -> None:
        """`spelling`: of a trigger that is one token."""
        self._grammar = grammar
        self._trigger = list(start_after or ())
        self._spelling = spelling
        self._begun = not self._trigger
        self._said: list[int] = []  # before the grammar begins: its last tokens, as many as the trigger may need
        self._n_said = max(len(self._trigger), spelling.n_tokens if spelling else 0)
        self._consumed: list[int] = []  # drafts that the grammar has taken
        self._masks: dict[tuple[int, ...], bytes | None] = {}
        self._n_bytes = (vocab + 7) // 8
        self._eos = frozenset(eos)
        self._ends = _bits(eos, self._n_bytes)
        self._open = bytes(0xFF ^ b for b in self._ends)
        self.error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing but the end may follow what was said."""
        if not self._begun or self.error or (self._consumed and self._consumed[0] not in self._eos):
            return False
        self._look(())
        return self._grammar.is_stopped()

    def mask(self, ahead: Seq[int] = ()) -> bytes | None:
        """Bits of the tokens that may follow, token i being bit i % 8 of byte i // 8; None when none may.

        Without drafts, none is a failure of this answer.
        """
        key = tuple(ahead)
        if key not in self._masks:
            self._masks[key] = self._mask(key)
        return self._masks[key]

    def accept(self, token: int) -> None:
        """The answer's next token. One that the mask did not allow is a failure of this answer."""
        self._masks.clear()
        if self.error:
            return
        if not self._begun:
            self._said = [*self._said, token][-self._n_said :]
            self._begun = self._triggers(())
            return
        if self._consumed[:1] == [token]:
            self._consumed.pop(0)
            return
        self._look(())
        if self._grammar.try_consume_tokens([token]) != 1:
            self._fail(_one_line(self._grammar.get_error()) or f"token {token} is not allowed where it was chosen")

    def cut(self, drafts: Seq[int]) -> list[int]:
        """The drafts that may be said and go on: up to the first that is not allowed."""
        mask = self.mask()
        for i, token in enumerate(drafts):
            if mask is None or not mask[token // 8] >> token % 8 & 1:
                return list(drafts[:i])
            mask = self.mask(drafts[: i + 1])
            if mask is None:
                return list(drafts[:i])
        return list(drafts)

    def _mask(self, ahead: tuple[int, ...]) -> bytes | None:
        if self.error:
            return None
        if not self._begun:
            n = next((i for i in range(1, 1 + len(ahead)) if self._triggers(ahead[:i])), None)
            if n is None:
                return self._spelling.without(self._open, [*self._said, *ahead]) if self._spelling else self._open
            ahead = ahead[n:]
        if not self._look(ahead) or self._grammar.is_stopped():
            mask = self._ends  # beyond the end, or a draft that cannot stand: only the end
        else:
            mask = self._grammar.compute_bitmask()[: self._n_bytes]
        if self._grammar.is_error():
            self._fail(_one_line(self._grammar.get_error()))
        elif not any(mask):
            if not self._consumed:
                self._fail("no token may follow what was said")
            return None
        return None if self.error else mask

    def _triggers(self, ahead: Seq[int]) -> bool:
        return [*self._said, *ahead][-len(self._trigger) :] == self._trigger

    def _look(self, ahead: Seq[int]) -> bool:
        """Bring the grammar to the tokens said and `ahead` of them. False: it does not allow them all."""
        same = 0
        while same < min(len(ahead), len(self._consumed)) and ahead[same] == self._consumed[same]:
            same += 1
        if len(self._consumed) > same:
            self._grammar.rollback(len(self._consumed) - same)
            del self._consumed[same:]
        rest = list(ahead[same:])
        n = self._grammar.try_consume_tokens(rest) if rest else 0
        self._consumed += rest[:n]
        return n == len(rest)

    def _fail(self, why: str) -> None:
        if "NoExtensionBias" in why:  # llguidance's word for it
            why = "nothing may follow what was said"
        self.error = f"The grammar cannot go on: {why}."


class Grammars:
    """Compiles grammars beside the step loop, so that a slow one delays nobody else, and keeps the last ones."""

    def __init__(self, tokenizer: Path, vocab: int, eos: Seq[int]) -> None:
        self._file, self._vocab, self._eos = tokenizer, vocab, tuple(eos)
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = Lock()  # of _compiled
        self._tokenizer: LLTokenizer | None = None  # of the compiling thread
        self._pool: ThreadPoolExecutor | None = None

    def get(self, grammar: Grammar) -> Matcher | None:
        """A fresh matcher, if this grammar was compiled before."""
        with self._lock:
            if grammar not in self._compiled:
                return None
            self._compiled.move_to_end(grammar)
            return self._matcher(grammar, self._compiled[grammar])

    def compile(self, grammar: Grammar) -> Future[Matcher]:
        """A matcher, or RequestError that names the fault. One thread: compiling takes turns."""
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="onebox-grammar")
        return self._pool.submit(self._compile, grammar)

    def _compile(self, grammar: Grammar) -> Matcher:
        if (matcher := self.get(grammar)) is not None:
            return matcher
        if self._tokenizer is None:
            self._tokenizer = make_tokenizer(self._file, self._vocab, self._eos)
        compiled = compile_grammar(grammar, self._tokenizer)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return self._matcher(grammar, compiled)

    def _matcher(self, grammar: Grammar, compiled: LLMatcher) -> Matcher:
        assert self._tokenizer is not None
        return new_matcher(compiled.deep_copy(), grammar, self._tokenizer, self._eos, self._vocab)


class PlainTokenizer:
    """What llguidance asks of a tokenizer. It encodes what a grammar leaves no choice about, to the byte: names of
    added tokens are text, and nothing is normalised."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, text: str, like: LLTokenizer) -> None:
        plain = json.dumps({**json.loads(text), "added_tokens": [], "normalizer": None})
        self._plain = type(like)(plain, eos_token=0)
        self.eos_token_id = like.eos_token
        self.tokens = [like.decode_bytes([i]) for i in range(like.vocab_size)]
        self.special_token_ids = [i for i in range(like.vocab_size) if like.is_special_token(i)]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._plain.tokenize_bytes(text if isinstance(text, bytes) else text.encode())


def make_tokenizer(file: Path, vocab: int, eos: Seq[int]) -> LLTokenizer:
    """llguidance's view of a tokenizer.json. Raises RequestError when either is missing."""
    try:
        from llguidance import LLTokenizer
    except ImportError as e:
        raise RequestError(
            "Structured output needs the package 'llguidance': pip install llguidance.", param="response_format"
        ) from e
    if not file.is_file():
        raise RequestError(
            f"Structured output needs a {file.name} beside the weights; this checkpoint has none.",
            param="response_format",
        )
    text = file.read_text("utf-8")
    given: Any = PlainTokenizer(text, LLTokenizer(text, n_vocab=vocab, eos_token=list(eos)))
    return LLTokenizer(given, n_vocab=vocab, eos_token=list(eos))


def make_matcher(grammar: Grammar, tokenizer: LLTokenizer) -> Matcher:
    """A matcher at its beginning. Raises RequestError that names what is wrong with the grammar."""
    compiled = compile_grammar(grammar, tokenizer)
    return new_matcher(compiled, grammar, tokenizer, tokenizer.eos_tokens, tokenizer.vocab_size)


def new_matcher(compiled: LLMatcher, grammar: Grammar, tokenizer: LLTokenizer, eos: Seq[int], vocab: int) -> Matcher:
    after = grammar.start_after
    spelled = spelling(tokenizer, after[0]) if after is not None and len(after) == 1 else None
    return Matcher(compiled, after, eos, vocab, spelled)


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Time and memory are bounded by the length of the source and llguidance's own limits. Raises RequestError."""
    from llguidance import LLMatcher, LLParserLimits

    if len(grammar.source) > MAX_SOURCE:
        raise _refusal(grammar, f"it has {len(grammar.source)} characters; at most {MAX_SOURCE}")
    limits = LLParserLimits(
        initial_lexer_fuel=1_000_000,  # 20 ms
        step_lexer_fuel=200_000,  # 15 ms
        step_max_items=50_000,
        max_items_in_row=20_000,  # 2,000 are too few for an object of 500 properties
        max_lexer_states=50_000,  # 2 kB each
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,  # they repeat the schema
    )
    try:
        compiled = LLMatcher(tokenizer, _llguidance_source(grammar), log_level=0, limits=limits)
    except RequestError:
        raise
    except Exception as e:  # a source that is no grammar at all
        raise _refusal(grammar, _one_line(str(e))) from e
    if compiled.is_error():
        raise _refusal(grammar, _one_line(compiled.get_error()))
    return compiled


def mask_logits(logits: Tensor, rows: Seq[tuple[Matcher | None, Seq[int]]]) -> Tensor:
    """Set to -inf, in each row of logits [R, V], what its matcher does not allow after its drafts.

    The same tensor when no row has a matcher, else a new one.
    """
    masked = [(i, mask) for i, (m, ahead) in enumerate(rows) if m is not None and (mask := m.mask(ahead)) is not None]
    if not masked:
        return logits
    index = torch.tensor([i for i, _ in masked], device=logits.device)
    data = torch.frombuffer(bytearray(b"".join(mask for _, mask in masked)), dtype=torch.uint8).view(len(masked), -1)
    bits = data.to(logits.device)[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    return logits.index_copy(0, index, logits[index].masked_fill(forbidden, float("-inf")))


def _llguidance_source(grammar: Grammar) -> str:
    """The grammar as llguidance's JSON list of grammars."""
    body: dict[str, object]
    match grammar.kind:
        case "json_object":
            body = {"json_schema": {"type": "object", "x-guidance": {"whitespace_pattern": WHITE_SPACE}}}
        case "json_schema":
            body = {"json_schema": _schema(grammar)}
        case "regex":
            from llguidance import regex_to_lark

            body = {"lark_grammar": f"start: /{regex_to_lark(grammar.source)}/"}
        case "choice":
            # one terminal: alternatives of a rule are followed one by one, and so have a limit
            body = {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(c) for c in _choices(grammar))}
        case "grammar":
            body = {"lark_grammar": _lark(grammar.source)}
    if not grammar.start_after:
        return json.dumps({"grammars": [body]})
    return json.dumps({"grammars": [{"lark_grammar": GAP}, {"name": "answer", **body}]})


def _schema(grammar: Grammar) -> dict[str, object]:
    try:
        schema = json.loads(grammar.source)
    except (ValueError, RecursionError) as e:
        raise _refusal(grammar, f"it is not JSON ({e})") from e
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise _refusal(grammar, "it must be a JSON object")
    return {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}


def _choices(grammar: Grammar) -> list[str]:
    try:
        choices = json.loads(grammar.source)
    except (ValueError, RecursionError) as e:
        raise _refusal(grammar, f"it is not JSON ({e})") from e
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise _refusal(grammar, "it must hold one or more strings, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise _refusal(grammar, f"it holds {len(choices)} strings; at most {MAX_CHOICES}")
    return choices


def _lark(source: str) -> str:
    """Lark as it is; GBNF, which names its rules with '::=', translated."""
    if "::=" not in source:
        return source
    from llguidance.gbnf_to_lark import gbnf_to_lark

    return gbnf_to_lark(source)


def _refusal(grammar: Grammar, why: str) -> RequestError:
    kind = {"grammar": "grammar", "choice": "list of choices", "regex": "regular expression"}.get(grammar.kind)
    return RequestError(f"The {kind or 'JSON schema'} cannot be used: {why}.", param="response_format")


def _one_line(text: str) -> str:
    """An error message of several lines as one, without the source it points into."""
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not set(line) <= {"^", "~", " ", "|"} and "|" not in line[:6]]
    return "; ".join(kept)[:300].rstrip(". ")


def _bits(tokens: Seq[int], n_bytes: int) -> bytes:
    bits = bytearray(n_bytes)
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)
