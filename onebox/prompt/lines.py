"""Text made of lines -> pieces: logs, whose repeated lines collapse into one with a count, and YAML, which loses its
comments and the later items of its lists first and stays well-formed."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any

import regex

from onebox.errors import PromptError
from onebox.prompt.segments import Bonds, Options, Piece, text_pieces

_TIME = regex.compile(
    r"\d{4}[-/]\d{2}[-/]\d{2}(?:[T ,]\d{2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?)?(?:\s?(?:Z|UTC|[+-]\d{2}:?\d{2}))?"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\s{1,2}\d{1,2}\s\d{2}:\d{2}:\d{2}"
    r"|\d{1,2}/(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)/\d{4}:\d{2}:\d{2}:\d{2}(?:\s[+-]\d{4})?"
    r"|(?<![\d:.])\d{1,2}:\d{2}:\d{2}(?:[.,]\d{1,9})?(?![\d:])|(?<![\d.])1[5-9]\d{8}(?:\.\d{1,6}|\d{3})?(?!\d)"
)
_LEVEL = r"(?:TRACE|DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL|SEVERE|E|W|I|D)"
_LOG_LINE = regex.compile(
    rf"[ \t]{{0,2}}(?:[\[<(]?(?:{_TIME.pattern})|\[?{_LEVEL}\]?[ \t:|]"
    rf"|\S{{1,60}} \S{{1,20}} \S{{1,20}} \[(?:{_TIME.pattern})\])"
)
_CONTINUED = regex.compile(r"[ \t]{2,}\S|\tat |Traceback |Caused by:|\.\.\. \d+ more|[A-Za-z_.]+(?:Error|Exception)\b")
_TROUBLE = regex.compile(r"\b(?:WARN(?:ING)?|ERROR|CRITICAL|FATAL|SEVERE|Traceback|panic|[\w.]*(?:Exception|Error))\b")
_MIN_LINES = 5


def log_regions(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """[start, end) of stretches of at least five log lines, with the indented lines that follow each."""
    regions: list[tuple[int, int]] = []
    first, last, matched = -1, -1, 0
    at = start
    while at < end:
        stop = text.find("\n", at, end)
        stop = end if stop < 0 else stop
        if _LOG_LINE.match(text, at, stop):
            first = at if matched == 0 else first
            matched, last = matched + 1, stop
        elif matched and (stop == at or _CONTINUED.match(text, at, stop)):
            last = stop if stop > at else last
        else:
            if matched >= _MIN_LINES:
                regions.append((first, last))
            matched = 0
        at = stop + 1
    if matched >= _MIN_LINES:
        regions.append((first, last))
    return regions


def log_pieces(text: str, start: int, end: int, bonds: Bonds, outer: int = -1) -> list[Piece]:
    """One piece a line. A line that equals an earlier one but for its time needs that one and goes first; the copies
    that went are counted behind it (`Piece.same`)."""
    pieces: list[Piece] = []
    leaders: dict[str, int] = {}
    shapes: set[str] = set()
    head = -1  # the log line that an indented line belongs to
    at = start
    while at <= end:
        stop = text.find("\n", at, end)
        stop = end if stop < 0 else stop
        body = text[at:stop].rstrip()
        if body.strip():
            lead = pieces[-1].end if pieces else start
            first = at if pieces or at == start else at + len(body) - len(body.lstrip())
            own = outer if outer >= 0 and not pieces else bonds.new()  # a fence may not be empty
            piece = Piece(first, at + len(body), "log", lead, bond=own, needs=outer if own != outer else -1)
            piece = replace(piece, pulls=piece.needs >= 0)
            begins = _LOG_LINE.match(body) is not None or not _CONTINUED.match(body)
            if begins:
                head = piece.bond
                shape = _TIME.sub("", body)
                numberless = regex.sub(r"\d+", "0", shape)
                if shape in leaders:
                    leader = leaders[shape]
                    piece = replace(
                        piece, needs=leader, pulls=True, weight=-3.0, rule="repeated line, times aside", same=leader
                    )
                elif numberless in shapes:
                    piece = replace(piece, weight=-1.0, rule="repeated line, numbers aside")
                elif _TROUBLE.search(body):
                    piece = replace(piece, weight=0.5, rule="line that reports trouble")
                leaders.setdefault(shape, piece.bond)
                shapes.add(numberless)
            elif head >= 0:
                piece = replace(piece, needs=head, pulls=True)
            pieces.append(piece)
        at = stop + 1
    return pieces


# ---------------------------------------------------------------- YAML

_YAML_KEY = regex.compile(r"\s*(?:- )*\s*[\w\"'./$-][^#:\n]{0,80}:(?:\s|$)|\s*-(?:\s|$)|\s*#|---|\.\.\.$")


def is_yaml(text: str) -> bool:
    """Nested mappings, or a document that begins with `---`. Flat `name: text` lines may be a conversation, and a list
    of sentences is Markdown: neither counts."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 3 or sum(_YAML_KEY.match(line) is not None for line in lines) < 0.6 * len(lines):
        return False
    nested = any(regex.match(r"\s+(?:- )?[\w\"'./-]+:(?:\s|$)", line) for line in lines)
    if not (lines[0].startswith("---") or nested):
        return False
    try:
        import yaml
    except ImportError:
        return False
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError):
        return False
    return any(isinstance(node, yaml.MappingNode) or _has_mapping(node, yaml) for node in nodes)


def _has_mapping(node: Any, yaml: Any) -> bool:
    return isinstance(node, yaml.SequenceNode) and any(isinstance(item, yaml.MappingNode) for item in node.value)


