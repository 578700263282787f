"""Calibration text: a file of JSON lines with a `text` each, and a tokenizer.json -> token ids of every line."""

from __future__ import annotations

import json
from pathlib import Path

from onebox.errors import ConfigError


def read_texts(text: Path, tokenizer: Path) -> list[list[int]]:
    """Token ids of every line. Raises ConfigError naming the file and the line at fault."""
    from tokenizers import Tokenizer

    if not tokenizer.is_file():
        raise ConfigError(f"{tokenizer}: the base has no tokenizer, which calibration needs.")
    try:
        encode = Tokenizer.from_file(str(tokenizer)).encode
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{tokenizer}: no tokenizer can be read from it ({error}).") from None
    try:
        lines = text.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{text}: {error}; expected calibration text: JSON lines with a 'text'.") from None
    texts = []
    for number, line in enumerate(lines, start=1):
        try:
            texts.append(list(encode(json.loads(line)["text"]).ids))
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"{text}: line {number} is no JSON object with a 'text'.") from None
    return texts
