"""What a body asks its answer to look like -> Grammar. Takes checked fields and tools, no text of a model.

A call that must be made is a grammar in the model's own form: every required parameter stands there, a parameter that
is no string is JSON of its schema, one that is a string is free text up to its closing tag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from onebox.errors import RequestError
from onebox.request import Grammar
from onebox.server.parsers import CALL, CALL_END, FUNCTION, FUNCTION_END, PARAMETER_END, tool_schema, value_types

STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class Asked:
    """A constraint, and the field of the body that asks for it."""

    grammar: Grammar
    field: str


class ResponseFormat(BaseModel):
    """OpenAI's response_format."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class StructuredOutputs(BaseModel):
    """vLLM's structured_outputs: one of its fields says what the answer must be."""

    model_config = ConfigDict(extra="allow")

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None


def asked_grammar(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    guided: Mapping[str, Any],
) -> Asked | None:
    """The one constraint of a body; `guided` are vLLM's older fields, by kind. Raises RequestError for two of them."""
    found: dict[str, Grammar] = {}
    if response_format is not None and response_format.type == "json_object":
        found["response_format"] = Grammar("json_object")
    elif response_format is not None and response_format.type == "json_schema":
        schema = (response_format.json_schema or {}).get("schema")
        if not isinstance(schema, Mapping):
            raise RequestError(
                "'response_format.json_schema.schema' must be a JSON schema, an object.",
                param="response_format.json_schema.schema",
            )
        found["response_format"] = Grammar("json_schema", json.dumps(schema))
    if structured is not None:
        if structured.model_extra and (unknown := [k for k, v in structured.model_extra.items() if v]):
            raise RequestError(
                f"Unsupported field 'structured_outputs.{unknown[0][:40]}'. Supported: {', '.join(STRUCTURES)}.",
                param="structured_outputs",
            )
        values = {"json": structured.json_, **{k: getattr(structured, k) for k in STRUCTURES[1:]}}
        found |= {f"structured_outputs.{k}": grammar_of(k, v) for k, v in values.items() if v not in (None, False)}
    found |= {f"guided_{k}": grammar_of(k, v) for k, v in guided.items() if v is not None}
    if len(found) > 1:
        names = ", ".join(f"'{name}'" for name in found)
        raise RequestError(f"{names}: an answer can have one constraint.", param=list(found)[-1].split(".")[0])
    return next((Asked(grammar, field) for field, grammar in found.items()), None)


def grammar_of(kind: str, value: Any) -> Grammar:
    if kind == "json":
        return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value))
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "choice":
        return Grammar("choice", json.dumps(value))
    return Grammar("regex" if kind == "regex" else "grammar", value)


def answer_grammar(
    asked: Asked | None,
    tools: Sequence[Mapping[str, Any]],
    forced: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    *,
    parallel: bool,
) -> Asked | None:
    """The grammar of an answer: a call of one of the `forced` functions, or what is asked for or a call of any tool."""
    if forced:
        named = [t for t in tools if tool_schema(t)[0] in forced]
        return Asked(Grammar("grammar", "start: calls\n" + call_rules(named, encode, parallel=parallel)), "tools")
    if asked is None or not tools:
        return asked
    if asked.grammar.kind == "grammar":
        raise RequestError(
            "A grammar of one's own cannot stand beside tools the model may call; send 'tool_choice': 'none'.",
            param="tools",
        )
    rules = f"start: calls | said\nsaid: {inline(asked)}\n" + call_rules(tools, encode, parallel=parallel)
    return Asked(Grammar("grammar", rules), asked.field)


def inline(asked: Asked) -> str:
    """A constraint as the right side of a Lark rule. Raises RequestError for a source that is no JSON."""
    grammar = asked.grammar
    if grammar.kind == "json_object":
        return json_rule({"type": "object"})
    if grammar.kind == "regex":
        return "/" + grammar.source.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n") + "/"
    try:
        value = json.loads(grammar.source)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"The JSON schema cannot be used: it is not JSON ({e}).", param=asked.field) from e
    if grammar.kind == "choice":
        return "CHOICE\nCHOICE: " + " | ".join(literal(c) for c in value)  # one terminal, however many there are
    return json_rule(value)


