"""Sequences side by side over a cache of their own: for measuring and calibrating, without an engine."""

from __future__ import annotations

import torch
from torch import Tensor

from onebox.kernels.paged_attention_ref import PAGE_SIZE
from onebox.model.cache import Cache, KvLayout
from onebox.model.qwen3_5 import Qwen35
from onebox.request import Batch


def page_table(n: int, max_tokens: int, device: torch.device) -> Tensor:
    """Pages [n, P] of `n` sequences of at most `max_tokens`; page 0 is nobody's."""
    pages = -(-max_tokens // PAGE_SIZE)
    return 1 + torch.arange(n * pages, device=device).view(n, pages)


def even_batch(tokens: Tensor, start: int, table: Tensor) -> Batch:
    """tokens [n, T] at positions [start, start + T) of each sequence, applied at once; slots 1..n."""
    n, t = tokens.shape
    position = start + torch.arange(t, device=tokens.device)
    slot = table[:, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    return Batch(
        tokens=tokens.reshape(-1),
        positions=position.repeat(n),
        query_start=torch.arange(n + 1, device=tokens.device) * t,
        context_len=torch.full((n,), start, device=tokens.device),
        page_table=table,
        kv_slot=slot.reshape(-1),
        state_slot=1 + torch.arange(n, device=tokens.device),
        commit=torch.zeros(n, dtype=torch.long, device=tokens.device),
        window=False,
        max_query=t,
        max_context=start + t,
    )


class Sequences:
    """`n` sequences of one model, all fed the same number of tokens at a time."""

    def __init__(
        self,
        model: Qwen35,
        n: int,
        max_tokens: int,
        *,
        state_dtype: torch.dtype = torch.float32,
        kv: KvLayout | None = None,
    ) -> None:
        self.model, self.length = model, 0
        self.table = page_table(n, max_tokens, model.device)
        self.cache = Cache.allocate(
            model.spec,
            n_pages=1 + self.table.numel(),
            n_slots=1 + n,
            n_snapshots=0,
            window=1,
            dtype=model.dtype,
            device=model.device,
            mtp=model.mtp is not None,
            state_dtype=state_dtype,
            kv=kv,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Append tokens [n, T]; gives hidden states [n, T, H]."""
        hidden = self.model.forward(even_batch(tokens, self.length, self.table), self.cache)
        self.length += tokens.shape[1]
        return hidden.view(*tokens.shape, -1)

    def draft(self, tokens: Tensor, start: int, hidden: Tensor) -> Tensor:
        """Drafter rows of tokens [n, T] at `start`; hidden [n * T, H] of the positions before. Gives [n * T, H]."""
        return self.model.draft_forward(even_batch(tokens, start, self.table), hidden, self.cache)
