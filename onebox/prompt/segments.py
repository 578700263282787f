"""Text -> pieces. Takes any text, gives the smallest spans that may be dropped, in order, covering every
character that is not whitespace exactly once. Numbers, dates, links, names in code and grapheme clusters are never cut.

Three fields tie pieces together, so that any selection which honours them is well-formed:

    bond    pieces with one bond are kept or dropped as one (an opening and its closing tag)
    needs   the bond that must be kept if this piece is kept (a comma and its word, a word and its negation)
    pulls   True: keeping this piece keeps what it needs. False: dropping what it needs drops this piece

`structures.py` adds the pieces of blocks (code, JSON, tags, tables, YAML, logs); this file reads running text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import regex

from onebox.errors import PromptError

Policy = Literal["keep", "atomic", "inside", "drop"]
POLICIES: tuple[Policy, ...] = ("keep", "atomic", "inside", "drop")

#: What each recognised kind of span does unless the caller says otherwise.
DEFAULT_POLICIES: dict[str, Policy] = {
    "code": "keep",
    "inline_code": "atomic",
    "link": "atomic",
    "url": "atomic",
    "email": "atomic",
    "number": "atomic",
    "date": "atomic",
    "citation": "atomic",
    "path": "atomic",
    "identifier": "atomic",
    "name": "atomic",
    "special": "atomic",
    "json": "inside",
    "xml": "inside",
    "yaml": "inside",
    "table": "inside",
    "log": "inside",
    "rule": "keep",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Half-open character range [start, end) of one part; whitespace before it, [lead, start), is not in it."""

    start: int
    end: int
    kind: str
    lead: int
    keep: bool = False
    drop: bool = False
    bond: int = -1
    needs: int = -1
    pulls: bool = False
    weight: float = 0.0  # added to the score: below zero for what repeats, above for what a reader looks for
    rule: str = ""
    sentence: int = 0
    same: int = -1  # bond of an earlier piece that this one repeats: copies that go are counted behind it


@dataclass(slots=True)
class Bonds:
    """Gives fresh bond ids: one counter for a whole prompt, so ids never clash between its parts."""

    next_id: int = 0

    def new(self) -> int:
        self.next_id += 1
        return self.next_id - 1


@dataclass(frozen=True)
class Options:
    """How text is cut: a policy for each kind, strings never to drop, and whether directives are protected."""

    policies: Mapping[str, Policy] = field(default_factory=lambda: dict(DEFAULT_POLICIES))
    force_tokens: tuple[str, ...] = ()
    keep_digits: bool = False
    keep_rules: bool = True
    code_language: str | None = None

    def policy(self, kind: str) -> Policy:
        return self.policies.get(kind, "inside")


def resolve_policies(overrides: Mapping[str, Policy] | None) -> dict[str, Policy]:
    """Defaults with the caller's overrides. Raises PromptError for an unknown kind or policy."""
    merged = dict(DEFAULT_POLICIES)
    if overrides is not None and not isinstance(overrides, Mapping):
        raise PromptError(f"policies: {type(overrides).__name__} is not a mapping of kinds to policies")
    for kind, policy in (overrides or {}).items():
        if kind not in merged:
            raise PromptError(f"policies: unknown kind {kind!r}; known kinds: {', '.join(sorted(merged))}")
        if policy not in POLICIES:
            raise PromptError(f"policies[{kind!r}]: unknown policy {policy!r}; use one of {', '.join(POLICIES)}")
        merged[kind] = policy
    return merged


