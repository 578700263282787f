"""Answers in the words of the original (LongLLMLingua's subsequence recovery). Takes an answer given on a compressed
prompt and where the prompt's characters came from; gives the answer with compressed phrases put back whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import regex

from onebox.prompt.budget import Slice

_TOKEN = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]|[\p{L}\p{N}\p{M}]+")
_LONGEST, _PLACES = 64, 64  # words of a run, and places in the output where it is looked for


@dataclass(frozen=True)
class Recovered:
    """Characters [start, end) of the answer stood for characters [source_start, source_end) of a part.

    `confidence` in (0, 1]: the share of the original phrase that the answer had, divided by the number of places in
    the output where the answer's words stand.
    """

    start: int
    end: int
    text: str
    part: int
    source_start: int
    source_end: int
    confidence: float


@dataclass(frozen=True)
class Recovery:
    """The answer, and what was found in it; phrases below the asked confidence are found but not replaced."""

    text: str
    matches: tuple[Recovered, ...]


def recover(
    response: str,
    output: str,
    slices: Sequence[Slice],
    parts: Sequence[str],
    *,
    max_gap: int = 10,
    min_confidence: float = 0.2,
) -> Recovery:
    """Longest runs of the response's words that stand in the output are mapped back; `max_gap` words may be missing
    between two of them. Runs that were never cut are reported with confidence 1 and stay as they are."""
    spoken = list(_TOKEN.finditer(response))
    written = list(_TOKEN.finditer(output))
    places: dict[str, list[int]] = {}
    for at, word in enumerate(written):
        places.setdefault(word.group().lower(), []).append(at)
    matches: list[Recovered] = []
    index = 0
    while index < len(spoken):
        length, found = _longest(spoken, index, written, places)
        if length < 2:
            index += 1
            continue
        origins = [_origin(written[at].start(), written[at + length - 1].end(), slices, parts, max_gap) for at in found]
        best = min((o for o in origins if o is not None), key=lambda o: o[2] - o[1], default=None)
        if best is not None:
            part, start, end = best
            kept = sum(len(spoken[i].group()) for i in range(index, index + length))
            whole = sum(len(word.group()) for word in _TOKEN.finditer(parts[part][start:end]))
            distinct = len({o for o in origins if o is not None})
            matches.append(
                Recovered(
                    spoken[index].start(),
                    spoken[index + length - 1].end(),
                    parts[part][start:end],
                    part,
                    start,
                    end,
                    min(1.0, kept / max(whole, 1)) / distinct,
                )
            )
        index += length
    pieces, at = [], 0
    for match in matches:
        if match.confidence >= min_confidence:
            pieces += [response[at : match.start], match.text]
            at = match.end
    return Recovery("".join([*pieces, response[at:]]), tuple(matches))


def _longest(
    spoken: list[regex.Match[str]], index: int, written: list[regex.Match[str]], places: dict[str, list[int]]
) -> tuple[int, list[int]]:
    """Words of the longest run from `index` that stands in the output, and where it does."""
    length, found = 0, []
    for at in places.get(spoken[index].group().lower(), [])[:_PLACES]:
        n = 1
        while (
            n < _LONGEST
            and index + n < len(spoken)
            and at + n < len(written)
            and spoken[index + n].group().lower() == written[at + n].group().lower()
        ):
            n += 1
        if n > length:
            length, found = n, [at]
        elif n == length:
            found.append(at)
    return length, found


def _origin(
    start: int, end: int, slices: Sequence[Slice], parts: Sequence[str], max_gap: int
) -> tuple[int, int, int] | None:
    """(part, start, end) in the source of output characters [start, end), if one part's and not too far apart."""
    touched = [s for s in slices if s.out < end and s.out + s.end - s.start > start]
    if not touched or touched[0].part < 0 or len({s.part for s in touched}) > 1:
        return None
    text = parts[touched[0].part]
    for before, after in pairwise(touched):
        if len(_TOKEN.findall(text[before.end : after.start])) > max_gap:
            return None
    first, last = touched[0], touched[-1]
    return first.part, first.start + max(0, start - first.out), last.start + min(end - last.out, last.end - last.start)


def align(original: str, compressed: str) -> list[Slice]:
    """Where each word of a compressed text stands in the original, for texts that come without a trace: the next
    place from where the last word was, else the first of all (documents may have been reordered)."""
    slices = []
    at = 0
    for word in _TOKEN.finditer(compressed):
        found = original.find(word.group(), at)
        if found < 0:
            found = original.find(word.group())
        if found < 0:
            continue
        at = found + len(word.group())
        slices.append(Slice(0, found, at, word.start()))
    return slices
