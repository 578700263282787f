"""Sparse attention of prompts: which pages and columns a head reads, found from a few of its rows. Plain mathematics.

After MInference (Jiang et al., arXiv 2407.02490). A prompt's positions are cut into spans of SPAN. The last OBSERVED
rows of a span read everything; what they attend to decides what the span's other rows read, head by head. So an
index needs no question at the prompt's end, and the last rows of a prompt, like those of every span, are dense.
Everything below is for one sequence: rows at positions `first` and up over keys [0, first + T).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PAGE = 64
SPAN = 1024
OBSERVED = 64
LOCAL = 2  # pages up to a row's own that every pattern reads
KINDS = ("dense", "a_shape", "vertical_slash", "block_sparse")


@dataclass(frozen=True)
class HeadPattern:
    """What one head reads. Every pattern reads the first page, a row's own page and the one before it.

    a_shape: `sink` first pages and `pages` local ones. vertical_slash: `columns` single positions and `pages` diagonals
    a page wide. block_sparse: `pages` pages, chosen for each page of rows by the means of queries and keys.
    Raises ValueError for an unknown kind and for counts that are no whole numbers of 0 and up.
    """

    kind: str = "dense"
    columns: int = 0
    pages: int = 0
    sink: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"pattern {self.kind!r} is not known; known: {', '.join(KINDS)}")
        for name in ("columns", "pages", "sink"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} of a {self.kind} pattern must be a whole number of 0 or more, got {value!r}")


@dataclass(frozen=True)
class SparseIndex:
    """What the rows of one sequence read. Tile i holds the rows of page first // PAGE + i.

    A row reads the pages that its tile has `seen` and, beside those, its span's first `n_columns` columns. Both only
    as far as its own position.
    """

    first: int
    seen: Tensor  # [tiles, H, pages] bool
    columns: Tensor  # [spans, H, C], rising; as many as the sequence has tokens where there is none
    n_columns: Tensor  # [tiles, H]

    @property
    def tile_span(self) -> Tensor:
        """Which row of `columns` is for each tile: [tiles]."""
        tile = torch.arange(len(self.seen), device=self.seen.device)
        return (self.first // PAGE + tile) * PAGE // SPAN - self.first // SPAN


def observed_ref(q: Tensor, k: Tensor, position: Tensor) -> Tensor:
    """Attention weights fp32 [H, R, L] of rows q [R, H, D] at `position` [R] over keys k [L, Hkv, D]."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("rhgd,lhd->hgrl", q.unflatten(1, (-1, group)).float(), k.float()).flatten(0, 1)
    later = torch.arange(len(k), device=k.device) > position[:, None]
    return (scores * q.shape[-1] ** -0.5).masked_fill_(later, -math.inf).softmax(-1)