_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?"
    r"|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_UNIT = (
    r"(?:%|‰|°[CFK]?|[kKMGTP]i?[Bb](?:/s|ps)?|[kMG]?bps|[kMGT]?Hz|km/h|mph|m/s|(?:[munpkcd]?[mgslLVAWJN]|k?cal|mol|kWh|MW|GW|"
    r"ms|min|mins|hrs?|hours?|days?|weeks?|months?|years?|secs?|seconds?|minutes?|ft|in(?=[.,;:)x×]|\s*$)|lbs?|oz|px|pt|tokens?|bytes?|"
    r"percent|million|billion|trillion|thousand|dozen|degrees?|people|miles?|meters?|metres?|tons?|tonnes?|USD|EUR|GBP|JPY|CNY|CHF|BTC)"
    r"(?:/(?:[munk]?[mgslL]|kg|h|s|day|year|month|hour|min|second|token))?(?![\p{L}\p{N}_]))"
)
_CJK_UNIT = r"[年月日时時分秒点點万萬亿億元円岁歳人个個件本名回度倍兆千百％]"
_NUM = r"\d(?:[\d]|[,.'’\u202f\u00a0]\d)*+"
_W = r"[\p{Latin}\p{Greek}\p{Cyrillic}\p{N}_]"
# Scripts written without spaces: a piece is a grapheme (a Thai leading vowel stays with its consonant).
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"

