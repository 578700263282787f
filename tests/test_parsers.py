"""Reasoning and tool-call parsing, for every way of cutting the text."""

from __future__ import annotations

import copy
import itertools
import json
import random
from typing import Any

import pytest
from serving import tokenizer

from onebox.request import Output
from onebox.server.chat import Answer, Detokenizer
from onebox.server.parsers import AnswerParser, Events, Thinking, typed_json, value_types

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "text": {"type": "string"},
                    "line": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "force": {"type": "boolean"},
                    "maybe": {"type": ["string", "null"]},
                    "options": {"$ref": "#/$defs/Options"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "mode": {"enum": ["a", "b"]},
                },
                "$defs": {"Options": {"type": "object", "properties": {"deep": {"type": "integer"}}}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def call_text(name: str, **values: str) -> str:
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def edit_text(body: str) -> str:
    return f"<tool_call>\n<function=edit>\n{body}</function>\n</tool_call>"


def parse(
    parts: list[str], *, thinking: Thinking = "closed", tools: Any = TOOLS, truncated: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and (name, arguments) of each call, from events of each part separately."""
    parser = AnswerParser(thinking=thinking, tools=tools)
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    for part in [*parts, None]:
        events = Events()
        if part is None:
            parser.finish(events, truncated=truncated)
        else:
            parser.push(part, events)
        reasoning += events.reasoning
        content += events.content
        for delta in events.calls:
            if delta.name is not None:
                assert delta.id and delta.index == len(calls)
                calls.append((delta.name, ""))
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + delta.arguments)
    return reasoning, content, calls


def every_cut(text: str) -> list[list[str]]:
    """Whole, by character, in two at every place, and at random into many."""
    rng = random.Random(text)
    cuts = [[text], list(text)] + [[text[:i], text[i:]] for i in range(len(text) + 1)]
    for _ in range(40):
        at = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(2, 12))))
        cuts.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    return cuts


EDIT = {
    "path": "src/$x.py",
    "text": "  two spaces\n\n\ttab, trailing  ",
}
CASES: dict[str, tuple[str, Thinking, tuple[str, str, list[tuple[str, Any]]]]] = {
    "thinking then answer": ("I think.\n</think>\n\nYes.", "open", ("I think.", "Yes.", [])),
    "no thinking end": ("I think and think", "open", ("I think and think", "", [])),
    "empty thinking": ("\n</think>\n\nHi", "open", ("", "Hi", [])),
    "closed passes everything": ("a </think> b <think> c \n", "closed", ("", "a </think> b <think> c \n", [])),
    "unknown opens itself": ("\n<think>\nhm\n</think>\nok", "unknown", ("hm", "ok", [])),
    "unknown without": ("  <thin air", "unknown", ("", "  <thin air", [])),
    "looks like a tag": (
        "x <tool_call> y </tool_call> <function= <parameter=a> </thin",
        "closed",
        ("", "x <tool_call> y </tool_call> <function= <parameter=a> </thin", []),
    ),
    "tag in thinking prose": (
        "use <tool_call>\n<function=nothing> here\n</think>\nok",
        "open",
        ("use <tool_call>\n<function=nothing> here", "ok", []),
    ),
    "one call": (
        "Sure.\n\n" + call_text("edit", **EDIT),
        "closed",
        ("", "Sure.", [("edit", EDIT)]),
    ),
    "call in thinking": (
        "hm\n" + call_text("now") + "\nmore\n</think>\n\ndone",
        "open",
        ("hmmore", "done", [("now", {})]),
    ),
    "call after thinking": (
        "hm\n</think>\n\n" + call_text("edit", line="3"),
        "open",
        ("hm", "", [("edit", {"line": 3})]),
    ),
    "parallel calls": (
        call_text("now") + "\n" + call_text("edit", path="a") + "\n" + call_text("now"),
        "closed",
        ("", "", [("now", {}), ("edit", {"path": "a"}), ("now", {})]),
    ),
    "two functions in one call": (
        "<tool_call>\n<function=now>\n</function>\n<function=edit>\n<parameter=path>\nb\n</parameter>\n</function>\n</tool_call>",
        "closed",
        ("", "", [("now", {}), ("edit", {"path": "b"})]),
    ),
    "types": (
        call_text(
            "edit",
            line="7",
            ratio="1.50",
            force="True",
            maybe="null",
            options='{"deep": 1, "x": [null, "y"]}',
            tags='["a", "null"]',
            mode="b",
            path="null",
            text="5",
        ),
        "closed",
        (
            "",
            "",
            [
                (
                    "edit",
                    {
                        "line": 7,
                        "ratio": 1.5,
                        "force": True,
                        "maybe": None,
                        "options": {"deep": 1, "x": [None, "y"]},
                        "tags": ["a", "null"],
                        "mode": "b",
                        "path": "null",
                        "text": "5",
                    },
                )
            ],
        ),
    ),
    "value quotes tags": (
        call_text("edit", text='a </parameter> b\n</parameter\n<parameter=x>\n"$1" </tool_call> <tool_call>'),
        "closed",
        ("", "", [("edit", {"text": 'a </parameter> b\n</parameter\n<parameter=x>\n"$1" </tool_call> <tool_call>'})]),
    ),
    "value of newlines": (
        call_text("edit", text="\n\n", path=""),
        "closed",
        ("", "", [("edit", {"text": "\n\n", "path": ""})]),
    ),
    "value on one line": (
        edit_text("<parameter=line>5</parameter>\n<parameter=path>x y</parameter>\n"),
        "closed",
        ("", "", [("edit", {"line": 5, "path": "x y"})]),
    ),
    "parameter not closed": (
        edit_text("<parameter=path>\nx\n"),
        "closed",
        ("", "", [("edit", {"path": "x"})]),
    ),
    "malformed parameter tag": (
        edit_text("<parameter path>\nx\n</parameter>\n<parameter=line>\n2\n</parameter>\n"),
        "closed",
        ("", "", [("edit", {"line": 2})]),
    ),
    "repeated key": (
        edit_text("<parameter=path>\na\n</parameter>\n<parameter=path>\nb\n</parameter>\n"),
        "closed",
        ("", "", [("edit", {"path": "a"})]),
    ),
    "no opening tag": ("ok\n<function=now>\n</function>\n</tool_call>", "closed", ("", "ok", [("now", {})])),
    "json form": (
        'a\n<tool_call>\n{"name": "edit", "arguments": {"path": "</tool_call>", "line": 1}}\n</tool_call>\nb',
        "closed",
        ("", "ab", [("edit", {"path": "</tool_call>", "line": 1})]),
    ),
    "json that is no call": (
        '<tool_call>{"a": 1}</tool_call> x',
        "closed",
        ("", '<tool_call>{"a": 1}</tool_call> x', []),
    ),
    "stopped in a value": (
        "<tool_call>\n<function=edit>\n<parameter=text>\nhalf",
        "closed",
        ("", "", [("edit", {"text": "half"})]),
    ),
    "unicode": (
        call_text("edit", text='naïve 你好 🙂 "q" \\n'),
        "closed",
        ("", "", [("edit", {"text": 'naïve 你好 🙂 "q" \\n'})]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_cut_of_the_text_means_the_same(name: str) -> None:
    text, thinking, (reasoning, content, calls) = CASES[name]
    for parts in every_cut(text):
        got = parse(parts, thinking=thinking)
        assert (got[0], got[1], [(n, json.loads(a)) for n, a in got[2]]) == (reasoning, content, calls), parts


def test_concatenated_argument_fragments_do_not_depend_on_cuts() -> None:
    text = CASES["types"][0] + CASES["value quotes tags"][0]
    whole = parse([text])
    assert all(parse(parts) == whole for parts in every_cut(text))


MOST = 5  # tokens a step: one of the model's own and four drafts
Seen = tuple[str, str, list[list[str]]]


def pushed(parser: AnswerParser, seen: Seen, text: str | None, *, truncated: bool = False) -> tuple[AnswerParser, Seen]:
    """A copy of the parser that has read `text` (None: the end), and all it has given so far."""
    parser, events = copy.deepcopy(parser), Events()
    if text is None:
        parser.finish(events, truncated=truncated)
    else:
        parser.push(text, events)
    calls = [list(call) for call in seen[2]]
    for delta in events.calls:
        if delta.name is not None:
            calls.append([delta.name, ""])
        calls[delta.index][1] += delta.arguments
    return parser, (seen[0] + events.reasoning, seen[1] + events.content, calls)


def reached(pieces: list[str], thinking: Thinking) -> list[dict[str, tuple[AnswerParser, Seen]]]:
    """After each number of tokens, every state in which any row of windows of 1 to MOST tokens can leave the parser.

    Two rows that leave it in the same state go on alike, so that following states covers every row there is.
    """
    start = AnswerParser(thinking=thinking, tools=TOOLS), ("", "", list[list[str]]())
    states: list[dict[str, tuple[AnswerParser, Seen]]] = [{"": start}, *({} for _ in pieces)]
    for i, before in enumerate(states):
        for (parser, seen), n in itertools.product(before.values(), range(1, MOST + 1)):
            if i + n <= len(pieces):
                after = pushed(parser, seen, "".join(pieces[i : i + n]))
                key = repr((sorted(vars(after[0]).items(), key=lambda item: item[0]), after[1]))
                states[i + n].setdefault(key, after)
        assert len(before) <= 8, f"after {i} tokens: {list(before)}"  # else rows would have to be followed one by one
    return states


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_row_of_windows_means_the_same_wherever_the_text_ends(name: str, truncated: bool) -> None:
    text, thinking, _ = CASES[name]
    detokenizer = Detokenizer(tokenizer(), skip_special=False)
    pieces = [detokenizer.push(t) for t in tokenizer().encode(text)]
    assert "".join(pieces) == text
    for i, states in enumerate(reached(pieces, thinking)):
        want = parse(["".join(pieces[:i])], thinking=thinking, truncated=truncated)
        for parser, seen in states.values():
            reasoning, content, calls = pushed(parser, seen, None, truncated=truncated)[1]
            assert (reasoning, content, [tuple(call) for call in calls]) == want, pieces[:i]


@pytest.mark.parametrize("step", range(1, MOST + 1))
def test_an_answer_cut_at_every_token_is_the_same_for_every_size_of_step(step: int) -> None:
    for name in ("unicode", "value quotes tags", "call in thinking", "json form"):
        text, thinking, _ = CASES[name]
        ids = tokenizer().encode(text)
        for end in range(1, len(ids) + 1):
            got = []
            for n, first in ((end, end), *((step, first) for first in range(1, step + 1))):
                answer = Answer(tokenizer(), AnswerParser(thinking=thinking, tools=TOOLS))
                edges = [0, *range(min(first, end), end, n), end]
                deltas = [
                    answer.push(Output("r", tuple(ids[a:b]), finish_reason="length" if b == end else None))
                    for a, b in itertools.pairwise(edges)
                    if b > a
                ]
                calls = "".join(c.name or c.arguments for d in deltas for c in d.calls)
                got.append(("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls))
            assert all(g == got[0] for g in got), (name, end)


def test_call_cut_by_the_token_limit_stays_cut() -> None:
    text = "<tool_call>\n<function=edit>\n<parameter=text>\nrm -rf /tmp"
    for parts in every_cut(text):
        ((name, arguments),) = parse(parts, truncated=True)[2]
        assert name == "edit"
        with pytest.raises(ValueError):
            json.loads(arguments)


def test_without_tools_call_text_is_text() -> None:
    text = "hm</think>\n" + call_text("now")
    for parts in every_cut(text):
        assert parse(parts, thinking="open", tools=None) == ("hm", call_text("now"), [])


def test_string_value_streams_before_it_ends() -> None:
    parser, events = AnswerParser(tools=TOOLS), Events()
    parser.push("<tool_call>\n<function=edit>\n<parameter=text>\nline one\nline two", events)
    assert "".join(c.arguments for c in events.calls) == '{"text": "line one\\nline two'


def test_visible_text_is_not_held_back_longer_than_a_tag() -> None:
    parser, events = AnswerParser(tools=TOOLS), Events()
    parser.push("a < b and <tool", events)
    assert events.content == "a < b and"
    parser.push("box> fits", events)
    assert events.content == "a < b and <toolbox> fits"


@pytest.mark.parametrize(
    ("text", "types", "want"),
    [
        ("5", {"string"}, '"5"'),
        ("5", {"integer"}, "5"),
        ("5.0", {"number"}, "5.0"),
        ("12345678901234567890", {"integer"}, "12345678901234567890"),
        ("007", set(), '"007"'),
        ("true", {"boolean", "string"}, "true"),
        ("None", {"null"}, "null"),
        ("NaN", {"number"}, '"NaN"'),
        ("{'a': None}", {"object"}, '{"a": null}'),
        ("{'a': 1e999}", {"object"}, "\"{'a': 1e999}\""),
        ("[1, 2", {"array"}, '"[1, 2"'),
        (" spaced ", {"string", "null"}, '" spaced "'),
        ('"quoted"', set(), '"\\"quoted\\""'),
        ("[" * 5000, set(), json.dumps("[" * 5000)),
    ],
)
def test_typed_json(text: str, types: set[str], want: str) -> None:
    assert typed_json(text, frozenset(types)) == want


@pytest.mark.parametrize(
    ("schema", "want"),
    [
        ({"type": "string"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "#/$defs/s"}, {"string"}),
        ({"allOf": [{"$ref": "#/$defs/s"}]}, {"string"}),
        ({"const": False}, {"boolean"}),
        ({"properties": {}}, {"object"}),
        (None, set()),
        ({"type": "string", "nullable": True}, {"string", "null"}),
    ],
)
def test_value_types(schema: Any, want: set[str]) -> None:
    root = {"$defs": {"loop": {"$ref": "#/$defs/loop"}, "s": {"type": "string"}}}
    assert value_types(schema, root) == want
