"""Gated attention layer over paged keys and values. Rows in, rows out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from onebox.kernels.paged_attention_ref import Pages, paged_attention_ref, write_kv_ref
from onebox.kernels.weights import Weight
from onebox.model.layers import linear, rms_norm, rotate
from onebox.model.sparse import SparseLayer
from onebox.request import Batch
from onebox.spec import Spec

if TYPE_CHECKING:  # the kernels need triton, which a CPU run never imports
    from onebox.model.prefill import Tiles


@dataclass(frozen=True)
class AttentionWeights:
    """Projections and head norms of one layer. `q` holds query and gate rows side by side for each head."""

    q: Weight  # [n_heads * 2 * D, H]
    k: Weight  # [n_kv_heads * D, H]
    v: Weight  # [n_kv_heads * D, H]
    out: Weight  # [H, n_heads * D]
    q_norm: Tensor  # [D]
    k_norm: Tensor  # [D]


def attention(
    x: Tensor,
    w: AttentionWeights,
    batch: Batch,
    kv: Pages,
    rope: tuple[Tensor, Tensor],
    spec: Spec,
    kv_start: int = 0,
    tiles: Tiles | None = None,
    sparse: SparseLayer | None = None,
) -> Tensor:
    """x [T, H] -> [T, H]. Writes the rows' K and V into `kv` first; entries below `kv_start` are never read."""
    if tiles is not None:
        from onebox.model.prefill import attention_rows

        return attention_rows(x, w, batch, kv, rope, spec, kv_start, tiles.attention, sparse)
    cos, sin = rope
    q, gate = linear(x, w.q).unflatten(-1, (spec.n_heads, 2, spec.head_dim)).unbind(-2)
    k, v = (linear(x, p).unflatten(-1, (spec.n_kv_heads, spec.head_dim)) for p in (w.k, w.v))
    q = rotate(rms_norm(q, w.q_norm, spec.norm_eps), cos, sin)
    k = rotate(rms_norm(k, w.k_norm, spec.norm_eps), cos, sin)
    write_kv_ref(k, v, kv, batch.kv_slot)
    if sparse is not None:
        out = sparse.attend(q, kv, batch.page_table, kv_start)
    else:
        out = paged_attention_ref(q, kv, batch.page_table, batch.positions, batch.query_start.tolist(), kv_start)
    return linear((out * gate.sigmoid()).flatten(-2), w.out)
