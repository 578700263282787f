"""Token mixers of prompts' rows through the Triton kernels: what `gated_delta` and `attention` compute, on a GPU.

Imported only where the kernels run, since they need triton.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from onebox.kernels import gated_delta_prefill, prefill_attention
from onebox.kernels.gated_delta_ref import CHUNK, WindowState, WindowWeights
from onebox.kernels.gemm import matmul_side_by_side
from onebox.kernels.paged_attention import rotate_and_write
from onebox.kernels.paged_attention_ref import PAGE_SIZE, Pages, entries
from onebox.kernels.row_tiles import RowTiles, row_tiles
from onebox.kernels.sparse_attention import sparse_attend
from onebox.model.attention import AttentionWeights
from onebox.model.cache import GdnState
from onebox.model.gated_delta import GatedDeltaWeights
from onebox.model.layers import linear
from onebox.model.sparse import SparseLayer
from onebox.request import Batch
from onebox.spec import Spec


@dataclass(frozen=True)
class Tiles:
    """A prefill batch cut for the kernels, once for all layers."""

    recurrent: RowTiles
    attention: RowTiles

    @classmethod
    def of(cls, batch: Batch) -> Tiles:
        device, n = batch.query_start.device, batch.tokens.shape[0]
        sizes = CHUNK, prefill_attention.tile_rows(device)
        return cls(*(row_tiles(batch.query_start, batch.context_len, n, size) for size in sizes))


def fits(spec: Spec) -> bool:
    """Whether the kernels are written for these widths: heads of a power of two, convolutions of 4."""
    widths = [spec.head_dim]
    if spec.n_gdn_layers:
        widths.append(spec.gdn_v_dim)
    square = not spec.n_gdn_layers or (spec.gdn_k_dim == spec.gdn_v_dim and spec.conv_width == 4)
    return square and all(d >= 16 and d & (d - 1) == 0 for d in widths)


def gated_delta_rows(
    x: Tensor, w: GatedDeltaWeights, batch: Batch, state: GdnState, spec: Spec, tiles: RowTiles
) -> Tensor:
    """`gated_delta` for x [T, H] of a prefill batch."""
    mixed = matmul_side_by_side(x, (w.qkv, w.z, w.b, w.a))
    y = gated_delta_prefill.prefill(
        mixed,
        WindowWeights(w.conv, w.dt_bias, w.a_log, w.norm),
        WindowState(**{f.name: getattr(state, f.name) for f in fields(state)}),
        batch.query_start,
        batch.state_slot,
        batch.commit,
        batch.context_len,
        spec.norm_eps,
        tiles,
    )
    return linear(y, w.out)


def attention_rows(
    x: Tensor,
    w: AttentionWeights,
    batch: Batch,
    kv: Pages,
    rope: tuple[Tensor, Tensor],
    spec: Spec,
    kv_start: int,
    tiles: RowTiles,
    sparse: SparseLayer | None = None,
) -> Tensor:
    """`attention` for x [T, H] of a prefill batch."""
    qkv = matmul_side_by_side(x, (w.q, w.k, w.v))
    cos, sin = (r.contiguous() for r in rope)
    if sparse is not None:
        return linear(_sparse_rows(qkv, w, batch, kv, (cos, sin), spec, kv_start, sparse), w.out)
    y = prefill_attention.gated_prefill_attention(
        qkv, w.q_norm, w.k_norm, (cos, sin), kv, batch.page_table, batch.kv_slot, batch.query_start, batch.context_len,
        spec.n_heads, spec.norm_eps, tiles, kv_start,
    )  # fmt: skip
    return linear(y, w.out)


def _sparse_rows(
    qkv: Tensor,
    w: AttentionWeights,
    batch: Batch,
    kv: Pages,
    rope: tuple[Tensor, Tensor],
    spec: Spec,
    kv_start: int,
    sparse: SparseLayer,
) -> Tensor:
    """`gated_prefill_attention`, sequence by sequence: by the heads' patterns where those begin, dense below."""
    q = rotate_and_write(qkv, w.q_norm, w.k_norm, rope, kv, batch.kv_slot, spec.n_heads, spec.norm_eps)
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    size = prefill_attention.tile_rows(q.device)
    for b, (start, end, first) in enumerate(sparse.sequences):
        rows, length = slice(start, end), first + end - start
        if start == end:
            continue
        if length > sparse.sparse_from:
            k = entries(kv, batch.page_table[b, : -(-length // PAGE_SIZE)])[0][:length]
            index = sparse.index(q[rows], k, first)
            sparse_attend(q[rows], qkv[rows], kv, batch.page_table[b], index, out[rows], kv_start)
            continue
        at, context = torch.tensor([0, end - start], device=q.device), batch.context_len[b : b + 1]
        tiles = row_tiles(at, context, end - start, size)
        table = batch.page_table[b : b + 1]
        out[rows] = prefill_attention.attend(q[rows], qkv[rows], kv, table, at, context, tiles, kv_start)
    return out


def tiles_of(batch: Batch, spec: Spec) -> Tiles | None:
    """How the kernels cut prompts' rows; None where the kernels are not for this model's widths."""
    return Tiles.of(batch) if fits(spec) else None