# One alternative a kind, most specific first. Quantifiers are bounded or possessive: a hostile line costs linear time.
_SCAN = regex.compile(
    r"(?P<special><\|[^|<>\s]{1,40}\|>|</?s>|\[(?:SEP|CLS|PAD|MASK|UNK|NEW\d{1,3})\])"
    r"|(?P<link>!?\[[^\[\]\n]{0,400}\]\((?:[^()\s]|\([^()\s]{0,200}\)){1,1000}(?:\s+\"[^\"\n]{0,200}\")?\)|<https?://[^\s<>]{1,1000}>)"
    r"|(?P<inline_code>``[^\n]{1,400}?``|`[^`\n]{1,400}`)"
    r"|(?P<url>(?:(?:https?|ftp|file|wss?|s3|ssh|git)://|www\.)[^\s<>\"'`\\^{}|\p{Han}]{1,2000}(?<![.,;:!?)\]]))"
    r"|(?P<email>(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,5})"
    r"|(?P<date>\d{4}[-/]\d{1,2}[-/]\d{1,2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?"
    r"(?:\s?Z|\s?[+-]\d{2}:?\d{2})?)?(?!\d)"
    r"|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}(?![\d.])"
    r"|(?:\d{1,2}(?:st|nd|rd|th)?\s(?:of\s)?)?\b" + _MONTH + r"\b\.?\s\d{1,2}(?:st|nd|rd|th)?(?!\d)(?:,?\s\d{4})?"
    r"|\d{1,2}(?:st|nd|rd|th)?\s(?:of\s)?" + _MONTH + r"\b\.?(?:,?\s\d{4})?|\b" + _MONTH + r"\.?\s\d{4}\b"
    r"|\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?:\s?[aApP]\.?[mM]\b\.?)?)"
    r"|(?P<citation>\[\d{1,3}(?:\s?[,–-]\s?\d{1,3}){0,20}\]|\[@[\w:.-]{1,80}\]|\((?:\p{Lu}[\w'’-]{1,40})"
    r"(?:\set\sal\.?|\s(?:and|&)\s\p{Lu}[\w'’-]{1,40})?,?\s\d{4}[a-z]?\)|\b10\.\d{4,9}/[^\s\"<>]{1,200}(?<![.,;)])"
    r"|\barXiv:\d{4}\.\d{4,5}(?:v\d+)?)"
    r"|(?P<path>(?<![\w/])(?:[A-Za-z]:\\[^\s\"<>|*?]{1,400}|(?:~|\.{1,2})?/(?:[\w.@%+-]{1,200}/){0,40}[\w.@%+-]{1,200}(?<![.])/?"
    r"|[\w.@-]{1,200}(?:/[\w.@-]{1,200}){1,40}\.\w{1,8}\b))"
    r"|(?P<identifier>(?<![\w-])--?[A-Za-z][\w-]{0,60}(?:=[^\s]{1,200})?"
    r"|[@#]"
    + _W
    + r"{1,100}+(?:[-./]"
    + _W
    + r"{1,100}+){0,8}+|\$[A-Za-z_]"
    + _W
    + r"{0,100}|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
    r"|\b[\p{Latin}_]" + _W + r"{0,100}+(?:(?:::|->|[._:/-])" + _W + r"{1,100}+){1,20}+(?:\(\))?"
    r"|\b\p{Latin}{1,20}[-_]?\d(?:" + _W + r"|-(?=" + _W + r")){0,60}|\b" + _W + r"{1,60}_" + _W + r"{1,60}(?:\(\))?"
    r"|(?<!" + _W + r")\d{1,10}(?=[A-Z\d]{0,40}[A-Z][A-Z\d]{0,40}\d)[A-Z\d]{5,40}(?!" + _W + r")"
    r"|\b\p{Ll}{1,40}\p{Lu}" + _W + r"{0,60}(?:\(\))?)"
    r"|(?P<number>(?:(?:US|C|A|HK)?[$€£¥₹₩₽]|\b(?:USD|EUR|GBP|JPY|CNY|CHF|RMB|Rs\.?)\s?)\s?-?" + _NUM + r"(?:\s?"
    r"(?:[kKmMbB]n?\b|thousand\b|million\b|billion\b|trillion\b))?(?:\s?(?:/|per\s)\w{1,20})?"
    r"|(?<!"
    + _W
    + r"|\.)[-+−±]?"
    + _NUM
    + r"(?:[eE][-+]?\d+)?(?:(?:\s?[-–×x:/^]\s?)"
    + _NUM
    + r"){0,6}(?:"
    + _CJK_UNIT
    + r"{1,4}|"
    r"(?:st|nd|rd|th|s|x)\b|\s?(?:" + _UNIT + r")|\s?[€£¥₹₩₽])?(?:\s(?:million|billion|trillion|percent)\b)?)"
    r"|(?P<unspaced>(?:[เแโใไ](?=\p{Thai}))?[" + _UNSPACED + r"]\p{M}*)"
    r"|(?P<katakana>[\p{Katakana}ー]{1,24}+)"
    r"|(?P<word>(?:(?![" + _UNSPACED + r"\p{Katakana}])[\w\p{M}])"
    r"(?:(?!["
    + _UNSPACED
    + r"\p{Katakana}])[\w\p{M}\u200c\u200d]|(?:['’.·-]|&(?![A-Za-z]\w{1,30};))(?=\p{L}(?!\s*$))){0,2000}+)"
    r"|(?P<entity>&(?:[A-Za-z]\w{1,30}|#\d{1,7}|#[xX][0-9A-Fa-f]{1,6});)"
    r"|(?P<cmp>[<>≤≥≠=!]=?=?|[≤≥≠≈]|&&|\|\|)"
    r"|(?P<end>[.!?。！？…؟۔।॥]++)"
    r"|(?P<sep>[,;:，、；：،؛]++)"
    r"|(?P<open>[(\[{“‘«¿¡「『（【《〈]|(?<!\S)[\"'])"
    r"|(?P<close>[)\]}”’»」』）】》〉]|[\"'])"
    r"|(?P<rule_line>[-=_*#~]{2,})"
    r"|(?P<other>\X)",
    regex.DOTALL,
)
_SPACE = regex.compile(r"\s+")
_GRAPHEME = regex.compile(r"\X")
_LONG_CONCLUSION = 120  # characters; a longer sentence is cut like any other
_LONG_RUN = 512  # a run of letters longer than this is no word; it is cut every _RUN_CUT graphemes
_RUN_CUT = 32

