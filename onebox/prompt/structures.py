"""Text -> pieces, block structure first. Takes one part of a prompt, gives its pieces so that every selection that
honours bonds stays well-formed: fences closed, tags balanced, JSON valid, tables with their header."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import regex

from onebox.prompt.code import LANGUAGES, code_pieces
from onebox.prompt.lines import is_yaml, log_pieces, log_regions, yaml_pieces
from onebox.prompt.segments import Bonds, Options, Piece, text_pieces

_FENCE = regex.compile(r"^[ ]{0,3}(```+|~~~+)[^\n]*\n(?:.*?\n)??[ ]{0,3}\1[ \t]*$", regex.MULTILINE | regex.DOTALL)
_TAG = regex.compile(
    r"<(?P<close>/)?(?P<name>[A-Za-z][\w:.-]{0,60})"
    r"(?:\s+[\w:@.-]{1,60}+(?:\s*+=\s*+(?:\"[^\"<]{0,2000}\"|'[^'<]{0,2000}'|[^\s\"'<>=]{1,500}+))?+)*+\s*+(?P<void>/)?>"
)
_ISLAND = regex.compile(
    r"(?P<comment><!--.*?-->)|(?P<section><!\[CDATA\[.*?\]\]>)|(?P<declaration><\?.*?\?>|<![A-Za-z][^<>]{0,500}>)"
    r"|(?P<script><(script|style|pre|textarea)\b[^<>]{0,1000}>.*?</\5\s*>)",
    regex.DOTALL | regex.IGNORECASE,
)
_ISLAND_WEIGHT = {"comment": -2.0, "section": 0.0, "declaration": -1.0, "script": 0.0}
_TABLE = regex.compile(
    r"(?:^[ ]*\|?[^\n]*\|[^\n]*\n)[ ]*\|?[ ]*:?-{2,}:?[ ]*(?:\|[ ]*:?-{2,}:?[ ]*)*\|?[ ]*$", regex.MULTILINE
)
_JSON_TOKEN = regex.compile(r'"(?:[^"\\]|\\.)*+"|-?\d[\d.eE+-]*+|true|false|null|[{}\[\]:,]')


def pieces_of(text: str, bonds: Bonds, options: Options) -> list[Piece]:
    """All pieces of `text`, in order; together with the whitespace between them they cover it exactly."""
    if options.policy("json") == "inside" and _is_json(text):
        return _json_pieces(text, 0, len(text), bonds, options)
    if options.code_language is not None and options.policy("code") == "inside":
        whole = _body_pieces(text, 0, len(text), options.code_language, bonds, options, -1)
        if whole is not None:
            return _renumber(text, whole)
    if options.policy("yaml") == "inside" and is_yaml(text):
        whole = yaml_pieces(text, 0, len(text), bonds, options, keep=True)
        if whole is not None:
            return _renumber(text, whole)
    pieces: list[Piece] = []
    position = 0
    for fence in _FENCE.finditer(text):
        pieces += _plain_pieces(text, position, fence.start(), bonds, options)
        pieces += _fence_pieces(text, fence, bonds, options, pieces[-1] if pieces else None)
        position = fence.end()
    pieces += _plain_pieces(text, position, len(text), bonds, options)
    return _renumber(text, pieces)


def _fence_pieces(text: str, fence: Any, bonds: Bonds, options: Options, before: Piece | None) -> list[Piece]:
    """A fenced block: whole by the policy of code, or its two fences and the pieces between them."""
    policy = options.policy("code")
    start, end = fence.span()
    lead, sentence = (before.end, before.sentence + 1) if before else (0, 0)
    bond = bonds.new()
    opening = text.find("\n", start, end)
    closing = text.rfind("\n", start, end)
    words = text[start:opening].strip().lstrip("`~").split()
    if policy == "inside" and closing > opening:
        language = words[0].lower().strip("{}.") if words else ""
        inner = _body_pieces(text, opening + 1, closing, language, bonds, options, bond)
        if inner:
            first = Piece(start, opening, "code", lead, bond=bond, weight=-2.0, rule="fence", sentence=sentence)
            return [first, *inner, Piece(closing + 1, end, "code", inner[-1].end, bond=bond, weight=-2.0, rule="fence")]
    keep, drop = policy == "keep", policy == "drop"
    return [Piece(start, end, "code", lead, keep=keep, drop=drop, bond=bond, rule=f"code: {policy}", sentence=sentence)]


def _body_pieces(
    text: str, start: int, end: int, language: str, bonds: Bonds, options: Options, outer: int
) -> list[Piece] | None:
    """Pieces of text in a known language; None where it is unknown or does not parse, so that it stays whole."""
    if language in LANGUAGES:
        return code_pieces(text, start, end, LANGUAGES[language], bonds, outer)
    if language == "json" and options.policy("json") == "inside" and _is_json(text[start:end]):
        return _json_pieces(text, start, end, bonds, options, outer)
    if language in ("yaml", "yml") and options.policy("yaml") == "inside":
        return yaml_pieces(text, start, end, bonds, options, keep=False, outer=outer)
    if (
        language in ("log", "console", "text", "")
        and options.policy("log") == "inside"
        and log_regions(text, start, end)
    ):
        return log_pieces(text, start, end, bonds, outer)
    return None


def _plain_pieces(text: str, start: int, end: int, bonds: Bonds, options: Options) -> list[Piece]:
    """Text outside fences: logs by lines, the rest as markup and prose."""
    pieces: list[Piece] = []
    position = start
    for first, last in log_regions(text, start, end) if options.policy("log") == "inside" else ():
        pieces += _markup_pieces(text, position, first, bonds, options)
        pieces += log_pieces(text, first, last, bonds)
        position = last
    return pieces + _markup_pieces(text, position, end, bonds, options)


def _renumber(text: str, pieces: list[Piece]) -> list[Piece]:
    """Leads and sentence numbers that run through the whole text, and later copies of one line marked down."""
    out: list[Piece] = []
    sentence = 0
    before: int | None = None
    lead = 0
    for piece in pieces:
        if before is not None and (piece.sentence != before or "\n" in text[lead : piece.start]):
            sentence += 1
        before = piece.sentence
        out.append(replace(piece, lead=lead, sentence=sentence))
        lead = piece.end
    seen: set[str] = set()
    first = 0
    for index in range(1, len(out) + 1):
        if index < len(out) and out[index].sentence == out[first].sentence:
            continue
        line = text[out[first].start : out[index - 1].end]
        shape = regex.sub(r"\d+", "0", line)
        if index - first >= 4 and shape in seen:
            for position in range(first, index):
                out[position] = replace(out[position], weight=-1.0, rule=out[position].rule or "repeated line")
        seen.add(shape)
        first = index
    return out


def _is_json(text: str) -> bool:
    if text.lstrip()[:1] not in ("{", "["):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json_pieces(text: str, start: int, end: int, bonds: Bonds, options: Options, outer: int = -1) -> list[Piece]:
    """Valid JSON: keys, scalars and the first element of every array stay; later elements go whole, with their comma;
    words inside string values go one by one, never splitting an escape. With `outer` it goes and stays with that."""
    pieces: list[Piece] = []
    root = bonds.new() if outer < 0 else outer
    # One frame a container: [is array, bond its tokens belong to, elements begun, next string is a key]
    frames: list[list[int | bool]] = []
    bond, lead = root, start
    for token in _JSON_TOKEN.finditer(text, start, end):
        left, right = token.span()
        symbol = text[left]
        if symbol == "," and frames and frames[-1][0]:
            bond = bonds.new()  # this comma opens a droppable element
        elif symbol in "}]":
            bond = int(frames.pop()[1])
        parent = int(frames[-1][1]) if frames and frames[-1][0] and bond != frames[-1][1] else -1
        held = bond == root and outer < 0
        if symbol == '"' and frames and not frames[-1][0] and frames[-1][3]:
            frames[-1][3] = False
            pieces.append(Piece(left, right, "json", lead, keep=held, bond=bond, needs=parent, rule="json structure"))
        elif symbol == '"' and right - left > 12 and " " in text[left:right] and "\\" not in text[left:right]:
            pieces.append(
                Piece(left, left + 1, "json", lead, keep=held, bond=bond, needs=parent, rule="json structure")
            )
            words = text_pieces(text, left + 1, right - 1, bonds, replace(options, keep_rules=False), needs=bond)
            pieces += [replace(word, needs=word.needs if word.needs >= 0 else bond) for word in words]
            pieces.append(
                Piece(
                    right - 1, right, "json", words[-1].end if words else left + 1, keep=held, bond=bond, needs=parent
                )
            )
        else:
            pieces.append(Piece(left, right, "json", lead, keep=held, bond=bond, needs=parent, rule="json structure"))
        if symbol in "{[":
            frames.append([symbol == "[", bond, 0, symbol == "{"])
        elif symbol == "," and frames and not frames[-1][0]:
            frames[-1][3] = True
        lead = right
    return [replace(piece, sentence=piece.bond if piece.kind == "json" else piece.needs) for piece in pieces]


def _markup_pieces(text: str, start: int, end: int, bonds: Bonds, options: Options) -> list[Piece]:
    """Running text with balanced tags bonded in pairs and table rows atomic. Comments, CDATA, scripts and single tags
    are atomic too."""
    if options.policy("xml") != "inside" or "<" not in text[start:end]:
        return _table_pieces(text, start, end, bonds, options, -1)
    marks = sorted([*_ISLAND.finditer(text, start, end), *_TAG.finditer(text, start, end)], key=lambda m: m.start())
    tags: list[Any] = []
    for mark in marks:
        if not tags or mark.start() >= tags[-1].end():  # a tag inside a comment is no tag
            tags.append(mark)
    pair: dict[int, int] = {}
    stack: list[int] = []
    for index, tag in enumerate(tags):
        if tag.re is _ISLAND or tag["void"]:
            continue
        if not tag["close"]:
            stack.append(index)
        else:
            names = [tags[open_index]["name"] for open_index in stack[-64:]]
            if tag["name"] in names:
                while tags[stack[-1]]["name"] != tag["name"]:
                    stack.pop()
                opening = stack.pop()
                pair[opening], pair[index] = index, opening
    pieces: list[Piece] = []
    enclosing: list[int] = []
    position = start
    for index, tag in enumerate(tags):
        outer = enclosing[-1] if enclosing else -1
        pieces += _table_pieces(text, position, tag.start(), bonds, options, outer)
        weight, rule = (-2.0, "tag") if index in pair else (0.0, "single tag")
        if tag.re is _ISLAND:
            bond, weight, rule = bonds.new(), _ISLAND_WEIGHT[tag.lastgroup], f"markup {tag.lastgroup}"
        elif index in pair and tag["close"]:
            bond = enclosing.pop()
            outer = enclosing[-1] if enclosing else -1
        else:
            bond = bonds.new()
            if index in pair:
                enclosing.append(bond)
        pieces.append(
            Piece(
                tag.start(),
                tag.end(),
                "xml",
                position,
                bond=bond,
                needs=outer,
                pulls=outer >= 0,
                weight=weight,
                rule=rule,
            )
        )
        position = tag.end()
    pieces += _table_pieces(text, position, end, bonds, options, enclosing[-1] if enclosing else -1)
    return pieces


def _table_pieces(text: str, start: int, end: int, bonds: Bonds, options: Options, outer: int) -> list[Piece]:
    pieces: list[Piece] = []
    position = start
    for head in _TABLE.finditer(text, start, end) if options.policy("table") != "keep" else ():
        if head.start() < position:
            continue
        pieces += text_pieces(text, position, head.start(), bonds, options, needs=outer, pulls=outer >= 0)
        header = bonds.new()
        pieces.append(Piece(head.start(), head.end(), "table", position, bond=header, weight=-2.0, rule="table header"))
        position = head.end()
        while position < end and text[position] == "\n":
            stop = text.find("\n", position + 1, end)
            stop = end if stop < 0 else stop
            if "|" not in text[position:stop]:
                break
            row = position + 1
            pieces.append(
                Piece(row, stop, "table", position, bond=bonds.new(), needs=header, pulls=True, rule="table row")
            )
            position = stop
    pieces += text_pieces(text, position, end, bonds, options, needs=outer, pulls=outer >= 0)
    return _nested(pieces, outer)


def _nested(pieces: list[Piece], outer: int) -> list[Piece]:
    """Every piece inside a tag needs the tag, directly or through what it already needs."""
    if outer < 0:
        return pieces
    return [piece if piece.needs >= 0 else replace(piece, needs=outer, pulls=True) for piece in pieces]
