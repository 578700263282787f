"""Multi-token-prediction head: a position's hidden state and the token after it -> hidden state for the one after that.

Row e reads token e and the hidden state of position e - 1, and its K and V go to entry e of the drafter's pages. Its
rotary position is e - 1, as in training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onebox.kernels.paged_attention_ref import Pages
from onebox.kernels.weights import Weight
from onebox.model.block import BlockWeights, attention_block
from onebox.model.layers import Rope, linear, rms_norm
from onebox.request import Batch
from onebox.spec import Spec

if TYPE_CHECKING:
    from onebox.model.prefill import Tiles

FIRST_ENTRY = 1  # entry 0 would belong to position -1


@dataclass(frozen=True)
class MtpWeights:
    """`fc` reads concat(norm(embedding), norm(hidden)); one full-attention block and a final norm follow."""

    fc: Weight  # [H, 2H]
    embedding_norm: Tensor  # [H]
    hidden_norm: Tensor  # [H]
    block: BlockWeights
    norm: Tensor  # [H]


def joined(embedded: Tensor, hidden: Tensor, w: MtpWeights, spec: Spec) -> Tensor:
    """What `fc` reads, [T, 2H]."""
    both = (rms_norm(embedded, w.embedding_norm, spec.norm_eps), rms_norm(hidden, w.hidden_norm, spec.norm_eps))
    return torch.cat(both, dim=-1)


def mtp(
    embedded: Tensor,
    hidden: Tensor,
    w: MtpWeights,
    batch: Batch,
    kv: Pages,
    rope: Rope,
    spec: Spec,
    tiles: Tiles | None = None,
) -> Tensor:
    """embedded [T, H] (of token e), hidden [T, H] (of position e - 1, after the final norm) -> [T, H]."""
    x = linear(joined(embedded, hidden, w, spec), w.fc)
    tables = rope.tables((batch.positions - 1).clamp(min=0), x.dtype)
    x = attention_block(x, w.block, batch, kv, tables, spec, FIRST_ENTRY, tiles)
    return rms_norm(x, w.norm, spec.norm_eps)