def json_rule(schema: Any, *, lenient: bool = False) -> str:
    options: dict[str, Any] = {"whitespace_pattern": r"[ ]|\n[ \t]{0,40}"}
    if lenient:
        options["lenient"] = True
    return "%json " + json.dumps({**schema, "x-guidance": options})


def call_rules(tools: Sequence[Mapping[str, Any]], encode: Callable[[str], Sequence[int]], *, parallel: bool) -> str:
    """Lark rules of `calls`: one call, or several, of any of these functions."""
    rules = ['calls: call ("\\n" call)*' if parallel else "calls: call"]
    functions = []
    for i, tool in enumerate(tools):
        name, schema = tool_schema(tool)
        functions.append(f"f{i}")
        parts = [literal(f"{name}>\n")]
        raw = schema.get("properties")
        properties = dict(raw) if isinstance(raw, Mapping) else {}
        required = schema.get("required")
        names = [k for k in required if isinstance(k, str)] if isinstance(required, Sequence) else []
        properties |= {k: {} for k in names if k not in properties}
        for j, (key, value) in enumerate(properties.items()):
            if any(c in key for c in "<>\n") or not key.strip("\"' ") == key or not key:
                raise RequestError(f"Parameter {key[:60]!r} of function {name!r} has no form.", param="tools")
            parts.append(f"p{i}_{j}" + ("" if key in names else "?"))
            rules.append(f"p{i}_{j}: {literal(f'<parameter={key}>' + chr(10))} v{i}_{j} " + literal("\n"))
            try:
                rules.append(value_rule(f"v{i}_{j}", value, schema))
            except RequestError as e:
                raise RequestError(f"Parameter {key[:60]!r} of function {name!r}: {e}", param="tools") from e
        rules.append(f"f{i}: " + " ".join(parts))
    rules.append(
        f"call: {tag(CALL, encode)} {literal(chr(10) + FUNCTION)} ({' | '.join(functions)}) "
        f"{literal(FUNCTION_END + chr(10))} {tag(CALL_END, encode)}"
    )
    return "\n".join(rules) + "\n"


def value_rule(rule: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The rule of a parameter's value and its closing tag. Raises RequestError for a value that has no form."""
    types = value_types(schema, root)
    closing = literal("</parameter>")
    values = (
        schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, Mapping) else None
    )
    if isinstance(values, Sequence) and values and all(isinstance(v, str) for v in values):
        if ends := [v for v in values if PARAMETER_END in v or FUNCTION_END in v]:
            raise RequestError(f"the value {ends[0][:60]!r} holds a closing tag of the call it would stand in.")
        one = f"ONE_{rule.upper()}"  # a terminal: alternatives of a rule are followed one by one
        return f"{rule}: {one} {closing}\n{one}: {' | '.join(literal(v + chr(10)) for v in values)}"
    if not types or "string" in types:
        return f"{rule}[suffix={closing}]: /(?s:.*)/"
    definitions = {k: root[k] for k in ("$defs", "definitions") if k in root}
    known = not any(f'"$ref": "{other}' in json.dumps(schema) for other in ("#/properties", '#"'))
    value = {**schema, **definitions} if known else {"type": sorted(types)}
    return f"{rule}: {rule}_json {literal(chr(10))} {closing}\n{rule}_json: {json_rule(value, lenient=True)}"


def tag(text: str, encode: Callable[[str], Sequence[int]]) -> str:
    """A tag that is one token is that token: its letters spelled out would not be the tag to the model."""
    ids = encode(text)
    return f"<[{ids[0]}]>" if len(ids) == 1 else literal(text)


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
