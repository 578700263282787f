"""Grammars inside speculation windows: what is allowed never depends on drafts, company or preemption."""

from __future__ import annotations

import json
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.engine.grammar import Grammars, Matcher, make_matcher, make_tokenizer, mask_logits
from onebox.errors import RequestError
from onebox.request import Grammar, Output, Request, SamplingParams
from onebox.server.chat import Tokenizer

TINY = Path(__file__).parent.parent / "onebox" / "models" / "tiny"
VOCAB, EOS = 8192, (8161, 8159)
FLAT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["x", "yy", None]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}


@cache
def text() -> Tokenizer:
    return Tokenizer.from_folder(TINY)


THINK_END = tuple(text().encode("</think>"))


@cache
def vocabulary() -> Any:
    return make_tokenizer(TINY / "tokenizer.json", VOCAB, EOS)


def schema(value: Any, *, start_after: tuple[int, ...] | None = None) -> Grammar:
    return Grammar("json_schema", json.dumps(value), start_after)


def matcher(grammar: Grammar) -> Matcher:
    return make_matcher(grammar, vocabulary())


def allowed(m: Matcher, ahead: list[int] | tuple[int, ...] = ()) -> set[int]:
    mask = m.mask(ahead)
    assert mask is not None
    return {i for i in range(VOCAB) if mask[i // 8] >> i % 8 & 1}


def says(m: Matcher, answer: str) -> bool:
    """Whether the grammar takes all of `answer` and lets it end there."""
    for token in text().encode(answer):
        if token not in allowed(m):
            return False
        m.accept(token)
    return bool(allowed(m) & set(EOS))


def engine(**options: Any) -> Engine:
    return Engine(EngineConfig(str(TINY), device="cpu", debug=True, **{"max_num_seqs": 8, **options}))


def run(engine: Engine, requests: list[Request]) -> dict[str, list[Output]]:
    got: dict[str, list[Output]] = {r.id: [] for r in requests}
    for r in requests:
        engine.add(r)
    while engine.has_work:
        for output in engine.step():
            got[output.request_id].append(output)
    return got


def said(outputs: list[Output]) -> str:
    return text().decode(t for o in outputs for t in o.tokens)


def ids(outputs: list[Output]) -> list[int]:
    return [t for o in outputs for t in o.tokens]


def chat(question: str, *, think: bool = False) -> tuple[int, ...]:
    message = {"role": "user", "content": question}
    return tuple(text().encode(text().render([message], options={"enable_thinking": think})))


# The matcher alone


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        (FLAT, ['{"n": 7, "kind": null}', '{"n":0,"kind":"yy"}'], ['{"n": 100, "kind": "x"}', '{"n": 7}', "[]"]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, ["[]", "[1, 2]"], ["[1, 2, 3]", '["a"]']),
        ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]}, ["7", '"ab"'], ['"abc"', "null"]),
        ({"oneOf": [{"const": "a"}, {"type": "boolean"}]}, ['"a"', "true"], ['"b"', "1"]),
        ({"type": ["string", "null"], "maxLength": 3}, ["null", '"é"'], ["1"]),
        ({"type": "string", "pattern": "^[a-c]{2}-[0-9]+$"}, ['"ab-12"'], ['"ab-"', '"dd-1"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"yesterday"']),
        (
            {
                "$defs": {
                    "leaf": {"type": "object", "properties": {"v": {"$ref": "#/$defs/v"}}, "required": ["v"]},
                    "v": {"enum": [1, 2]},
                },
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/leaf"}, "b": {"type": "array", "items": {"$ref": "#/$defs/v"}}},
                "required": ["a"],
            },
            ['{"a": {"v": 1}, "b": [2, 1]}', '{"a": {"v": 2}}'],
            ['{"a": {"v": 3}}', '{"b": []}'],
        ),
        (
            {
                "$defs": {
                    "tree": {
                        "type": "object",
                        "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                        "required": ["kids"],
                        "additionalProperties": False,
                    }
                },
                "$ref": "#/$defs/tree",
            },
            ['{"kids": [{"kids": []}, {"kids": [{"kids": []}]}]}'],
            ['{"kids": [1]}'],
        ),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ['{"any": 1}', "{}"], ['{"any": "1"}']),
        (True, ["1", '{"a": [null]}'], ["x"]),
    ],
)
def test_a_schema_allows_what_fits_it_and_nothing_else(value: Any, good: list[str], bad: list[str]) -> None:
    for answer in good:
        assert says(matcher(schema(value)), answer), answer
    for answer in bad:
        assert not says(matcher(schema(value)), answer), answer


