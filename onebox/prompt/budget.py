"""Which bonds stay. Takes pieces with priorities and a token budget, gives the kept pieces: never above the budget by
the caller's own tokenizer, and as close below it as whole pieces allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from onebox.errors import PromptError
from onebox.prompt.scoring import readable
from onebox.prompt.segments import Piece

Counter = Callable[[str], int]
_BUNDLED = Path(__file__).parent.parent / "models" / "tiny" / "tokenizer.json"


@cache
def _bundled_counter() -> Counter | None:
    if not _BUNDLED.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_BUNDLED))
    return lambda text: len(tokenizer.encode(readable(text), add_special_tokens=False).ids)


def counter_of(tokenizer: Any | None) -> Counter:
    """A token counter from a tiktoken encoding, a `tokenizers` or transformers tokenizer, or a function of text; the
    same one for the same tokenizer.

    None means the bundled Qwen-style tokenizer, or a quarter of the UTF-8 bytes where it is not installed.
    """
    try:
        return _counter_of(tokenizer)
    except TypeError:  # not hashable: no harm, only its own counter each time
        return _counter_of.__wrapped__(tokenizer)


def _by_function(function: Callable[[str], Any], text: str) -> int:
    """Tokens by a caller's function, which gives their number or the tokens. Raises PromptError for anything else."""
    try:
        found = function(text)
    except Exception as e:
        reason = (str(e).splitlines() or [""])[0]
        raise PromptError(
            f"tokenizer: failed on a text of {len(text)} characters ({type(e).__name__}: {reason})"
        ) from e
    number = found if isinstance(found, int) and not isinstance(found, bool) else None
    if number is None and hasattr(found, "__len__") and not isinstance(found, (str, bytes)):
        number = len(found)
    if number is None or number < 0:
        raise PromptError(f"tokenizer: gave {found!r:.40} for a text; give the number of tokens, or the tokens")
    return number


