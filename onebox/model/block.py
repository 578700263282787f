"""One decoder layer: a token mixer, then an MLP, each behind a norm and beside the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from onebox.kernels.paged_attention_ref import Pages
from onebox.model.attention import AttentionWeights, attention
from onebox.model.cache import GdnState
from onebox.model.gated_delta import GatedDeltaWeights, gated_delta
from onebox.model.layers import MlpWeights, add_rms_norm, mlp, rms_norm
from onebox.model.moe import MoeWeights, moe
from onebox.model.sparse import SparseLayer
from onebox.request import Batch
from onebox.spec import Spec

if TYPE_CHECKING:  # the kernels need triton, which a CPU run never imports
    from onebox.model.prefill import Tiles


@dataclass(frozen=True)
class BlockWeights:
    """One layer. The mixer's and the MLP's types say which kind of layer it is."""

    mixer_norm: Tensor  # [H]
    mixer: AttentionWeights | GatedDeltaWeights
    mlp_norm: Tensor  # [H]
    mlp: MoeWeights | MlpWeights


def attention_block(
    x: Tensor,
    w: BlockWeights,
    batch: Batch,
    kv: Pages,
    rope: tuple[Tensor, Tensor],
    spec: Spec,
    kv_start: int = 0,
    tiles: Tiles | None = None,
    sparse: SparseLayer | None = None,
) -> Tensor:
    """x [T, H] -> [T, H] through a full-attention layer. `tiles`: prompts' rows, through the kernels."""
    assert isinstance(w.mixer, AttentionWeights)
    y = rms_norm(x, w.mixer_norm, spec.norm_eps)
    return _mlp(x, attention(y, w.mixer, batch, kv, rope, spec, kv_start, tiles, sparse), w, spec)


def gdn_block(
    x: Tensor, w: BlockWeights, batch: Batch, state: GdnState, spec: Spec, tiles: Tiles | None = None
) -> Tensor:
    """x [T, H] -> [T, H] through a gated-delta-net layer. `tiles` as in `attention_block`."""
    assert isinstance(w.mixer, GatedDeltaWeights)
    y = rms_norm(x, w.mixer_norm, spec.norm_eps)
    return _mlp(x, gated_delta(y, w.mixer, batch, state, spec, tiles), w, spec)


def _mlp(x: Tensor, mixed: Tensor, w: BlockWeights, spec: Spec) -> Tensor:
    """The MLP behind the mixer, both beside the residual stream."""
    x, y = add_rms_norm(x, mixed, w.mlp_norm, spec.norm_eps)
    return x + (moe(y, w.mlp, spec) if isinstance(w.mlp, MoeWeights) else mlp(y, w.mlp))
