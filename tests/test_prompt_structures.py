"""Structure survives by construction: whatever the rate, code parses, YAML and JSON load, markup is well-formed, tables
keep their columns, logs count what was collapsed; the original can always be rebuilt."""

# ruff: noqa: E501

from __future__ import annotations

import ast
import io
import json
import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tree_sitter
import tree_sitter_javascript
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.errors import PromptError
from onebox.prompt import Compressor, TokenScores
from onebox.prompt.lines import is_yaml, log_regions
from onebox.prompt.segments import Bonds, Options, resolve_policies
from onebox.prompt.structures import pieces_of

RATES = st.floats(0.02, 0.98)
SEEDS = st.integers(0, 10_000)
STDLIB = [
    str(find_spec(name).origin)  # type: ignore[union-attr]
    for name in (
        "bisect",
        "contextlib",
        "dataclasses",
        "json.decoder",
        "textwrap",
        "queue",
        "ast",
        "asyncio.taskgroups",
        "functools",
        "enum",
        "string",
        "shlex",
    )
]


class Random:
    """Scores that follow no structure at all: the harshest test of what construction alone guarantees."""

    name = "random"

    def __init__(self, seed: int):
        self.seed = seed

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]:
        rng = np.random.default_rng(self.seed)
        return [TokenScores(np.arange(len(t)), np.arange(len(t)) + 1, rng.random(len(t))) for t in texts]


def shorten(text: str, rate: float, seed: int, **options: Any) -> str:
    """Compressed by random scores, after checking that the original can be rebuilt and nothing was added."""
    result = Compressor("llmlingua", scorer=Random(seed), policies={"code": "inside"}, **options).compress(
        text, rate=rate, tokenizer=len
    )
    assert result.trace.restore() == text
    assert len(result.text) <= len(text)
    if result.status == "compressed":
        assert len(result.text) <= rate * len(text) + 1e-6
    return result.text


def inside_fence(text: str, language: str) -> str | None:
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else None


# ---- Python


@given(st.sampled_from(STDLIB), RATES, SEEDS)
@settings(max_examples=25, deadline=None)
def test_compressed_python_parses(path: str, rate: float, seed: int) -> None:
    source = Path(path).read_text("utf-8")[:12_000].rpartition("\n\n\n")[0] + "\n"
    text = f"Find the bug.\n\n```python\n{source}```\n\nBe brief."
    out = shorten(text, rate, seed)
    code = inside_fence(out, "python")
    if code is not None:
        ast.parse(code)
    else:
        assert "```" not in out


PYTHON = '''\
#!/usr/bin/env python
"""Module."""
import os, sys  # two
x = 1; y = 2
def f(a, *,
      b=3):  # comment in a header
    """Doc."""
    # before
    if a: return 1
    elif b:
        # only a comment, then this
        pass
    else:
        z = """text
# not a comment
  more"""
    for i in range(3):
        try:
            g(i)
        except* ValueError:
            continue
        else:
            h()
        finally:
            k()
    match a:
        case 1:
            return "één"
        case _:
            return [  # open
                1,
                # inner 汉字
                2,
            ]
    while True:
        with open("a") as q, \\
             open("b"):
            break

@decorated(
    # why
    1,
)
class A(B):
    """Doc only."""

    @property
    def only(self):
        # nothing else
        """Just a docstring."""

    async def w(self): return await z()
'''


@given(RATES, SEEDS)
@settings(max_examples=70, deadline=None)
def test_awkward_python_parses(rate: float, seed: int) -> None:
    ast.parse(PYTHON.replace("except*", "except"))
    out = shorten(f"```python\n{PYTHON.replace('except*', 'except')}```", rate, seed)
    code = inside_fence(out, "python")
    if code is not None:
        ast.parse(code)


