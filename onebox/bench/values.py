"""Values of benchmark options: numbers that make sense, and one line for those that do not."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

T = TypeVar("T")

Refused = argparse.ArgumentTypeError


class Parser(argparse.ArgumentParser):
    """A mistake is one line on stderr and exit status 2; `--help` has the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see --help)\n")


def parser(text: str | None) -> Parser:
    """A parser whose help is a module's docstring as it stands."""
    return Parser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def count(text: str) -> int:
    """A whole number above 0."""
    return _whole(text, 1)


def count_or_none(text: str) -> int:
    """A whole number, 0 or more."""
    return _whole(text, 0)


def drafts(text: str) -> int:
    """Drafts a step that the engine can make."""
    from onebox.config import MAX_DRAFT_LEN

    n = _whole(text, 0)
    if n > MAX_DRAFT_LEN:
        raise Refused(f"must be 0 to {MAX_DRAFT_LEN} drafts, got {n}")
    return n


def positive(text: str) -> float:
    """A finite number above 0."""
    x = _number(text)
    if not x > 0:
        raise Refused(f"must be above 0, got {text}")
    return x


def not_negative(text: str) -> float:
    """A finite number, 0 or more."""
    x = _number(text)
    if not x >= 0:
        raise Refused(f"must be 0 or more, got {text}")
    return x


def share(text: str) -> float:
    """A number from 0 to 1."""
    x = _number(text)
    if not 0 <= x <= 1:
        raise Refused(f"must be from 0 to 1, got {text}")
    return x


def shares(text: str) -> tuple[float, ...]:
    """Numbers from 0 to 1, separated by commas."""
    return _several(text, share)


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers above 0, separated by commas."""
    return _several(text, count)


def draft_lengths(text: str) -> tuple[int, ...]:
    """Drafts a step, separated by commas."""
    return _several(text, drafts)


def folder(text: str) -> Path:
    """A folder that is there."""
    path = Path(text)
    if not path.is_dir():
        raise Refused(f"{text}: no such folder")
    return path


def file(text: str) -> Path:
    """A file that is there."""
    path = Path(text)
    if not path.is_file():
        raise Refused(f"{text}: no such file")
    return path


def output(text: str) -> Path:
    """A file that can be written: found out before anything is measured. Its folder is made when results come."""
    path = Path(text)
    above = next((p for p in path.absolute().parents if p.exists()), Path("/"))
    if path.is_dir():
        raise Refused(f"{text}: is a folder; name a file")
    if not above.is_dir():
        raise Refused(f"{text}: {above} is a file, not a folder")
    if not os.access(path if path.exists() else above, os.W_OK):
        raise Refused(f"{text}: cannot be written")
    return path


def _whole(text: str, least: int) -> int:
    try:
        n = int(text)
    except ValueError:
        raise Refused(f"must be a whole number, got {text!r}") from None
    if n < least:
        raise Refused(f"must be at least {least}, got {n}")
    return n


def _number(text: str) -> float:
    try:
        x = float(text)
    except ValueError:
        raise Refused(f"must be a number, got {text!r}") from None
    if not math.isfinite(x):
        raise Refused(f"must be finite, got {text}")
    return x


def _several(text: str, one: Callable[[str], T]) -> tuple[T, ...]:
    found = tuple(one(part) for part in text.split(",") if part)
    if not found:
        raise Refused(f"must be numbers separated by commas, got {text!r}")
    return found
