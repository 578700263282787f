"""Source code -> pieces. Takes Python or JavaScript, gives its comments, docstrings and statements as pieces, so that
every selection that honours their bonds still parses: a block keeps its header and at least one statement.

Syntax trees come from tree-sitter; text that it cannot parse without an error is refused (None) and stays whole.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from onebox.errors import PromptError
from onebox.prompt.segments import Bonds, Piece

#: Names that a fence or a caller may give a language, and the grammar they mean.
LANGUAGES = {
    "python": "python",
    "py": "python",
    "python3": "python",
    "javascript": "javascript",
    "js": "javascript",
    "jsx": "javascript",
    "mjs": "javascript",
    "node": "javascript",
}
_CLAUSES = frozenset(
    ["elif_clause", "else_clause", "except_clause", "except_group_clause", "finally_clause", "case_clause"]
)
_BRACED = frozenset(["program", "statement_block", "class_body", "switch_body"])
_COMPOUND = frozenset(
    [
        "function_definition",
        "class_definition",
        "decorated_definition",
        "if_statement",
        "for_statement",
        "while_statement",
        "with_statement",
        "try_statement",
        "match_statement",
        "case_clause",
    ]
)
_OPENERS = ("(", "[", "`", "+", "-", "/", "*", ".", ",")
# Added to the score: comments go first, then docstrings; what names things stays longest.
_COMMENT, _DOCSTRING, _IMPORT, _DEFINITION = -2.0, -1.0, 0.5, 1.0


@cache
def _parser(grammar: str) -> Any:
    try:
        library = import_module("tree_sitter")
        module = import_module(f"tree_sitter_{grammar}")
    except ImportError as error:
        raise PromptError(
            f"policies['code'] 'inside': needs tree-sitter for {grammar}; pip install 'onebox[prompt]'"
        ) from error
    return library.Language(module.language()), library.Parser


def code_pieces(text: str, start: int, end: int, grammar: str, bonds: Bonds, outer: int = -1) -> list[Piece] | None:
    """Pieces of the code text[start:end), the outermost tied to the bond `outer`; None if it does not parse."""
    language, parser = _parser(grammar)
    source = text[start:end].encode("utf-8", "surrogatepass")
    tree = parser(language).parse(source)
    if tree.root_node.has_error:
        return None
    return _Cut(text, start, end, source, bonds, outer).run(tree.root_node, grammar)


class _Unit:
    """What stays or goes as one. `owner` numbers index these."""

    def __init__(self, bond: int, needs: int, pulls: bool, weight: float, rule: str):
        self.bond, self.needs, self.pulls, self.weight, self.rule = bond, needs, pulls, weight, rule


class _Cut:
    """One pass over one tree: gives every character an owner, then reads the pieces off line by line."""

    def __init__(self, text: str, start: int, end: int, source: bytes, bonds: Bonds, outer: int):
        self.text, self.start, self.end, self.bonds, self.outer = text, start, end, bonds, outer
        self.units: list[_Unit] = []
        self.owner = np.full(end - start, -1, dtype=np.int32)
        if len(source) == end - start:
            self.chars: np.ndarray | None = None
        else:  # byte offset -> character offset
            leading = np.frombuffer(source, dtype=np.uint8)
            self.chars = np.concatenate([[0], np.cumsum((leading & 0xC0) != 0x80)])
            self.chars[:-1] = self.chars[1:] - 1
        self.comments: list[Any] = []

    def run(self, root: Any, grammar: str) -> list[Piece]:
        self._comments_of(root)
        if grammar == "python":
            self._block(root, self.outer, anchored=self.outer >= 0)
        else:
            self._braced(root, self.outer)
        for node in self.comments:
            self._comment(node)
        return self._pieces()

    def _span(self, node: Any) -> tuple[int, int]:
        a, b = node.start_byte, node.end_byte
        return (a, b) if self.chars is None else (int(self.chars[a]), int(self.chars[b]))

    def _own(self, first: int, last: int, unit: _Unit) -> None:
        self.units.append(unit)
        self.owner[first:last] = len(self.units) - 1

    def _comments_of(self, root: Any) -> None:
        stack = [root]
        while stack:
            node = stack.pop()
            if node.type in ("comment", "html_comment"):
                self.comments.append(node)
            stack += node.children

    # -- Python

    def _block(self, block: Any, bond: int, *, anchored: bool) -> None:
        """The statements of a block; one of them shares `bond` when `anchored`, for a block may not be empty."""
        groups = self._groups(block)
        documented = block.parent is None or block.parent.type in ("function_definition", "class_definition")
        anchor = self._anchor(groups, documented) if anchored else -1
        for at, group in enumerate(groups):
            first, last = self._span(group[0])[0], self._end(group[-1])
            docstring = documented and at == 0 and _is_string(group[0])
            if at == anchor:
                own = bond
                self._own(first, last, _Unit(bond, -1, False, 0.0, "code that its block needs"))
            else:
                own = self.bonds.new()
                weight, rule = _worth(group[0], docstring)
                self._own(first, last, _Unit(own, bond, bond >= 0, weight, rule))
            if len(group) == 1:
                self._inside(group[0], own)

    def _inside(self, statement: Any, bond: int) -> None:
        """Blocks and clauses of a compound statement whose header has `bond`."""
        if statement.type not in _COMPOUND and statement.type not in _CLAUSES:
            return
        needed = _needed_clause(statement)
        for child in statement.children:
            if child.type == "block":
                if child.children and child.start_point[0] != _row_before(child):
                    self._block(child, bond, anchored=True)
            elif child.type in _CLAUSES:
                own = bond
                if child.id != needed:
                    own = self.bonds.new()
                    self._own(*self._span(child), _Unit(own, bond, True, 0.0, "clause"))
                self._inside(child, own)
            elif child.type in _COMPOUND and statement.type == "decorated_definition":
                self._inside(child, bond)

    def _groups(self, block: Any) -> list[list[Any]]:
        """Statements, those that share a line together."""
        groups: list[list[Any]] = []
        for child in block.children:
            if not child.is_named or child.type == "comment":
                continue
            if groups and groups[-1][-1].end_point[0] == child.start_point[0]:
                groups[-1].append(child)
            else:
                groups.append([child])
        return groups

    def _anchor(self, groups: list[list[Any]], documented: bool) -> int:
        """Which statement stands for its block: the last if it is simple, else the shortest that is."""
        simple = [at for at, group in enumerate(groups) if not any(node.type in _COMPOUND for node in group)]
        if documented and len(simple) > 1 and simple[0] == 0 and _is_string(groups[0][0]):
            simple = simple[1:]
        if not simple:
            return 0
        if simple[-1] == len(groups) - 1:
            return simple[-1]
        return min(simple, key=lambda at: groups[at][-1].end_byte - groups[at][0].start_byte)

    def _end(self, node: Any) -> int:
        """End of a statement with the semicolons behind it."""
        end = self._span(node)[1]
        while True:
            at = end
            while at < len(self.owner) and self.text[self.start + at] in " \t":
                at += 1
            if at >= len(self.owner) or self.text[self.start + at] != ";":
                return end
            end = at + 1

    # -- JavaScript

    def _braced(self, node: Any, bond: int) -> None:
        anchor = -1
        if node.type == "program" and bond >= 0:  # a fence may not be empty
            named = [child for child in node.children if child.is_named and "comment" not in child.type]
            anchor = min(named, key=lambda child: child.end_byte - child.start_byte).id if named else -1
        for child in node.children:
            if node.type not in _BRACED or not child.is_named or child.type in ("comment", "html_comment"):
                self._braced(child, bond)
                continue
            own, needs = bond if child.id == anchor else self.bonds.new(), bond
            first = self._span(child)[0]
            previous = child.prev_named_sibling
            while previous is not None and "comment" in previous.type:
                previous = previous.prev_named_sibling
            if self.text[self.start + first] in _OPENERS and previous is not None:
                # Without a semicolon before it this line would continue another statement.
                needs = self.units[self.owner[self._span(previous)[0]]].bond
            weight, rule = _worth(child, False)
            self._own(first, self._end(child), _Unit(own, needs, needs >= 0, weight, rule))
            self._braced(child, own)

    # -- both

    def _comment(self, node: Any) -> None:
        first, last = self._span(node)
        before = self.text[self.start + first - 1] if first else "\n"
        after = self.text[self.start + last] if last < len(self.owner) else "\n"
        line = self.text.rfind("\n", self.start, self.start + first) + 1 or self.start
        alone = not self.text[max(line, self.start) : self.start + first].strip()
        body = self.text[self.start + first : self.start + last]
        if not alone and ("\n" in body or (not before.isspace() and not after.isspace())):
            return  # it separates two tokens or ends a statement
        inside = int(self.owner[first])
        needs = self.units[inside].bond if inside >= 0 else self.outer
        kept = body.startswith("#!") or "coding:" in body[:30]
        self._own(first, last, _Unit(self.bonds.new(), needs, False, 0.0 if kept else _COMMENT, "comment"))

    def _pieces(self) -> list[Piece]:
        """Runs of one owner. A run that begins a line takes its indentation along."""
        pieces: list[Piece] = []
        text, start = self.text, self.start
        at, n = 0, len(self.owner)
        rest: _Unit | None = None
        while at < n:
            if text[start + at].isspace():
                at += 1
                continue
            number, first, last = int(self.owner[at]), at, at + 1
            while at < n and (text[start + at].isspace() or int(self.owner[at]) == number):
                if not text[start + at].isspace():
                    last = at + 1
                at += 1
            if number < 0:  # what no statement owns, such as the braces of nothing
                rest = rest or _Unit(self.bonds.new(), self.outer, self.outer >= 0, 0.0, "code")
            unit = self.units[number] if number >= 0 else rest
            assert unit is not None
            line = text.rfind("\n", start, start + first) + 1 or start
            begin = start + first
            if not text[max(line, start) : begin].strip():
                begin = max(line, start)
            pieces.append(
                Piece(
                    begin,
                    start + last,
                    "code",
                    pieces[-1].end if pieces else start,
                    bond=unit.bond,
                    needs=unit.needs if unit.needs != unit.bond else -1,
                    pulls=unit.pulls,
                    weight=unit.weight,
                    rule=unit.rule,
                )
            )
        return pieces


def _is_string(node: Any) -> bool:
    return bool(
        node.type == "expression_statement"
        and len(node.named_children) == 1
        and node.named_children[0].type == "string"
    )


def _row_before(block: Any) -> int:
    previous = block.prev_sibling
    while previous is not None and previous.type == "comment":
        previous = previous.prev_sibling
    return int(previous.end_point[0]) if previous is not None else -1


def _needed_clause(statement: Any) -> int:
    """Id of the clause a statement cannot lose: `try` needs a handler or a `finally`."""
    if statement.type != "try_statement":
        return -1
    for kinds in (("except_clause", "except_group_clause"), ("finally_clause",)):
        for child in statement.children:
            if child.type in kinds:
                return int(child.id)
    return -1


def _worth(node: Any, docstring: bool) -> tuple[float, str]:
    if docstring:
        return _DOCSTRING, "docstring"
    if "import" in node.type:
        return _IMPORT, "import"
    if node.type in (
        "function_definition",
        "class_definition",
        "decorated_definition",
        "function_declaration",
        "class_declaration",
        "method_definition",
        "export_statement",
    ):
        return _DEFINITION, "definition"
    return 0.0, ""