def test_comments_go_before_docstrings_and_docstrings_before_statements() -> None:
    text = (
        '```python\n# alpha beta gamma delta\ndef f(x):\n    """Epsilon zeta eta theta iota."""\n'
        "    # kappa lambda mu\n    y = x + 1\n    z = y * 2\n    return z\n```"
    )
    result = Compressor(policies={"code": "inside"}).compress(text, rate=0.72, tokenizer=len)
    assert "alpha" not in result.text and "kappa" not in result.text and "Epsilon" in result.text
    result = Compressor(policies={"code": "inside"}).compress(text, rate=0.5, tokenizer=len)
    assert "Epsilon" not in result.text and "def f(x):" in result.text and "return z" in result.text


def test_code_that_does_not_parse_stays_whole_or_goes_whole() -> None:
    broken = "```python\ndef f(:\n    return 1\n```"
    text = "Some words about the harbour and the boats in it. " * 4 + "\n\n" + broken
    for rate in (0.8, 0.5, 0.2):
        out = shorten(text, rate, 3)
        assert broken in out or "```" not in out


def test_a_file_of_code_needs_no_fence_when_its_language_is_named() -> None:
    options = Options(resolve_policies({"code": "inside"}), code_language="python")
    pieces = pieces_of(PYTHON.replace("except*", "except"), Bonds(), options)
    assert sum(piece.rule == "comment" for piece in pieces) >= 6
    assert all(piece.kind == "code" for piece in pieces)


# ---- JavaScript

JAVASCRIPT = """\
#!/usr/bin/env node
'use strict';
// leading
import { a, b as c } from "./m.js"; /* trailing */
const f = async (x, /* inline */ y = 2) => {
  let n = 0
  n++ // no semicolon
  ;[1, 2].forEach(i => { n += i; g(i) })
  if (x > y) {
    // only this
    return x /* before */ + y
  } else if (y) { return `template ${y /* in */} text
// not a comment`; }
  switch (x) {
    case 1:
      n = 1; break;
    default: n = /re[/]gex/.test("// no") ? 1 : 2
  }
  try { h() } catch { /* nothing */ } finally { k(); }
  return n
}
let q = f
(1)
class A extends B {
  static #p = 1;
  z = 2
  constructor() { super(); this.w = 'ü' }
  get v() { return this.#p } // get
}
export default class { m() {} }
label: for (const k of [1]) { continue label; }
"""


def javascript_has_error(code: str) -> bool:
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_javascript.language()))
    return bool(parser.parse(code.encode()).root_node.has_error)


@given(RATES, SEEDS)
@settings(max_examples=70, deadline=None)
def test_compressed_javascript_parses(rate: float, seed: int) -> None:
    assert not javascript_has_error(JAVASCRIPT)
    out = shorten(f"Explain:\n```js\n{JAVASCRIPT}```\nThanks.", rate, seed)
    code = inside_fence(out, "js")
    if code is not None:
        assert not javascript_has_error(code), code


def test_a_comment_that_keeps_tokens_apart_stays() -> None:
    text = "```js\nlet x = typeof/*a*/y;\n// " + "c " * 60 + "\n```"
    out = shorten(text, 0.5, 1)
    assert "typeof/*a*/y" in out and "// c" not in out


# ---- JSON

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=25,
)


def shaped_like(small: Any, large: Any) -> bool:
    """Same keys, scalars equal or texts shortened, arrays a subsequence that is empty only if it was."""
    if isinstance(large, dict):
        return (
            isinstance(small, dict)
            and list(small) == list(large)
            and all(shaped_like(small[k], large[k]) for k in large)
        )
    if isinstance(large, list):
        rest = iter(large)
        kept = isinstance(small, list) and (bool(small) or not large)
        return kept and all(any(shaped_like(item, other) for other in rest) for item in small)
    if isinstance(large, str):
        rest_of = iter(large)
        return isinstance(small, str) and all(c in rest_of for c in small)
    return type(small) is type(large) and small == large