def test_white_space_in_json_is_bounded() -> None:
    assert says(matcher(schema(FLAT)), '{\n  "n": 1,\n  "kind": "x"\n}')
    assert not says(matcher(schema(FLAT)), '{\n\n  "n": 1,\n  "kind": "x"\n}')


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_object"), '{"a": {"b": []}}', "[1]"),
        (Grammar("regex", r"[0-9]{3}-(a|b/c)\d"), "123-b/c7", "12-a1"),
        (Grammar("choice", '["yes", "no \\"q\\"\\nthen", "naïve"]'), 'no "q"\nthen', "no"),
        (Grammar("choice", '["yes", "yes, sir"]'), "yes", "ye"),
        (Grammar("grammar", 'start: word ("," word)*\nword: /[a-z]+/'), "ab,c", "ab,"),
        (Grammar("grammar", 'root ::= "a" item+\nitem ::= "x" | "y"'), "axy", "a"),
    ],
)
def test_every_kind_of_grammar(grammar: Grammar, good: str, bad: str) -> None:
    assert says(matcher(grammar), good)
    assert not says(matcher(grammar), bad)


def test_masks_of_drafts_are_those_of_the_same_tokens_said() -> None:
    tokens = text().encode('{"n": 12, "kind": "yy"}')
    ahead, step = matcher(schema(FLAT)), matcher(schema(FLAT))
    for i in range(len(tokens)):
        wrong = [tokens[i], *text().encode('"zz')]
        for drafts in (tokens[i : i + 3], wrong, tokens[i : i + 1]):  # forth and back again
            fresh = matcher(schema(FLAT))
            for token in [*tokens[:i]]:
                fresh.accept(token)
            kept = ahead.cut(drafts)
            assert kept == drafts[: len(kept)]
            for token in kept:
                fresh.accept(token)
            assert ahead.mask(kept) == fresh.mask()
        assert ahead.mask() == step.mask()
        ahead.accept(tokens[i])
        step.accept(tokens[i])
    assert ahead.finished and step.finished


def test_the_constraint_begins_where_the_end_of_thinking_lands_in_a_window() -> None:
    before, after = text().encode("so it is"), text().encode('{"n": 1')
    m = matcher(schema(FLAT, start_after=THINK_END))
    for token in before:
        assert not allowed(m) & set(EOS)  # an answer that ends before the constraint began would be none
        assert THINK_END[0] in allowed(m)
        m.accept(token)
    drafts = [*before[:1], *THINK_END, *after]
    assert m.cut(drafts) == drafts
    assert m.cut([*THINK_END, *before]) == list(THINK_END)
    assert m.cut([*before, *before]) == [*before, *before]  # not begun: anything goes
    for token in THINK_END:
        m.accept(token)
    first = {text().decode([t])[0] for t in allowed(m)}
    assert first == {"{", "\n"}
    assert m.cut(text().encode("\n\n{")) == text().encode("\n\n{")
    assert not m.finished


NAMES = ["<tool_call>", "a<think>b", "<|im_end|>", "</think>", "<|endoftext|> x <tool_response>", "e\u0301\u212b"]


