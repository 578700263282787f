"""The Qwen3.5 / 3.6 text model: a Batch and the Cache in, hidden states and logits out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from onebox.kernels.weights import Weight, rows
from onebox.model.block import BlockWeights, attention_block, gdn_block
from onebox.model.cache import Cache
from onebox.model.layers import Rope, linear, on_gpu, rms_norm
from onebox.model.mtp import MtpWeights, mtp
from onebox.model.sparse import SparsePrefill
from onebox.request import Batch
from onebox.spec import Spec

if TYPE_CHECKING:  # the fused kernels need triton, which a CPU run never imports
    from onebox.model.decode import Fused
    from onebox.model.prefill import Tiles


@dataclass(frozen=True)
class Qwen35:
    """Weights of one model and how to run them. `head` is the embedding itself when the spec says tied."""

    spec: Spec
    embedding: Tensor  # [V, H]
    layers: tuple[BlockWeights, ...]
    norm: Tensor  # [H]
    head: Weight  # [V, H]
    mtp: MtpWeights | None
    rope: Rope
    dtype: torch.dtype
    device: torch.device
    fused: Fused | None = None  # what runs windows and logits where kernels can read the weights
    sparse: SparsePrefill | None = None  # which heads read what of long prompts; None: all of it
    prefill_kernels: bool = True  # prompts' mixers through the kernels, where those can
    draft_vocab: int | None = None  # tokens that drafts are chosen from; None: all

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        """Hidden states [T, H] after the final norm. KV and states move as the batch says."""
        if self.fused is not None and batch.window:
            return self.fused.forward(batch, cache)
        x = F.embedding(batch.tokens, self.embedding).to(self.dtype)
        rope = self.rope.tables(batch.positions, self.dtype)
        tiles = self._tiles(batch, x)
        rows = self.sparse.rows(batch) if self.sparse is not None else None
        n_attention = n_gdn = 0
        for kind, weights in zip(self.spec.layer_types, self.layers, strict=True):
            if kind == "full_attention":
                sparse = self.sparse.layer(n_attention, rows) if self.sparse is not None and rows else None
                x = attention_block(x, weights, batch, cache.kv[n_attention], rope, self.spec, 0, tiles, sparse)
                n_attention += 1
            else:
                x = gdn_block(x, weights, batch, cache.gdn[n_gdn], self.spec, tiles)
                n_gdn += 1
        return rms_norm(x, self.norm, self.spec.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] -> logits [R, V] fp32."""
        return linear(hidden, self.head).float() if self.fused is None else self.fused.logits(hidden)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """`logits` for drafts: over the first `draft_vocab` tokens, which a byte-pair vocabulary has by frequency."""
        if self.draft_vocab is None:
            return self.logits(hidden)
        w = rows(self.head, slice(0, self.draft_vocab))
        return linear(hidden, w).float() if self.fused is None else self.fused.logits(hidden, w)

    def draft_forward(self, batch: Batch, hidden: Tensor, cache: Cache) -> Tensor:
        """One pass of the MTP head. Row e of `batch` reads token e; `hidden` [T, H] is that of position e - 1.

        Gives [T, H]: its logits are the draft for token e + 1, and it is the `hidden` of the next pass at e + 1.
        """
        assert self.mtp is not None, "draft_forward on a model without an MTP head"
        if self.fused is not None and self.fused.drafter is not None and batch.window:
            return self.fused.draft_forward(batch, hidden, cache)
        embedded = F.embedding(batch.tokens, self.embedding).to(self.dtype)
        kv, tiles = cache.kv[self.spec.n_attention_layers], self._tiles(batch, embedded)
        return mtp(embedded, hidden, self.mtp, batch, kv, self.rope, self.spec, tiles)

    def _tiles(self, batch: Batch, x: Tensor) -> Tiles | None:
        """How the prefill kernels cut the batch's rows x; None where they are not for it."""
        if not self.prefill_kernels or not on_gpu(x) or batch.window:
            return None
        from onebox.model.prefill import tiles_of  # triton, which a CPU run never imports

        return tiles_of(batch, self.spec)

    def store_hidden(self, hidden: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Remember the batch's hidden states in `cache.hidden`; gives each row's predecessor's [T, H].

        The predecessor of a sequence's first row is the last committed row before this step (zeros at position 0).
        """
        slot, first = batch.state_slot, batch.query_start[:-1]
        before = cache.hidden[slot, batch.commit]
        before = torch.where((batch.context_len > 0)[:, None], before, torch.zeros_like(before))
        previous = hidden.roll(1, dims=0)
        previous[first] = before
        if batch.window:
            cache.hidden[slot, 0] = before
            row = torch.arange(hidden.shape[0], device=hidden.device)
            sequence = torch.searchsorted(batch.query_start[1:], row, right=True)
            cache.hidden[slot[sequence], 1 + row - first[sequence]] = hidden
        else:
            cache.hidden[slot, 0] = hidden[batch.query_start[1:] - 1]
        return previous