_ABBREVIATIONS = frozenset(
    "dr mr mrs ms prof st jr sr vs etc inc ltd co corp no vol fig eq e.g i.e a.m p.m u.s u.k approx dept est".split()  # noqa: SIM905
)
_NEGATIONS = frozenset(
    [
        "not",
        "no",
        "never",
        "none",
        "neither",
        "nor",
        "cannot",
        "without",
        "unless",
        "except",
        "nothing",
        "nobody",
        "hardly",
        "barely",
        "nicht",
        "kein",
        "keine",
        "keinen",
        "keiner",
        "keines",
        "nie",
        "niemals",
        "ohne",
        "außer",
        "ne",
        "pas",
        "jamais",
        "sans",
        "sauf",
        "sin",
        "nunca",
        "ningún",
        "ninguna",
        "не",
        "нет",
        "нельзя",
        "никогда",
        "без",
        "لا",
        "لن",
        "لم",
        "ليس",
        "بدون",
        "नहीं",
        "मत",
        "न",
        "बिना",
    ]
)
_MODALS = frozenset("must shall should may might can could cannot will would muss darf soll sollte kann".split())  # noqa: SIM905
_COMPARE_PHRASE = regex.compile(
    r"(?:at\s(?:most|least)|no\s(?:more|less|fewer|later|earlier)\sthan|(?:more|less|fewer|greater|higher|lower|larger|smaller|later|earlier)"
    r"\sthan|(?:up|only|prior|equal)\sto|not\sexceed(?:ing)?|(?:above|below|under|over|within|before|after|until|only\sif|if\sand\sonly\sif)"
    r"|mindestens|höchstens|weniger\sals|mehr\sals)(?!\w)",
    regex.IGNORECASE,
)
_UNSPACED_NEGATION = frozenset("不没沒无無非未勿禁")
# A directive of the prompt's own author: dropping one changes what the model is allowed to do.
_DIRECTIVE = regex.compile(
    r"\s*(?:[-*•]\s+|\d+[.)]\s+)?(?:(?:please\s+)?(?:never|always|do\s+not|don['’]?t|under\s+no\s+circumstances|only\s+(?:answer|reply|respond|use|return|output)|"
    r"make\s+sure|ensure\s+that|refuse\s+to)\b|(?:you|the\s+assistant)\s+(?:must|shall|should|may|can)(?:\s+(?:not|never|only|always)|not|n['’]t)?\b"
    r"|if\s+(?:you\s+(?:are|do|don['’]?t|cannot|can['’]?t|feel)\s+|you['’]re\s+)?(?:unsure|uncertain|not\s+sure|in\s+doubt|not\s+know|know|not\s+certain|asked|unable)\b"
    r"|when\s+(?:unsure|in\s+doubt|asked)\b|say\s*:|(?:answer|reply|respond)\s+(?:only|with|in)\b"
    r"|(?:niemals|nie|immer|verwende\s+nie)\b|(?:不要|必须|禁止|请勿|务必|切勿|永远不))",
    regex.IGNORECASE,
)

# What a text comes to: the last thing to go of a worked example.
_CONCLUSION = regex.compile(
    r"\s*(?:####|(?:(?:so|thus|hence|therefore|finally|also|in\s(?:conclusion|short|summary|total))\b,?\s+)?(?:(?:the|my|our|die|la|le)\s+)?"
    r"(?:(?:final|correct|right|short)\s+)?(?:answers?|results?|solution|conclusion|verdict|decision|antwort|ergebnis|réponse|respuesta)"
    r"(?:\s+(?:is|was|are|ist|lautet|est|es)\b|\s*[:=])|(?:答案|答|結論|结论)[是为為は:：])",
    regex.IGNORECASE,
)


def scan(text: str, start: int, end: int) -> Iterator[tuple[int, int, str]]:
    """(start, end, kind) of each token of text[start:end]; whitespace is skipped."""
    position = start
    while position < end:
        space = _SPACE.match(text, position, end)
        if space:
            position = space.end()
            continue
        found = _SCAN.match(text, position, end)
        if found is None:  # pragma: no cover - `other` matches any character
            raise AssertionError(f"no token at {position}")
        stop = found.end()
        kind = found.lastgroup or "other"
        if kind == "word" and stop - position > _LONG_RUN:
            yield from _cut_run(text, position, stop)
        else:
            yield position, stop, kind
        position = stop