@given(JSON.filter(lambda v: isinstance(v, (dict, list)) and v), RATES, SEEDS, st.sampled_from([None, 2]))
@settings(max_examples=200, deadline=None)
def test_compressed_json_loads_with_the_same_schema(value: Any, rate: float, seed: int, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    assert shaped_like(json.loads(shorten(text, rate, seed)), value)
    out = shorten(f"See:\n```json\n{text}\n```\nDone.", rate, seed)
    body = inside_fence(out, "json")
    if body is not None:
        assert shaped_like(json.loads(body), value)


# ---- YAML

WORDS = st.text("abc xyz-:#'\"", min_size=1, max_size=30).filter(lambda s: s.strip())
YAML = st.recursive(
    st.integers() | st.booleans() | WORDS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=5)
        | st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), inner, min_size=1, max_size=4)
    ),
    max_leaves=25,
)


@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), YAML, min_size=1, max_size=4), RATES, SEEDS)
@settings(max_examples=50, deadline=None)
def test_compressed_yaml_loads_with_the_same_keys(value: Any, rate: float, seed: int) -> None:
    text = "---\n" + yaml.safe_dump(value, allow_unicode=True, sort_keys=False)
    out = shorten(text, rate, seed)
    assert not is_yaml(text) or shaped_like(yaml.safe_load(out), value), out
    body = inside_fence(shorten(f"See:\n```yaml\n{text}```\n", rate, seed), "yaml")
    if body is not None:
        assert shaped_like(yaml.safe_load(body), value)


COMPOSE = """\
# services of the shop
services:            # everything that runs
  web:
    image: "nginx:1.27"   # pinned
    ports:
    - "80:80"
    # tls
    - "443:443"
    - 8080:8080 # debug
    environment: {A: 1, "B#": '# no comment'}
    command: |
      first --line
      # a line of the script
      second --line

      third --line
  db: &db
    image: postgres
    tags:
      - - nested
        - list
      - key: value
        other: [1, 2,
                3]
      -
        late: true
  copy:
    <<: *db
note: "a quoted text with several words in it"
folded: >-
  some folded
  text here
empty:
last: ~
"""


@given(RATES, SEEDS)
@settings(max_examples=60, deadline=None)
def test_a_real_yaml_file_loads_whatever_goes(rate: float, seed: int) -> None:
    assert is_yaml(COMPOSE)
    small, large = yaml.safe_load(shorten(COMPOSE, rate, seed)), yaml.safe_load(COMPOSE)
    assert list(small) == list(large)
    assert small["services"]["web"]["environment"] == large["services"]["web"]["environment"]
    assert small["services"]["web"]["ports"][0] == "80:80"
    assert small["services"]["web"]["command"].startswith("first --line")
    assert small["services"]["copy"]["image"] == "postgres"


def test_yaml_comments_go_first_and_items_next() -> None:
    out = Compressor().compress(COMPOSE, rate=0.86, tokenizer=len).text
    assert "# tls" not in out and "# pinned" not in out and "'# no comment'" in out and "443:443" in out
    out = Compressor().compress(COMPOSE, rate=0.46, tokenizer=len).text
    assert "443:443" not in out and "80:80" in out


@pytest.mark.parametrize(
    "text",
    [
        "- buy milk\n- call home\n- sleep\n",
        "Ann: hello there\nBob: good morning\nAnn: how are you?\n",
        "One.\nTwo.\nThree.\n",
    ],
)
def test_lists_and_conversations_are_not_yaml(text: str) -> None:
    assert not is_yaml(text)


# ---- logs


def log(n: int, rng: random.Random) -> list[str]:
    kinds = (
        "INFO heartbeat ok",
        "INFO GET /health 200",
        "WARN disk 91% full",
        "ERROR worker 7 died: Segmentation fault",
        "DEBUG cache miss key=a1",
    )
    weights = (40, 40, 3, 2, 15)
    return [
        f"2026-03-{1 + i // 1440:02d} {i // 60 % 24:02d}:{i % 60:02d}:0{rng.randrange(10)}.{rng.randrange(1000):03d} {rng.choices(kinds, weights)[0]}"
        for i in range(n)
    ]


