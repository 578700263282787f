"""Data with a config of the same shape -> the data with its long strings compressed. Types, keys and order stay."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from onebox.errors import PromptError
from onebox.prompt.compressor import Compressor

_SETTINGS = frozenset(["rate", "compress", "value_type", "pair_remove"])
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "string": (str,),
    "int": (int,),
    "integer": (int,),
    "float": (float, int),
    "number": (float, int),
    "bool": (bool,),
    "list": (list,),
    "tuple": (tuple, list),
    "dict": (dict,),
}


def compress_fields(
    data: Mapping[str, Any],
    config: Mapping[str, Any],
    compressor: Compressor,
    *,
    rate: float,
    question: str | None,
    tokenizer: Any,
    remove_pairs: bool,
) -> dict[str, Any]:
    """A field's config is `{rate, compress, value_type, pair_remove}`, or a config of its own fields. A field without
    one stays. All strings are scored in one batch. Raises PromptError naming the field."""
    out: dict[str, Any] = copy.deepcopy(dict(data))
    strings: list[tuple[Any, Any, float]] = []  # (container, key, rate)
    pairs: list[tuple[dict[str, Any], str]] = []
    tuples: list[tuple[Any, Any]] = []  # lists while their strings change
    _walk(out, config, rate, "", strings, pairs, tuples)
    if remove_pairs and pairs:
        texts = [f"{key}: {holder[key]}" for holder, key in pairs]
        result = compressor.compress(
            documents=texts, rate=rate, question=question, append_question=False, tokenizer=tokenizer
        )
        for (holder, key), left in zip(pairs, result.documents, strict=True):
            if not left.strip():
                del holder[key]
        gone = {(id(holder), key) for holder, key in pairs if key not in holder}
        strings = [row for row in strings if (id(row[0]), row[1]) not in gone]
    if strings:
        result = compressor.compress(
            documents=[holder[key] for holder, key, _ in strings],
            document_rates=[own for _, _, own in strings],
            rate=rate,
            question=question,
            append_question=False,
            tokenizer=tokenizer,
        )
        for (holder, key, _), left in zip(strings, result.documents, strict=True):
            holder[key] = left
    for holder, key in reversed(tuples):
        holder[key] = tuple(holder[key])
    return out


def _walk(
    holder: dict[str, Any],
    config: Mapping[str, Any],
    rate: float,
    path: str,
    strings: list[tuple[Any, Any, float]],
    pairs: list[tuple[dict[str, Any], str]],
    tuples: list[tuple[Any, Any]],
) -> None:
    if unknown := [key for key in config if key not in holder]:
        raise PromptError(f"json_config: field {path + str(unknown[0])!r} is not in the data")
    for key, value in list(holder.items()):
        if key not in config:
            continue
        own = config[key]
        name = path + str(key)
        if not isinstance(own, Mapping):
            raise PromptError(f"json_config[{name!r}]: {own!r} is no dictionary of {', '.join(sorted(_SETTINGS))}")
        if isinstance(value, dict) and not (set(own) <= _SETTINGS and not set(own) & set(value)):
            _walk(value, own, rate, f"{name}.", strings, pairs, tuples)
            continue
        if strange := set(own) - _SETTINGS:
            raise PromptError(f"json_config[{name!r}]: unknown {', '.join(sorted(map(str, strange)))}")
        kind = own.get("value_type")
        if kind is not None and kind not in _TYPES:
            raise PromptError(f"json_config[{name!r}]: unknown value_type {kind!r}; known: {', '.join(_TYPES)}")
        if kind is not None and value is not None and not isinstance(value, _TYPES[kind]):
            raise PromptError(f"json_config[{name!r}]: value_type is {kind}, the value is {type(value).__name__}")
        field_rate = own.get("rate")
        field_rate = rate if field_rate is None else field_rate
        if isinstance(field_rate, bool) or not isinstance(field_rate, (int, float)) or not 0 <= field_rate <= 1:
            raise PromptError(f"json_config[{name!r}]: rate={field_rate!r} is not a number from 0 to 1")
        if own.get("pair_remove"):
            pairs.append((holder, key))
        if own.get("compress", True):
            _strings(holder, key, float(field_rate), strings, tuples)


def _strings(
    holder: Any, key: Any, rate: float, strings: list[tuple[Any, Any, float]], tuples: list[tuple[Any, Any]]
) -> None:
    value = holder[key]
    if isinstance(value, str):
        if value.strip():
            strings.append((holder, key, rate))
    elif isinstance(value, tuple):
        holder[key] = items = list(value)
        tuples.append((holder, key))
        for index in range(len(items)):
            _strings(items, index, rate, strings, tuples)
    elif isinstance(value, list):
        for index in range(len(value)):
            _strings(value, index, rate, strings, tuples)
    elif isinstance(value, dict):
        for inner in value:
            _strings(value, inner, rate, strings, tuples)