def _cut_run(text: str, start: int, end: int) -> Iterator[tuple[int, int, str]]:
    marks = [*[match.start() for match in _GRAPHEME.finditer(text, start, end)][::_RUN_CUT], end]
    for left, right in pairwise(marks):
        yield left, right, "word"


def grapheme_starts(text: str) -> np.ndarray:
    """Boolean [len(text) + 1]: True where a grapheme cluster starts (and at the end)."""
    starts = np.zeros(len(text) + 1, dtype=bool)
    if text.isascii() and "\r\n" not in text:
        starts[:] = True
        return starts
    starts[[match.start() for match in _GRAPHEME.finditer(text)]] = True
    starts[len(text)] = True
    return starts


def text_pieces(
    text: str, start: int, end: int, bonds: Bonds, options: Options, *, needs: int = -1, pulls: bool = False
) -> list[Piece]:
    """Pieces of running text[start:end]. `needs`/`pulls` tie all of them to an enclosing bond (a tag, a table row)."""
    whole = grapheme_starts(text[start:end])
    tokens: list[tuple[int, int, str]] = []
    for left, right, kind in scan(text, start, end):
        if tokens and not whole[left - start]:
            tokens[-1] = (tokens[-1][0], right, tokens[-1][2])
        else:
            tokens.append((left, right, kind))
    return _tie(text, start, tokens, bonds, options, needs, pulls)


def _tie(
    text: str,
    start: int,
    tokens: list[tuple[int, int, str]],
    bonds: Bonds,
    options: Options,
    needs: int,
    pulls: bool,
) -> list[Piece]:
    """Tokens -> pieces: joins names, binds operators to operands, hangs punctuation on its word, numbers sentences."""
    pieces: list[Piece] = []
    lead = start
    sentence = 0
    previous_bond = -1
    open_marks: list[int] = []  # opening marks wait for the word they belong to
    for index, (left, right, kind) in enumerate(tokens):
        gap = text[lead:left]
        if "\n" in gap and pieces:
            sentence += 1
        policy = options.policy(kind)
        if kind in DEFAULT_POLICIES and policy == "inside":
            kind = "word"
        piece = Piece(left, right, kind, lead, bond=bonds.new(), needs=needs, pulls=pulls, sentence=sentence)
        if kind in DEFAULT_POLICIES and policy in ("keep", "drop"):
            piece = replace(piece, keep=policy == "keep", drop=policy == "drop", rule=f"{kind}: {policy}")
        if kind in ("sep", "close") and previous_bond >= 0 and left == lead:
            piece = replace(piece, needs=previous_bond, pulls=False)
        elif kind == "open":
            open_marks.append(index)
        pieces.append(piece)
        if kind not in ("sep", "close", "open", "end"):
            for mark in open_marks:
                pieces[mark] = replace(pieces[mark], needs=piece.bond, pulls=False)
            open_marks.clear()
            previous_bond = piece.bond
        elif kind == "end":
            open_marks.clear()
            if not _abbreviation(text, pieces, left, right):
                sentence += 1
        lead = right
    _bind_names(text, pieces)
    _bind_operators(text, pieces)
    _bind_joints(text, pieces)
    if options.force_tokens or options.keep_digits:
        _force(text, pieces, options)
    if options.keep_rules and options.policy("rule") == "keep":
        _keep_directives(text, pieces)
    _raise_conclusions(text, pieces)
    return pieces


def _abbreviation(text: str, pieces: list[Piece], left: int, right: int) -> bool:
    if text[left:right] != "." or len(pieces) < 2:
        return False
    word = text[pieces[-2].start : pieces[-2].end].lower()
    return pieces[-2].end == left and (word in _ABBREVIATIONS or (len(word) == 1 and word.isalpha()))