@lru_cache(maxsize=16)
def _counter_of(tokenizer: Any | None) -> Counter:
    if tokenizer is None:
        return _bundled_counter() or (lambda text: -(-len(readable(text).encode()) // 4))
    if isinstance(tokenizer, (str, bytes, type)):
        raise PromptError(
            f"tokenizer: {tokenizer!r:.60} is no tokenizer; pass the tokenizer itself, or a function of text"
        )
    if hasattr(tokenizer, "encode_ordinary"):
        return lambda text: len(tokenizer.encode_ordinary(readable(text)))
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        options = {"add_special_tokens": False, "split_special_tokens": True}
        return lambda text: len(tokenizer(readable(text), **options)["input_ids"])
    if hasattr(tokenizer, "encode"):
        return lambda text: len(tokenizer.encode(readable(text), add_special_tokens=False).ids)
    if callable(tokenizer):
        return lambda text: _by_function(tokenizer, text)
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


@dataclass(frozen=True)
class Layout:
    """What `assemble` asks of a row again and again: line breaks before each piece (-1: no gap), and its copies."""

    breaks: np.ndarray
    copies: list[int]

    @classmethod
    def of(cls, text: str, row: Sequence[Piece]) -> Layout:
        breaks = [text.count("\n", p.lead, p.start) if p.start > p.lead else -1 for p in row]
        return cls(np.array(breaks, dtype=int), [at for at, piece in enumerate(row) if piece.same >= 0])


def assemble(
    parts: Sequence[str],
    pieces: Sequence[Sequence[Piece]],
    kept: Sequence[np.ndarray],
    order: Sequence[int],
    separator: str,
    layouts: Sequence[Layout] | None = None,
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
        layout = layouts[part] if layouts is not None else Layout.of(text, row)
        gone: dict[int, list[int]] = {}  # bond -> lengths of its copies that are not kept
        for piece in (row[at] for at in layout.copies if not keep[at]):
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
                    gaps = layout.breaks[previous + 1 : index + 1][::-1]
                    strongest = int(np.argmax(gaps))
                    if gaps[strongest] >= 0:
                        before = row[index - strongest]
                        emit(part, before.lead, before.start)
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


class _Bonds:
    """Pieces of all parts as bonds: weight in characters, priority, what must stay, what must go, what needs what."""

    def __init__(self, pieces: Sequence[Sequence[Piece]], priorities: Sequence[np.ndarray]) -> None:
        flat = [piece for row in pieces for piece in row]
        ids, self.of = np.unique(np.array([piece.bond for piece in flat], dtype=np.int64), return_inverse=True)
        n = len(ids)
        size = np.array([piece.end - piece.lead for piece in flat], dtype=float)
        value = np.concatenate([*priorities, np.zeros(0)])
        self.weight = np.bincount(self.of, weights=size, minlength=n)
        self.priority = np.bincount(self.of, weights=value * size, minlength=n) / np.maximum(self.weight, 1e-9)
        self.keep, self.drop = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
        index_of = {int(bond): at for at, bond in enumerate(ids)}
        links: list[tuple[int, int, bool]] = []
        for at, piece in enumerate(flat):
            self.keep[self.of[at]] |= piece.keep
            self.drop[self.of[at]] |= piece.drop
            if piece.needs >= 0 and piece.needs in index_of and index_of[piece.needs] != self.of[at]:
                links.append((int(self.of[at]), index_of[piece.needs], piece.pulls))
        self.drop &= ~self.keep
        self.needs: dict[int, list[int]] = {}
        for child, parent, _pulls in links:
            self.needs.setdefault(child, []).append(parent)
        self._spread(links)
        depth = np.zeros(n, dtype=int)
        for _ in range(64):
            before = depth.copy()
            for child, parent, _pulls in links:
                depth[child] = max(depth[child], depth[parent] + 1) if depth[parent] < 64 else depth[child]
            if (depth == before).all():
                break
        order = np.lexsort((np.arange(n), depth, -self.priority))
        self.ranked = order[~self.keep[order] & ~self.drop[order]]

    def _spread(self, links: list[tuple[int, int, bool]]) -> None:
        """A kept piece keeps what it needs, a dropped one drops what needs it, through every level; a piece ranks no
        higher than what it needs, and pulls it up first where it may."""
        keep, drop, priority = self.keep, self.drop, self.priority
        for _ in range(64):
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

    def closure(self, bond: int, chosen: np.ndarray) -> list[int] | None:
        """`bond` with all it needs that is not chosen yet; None if that cannot be had."""
        found, open_ = [bond], [bond]
        while open_:
            for parent in self.needs.get(open_.pop(), ()):
                if not chosen[parent] and parent not in found:
                    if self.drop[parent] or len(found) > 64:
                        return None
                    found.append(parent)
                    open_.append(parent)
        return found


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
    bonds = _Bonds(pieces, priorities)
    bounds = np.cumsum([0, *[len(row) for row in pieces]])
    layouts = [Layout.of(text, row) for text, row in zip(parts, pieces, strict=True)]

    def build(chosen: np.ndarray) -> Selection:
        held = chosen[bonds.of] if len(bonds.of) else np.zeros(0, dtype=bool)
        rows = [held[bounds[i] : bounds[i + 1]] for i in range(len(pieces))]
        text, slices = assemble(parts, pieces, rows, order, separator, layouts)
        return Selection(text, slices, rows, count(text), 0)

    best = build(bonds.keep)
    floor = best.tokens
    if floor > budget and not best.text.strip():
        return Selection("", [], best.kept, 0, 0)
    if floor > budget:
        return Selection(best.text, best.slices, best.kept, floor, floor)
    total_tokens = count(separator.join(parts)) or 1
    cost = bonds.weight * total_tokens / max(bonds.weight.sum(), 1.0)
    best, chosen = _fill_in_order(bonds, best, cost, budget, build)
    best = _fill_gaps(bonds, best, chosen, cost, budget, build)
    return Selection(best.text, best.slices, best.kept, best.tokens, floor)


def _near(tokens: int, budget: int) -> bool:
    return tokens >= budget - max(0, budget // 250)


def _fill_in_order(
    bonds: _Bonds, best: Selection, cost: np.ndarray, budget: int, build: Callable[[np.ndarray], Selection]
) -> tuple[Selection, np.ndarray]:
    """The longest run of the ranking that fits, found by counting real text a few times."""

    def taking(amount: int) -> np.ndarray:
        chosen = bonds.keep.copy()
        chosen[bonds.ranked[:amount]] = True
        return chosen

    cumulative = best.tokens + np.cumsum(cost[bonds.ranked])
    low, high = 0, len(bonds.ranked) + 1
    guess = int(np.searchsorted(cumulative, budget))
    while high - low > 1 and not _near(best.tokens, budget):
        guess = min(max(guess, low + 1), high - 1)
        tried = build(taking(guess))
        if tried.tokens <= budget:
            low, best = guess, tried
        else:
            high = guess
        here = cumulative[guess - 1] + (budget - tried.tokens)
        proposal = int(np.searchsorted(cumulative, here))
        guess = proposal if low < proposal < high else (low + high) // 2
    return best, taking(low)


def _fill_gaps(
    bonds: _Bonds,
    best: Selection,
    chosen: np.ndarray,
    cost: np.ndarray,
    budget: int,
    build: Callable[[np.ndarray], Selection],
) -> Selection:
    """The next piece of the ranking is too large: later ones that fit go in, with what they need."""
    too_large: set[int] = set()
    for _ in range(12):
        room = float(budget - best.tokens)
        if _near(best.tokens, budget):
            break
        added: list[list[int]] = []
        for bond_ in bonds.ranked:
            bond = int(bond_)
            if chosen[bond] or bond in too_large:
                continue
            group = bonds.closure(bond, chosen)
            price = float(cost[group].sum()) if group else np.inf
            if group is None or price > room:
                continue
            chosen[group] = True
            added.append(group)
            room -= price
            if room < 1:
                break
        if not added:
            break
        while added:
            tried = build(chosen)
            if tried.tokens <= budget:
                best = tried
                break
            if len(added) == 1:
                too_large.update(added[0])
            for group in added[len(added) // 2 :]:
                chosen[group] = False
            del added[len(added) // 2 :]
    return best


def settle(
    text: str, row: Sequence[Piece], priority: np.ndarray, rate: float, count: Counter, rule: str
) -> list[Piece]:
    """Pieces of one stretch decided by themselves: kept to at most `rate` of the stretch's own tokens, or kept whole
    at 1.0, whatever the budget of the rest."""
    if not row:
        return []
    if rate >= 1:
        return [replace(piece, keep=True, drop=False, rule=rule) for piece in row]
    begin, end = row[0].start, row[-1].end
    moved = [
        replace(piece, start=piece.start - begin, end=piece.end - begin, lead=max(0, piece.lead - begin))
        for piece in row
    ]
    stretch = text[begin:end]
    kept = select([stretch], [moved], [priority], [0], int(rate * count(stretch) + 1e-9), count, "").kept[0]
    return [
        replace(piece, keep=bool(held), drop=not held, rule=piece.rule or rule)
        for piece, held in zip(row, kept, strict=True)
    ]
