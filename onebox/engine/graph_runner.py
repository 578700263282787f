"""Sequences -> Batch -> hidden states and drafts, eagerly: prompts, and windows that no captured step can run."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from onebox.engine.grammar import mask_logits
from onebox.engine.pages import PAGE_SIZE, pages_for
from onebox.engine.sampler import SamplingRows, sample
from onebox.engine.scheduler import Chunk
from onebox.engine.sequence import Sequence
from onebox.engine.speculate import News
from onebox.engine.states import (
    CopyPage,
    DeviceOp,
    LoadPage,
    LoadState,
    OffloadPage,
    OffloadState,
    RestoreState,
    SaveState,
)
from onebox.model.cache import Cache
from onebox.model.qwen3_5 import Qwen35
from onebox.request import Batch


class GraphRunner:
    """Forwards of one model over one cache."""

    def __init__(self, model: Qwen35, cache: Cache, n_host_pages: int = 0) -> None:
        self.model, self.cache = model, cache
        self.host_pages = cache.host_pages(1 + n_host_pages) if n_host_pages else ()
        self.host: dict[int, list[Tensor]] = {}  # snapshots pushed out of device memory

    def prefill(self, chunks: Seq[Chunk]) -> Tensor:
        """Compute the chunks, main model and drafter. Gives the hidden state of each chunk's last row [B, H]."""
        rows = [(c.sequence, c.start, c.sequence.tokens[c.start : c.start + c.n]) for c in chunks]
        batch = self._batch(rows, window=False)
        hidden = self.model.forward(batch, self.cache)
        previous = self.model.store_hidden(hidden, batch, self.cache)
        if self.model.mtp is not None and any(c.sequence.draft_len for c in chunks):
            self.model.draft_forward(batch, previous, self.cache)
        return hidden[batch.query_start[1:] - 1]

    def window(self, sequences: Seq[Sequence]) -> Tensor:
        """Rows of every sequence's last token and drafts, left pending. Gives their hidden states [T, H]."""
        rows = [(s, s.computed, [s.tokens[-1], *s.drafts]) for s in sequences]
        batch = self._batch(rows, window=True)
        hidden = self.model.forward(batch, self.cache)
        self.model.store_hidden(hidden, batch, self.cache)
        return hidden

    def move(self, ops: Seq[DeviceOp]) -> None:
        """Run device operations in order."""
        cache = self.cache
        for op in ops:
            match op:
                case CopyPage(src, dst):
                    cache.copy_page(src, dst)
                case SaveState(slot, commit, snapshot):
                    cache.save_state(slot, commit, snapshot)
                case RestoreState(snapshot, slot):
                    cache.restore_state(snapshot, slot)
                case OffloadState(snapshot, host):
                    self.host[host] = cache.snapshot_to_host(snapshot)
                case LoadState(host, snapshot):
                    cache.snapshot_from_host(self.host.pop(host), snapshot)
                case OffloadPage(page, host):
                    cache.page_to_host(page, self.host_pages, host)
                case LoadPage(host, page):
                    cache.page_from_host(self.host_pages, host, page)

    def draft(self, news: Seq[News]) -> None:
        """Fill `drafts` of each sequence, and write the drafter's entries of its newest tokens.

        That is done for sequences that just ended too, whose pages may live on in the prefix cache. Each further draft
        is a pass over the drafter's own output.
        """
        news = [item for item in news if item.sequence.draft_len and item.n]
        if not news:
            return
        rows = [(s, len(s.tokens) - n, s.tokens[-n:]) for s, n, _ in news]
        hidden = torch.cat([h for _, _, h in news])
        passes = max(s.n_drafts for s, _, _ in news)
        sequences = [s for s, _, _ in news]
        for s in sequences:
            s.drafts = []
        for i in range(1 + passes):
            batch = self._batch(rows, window=True)
            hidden = self.model.draft_forward(batch, hidden, self.cache)[batch.query_start[1:] - 1]
            keep = [j for j, s in enumerate(sequences) if s.n_drafts > i]
            if not keep:
                break
            sequences = [sequences[j] for j in keep]
            hidden = hidden[keep]
            for s, token in zip(sequences, self._choose(self.model.draft_logits(hidden), sequences), strict=True):
                s.drafts.append(token)
            if i + 1 == passes:
                break
            rows = [(s, len(s.tokens) + i, [s.drafts[i]]) for s in sequences]

    def _choose(self, logits: Tensor, sequences: Seq[Sequence]) -> list[int]:
        """The drafter's proposals, with the noise that the target will use at the same positions."""
        logits = mask_logits(logits, [(s.matcher, s.drafts) for s in sequences])
        positions = [len(s.tokens) + len(s.drafts) for s in sequences]
        params = [s.request.params for s in sequences]
        chosen: list[int] = sample(
            logits, SamplingRows.of(params, [s.seed for s in sequences], positions, logits.device)
        ).tolist()
        return chosen

    def _batch(self, rows: Seq[tuple[Sequence, int, Seq[int]]], *, window: bool) -> Batch:
        """(sequence, first position, tokens) a sequence -> one Batch."""
        device = self.model.device
        starts: list[int] = [0]
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        width = max(pages_for(start + len(ids)) for _, start, ids in rows)
        table = []
        for s, start, ids in rows:
            tokens += ids
            starts.append(len(tokens))
            positions += range(start, start + len(ids))
            slots += [s.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(start, start + len(ids))]
            pages = s.pages[:width]
            table.append(pages + [0] * (width - len(pages)))

        def int64(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return Batch(
            tokens=int64(tokens),
            positions=int64(positions),
            query_start=int64(starts),
            context_len=int64([start for _, start, _ in rows]),
            page_table=int64(table),
            kv_slot=int64(slots),
            state_slot=int64([s.slot for s, _, _ in rows]),
            commit=int64([s.pending for s, _, _ in rows]),
            window=window,
            max_query=max(len(ids) for _, _, ids in rows),
            max_context=max(start + len(ids) for _, start, ids in rows),
        )