def grammars_of(name: str) -> dict[str, Grammar]:
    return {
        "choice": Grammar("choice", json.dumps([name])),
        "enum": schema({"enum": [name]}),
        "regex": Grammar("regex", f"({re.escape(name)}){{1,2}}".replace("/", "\\/")),
        "grammar": Grammar("grammar", f"start: {json.dumps(name)}"),
        "after thinking": Grammar("choice", json.dumps([name]), THINK_END),
    }


def test_the_name_of_a_token_in_a_grammar_is_said_in_letters() -> None:
    """And text that normalisation would change is said as it stands there."""
    ends = SamplingParams(max_tokens=60, temperature=1.0, seed=1, logit_bias=((THINK_END[0], 100.0),))
    cases = {f"{kind}: {name}": (kind, name) for name in NAMES for kind in grammars_of(name)}
    requests = [
        Request(id, chat("x", think=kind == "after thinking"), ends, grammar=grammars_of(name)[kind])
        for id, (kind, name) in cases.items()
    ]
    got = run(engine(draft_len=3, max_num_seqs=32), requests)
    added = set(text().rust.get_added_tokens_decoder())
    for id, outputs in got.items():
        assert outputs[-1].finish_reason == "stop", (id, outputs[-1])
        tokens, whole, (kind, name) = ids(outputs), said(outputs), cases[id]
        if kind == "after thinking":
            assert tokens[0] == THINK_END[0]
            tokens, whole = tokens[1:], whole.removeprefix("</think>").lstrip("\n")
        assert whole in (name, name * 2, json.dumps(name), json.dumps(name, ensure_ascii=False)), id
        assert not set(tokens) & added


def test_a_grammar_may_still_name_a_token() -> None:
    tag = text().encode("<tool_call>")
    m = matcher(Grammar("grammar", f'start: <tool_call> "x" <[{THINK_END[0]}]>'))
    for token in [*tag, *text().encode("x"), *THINK_END]:
        assert allowed(m) == {token}
        m.accept(token)
    assert m.finished


def test_the_end_of_thinking_cannot_be_spelled_in_letters() -> None:
    """A reader of the text would take it for the end, and what follows would be held to nothing."""
    letters = [text().encode(c)[0] for c in "</think>"]
    three = [t for piece in ("</", "think", ">") for t in text().encode(piece)]
    for pieces in (letters, three, text().encode("<</think")):
        m = matcher(schema(FLAT, start_after=THINK_END))
        finishing = {i for i, b in enumerate(text().token_bytes) if b.startswith(b">")} & allowed(m)
        assert text().encode(">")[0] in finishing
        for token in pieces[:-1] if pieces[-1] in finishing else pieces:
            assert token in allowed(m)
            m.accept(token)
        assert not allowed(m) & finishing
        assert allowed(m) & {*letters[:-1]} == {*letters[:-1]}
        assert not m.cut([text().encode(">")[0]])
        fresh = matcher(schema(FLAT, start_after=THINK_END))
        assert fresh.cut([*letters, *letters]) == letters[:-1]
        m.accept(letters[1])  # it went on otherwise
        assert finishing <= allowed(m)