def yaml_pieces(
    text: str, start: int, end: int, bonds: Bonds, options: Options, *, keep: bool, outer: int = -1
) -> list[Piece] | None:
    """Keys, scalars and the first item of every list stay (with `keep`; otherwise they share the bond `outer`).

    Comments go first; later items go whole; of a literal block later lines, of a quoted text
    words. None if it is no YAML."""
    try:
        import yaml
    except ImportError as error:
        raise PromptError("policies['yaml'] 'inside': needs PyYAML; pip install 'onebox[prompt]'") from error
    body = text[start:end]
    try:
        tokens = list(yaml.scan(body, Loader=yaml.SafeLoader))
        nodes = list(yaml.compose_all(body, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError):
        return None
    anchored = {t.start_mark.line for t in tokens if isinstance(t, yaml.AnchorToken)}
    dashes = [(t.start_mark.index, t.start_mark.line) for t in tokens if isinstance(t, yaml.BlockEntryToken)]
    root = bonds.new() if outer < 0 else outer
    starts = [0]
    for at, character in enumerate(body):
        if character == "\n":
            starts.append(at + 1)
    n = len(starts)
    owner, parent = [root] * n, {root: -1}
    for first, last in _items(nodes, dashes, yaml, body):
        if any(first <= line < last for line in anchored):
            continue
        bond = bonds.new()
        parent[bond] = owner[first]
        for line in range(first, last):
            owner[line] = bond
    spans = {t.start_mark.line: t for t in tokens if isinstance(t, yaml.ScalarToken)}
    covered = sorted((t.start_mark.index, t.end_mark.index) for t in tokens if isinstance(t, yaml.ScalarToken))
    literal = _literal_lines(tokens, yaml, body)
    pieces: list[Piece] = []

    def add(first: int, last: int, **fields: Any) -> None:
        pieces.append(Piece(start + first, start + last, "yaml", pieces[-1].end if pieces else start, **fields))

    for line in range(n):
        first = starts[line]
        stop = (starts[line + 1] - 1) if line + 1 < n else len(body)
        row = body[first:stop].rstrip()
        if not row.strip():
            continue
        stop = first + len(row)
        bond = owner[line]
        needs = parent[bond]
        tie: dict[str, Any] = {"keep": keep and bond == root, "bond": bond, "needs": needs, "rule": "yaml structure"}
        mark = _comment_at(body, first, stop, covered)
        code = stop if mark < 0 else first + len(body[first:mark].rstrip())
        if line in literal:
            add(first, stop, bond=bonds.new(), needs=bond, pulls=True, rule="line of a literal block")
            continue
        token = spans.get(line)
        if code > first:
            quoted = token is not None and _droppable_words(token, body, code)
            if quoted and token is not None:
                left, right = token.start_mark.index, token.end_mark.index
                add(first, left + 1, **tie)
                words = text_pieces(
                    text, start + left + 1, start + right - 1, bonds, replace(options, keep_rules=False), needs=bond
                )
                pieces += [replace(word, needs=word.needs if word.needs >= 0 else bond) for word in words]
                add(right - 1, code, **tie)
            else:
                add(first, code, **tie)
        if mark >= 0:
            begin = first if code <= first else mark
            add(begin, stop, bond=bonds.new(), needs=bond, weight=-2.0, rule="comment")
    return pieces


def _items(nodes: list[Any], dashes: list[tuple[int, int]], yaml: Any, body: str) -> list[tuple[int, int]]:
    """[first line, end line) of every list item but the first of its list, outermost first. `dashes`: (index, line) of
    each item's dash. Items whose dash does not begin a line, and those that hold an anchor, are not among them."""
    found: list[tuple[int, int]] = []
    marks = [index for index, _ in dashes]
    seen: set[int] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode) or node is None:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            stack += [side for pair in node.value for side in pair]
            continue
        stack += node.value
        if node.flow_style:
            continue
        lines = [dashes[bisect_left(marks, item.start_mark.index) - 1] for item in node.value]
        last = body[: node.end_mark.index].rstrip().count("\n") + 1
        stops = [*[line for _, line in lines[1:]], last]
        for (index, first), stop in list(zip(lines, stops, strict=True))[1:]:
            begins = not body[body.rfind("\n", 0, index) + 1 : index].strip()
            if begins and stop > first:
                found.append((first, stop))
    return sorted(set(found), key=lambda item: (item[0], -item[1]))


def _literal_lines(tokens: list[Any], yaml: Any, body: str) -> set[int]:
    """Lines of `|` and `>` blocks that may go: all after the first that has text."""
    found: set[int] = set()
    for token in tokens:
        if isinstance(token, yaml.ScalarToken) and token.style in ("|", ">"):
            lines = body[token.start_mark.index : token.end_mark.index].rstrip().split("\n")
            filled = [at for at in range(1, len(lines)) if lines[at].strip()]
            found.update(token.start_mark.line + at for at in filled[1:])
    return found


def _droppable_words(token: Any, body: str, code: int) -> bool:
    """A quoted text of one line with several words and no escapes, at the end of its line."""
    left, right = token.start_mark.index, token.end_mark.index
    text = body[left:right]
    quoted = token.style in ("'", '"') and "\n" not in text and "\\" not in text and "''" not in text[1:-1]
    return bool(quoted and right == code and len(text) > 12 and " " in text)


def _comment_at(body: str, first: int, stop: int, covered: list[tuple[int, int]]) -> int:
    """Where the comment of a line begins; -1 if it has none."""
    at = body.find("#", first, stop)
    while at >= 0:
        free = at == first or body[at - 1] in " \t"
        if free and not any(left <= at < right for left, right in covered):
            return at
        at = body.find("#", at + 1, stop)
    return -1
