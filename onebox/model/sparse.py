"""Sparse prefill: which pattern each head of each attention layer has, from where on, and for which rows of a batch."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from onebox.errors import ConfigError
from onebox.kernels.paged_attention_ref import Pages, entries, turned_back, turned_queries
from onebox.kernels.sparse_attention_ref import HeadPattern, SparseIndex, sparse_attention_ref, sparse_index_ref
from onebox.request import Batch
from onebox.spec import Spec

FROM = {"minference": 16_384, "auto": 65_536}  # tokens below which a mode stays dense, unless told otherwise
DEFAULT = HeadPattern("vertical_slash", columns=1024, pages=32)
Watch: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class SparseLayer:
    """One layer's patterns and a batch's sequences: rows [start, end) at positions `first` and up."""

    number: int
    patterns: Sequence[HeadPattern]  # [H]
    sparse_from: int
    sequences: Sequence[tuple[int, int, int]]
    watch: Watch | None = None

    def index(self, q: Tensor, k: Tensor, first: int) -> SparseIndex:
        """What rows q [T, H, D] at `first` and up read of keys [first + T, Hkv, D]; all of it while watched."""
        patterns = (HeadPattern(),) * len(self.patterns) if self.watch is not None else self.patterns
        return sparse_index_ref(q, k, first, patterns, self.sparse_from)

    def attend(self, q: Tensor, pages: Pages, page_table: Tensor, kv_start: int = 0) -> Tensor:
        """`paged_attention_ref` of turned queries q [T, H, D], each head by its pattern."""
        q, out = turned_queries(q, pages), torch.empty_like(q)
        for b, (start, end, first) in enumerate(self.sequences):
            if start == end:
                continue
            length = first + end - start
            k, v = (x[:length].to(q.dtype) for x in entries(pages, page_table[b, : -(-length // 64)]))
            if self.watch is not None:
                self.watch(self.number, q[start:end], k, v)
            index = self.index(q[start:end], k, first)
            out[start:end] = sparse_attention_ref(q[start:end], k, v, index, kv_start)
        return turned_back(out, pages)


@dataclass(frozen=True)
class SparsePrefill:
    """Patterns [layer][head] of a model's attention layers; spans that begin below `sparse_from` are dense.

    `watch` is called with a layer's number and its queries [T, H, D], keys and values [L, Hkv, D] of a prompt computed
    at once, which then stays dense: for the search of patterns.
    """

    patterns: tuple[tuple[HeadPattern, ...], ...]
    sparse_from: int
    watch: Watch | None = None

    @classmethod
    def of(cls, mode: str, spec: Spec, sparse_from: int | None = None, table: Path | None = None) -> SparsePrefill:
        """Of the mode "minference" or "auto". Raises ConfigError for a table that is not for this model."""
        patterns = read_table(table, spec) if table else ((DEFAULT,) * spec.n_heads,) * spec.n_attention_layers
        return cls(patterns, FROM[mode] if sparse_from is None else sparse_from)

    @property
    def key(self) -> str:
        """What of a prefix's numbers depends on this."""
        return f"sparse:{self.sparse_from}:{zlib.crc32(repr(self.patterns).encode()):08x}"

    def rows(self, batch: Batch) -> list[tuple[int, int, int]] | None:
        """Where a prompt batch's sequences stand; None where all of it is dense. Waits for the device once."""
        if batch.window:
            return None
        starts, first = batch.query_start.tolist(), batch.context_len.tolist()
        found = [(a, b, n) for (a, b), n in zip(pairwise(starts), first, strict=True)]
        return found if self.watch or any(n + b - a > self.sparse_from for a, b, n in found) else None

    def layer(self, i: int, rows: list[tuple[int, int, int]]) -> SparseLayer:
        """The patterns of attention layer i for a batch whose `rows` are not None."""
        return SparseLayer(i, self.patterns[i], self.sparse_from, rows, self.watch)


def write_table(patterns: Sequence[Sequence[HeadPattern]], path: Path) -> None:
    """Patterns [layer][head] as JSON of format 1."""
    layers = [[asdict(p) for p in layer] for layer in patterns]
    path.write_text(json.dumps({"format": 1, "layers": layers}, indent=1) + "\n", encoding="utf-8")


def read_table(path: Path, spec: Spec) -> tuple[tuple[HeadPattern, ...], ...]:
    """Patterns of every attention layer's heads. Raises ConfigError naming the file and what is wrong in it."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(table, dict) or table.get("format") != 1 or not isinstance(table.get("layers"), list):
            raise ValueError('it must be an object with "format": 1 and "layers"')
        patterns = tuple(tuple(HeadPattern(**head) for head in layer) for layer in table["layers"])
    except (OSError, ValueError, TypeError, RecursionError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise ConfigError(f"--sparse-table {path}: {reason}. `onebox bench sparse-search` writes one.") from e
    if [len(layer) for layer in patterns] != [spec.n_heads] * spec.n_attention_layers:
        raise ConfigError(
            f"--sparse-table {path}: it has {[len(x) for x in patterns]} heads a layer; this model has "
            f"{spec.n_attention_layers} attention layers of {spec.n_heads}."
        )
    return patterns