def _bind_names(text: str, pieces: list[Piece]) -> None:
    """Runs of capitalised words ("Wilhelm Conrad Röntgen") share a bond: half a name names nobody."""
    run: list[int] = []

    def close() -> None:
        if len(run) > 1:
            bond = pieces[run[0]].bond
            for position in run:
                pieces[position] = replace(
                    pieces[position], bond=bond, kind="name", rule=pieces[position].rule or "name"
                )
        run.clear()

    first_of_sentence = -1
    for index, piece in enumerate(pieces):
        if piece.sentence != first_of_sentence:
            close()
            first_of_sentence = piece.sentence
        head = text[piece.start]
        joined = not run or (piece.start - pieces[run[-1]].end == 1 and text[piece.lead : piece.start] == " ")
        if piece.kind in ("word", "identifier") and head.isupper() and joined and len(run) < 6:
            run.append(index)
        elif (
            run
            and piece.kind == "word"
            and text[piece.start : piece.end] in ("of", "de", "von", "van", "der", "la")
            and joined
        ):
            follower = pieces[index + 1] if index + 1 < len(pieces) else None
            if follower and follower.kind == "word" and text[follower.start].isupper() and len(run) < 5:
                run.append(index)
            else:
                close()
        else:
            close()
            if piece.kind == "word" and head.isupper():
                run.append(index)
    close()


def _bind_operators(text: str, pieces: list[Piece]) -> None:
    """Negations, modals and comparisons: the operator is bonded to its operand, and every later word of the clause
    needs (and pulls) that bond, so an operand never stands without its operator."""
    index = 0
    n = len(pieces)
    while index < n:
        stop = _operator_end(text, pieces, index)
        if stop == index:
            index += 1
            continue
        first = index
        if pieces[index].kind == "cmp" and index > 0 and pieces[index - 1].kind not in ("end", "sep", "open", "close"):
            first = index - 1  # `a < b`: both sides
        last = stop
        while last < n and pieces[last].sentence == pieces[index].sentence and _operator_end(text, pieces, last) > last:
            last = _operator_end(text, pieces, last)  # "must not", "should never be less than"
        if (
            last < n
            and pieces[last].sentence == pieces[index].sentence
            and pieces[last].kind not in ("end", "sep", "close")
        ):
            last += 1
        operand = pieces[last - 1]
        if operand.kind == "name" and last < n and pieces[last].bond == operand.bond:
            while last < n and pieces[last].bond == operand.bond:
                last += 1
        bond = pieces[first].bond
        if bond in (operand.bond,) and last - first == 1:
            index = last
            continue
        for position in range(first, last):
            pieces[position] = replace(pieces[position], bond=bond, rule="operator with operand")
        for position in range(last, min(last + 40, n)):  # the rest of the clause is the operator's scope
            piece = pieces[position]
            if piece.kind in ("end", "sep") or piece.sentence != pieces[first].sentence:
                break
            if piece.needs < 0 and piece.bond != bond:
                pieces[position] = replace(piece, needs=bond, pulls=True)
        index = last


_MARKS = frozenset(("other", "sep", "end", "open", "close", "cmp", "rule_line"))
_COMPOUND = frozenset("-.\u2010\u2011/°·+&_'’*×")


def _bind_joints(text: str, pieces: list[Piece]) -> None:
    """A mark that alone keeps two words apart ("influences—such") stays with the word before it, and what it makes one
    word of ("31-member", "0°N") goes as one: dropping it would make a word that nobody wrote."""
    joined: dict[int, int] = {}
    left = -1  # the last piece that is no mark, while no whitespace has come since
    for index, piece in enumerate(pieces):
        if piece.lead != piece.start:
            left = -1
        if piece.kind in _MARKS:
            continue
        if 0 <= left < index - 1 and text[pieces[left].end - 1].isalnum() and text[piece.start].isalnum():
            run, before = range(left + 1, index), pieces[left]
            bond = joined.get(before.bond, before.bond)
            closing = next((at for at in run if pieces[at].kind != "open"), None)
            if len(run) == 1 and text[pieces[left + 1].start : pieces[left + 1].end] in _COMPOUND:
                joined[piece.bond] = bond
                pieces[left + 1] = replace(
                    pieces[left + 1], bond=bond, needs=pieces[left].needs, pulls=pieces[left].pulls
                )
            elif closing is not None:
                pieces[closing] = replace(
                    pieces[closing], bond=bond, needs=pieces[left].needs, pulls=pieces[left].pulls
                )
            else:
                pieces[index - 1] = replace(pieces[index - 1], bond=piece.bond, needs=piece.needs, pulls=piece.pulls)
        left = -1 if piece.kind == "unspaced" else index
    if joined:
        for index, piece in enumerate(pieces):
            if piece.bond in joined or piece.needs in joined:
                bond, needs = joined.get(piece.bond, piece.bond), joined.get(piece.needs, piece.needs)
                pieces[index] = replace(piece, bond=bond, needs=-1 if needs == bond else needs)