def column_mass_ref(weights: Tensor, position: Tensor) -> Tensor:
    """What the rows give each key, but for the one that gives it most: weights [H, R, L] -> [H, L].

    A diagonal gives much of one row to each of many keys, a column something of every row to one. The first page and
    the last LOCAL, which are read anyway, count as nothing.
    """
    mass = weights.sum(1) - weights.amax(1)
    mass[:, :PAGE] = 0
    mass[:, max(int(position[-1]) // PAGE - LOCAL + 1, 0) * PAGE :] = 0
    return mass


def slash_mass_ref(weights: Tensor, position: Tensor) -> Tensor:
    """What the rows give to pages so many before their own: weights [H, R, L] -> [H, pages]."""
    n = -(-weights.shape[-1] // PAGE)
    by_page = F.pad(weights, (0, n * PAGE - weights.shape[-1])).unflatten(-1, (n, PAGE)).sum(-1)
    page = position[:, None] // PAGE - torch.arange(n, device=weights.device)
    return (by_page.gather(-1, page.clamp(min=0).expand_as(by_page)) * (page >= 0)).sum(1)


def _largest(mass: Tensor, counts: list[int]) -> Tensor:
    """The counts[h] largest of each row of mass [H, N]: bool [H, N]."""
    most = min(max(counts), mass.shape[-1])
    chosen = torch.zeros_like(mass, dtype=torch.bool)
    if most:
        best = mass.topk(most, dim=-1).indices
        rank = torch.arange(most, device=mass.device)
        wanted = rank < torch.tensor(counts, device=mass.device)[:, None]
        chosen.scatter_(-1, best, wanted)
    return chosen


def sparse_index_ref(
    q: Tensor, k: Tensor, first: int, patterns: Sequence[HeadPattern], sparse_from: int = 0
) -> SparseIndex:
    """Turned queries q [T, H, D] at positions `first` and up, keys k [first + T, Hkv, D], a pattern a query head.

    Spans that begin below `sparse_from` are dense.
    """
    (n_rows, n_heads, _), length, device = q.shape, len(k), q.device
    assert length == first + n_rows and len(patterns) == n_heads
    n_pages, first_page = -(-length // PAGE), first // PAGE
    page, tile = torch.arange(n_pages, device=device), torch.arange(first_page, n_pages, device=device)
    causal = page <= tile[:, None]
    seen = torch.zeros(len(tile), n_heads, n_pages, dtype=torch.bool, device=device)
    n_columns = torch.zeros(len(tile), n_heads, dtype=torch.int64, device=device)
    spans = range(first // SPAN, (length - 1) // SPAN + 1)
    most = min(max(p.columns if p.kind == "vertical_slash" else 0 for p in patterns), length)
    columns = torch.full((len(spans), n_heads, most), length, device=device)
    shaped = _shaped(patterns, page, tile, device)
    if any(p.kind == "block_sparse" for p in patterns):
        shaped |= _blocks(q, k, first, patterns, n_pages)
    for i, span in enumerate(spans):
        begin, end = max(first, span * SPAN), min(length, (span + 1) * SPAN)
        observed = max(begin, end - OBSERVED)
        tiles = slice(begin // PAGE - first_page, -(-end // PAGE) - first_page)
        dense = slice(observed // PAGE - first_page if span * SPAN >= sparse_from else tiles.start, tiles.stop)
        seen[tiles] = shaped[tiles]
        if span * SPAN >= sparse_from and dense.start > tiles.start:
            position = torch.arange(observed, end, device=device)
            group = n_heads // k.shape[1]
            for h in range(0, n_heads, group):  # a key head at a time: its queries' weights are large
                heads = slice(h, h + group)
                if all(p.kind != "vertical_slash" for p in patterns[heads]):
                    continue
                weights = observed_ref(q[position - first, heads], k[:end, h // group, None], position)
                found, slashes = _vertical_slash(weights, position, patterns[heads])
                key = torch.arange(end, device=device).expand_as(found)
                columns[i, heads, :end] = torch.where(found, key, length).sort(-1).values[:, :most]
                n_columns[tiles, heads] = found.sum(-1)
                before = tile[tiles, None] - page
                slashes = F.pad(slashes, (0, n_pages - slashes.shape[-1]))
                seen[tiles, heads] |= slashes[:, before.clamp(min=0)].transpose(0, 1) & (before >= 0)[:, None]
        seen[dense], n_columns[dense] = True, 0
    return SparseIndex(first, seen & causal[:, None], columns, n_columns)


def _shaped(patterns: Sequence[HeadPattern], page: Tensor, tile: Tensor, device: torch.device) -> Tensor:
    """Pages that patterns read wherever the rows look: bool [tiles, H, pages]."""

    def number(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device)[None, :, None]

    a_shape = [p.kind == "a_shape" for p in patterns]
    sink = number([max(p.sink, 1) if a else 1 for p, a in zip(patterns, a_shape, strict=True)])
    local = number([max(p.pages, LOCAL) if a else LOCAL for p, a in zip(patterns, a_shape, strict=True)])
    dense = number([p.kind == "dense" for p in patterns])
    return (page < sink) | (tile[:, None, None] - page < local) | (dense > 0)


def _vertical_slash(weights: Tensor, position: Tensor, patterns: Sequence[HeadPattern]) -> tuple[Tensor, Tensor]:
    """Columns [H, L] and page diagonals [H, pages] of the patterns, by attention weights [H, R, L].

    What the columns hold is no reason for a diagonal.
    """
    chosen = [p if p.kind == "vertical_slash" else HeadPattern() for p in patterns]
    mass = column_mass_ref(weights, position)
    columns = _largest(mass, [p.columns for p in chosen]) & (mass > 0)
    slash = slash_mass_ref(weights.masked_fill(columns[:, None], 0), position)
    slash[:, :LOCAL] = 0
    return columns, _largest(slash, [p.pages for p in chosen]) & (slash > 0)


def _blocks(q: Tensor, k: Tensor, first: int, patterns: Sequence[HeadPattern], n_pages: int) -> Tensor:
    """Pages of block-sparse heads by mean queries and mean keys: bool [tiles, H, pages]."""
    tile = torch.arange(first, first + len(q), device=q.device) // PAGE - first // PAGE
    n_tiles = int(tile[-1]) + 1
    mean_q = q.new_zeros(n_tiles, *q.shape[1:], dtype=torch.float32).index_add_(0, tile, q.float())
    mean_q /= tile.bincount(minlength=n_tiles)[:, None, None]
    sums = F.pad(k.float(), (0, 0, 0, 0, 0, n_pages * PAGE - len(k))).unflatten(0, (n_pages, PAGE)).sum(1)
    count = torch.full((n_pages, 1, 1), PAGE, device=k.device)
    count[-1] = len(k) - (n_pages - 1) * PAGE
    mean_k = (sums / count).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("thd,phd->thp", mean_q, mean_k)
    page, own = torch.arange(n_pages, device=q.device), first // PAGE + torch.arange(n_tiles, device=q.device)
    scores.masked_fill_((page >= own[:, None])[:, None], -math.inf)
    counts = [p.pages if p.kind == "block_sparse" else 0 for p in patterns]
    return _largest(scores.flatten(0, 1), counts * n_tiles).unflatten(0, (n_tiles, -1))


def reads_ref(index: SparseIndex, n_rows: int) -> Tensor:
    """Which keys each row reads: bool [H, T, first + T]."""
    first, length, device = index.first, index.first + n_rows, index.seen.device
    key, position = torch.arange(length, device=device), torch.arange(first, length, device=device)
    n_heads, tile = index.seen.shape[1], position // PAGE - first // PAGE
    single = torch.zeros(*index.columns.shape[:2], length + 1, dtype=torch.bool, device=device)
    single = single.scatter_(-1, index.columns, True)[..., :length]
    single = single[index.tile_span] & (index.n_columns > 0)[..., None]
    out = torch.empty(n_heads, n_rows, length, dtype=torch.bool, device=device)
    for h in range(n_heads):
        by_page = index.seen[:, h].repeat_interleave(PAGE, -1)[:, :length]
        out[h] = (by_page | single[:, h])[tile]
    return out & (key <= position[:, None])


def sparse_attention_ref(q: Tensor, k: Tensor, v: Tensor, index: SparseIndex, kv_start: int = 0) -> Tensor:
    """q [T, H, D] over the keys k, v [first + T, Hkv, D] that `index` gives its rows, from `kv_start` on: [T, H, D].

    A row with nothing to read gives zeros.
    """
    reads = reads_ref(index, len(q))
    reads[..., :kv_start] = False
    group, out = q.shape[1] // k.shape[1], torch.empty_like(q)
    for h in range(q.shape[1]):
        key, value = (x[:, h // group].to(q.dtype)[None, None] for x in (k, v))
        out[:, h] = F.scaled_dot_product_attention(q[:, h][None, None], key, value, attn_mask=reads[h])[0, 0]
    return torch.where(reads.any(-1).T[..., None], out, 0.0)


def retained_ref(q: Tensor, k: Tensor, index: SparseIndex) -> Tensor:
    """The share of full attention's weights that the rows keep, mean over rows: [H]."""
    position = torch.arange(index.first, len(k), device=q.device)
    return (observed_ref(q, k, position) * reads_ref(index, len(q))).sum(-1).mean(-1)