def test_masks_change_only_rows_with_a_matcher() -> None:
    logits = torch.randn(3, VOCAB)
    m = matcher(schema(FLAT))
    assert mask_logits(logits, [(None, [])] * 3) is logits
    masked = mask_logits(logits, [(None, []), (m, []), (None, [])])
    assert masked[[0, 2]].equal(logits[[0, 2]])
    assert set(masked[1].isfinite().nonzero().flatten().tolist()) == allowed(m)
    assert masked[1, sorted(allowed(m))].equal(logits[1, sorted(allowed(m))])


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        (schema({"type": "foo"}), "foo"),
        (schema({"type": "string", "pattern": "(a"}), "unclosed group"),
        (schema({"$ref": "#/$defs/gone"}), "gone"),
        (schema({"$ref": "http://example.com/x"}), "example.com"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema([1]), "object"),
        (schema(False), "not"),
        (Grammar("json_schema", '{"a": '), "JSON"),
        (Grammar("regex", "a(?=b)"), "look"),
        (Grammar("regex", "a("), "unclosed"),
        (Grammar("choice", "[]"), "one or more"),
        (Grammar("choice", '["a", 1]'), "strings"),
        (Grammar("grammar", "start: gone"), "gone"),
        (Grammar("grammar", 'root ::= "a" ('), ""),
        (Grammar("json_schema", json.dumps({"enum": ["x" * 400_000]})), "400000"),
    ],
)
def test_a_fault_in_a_grammar_is_named(grammar: Grammar, fault: str) -> None:
    with pytest.raises(RequestError) as e:
        matcher(grammar)
    assert fault in str(e.value)
    assert "\n" not in str(e.value) and len(str(e.value)) < 500


def deep(n: int) -> Any:
    value: Any = {"type": "integer"}
    for _ in range(n):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    return value


HOSTILE = {
    "exponential references": {
        "$defs": {
            **{
                f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}]}
                for i in range(24)
            },
            "d24": {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+b"}}},
        },
        "$ref": "#/$defs/d0",
    },
    "a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "repeats of repeats": {"type": "string", "pattern": "^(((a{1,1000}){1,1000}){1,1000})$"},
    "an ambiguous pattern": {"type": "string", "pattern": "^(.*a.{40}b|.*c.{50}d)$"},
    "a million items": {"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}},
    "many patterns": {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": f"^x{i}[a-z]+.*{i}$"} for i in range(3000)},
    },
    "300 levels": deep(300),
    "5000 names": {"enum": [f"name {i}" for i in range(5000)]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_or_served_in_bounded_time(name: str) -> None:
    began_s = time.process_time()
    try:
        m = matcher(schema(HOSTILE[name]))
        for token in text().encode('{"a": "aaab'):
            mask = m.mask()
            if mask is None or not mask[token // 8] >> token % 8 & 1:
                break
            m.accept(token)
    except RequestError:
        pass
    assert time.process_time() - began_s < 6.0


# Through the engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_does_not_depend_on_drafts(temperature: float) -> None:
    """With k = 0..4, alone and in company, with and without thinking before it."""
    params = SamplingParams(max_tokens=32, temperature=temperature, seed=3)
    requests = [
        Request("at once", chat("Give me numbers."), params, grammar=schema(FLAT)),
        Request("thinking", chat("Hi", think=True), params, grammar=schema(FLAT, start_after=THINK_END)),
        Request("regex", chat("Say a code"), params, grammar=Grammar("regex", "[A-Z]{3}-[0-9]{2,6}")),
        Request("free", chat("Hello"), params),
    ]
    want: dict[str, list[int]] | None = None
    for k in range(5):
        e = engine(draft_len=k)
        got = {name: ids(outputs) for name, outputs in run(e, requests).items()}
        if k == 3:
            assert e.stats().accepted_tokens > 0
            assert got == {r.id: ids(run(e, [r])[r.id]) for r in requests}
        want = want or got
        assert got == want, k


def test_an_answer_without_a_grammar_is_the_same_beside_one_with() -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5)
    free = [Request(f"free{i}", chat(f"Tell me {i}"), params) for i in range(3)]
    alone = run(engine(draft_len=3), free)
    beside = run(engine(draft_len=3), [*free, Request("g", chat("x"), params, grammar=schema(FLAT))])
    assert all(ids(alone[r.id]) == ids(beside[r.id]) for r in free)


def test_preemption_keeps_the_matcher() -> None:
    array = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 9999},
        "minItems": 30,
        "maxItems": 30,
    }
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=1)
    requests = [Request(str(i), chat(f"list {i}"), params, grammar=schema(array)) for i in range(4)]
    wide = run(engine(draft_len=2, max_model_len=384), requests)
    small = engine(draft_len=2, max_model_len=384, kv_gb=0.0028)
    tight = run(small, requests)
    assert small.stats().preemptions > 0
    for r in requests:
        assert ids(tight[r.id]) == ids(wide[r.id])
        assert len(json.loads(said(wide[r.id]))) == 30


