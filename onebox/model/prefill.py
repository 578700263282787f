"""Token mixers of prompts' rows through the Triton kernels: what `gated_delta` and `attention` compute, on a GPU.

Imported only where the kernels run, since they need triton.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from onebox.kernels import gated_delta_prefill, prefill_attention
from onebox.kernels.gated_delta_ref import CHUNK, WindowState, WindowWeights
from onebox.kernels.gemm import matmul_side_by_side
from onebox.kernels.paged_attention_ref import Pages
from onebox.kernels.row_tiles import RowTiles, row_tiles
from onebox.model.attention import AttentionWeights
from onebox.model.cache import GdnState
from onebox.model.gated_delta import GatedDeltaWeights
from onebox.model.layers import linear
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
) -> Tensor:
    """`attention` for x [T, H] of a prefill batch."""
    qkv = matmul_side_by_side(x, (w.q, w.k, w.v))
    cos, sin = (r.contiguous() for r in rope)
    y = prefill_attention.gated_prefill_attention(
        qkv, w.q_norm, w.k_norm, (cos, sin), kv, batch.page_table, batch.kv_slot, batch.query_start, batch.context_len,
        spec.n_heads, spec.norm_eps, tiles, kv_start,
    )  # fmt: skip
    return linear(y, w.out)


def tiles_of(batch: Batch, spec: Spec) -> Tiles | None:
    """How the kernels cut prompts' rows; None where the kernels are not for this model's widths."""
    return Tiles.of(batch) if fits(spec) else None
