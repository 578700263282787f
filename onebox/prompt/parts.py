"""Parts of a prompt and the units they are ranked and scored in: documents, passages of a long text, whole parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onebox.prompt.ranking import AROUND, Bm25Ranker
from onebox.prompt.scoring import TokenScores
from onebox.prompt.segments import Piece

Progress = Callable[[int, int], None]
_PASSAGE = 600  # characters, about 150 tokens: what a ranker sees of a prompt that is one long text
_LONG = 2_000


@dataclass(frozen=True)
class Region:
    """Characters [start, end) with a rate of their own."""

    start: int
    end: int
    rate: float


@dataclass(frozen=True)
class Part:
    """One stretch of the prompt. `rate` None: it shares the prompt's budget. `wanted`: never left out as a whole."""

    text: str
    source: str
    document: bool = False
    wanted: bool = False
    rate: float | None = None
    regions: tuple[Region, ...] = ()

    def fixed(self) -> list[tuple[int, int, float]]:
        """(start, end, rate) of what does not share the prompt's budget."""
        if self.rate is not None:
            return [(0, len(self.text), self.rate)]
        return [(region.start, region.end, region.rate) for region in self.regions]


@dataclass(frozen=True)
class Unit:
    """Pieces [first, past) of a part. `rank` 0 is the most relevant; only a unit that is `worth` it is scored. `known`:
    surprisal of its first passage, where the ranking has read it."""

    part: int
    first: int
    past: int
    characters: int
    ranked: bool
    worth: bool = True
    rank: int | None = None
    known: TokenScores | None = None

    def row(self, pieces: Sequence[Sequence[Piece]]) -> list[Piece]:
        return list(pieces[self.part][self.first : self.past])

    def start(self, pieces: Sequence[Sequence[Piece]]) -> int:
        return pieces[self.part][self.first].lead

    def text(self, parts: Sequence[Part], pieces: Sequence[Sequence[Piece]]) -> str:
        return parts[self.part].text[self.start(pieces) : pieces[self.part][self.past - 1].end]

    def slabs(self, pieces: Sequence[Sequence[Piece]], characters: int) -> Iterator[tuple[int, int]]:
        """Character ranges of at most `characters`, cut between pieces, at the end of a sentence where one is near."""
        row = pieces[self.part]
        at = self.first
        while at < self.past:
            end = at + 1
            while end < self.past and row[end].end - row[at].lead <= characters:
                end += 1
            if end < self.past:
                cut = end
                while cut > at + (end - at) // 2 and row[cut].sentence == row[cut - 1].sentence:
                    cut -= 1
                end = cut if row[cut].sentence != row[cut - 1].sentence else end
            yield row[at].lead, row[end - 1].end
            at = end


def compressible_units(parts: Sequence[Part], pieces: Sequence[Sequence[Piece]], passages: bool) -> list[Unit]:
    """Units of the parts that may lose something. With `passages` a long prompt that is no document is cut into
    passages at sentence ends, to be ranked like documents."""
    found: list[Unit] = []
    for index, part in enumerate(parts):
        row = pieces[index]
        if not row or part.rate == 1:
            continue
        if passages and not part.document and part.rate is None and len(part.text) > _LONG:
            first = 0
            for at in range(1, len(row) + 1):
                size = row[at - 1].end - row[first].lead
                if at == len(row) or (row[at].sentence != row[at - 1].sentence and size >= _PASSAGE):
                    found.append(Unit(index, first, at, size, ranked=True))
                    first = at
        else:
            found.append(Unit(index, 0, len(row), row[-1].end - row[0].lead, ranked=part.document))
    return found


def relevance_of_sentences(text: str, row: Sequence[Piece], question: str) -> np.ndarray:
    """BM25 of each sentence and of what stands around it for the question, in [0, 1], half of it shared with the
    neighbours; one value a piece."""
    number = np.array([piece.sentence for piece in row])
    ids, at = np.unique(number, return_inverse=True)
    if len(ids) < 2 or not (np.diff(at) >= 0).all():
        return np.zeros(len(row))
    first = np.searchsorted(at, np.arange(len(ids)))
    ends = [*[row[i].start for i in first[1:]], row[-1].end]
    sentences = [text[row[a].start : b] for a, b in zip(first, ends, strict=True)]
    scores = np.array(Bm25Ranker(AROUND).rank(question, sentences))
    spread = scores.max() - scores.min()
    scores = (scores - scores.min()) / spread if spread > 0 else scores * 0
    padded = np.pad(scores, 1)
    shared: np.ndarray = np.maximum(scores, 0.5 * np.maximum(padded[:-2], padded[2:]))[at]
    return shared


_STRUCTURE = frozenset(["json", "xml", "yaml", "table", "code", "log"])


def by_sentence(row: Sequence[Piece]) -> list[Piece]:
    """The pieces with those of one sentence bonded, so that sentences go whole; structure keeps its own bonds."""
    leader: dict[int, int] = {}
    moved: dict[int, int] = {}
    for piece in row:
        if piece.kind not in _STRUCTURE:
            moved[piece.bond] = leader.setdefault(piece.sentence, moved.get(piece.bond, piece.bond))
    return [
        replace(
            piece,
            bond=moved.get(piece.bond, piece.bond) if piece.kind not in _STRUCTURE else piece.bond,
            needs=moved.get(piece.needs, piece.needs),
        )
        for piece in row
    ]