def test_a_faulty_grammar_fails_its_request_alone() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0)
    bad = Request("bad", chat("x"), params, grammar=Grammar("regex", "a("))
    dead = Request("dead", chat("x"), params, grammar=Grammar("grammar", "start: A\nA: /ab?/ & /c/"))
    good = Request("good", chat("x"), params, grammar=Grammar("choice", '["left", "right"]'))
    free = Request("free", chat("x"), params)
    got = run(engine(), [bad, dead, good, free])
    for name in ("bad", "dead"):
        (output,) = got[name]
        assert (output.finish_reason, output.refused, output.tokens) == ("error", True, ())
        assert output.error
    assert said(got["good"]) in ("left", "right")
    assert ids(got["free"]) == ids(run(engine(), [free])["free"])


def test_a_request_cancelled_while_its_grammar_compiles_leaves_nothing() -> None:
    e = engine()
    e.add(Request("a", chat("x"), grammar=schema(HOSTILE["many patterns"])))
    e.step()
    e.cancel("a")
    assert not e.has_work
    assert said(run(e, [Request("b", chat("x"), grammar=Grammar("choice", '["ok"]'))])["b"]) == "ok"


def test_a_finished_grammar_ends_the_answer_whatever_min_tokens_says() -> None:
    params = SamplingParams(max_tokens=50, min_tokens=40, temperature=0.0, ignore_eos=True)
    grammars = {
        "choice": Grammar("choice", '["left"]'),
        "open": Grammar("regex", "ab*"),
        "shut": Grammar("regex", "ab{1,2}"),
    }
    got = run(engine(), [Request(k, chat("x"), params, grammar=g) for k, g in grammars.items()])
    assert said(got["choice"]) == "left" and got["choice"][-1].finish_reason == "stop"
    assert re.fullmatch("ab+", said(got["open"])) and len(ids(got["open"])) >= 40
    assert said(got["shut"]) in ("ab", "abb") and got["shut"][-1].finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 30.0, 100.0])
def test_bias_penalties_and_temperature_cannot_break_a_grammar(temperature: float) -> None:
    left = text().encode("left")
    params = SamplingParams(
        max_tokens=10,
        temperature=temperature,
        seed=2,
        logit_bias=(*((t, -100.0) for t in left), (5, 100.0)),
        presence_penalty=2.0,
        repetition_penalty=50.0,
    )
    got = run(engine(), [Request("a", chat("left"), params, grammar=Grammar("choice", '["left"]'))])
    assert said(got["a"]) == "left"


def test_logprobs_are_the_models_own() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)
    free = run(engine(), [Request("a", chat("Hello"), params)])["a"][0].logprobs[0]
    got = run(engine(), [Request("a", chat("Hello"), params, grammar=Grammar("choice", '["{"]'))])["a"][0].logprobs[0]
    assert got.top == free.top
    assert got.token not in [t for t, _ in free.top]
    assert got.logprob < free.top[-1][1]


def test_the_same_grammar_is_compiled_once() -> None:
    grammars = Grammars(TINY / "tokenizer.json", VOCAB, EOS)
    assert grammars.get(schema(FLAT)) is None
    first = grammars.compile(schema(FLAT)).result()
    again = grammars.get(schema(FLAT))
    assert again is not None
    first.accept(text().encode("{")[0])
    assert first.mask() != again.mask()


def test_a_checkpoint_without_a_tokenizer_refuses_by_name(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        Grammars(tmp_path / "tokenizer.json", VOCAB, EOS).compile(schema(FLAT)).result()