def _operator_end(text: str, pieces: list[Piece], index: int) -> int:
    """Index past the operator that starts at `index`, or `index` if none does."""
    piece = pieces[index]
    if piece.kind == "cmp":
        return index + 1
    word = text[piece.start : piece.end].lower()
    if piece.kind == "unspaced":
        return index + 1 if word in _UNSPACED_NEGATION else index
    if piece.kind not in ("word", "name", "identifier"):
        return index
    phrase = _COMPARE_PHRASE.match(text, piece.start, min(piece.start + 40, len(text)))
    if phrase:
        end = index
        while end < len(pieces) and pieces[end].start < phrase.end():
            end += 1
        if end < len(pieces) and (pieces[end].kind == "number" or " " in phrase.group()):
            return end
    if word in _NEGATIONS or word in _MODALS or word.endswith(("n't", "n’t")):
        return index + 1
    return index


def _force(text: str, pieces: list[Piece], options: Options) -> None:
    forced = [token for token in options.force_tokens if token.strip()]
    for index, piece in enumerate(pieces):
        body = text[piece.start : piece.end]
        if options.keep_digits and any(character.isdigit() for character in body):
            pieces[index] = replace(piece, keep=True, rule="digits reserved")
        elif body in forced:
            pieces[index] = replace(piece, keep=True, rule="forced token")
    spaced = [token for token in forced if len(token.split()) > 1 or not token.isalnum()]
    for token in spaced:
        at = text.find(token)
        while at >= 0:
            for index, piece in enumerate(pieces):
                if piece.start < at + len(token) and piece.end > at:
                    pieces[index] = replace(piece, keep=True, rule="forced token")
            at = text.find(token, at + len(token))


def _keep_directives(text: str, pieces: list[Piece]) -> None:
    begin = 0
    after_directive = False
    for index in range(1, len(pieces) + 1):
        if index < len(pieces) and pieces[index].sentence == pieces[begin].sentence:
            continue
        sentence = text[pieces[begin].start : pieces[index - 1].end]
        found = _DIRECTIVE.match(sentence) is not None
        # "If unsure say: I don't know." is one sentence; `Say:` on its own carries the next one along.
        if found or after_directive:
            for position in range(begin, index):
                pieces[position] = replace(pieces[position], keep=True, rule="directive")
        after_directive = found and sentence.rstrip().endswith(":")
        begin = index


def _raise_conclusions(text: str, pieces: list[Piece]) -> None:
    """A sentence that gives the answer is one piece with a bonus: half of "The answer is 18." says nothing."""
    begin = 0
    for index in range(1, len(pieces) + 1):
        if index < len(pieces) and pieces[index].sentence == pieces[begin].sentence:
            continue
        first, last = pieces[begin], pieces[index - 1]
        if last.end - first.start <= _LONG_CONCLUSION and _CONCLUSION.match(text, first.start, last.end):
            for position in range(begin, index):
                piece = pieces[position]
                pieces[position] = replace(
                    piece,
                    bond=first.bond,
                    needs=first.needs,
                    pulls=first.pulls,
                    weight=1.0,
                    rule=piece.rule or "conclusion",
                )
        begin = index
