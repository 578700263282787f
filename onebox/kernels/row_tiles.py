"""Prefill rows cut into tiles at absolute positions. Takes where sequences' rows stand, gives one program's share each.

Tile edges are multiples of the tile size in a sequence's own positions, whatever the chunk: a prompt computed in chunks
that end there meets the same tiles as one computed at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowTiles:
    """Tiles of `size` positions. Tile i holds rows first[i] + [0, size) that belong to sequence[i] (-1: no tile).

    `first` may lie before the sequence's rows, where its chunk begins inside a tile. Tiles of sequence b are
    [start[b], start[b + 1]). All int32, on the device of the batch.
    """

    size: int
    sequence: Tensor  # [n]
    first: Tensor  # [n]
    start: Tensor  # [B + 1]

    @property
    def n(self) -> int:
        return self.sequence.shape[0]


def row_tiles(query_start: Tensor, context_len: Tensor, n_rows: int, size: int) -> RowTiles:
    """query_start [B + 1], context_len [B], both whole numbers. Waits for nothing on the device: as many tiles are
    given as that many rows can need, some of them empty."""
    batch, device = context_len.shape[0], query_start.device
    rows = query_start[1:] - query_start[:-1]
    counts = torch.where(rows > 0, (context_len + rows - 1) // size - context_len // size + 1, 0)
    start = torch.zeros(batch + 1, dtype=torch.int64, device=device)
    start[1:] = counts.cumsum(0)
    i = torch.arange(n_rows // size + 2 * batch, device=device)
    b = torch.searchsorted(start[1:], i, right=True).clamp(max=batch - 1)
    first = query_start[b] - context_len[b] % size + (i - start[b]) * size
    sequence = torch.where(i < start[-1], b, -1)
    return RowTiles(size, sequence.int(), first.int(), start.int())