def expanded(out: str) -> dict[str, int]:
    """How often each line stands in the output, counts included, times aside."""
    found: dict[str, int] = {}
    for line in out.splitlines():
        match = re.fullmatch(r"(.*?)(?: \[(\d+) more like it\])?", line)
        assert match
        body = re.sub(r"^\S+ \S+ ", "", match[1])
        found[body] = found.get(body, 0) + 1 + int(match[2] or 0)
    return found


@given(RATES, SEEDS, st.integers(8, 120))
@settings(max_examples=60, deadline=None)
def test_collapsed_lines_are_counted_exactly(rate: float, seed: int, n: int) -> None:
    lines = log(n, random.Random(seed))
    out = shorten("\n".join(lines), rate, seed)
    whole: dict[str, int] = {}
    for line in lines:
        body = line.split(" ", 2)[2]
        whole[body] = whole.get(body, 0) + 1
    got = expanded(out)
    assert set(got) <= set(whole)
    assert all(got[body] == whole[body] for body in got), "a count that does not add up"


def test_every_kind_of_line_survives_a_log_that_repeats_itself() -> None:
    lines = log(600, random.Random(5))
    result = Compressor().compress("\n".join(lines), rate=0.1)
    assert {line.split(" ", 2)[2] for line in lines} == set(expanded(result.text))
    assert "more like it]" in result.text and result.trace.restore() == "\n".join(lines)
    assert "Segmentation fault" in result.text


def test_counts_reach_messages_and_stack_traces_stay_with_their_line() -> None:
    lines = log(60, random.Random(2))
    lines[30:30] = [
        "2026-03-01 00:30:00 ERROR boom",
        "Traceback (most recent call last):",
        '  File "a.py", line 1',
        "ValueError: bad",
    ]
    messages = [{"role": "tool", "tool_call_id": "1", "content": "\n".join(lines)}, {"role": "user", "content": "Why?"}]
    result = Compressor().compress(messages=messages, rate=0.3)
    assert result.messages is not None
    body = result.messages[0]["content"]
    assert "more like it]" in body
    if "ValueError: bad" in body:
        assert "ERROR boom" in body


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("\n".join(f"[{i:02d}:00:00] INFO x" for i in range(9)), 1),
        ("\n".join(f'10.0.0.{i} - - [12/Mar/2026:10:00:0{i} +0000] "GET / HTTP/1.1" 200' for i in range(9)), 1),
        ("\n".join(f"Mar  {i} 10:00:00 host sshd[{i}]: closed" for i in range(1, 9)), 1),
        ("In 2026-01-02 we met.\nThen we left.\nIt was 10:30 by then.\nNobody spoke.\nThe end came.\n", 0),
    ],
)
def test_logs_are_told_from_prose(text: str, n: int) -> None:
    assert len(log_regions(text, 0, len(text))) == n


# ---- markup


def tree_of(depth: int, rng: random.Random) -> str:
    if depth == 0:
        return rng.choice(
            (
                "plain words here",
                "a &lt; b &amp;&amp; c &#8364;5",
                "AT&amp;T grew",
                "<!-- a -- b comment -->".replace(" -- ", " "),
                "<![CDATA[x < y & z]]>",
            )
        )
    name = rng.choice(("item", "ns:part", "p-x", "div"))
    inside = " ".join(tree_of(depth - 1, rng) for _ in range(rng.randint(1, 3)))
    return f'<{name} id="{rng.randrange(99)}" note=\'a "b" &lt;\'>{inside}<br/></{name}>'


@given(RATES, SEEDS)
@settings(max_examples=70, deadline=None)
def test_compressed_xml_is_well_formed(rate: float, seed: int) -> None:
    text = f'<?xml version="1.0"?>\n<!DOCTYPE r>\n<r xmlns:ns="u">{tree_of(4, random.Random(seed))}</r>'
    ET.parse(io.StringIO(text))
    out = shorten(text, rate, seed)
    if "<r" in out:
        ET.parse(io.StringIO(out))


class Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("br", "img", "hr", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag


HTML = """<!DOCTYPE html><html><head><meta charset="utf-8"><title>A page</title><style>p > a { color: red }</style></head>
<body><!-- navigation --><h1>The harbour &amp; the town</h1><p>It was rebuilt in <b>1887</b> after a <i>great storm</i>.<br>
More <a href="x?a=1&amp;b=2" title='it "was"'>text here</a> and an <img src="a.png" alt="a boat"> image.</p>
<script>if (a < b && c) { d("</p>"); }</script><ul><li>one thing</li><li>another thing</li></ul></body></html>"""


@given(RATES, SEEDS)
@settings(max_examples=70, deadline=None)
def test_compressed_html_stays_balanced(rate: float, seed: int) -> None:
    out = shorten(HTML, rate, seed)
    parser = Balance()
    parser.feed(out)
    parser.close()
    assert not parser.open
    assert ("<style>" in out) == ("p > a { color: red }" in out)
    assert ("<script>" in out) == ('d("</p>")' in out)
    assert ("<img" in out) == ('alt="a boat">' in out)


# ---- tables


@given(RATES, SEEDS, st.integers(2, 5), st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_tables_keep_their_header_and_columns(rate: float, seed: int, columns: int, rows: int) -> None:
    rng = random.Random(seed)
    cells = [[f"{rng.choice(('alpha', 'beta x', '12.5 %'))}{r}{c}" for c in range(columns)] for r in range(rows)]
    lines = ["| " + " | ".join(f"h{c}" for c in range(columns)) + " |", "|" + " --- |" * columns]
    lines += ["| " + " | ".join(row) + " |" for row in cells]
    out = shorten("Prices of the week follow.\n\n" + "\n".join(lines) + "\n\nAsk for more.", rate, seed)
    kept = [line for line in out.splitlines() if line.startswith("|")]
    if kept:
        assert kept[:2] == lines[:2] and all(line in lines for line in kept)


# ---- all of them

ALL = {"python": f"```python\n{PYTHON.replace('except*', 'except')}```", "js": f"```js\n{JAVASCRIPT}```", "yaml": COMPOSE, "html": HTML,
       "log": "\n".join(log(40, random.Random(1))), "json": json.dumps({"a": [1, {"b": "some words in here"}, 3]}, indent=1)}  # fmt: skip


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("policy", ["keep", "inside"])
def test_rate_one_gives_the_same_bytes(kind: str, policy: str) -> None:
    result = Compressor(policies={"code": policy}).compress(ALL[kind], rate=1.0)  # type: ignore[dict-item]
    assert result.text == ALL[kind] and result.trace.restore() == ALL[kind]


@pytest.mark.parametrize("kind", ALL)
def test_pieces_cover_every_visible_character_once_and_in_order(kind: str) -> None:
    text = ALL[kind]
    pieces = pieces_of(text, Bonds(), Options(resolve_policies({"code": "inside"})))
    at = 0
    for piece in pieces:
        assert piece.lead == at and not text[piece.lead : piece.start].strip() and piece.end > piece.start
        at = piece.end
    assert not text[at:].strip()


@given(st.text(alphabet="<>{}[]()&;:#-|`\"'\\/ \n\tab=1é汉", max_size=300), RATES, SEEDS)
@settings(max_examples=80, deadline=None)
def test_any_soup_of_marks_is_rebuilt(text: str, rate: float, seed: int) -> None:
    for language in ("js", "yaml", "python", "log"):
        shorten(f"```{language}\n{text}\n```", rate, seed)
    shorten(text, rate, seed)


def test_without_the_grammar_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import onebox.prompt.code as code

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(code, "import_module", absent)
    code._parser.cache_clear()
    with pytest.raises(PromptError, match=r"onebox\[prompt\]"):
        Compressor(policies={"code": "inside"}).compress(ALL["python"], rate=0.5)
    code._parser.cache_clear()
