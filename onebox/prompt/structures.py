"""Text -> pieces, block structure first. Takes one part of a prompt, gives its pieces so that every selection that
honours bonds stays well-formed: fences closed, tags balanced, JSON valid, tables with their header."""

from __future__ import annotations

import json
from dataclasses import replace

import regex

from onebox.prompt.segments import Bonds, Options, Piece, text_pieces

_FENCE = regex.compile(r"^[ ]{0,3}(```+|~~~+)[^\n]*\n(?:.*?\n)??[ ]{0,3}\1[ \t]*$", regex.MULTILINE | regex.DOTALL)
_TAG = regex.compile(
    r"<(?P<close>/)?(?P<name>[A-Za-z][\w:.-]{0,60})"
    r"(?:\s+[\w:@.-]{1,60}+(?:\s*+=\s*+(?:\"[^\"<]{0,2000}\"|'[^'<]{0,2000}'|[^\s\"'<>=]{1,500}+))?+)*+\s*+(?P<void>/)?>"
)
_TABLE = regex.compile(
    r"(?:^[ ]*\|?[^\n]*\|[^\n]*\n)[ ]*\|?[ ]*:?-{2,}:?[ ]*(?:\|[ ]*:?-{2,}:?[ ]*)*\|?[ ]*$", regex.MULTILINE
)
_JSON_TOKEN = regex.compile(r'"(?:[^"\\]|\\.)*+"|-?\d[\d.eE+-]*+|true|false|null|[{}\[\]:,]')


def pieces_of(text: str, bonds: Bonds, options: Options) -> list[Piece]:
    """All pieces of `text`, in order; together with the whitespace between them they cover it exactly."""
    if options.policy("json") == "inside" and _is_json(text):
        return _json_pieces(text, bonds, options)
    pieces: list[Piece] = []
    position = 0
    policy = options.policy("code")
    for fence in _FENCE.finditer(text):
        pieces += _markup_pieces(text, position, fence.start(), bonds, options)
        lead = pieces[-1].end if pieces else 0
        pieces.append(
            Piece(
                fence.start(),
                fence.end(),
                "code",
                lead,
                keep=policy == "keep",
                drop=policy == "drop",
                bond=bonds.new(),
                rule=f"code: {policy}",
                sentence=pieces[-1].sentence + 1 if pieces else 0,
            )
        )
        position = fence.end()
    pieces += _markup_pieces(text, position, len(text), bonds, options)
    return _renumber(text, pieces)


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


def _json_pieces(text: str, bonds: Bonds, options: Options) -> list[Piece]:
    """Valid JSON: keys, scalars and the first element of every array stay; later elements go whole, with their comma;
    words inside string values go one by one, never splitting an escape."""
    pieces: list[Piece] = []
    root = bonds.new()
    # One frame a container: [is array, bond its tokens belong to, elements begun, next string is a key]
    frames: list[list[int | bool]] = []
    bond, lead = root, 0
    for token in _JSON_TOKEN.finditer(text):
        left, right = token.span()
        symbol = text[left]
        if symbol == "," and frames and frames[-1][0]:
            bond = bonds.new()  # this comma opens a droppable element
        elif symbol in "}]":
            bond = int(frames.pop()[1])
        parent = int(frames[-1][1]) if frames and frames[-1][0] and bond != frames[-1][1] else -1
        held = bond == root
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
    """Running text with balanced tags bonded in pairs and table rows atomic."""
    if options.policy("xml") != "inside" or "<" not in text[start:end]:
        return _table_pieces(text, start, end, bonds, options, -1)
    tags = list(_TAG.finditer(text, start, end))
    pair: dict[int, int] = {}
    stack: list[int] = []
    for index, tag in enumerate(tags):
        if tag["void"]:
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
        if index not in pair and not tag["void"]:
            continue  # plain text that looks like a tag
        outer = enclosing[-1] if enclosing else -1
        pieces += _table_pieces(text, position, tag.start(), bonds, options, outer)
        if tag["close"]:
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
                weight=-2.0,
                rule="tag",
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
