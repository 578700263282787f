"""Which bonds stay. Takes pieces with priorities and a token budget, gives the kept pieces: never above the budget by
the caller's own tokenizer, and as close below it as whole pieces allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from onebox.errors import PromptError
from onebox.prompt.segments import Piece

Counter = Callable[[str], int]
_BUNDLED = Path(__file__).parent.parent / "models" / "tiny" / "tokenizer.json"


@cache
def _bundled_counter() -> Counter | None:
    if not _BUNDLED.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_BUNDLED))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def counter_of(tokenizer: Any | None) -> Counter:
    """A token counter from a tiktoken encoding, a `tokenizers` or transformers tokenizer, or a function of text.

    None means the bundled Qwen-style tokenizer, or a quarter of the UTF-8 bytes where it is not installed.
    """
    if tokenizer is None:
        return _bundled_counter() or (lambda text: -(-len(text.encode()) // 4))
    if hasattr(tokenizer, "encode_ordinary"):
        return lambda text: len(tokenizer.encode_ordinary(text))
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return lambda text: len(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
    if hasattr(tokenizer, "encode"):
        return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
    if callable(tokenizer):
        return lambda text: (lambda found: found if isinstance(found, int) else len(found))(tokenizer(text))
    raise PromptError(
        f"tokenizer: {type(tokenizer).__name__} is not a tokenizer; pass tiktoken, transformers or a function"
    )


@dataclass(frozen=True)
class Slice:
    """Source characters [start, end) of a part, at `out` in the output. part -1: a separator, not from the source;
    `note`: text that stands there in their place, a count of what was left out."""

    part: int
    start: int
    end: int
    out: int
    note: str = ""


def assemble(
    parts: Sequence[str],
    pieces: Sequence[Sequence[Piece]],
    kept: Sequence[np.ndarray],
    order: Sequence[int],
    separator: str,
) -> tuple[str, list[Slice]]:
    """Output text and where each stretch came from. Of the whitespace between two kept pieces the strongest stays."""
    out: list[str] = []
    slices: list[Slice] = []
    length = 0

    def emit(part: int, start: int, end: int) -> None:
        nonlocal length
        if start == end:
            return
        body = separator if part < 0 else parts[part][start:end]
        if slices and slices[-1].part == part and slices[-1].end == start and part >= 0 and not slices[-1].note:
            slices[-1] = Slice(part, slices[-1].start, end, slices[-1].out)
        else:
            slices.append(Slice(part, start, end, length))
        out.append(body)
        length += len(body)

    for part in order:
        text, row, keep = parts[part], pieces[part], kept[part]
        held = np.flatnonzero(keep)
        gone: dict[int, list[int]] = {}  # bond -> lengths of its copies that are not kept
        for piece in (row[int(at)] for at in np.flatnonzero(~keep)):
            if piece.same >= 0:
                gone.setdefault(piece.same, []).append(piece.end - piece.lead)
        if not len(held):
            if not row and text and all(not other.strip() for other in parts):
                emit(part, 0, len(text))
            continue
        if slices:
            emit(-1, 0, len(separator))
        previous = -1
        for index_ in held:
            index = int(index_)
            piece = row[index]
            if index == previous + 1:
                emit(part, piece.lead, piece.end)
            else:
                if previous >= 0:
                    gaps = [
                        (row[i].lead, row[i].start)
                        for i in range(previous + 1, index + 1)
                        if row[i].start > row[i].lead
                    ]
                    if gaps:
                        best = max(gaps, key=lambda gap: (text.count("\n", *gap), gap[0]))
                        emit(part, *best)
                emit(part, piece.start, piece.end)
            if piece.bond in gone:
                lengths = gone.pop(piece.bond)
                note = f" [{len(lengths)} more like it]"
                if len(note) <= sum(lengths):
                    slices.append(Slice(part, piece.end, piece.end, length, note))
                    out.append(note)
                    length += len(note)
            previous = index
        if previous == len(row) - 1:
            emit(part, row[-1].end, len(text))
    return "".join(out), slices


@dataclass(frozen=True)
class Selection:
    text: str
    slices: list[Slice]
    kept: list[np.ndarray]
    tokens: int
    floor_tokens: int  # what the protected pieces alone take


def select(
    parts: Sequence[str],
    pieces: Sequence[Sequence[Piece]],
    priorities: Sequence[np.ndarray],
    order: Sequence[int],
    budget: int,
    count: Counter,
    separator: str,
) -> Selection:
    """Highest priorities first until the budget is full. `tokens` above the budget: the floor alone is."""
    flat = [piece for row in pieces for piece in row]
    n = len(flat)
    bonds, bond_of = np.unique(np.array([piece.bond for piece in flat], dtype=np.int64), return_inverse=True)
    m = len(bonds)
    size = np.array([piece.end - piece.lead for piece in flat], dtype=float)
    value = np.concatenate([*priorities, np.zeros(0)]) if n else np.zeros(0)
    weight = np.bincount(bond_of, weights=size, minlength=m)
    priority = np.bincount(bond_of, weights=value * size, minlength=m) / np.maximum(weight, 1e-9)
    keep, drop = np.zeros(m, dtype=bool), np.zeros(m, dtype=bool)
    index_of = {int(bond): at for at, bond in enumerate(bonds)}
    links: list[tuple[int, int, bool]] = []
    for at, piece in enumerate(flat):
        keep[bond_of[at]] |= piece.keep
        drop[bond_of[at]] |= piece.drop
        if piece.needs >= 0 and piece.needs in index_of and index_of[piece.needs] != bond_of[at]:
            links.append((int(bond_of[at]), index_of[piece.needs], piece.pulls))
    drop &= ~keep
    for _ in range(64):  # a kept piece keeps what it needs, a dropped one drops what needs it, through every level
        changed = False
        for child, parent, pulls in reversed(links):
            if keep[child] and not keep[parent]:
                keep[parent], drop[parent], changed = True, False, True
            if drop[parent] and not drop[child]:
                drop[child], changed = True, True
            if pulls and not drop[child] and priority[child] > priority[parent]:
                priority[parent], changed = priority[child], True
        if not changed:
            break
    for _ in range(64):
        changed = False
        for child, parent, _pulls in links:
            if priority[child] > priority[parent]:
                priority[child], changed = priority[parent], True
        if not changed:
            break
    depth = np.zeros(m, dtype=int)
    for _ in range(64):
        before = depth.copy()
        for child, parent, _pulls in links:
            depth[child] = max(depth[child], depth[parent] + 1) if depth[parent] < 64 else depth[child]
        if (depth == before).all():
            break
    ranked = np.lexsort((np.arange(m), depth, -priority))
    ranked = ranked[~keep[ranked] & ~drop[ranked]]
    needs: dict[int, list[int]] = {}
    for child, parent, _pulls in links:
        needs.setdefault(child, []).append(parent)
    bounds = np.cumsum([0, *[len(row) for row in pieces]])

    def build(chosen: np.ndarray) -> Selection:
        held = chosen[bond_of] if n else np.zeros(0, dtype=bool)
        rows = [held[bounds[i] : bounds[i + 1]] for i in range(len(pieces))]
        text, slices = assemble(parts, pieces, rows, order, separator)
        return Selection(text, slices, rows, count(text), 0)

    def taking(amount: int) -> np.ndarray:
        chosen = keep.copy()
        chosen[ranked[:amount]] = True
        return chosen

    best = build(keep)
    floor = best.tokens
    if floor > budget:
        return Selection(best.text, best.slices, best.kept, floor, floor)
    total_tokens = count(separator.join(parts)) or 1
    cost = weight * total_tokens / max(weight.sum(), 1.0)
    cumulative = floor + np.cumsum(cost[ranked])
    low, high = 0, len(ranked) + 1
    guess = int(np.searchsorted(cumulative, budget))
    while high - low > 1 and best.tokens < budget - max(0, budget // 250):
        guess = min(max(guess, low + 1), high - 1)
        tried = build(taking(guess))
        if tried.tokens <= budget:
            low, best = guess, tried
        else:
            high = guess
        here = cumulative[guess - 1] + (budget - tried.tokens)
        proposal = int(np.searchsorted(cumulative, here))
        guess = proposal if low < proposal < high else (low + high) // 2
    chosen = taking(low)
    room = float(budget - best.tokens)
    extra: list[int] = []
    if low < len(ranked) and room > budget * 0.02:  # the next piece is too large: take smaller ones after it
        for bond in ranked[low:]:
            if cost[bond] <= room and all(chosen[parent] for parent in needs.get(int(bond), [])):
                chosen[bond] = True
                extra.append(int(bond))
                room -= cost[bond]
                if room < 1:
                    break
        while extra:
            tried = build(chosen)
            if tried.tokens <= budget:
                best = tried
                break
            for bond in extra[-max(1, len(extra) // 4) :]:
                chosen[bond] = False
            del extra[-max(1, len(extra) // 4) :]
    return Selection(best.text, best.slices, best.kept, best.tokens, floor)
