"""One decoder layer: a token mixer, then an MLP, each behind a norm and beside the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from onebox.model.attention import AttentionWeights, attention
from onebox.model.cache import GdnState
from onebox.model.gated_delta import GatedDeltaWeights, gated_delta
from onebox.model.layers import MlpWeights, mlp, rms_norm
from onebox.model.moe import MoeWeights, moe
from onebox.request import Batch
from onebox.spec import Spec


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
    kv: Tensor,
    rope: tuple[Tensor, Tensor],
    spec: Spec,
    kv_start: int = 0,
) -> Tensor:
    """x [T, H] -> [T, H] through a full-attention layer."""
    assert isinstance(w.mixer, AttentionWeights)
    x = x + attention(rms_norm(x, w.mixer_norm, spec.norm_eps), w.mixer, batch, kv, rope, spec, kv_start)
    return _mlp(x, w, spec)


def gdn_block(x: Tensor, w: BlockWeights, batch: Batch, state: GdnState, spec: Spec) -> Tensor:
    """x [T, H] -> [T, H] through a gated-delta-net layer."""
    assert isinstance(w.mixer, GatedDeltaWeights)
    x = x + gated_delta(rms_norm(x, w.mixer_norm, spec.norm_eps), w.mixer, batch, state, spec)
    return _mlp(x, w, spec)


def _mlp(x: Tensor, w: BlockWeights, spec: Spec) -> Tensor:
    y = rms_norm(x, w.mlp_norm, spec.norm_eps)
    return x + (moe(y, w.mlp, spec) if isinstance(w.mlp, MoeWeights) else mlp(y, w.mlp))
