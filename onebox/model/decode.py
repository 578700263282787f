"""Decode windows through the fused kernels: packed layers, a Batch and a Cache in, hidden states out.

What `Qwen35.forward` computes, for windows of up to 64 rows on a GPU. Packing merges the projections that read the same
rows; the merged weights replace the ones they were made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebox.kernels import gated_delta, linear, moe, paged_attention
from onebox.kernels.fp8_ref import Fp8Weight
from onebox.kernels.gated_delta_ref import WindowState, WindowWeights
from onebox.kernels.int4_ref import Int4Weight
from onebox.kernels.linear_ref import Residual
from onebox.kernels.weights import Weight, cat, dequantize, same_format
from onebox.model.attention import AttentionWeights
from onebox.model.block import BlockWeights
from onebox.model.gated_delta import GatedDeltaWeights
from onebox.model.moe import MoeWeights
from onebox.spec import Spec

MAX_ROWS = linear.MAX_ROWS


@dataclass(frozen=True)
class DecodeLayer:
    """One layer as the decode kernels take it. Exactly one of `window` and `head_norms` is there."""

    mixer_norm: Tensor
    project: Weight  # GDN: qkv, z (b, a) rows; attention: q with gate, k, v rows
    tail: Weight | None  # GDN: b, a rows where their format is another
    out: Weight
    window: WindowWeights | None  # GDN
    head_norms: tuple[Tensor, Tensor] | None  # attention: q, k
    mlp_norm: Tensor
    router: Tensor
    shared_gate: Tensor
    gate_up: Weight
    down: Weight
    shared_gate_up: Weight
    shared_down: Weight


def readable(w: Weight) -> bool:
    """Whether the kernels read this weight as it is."""
    if isinstance(w, Int4Weight):
        return w.zero is None
    return w.block == (128, 128) if isinstance(w, Fp8Weight) else True


def pack(block: BlockWeights) -> DecodeLayer | None:
    """A layer for the kernels, or None where they cannot read its weights or shapes (a dense MLP, zero points)."""
    mixer, mlp = block.mixer, block.mlp
    if not isinstance(mlp, MoeWeights) or not same_format(mlp.shared.gate, mlp.shared.up):
        return None
    tail: Weight | None = None
    window, head_norms = None, None
    if isinstance(mixer, GatedDeltaWeights):
        if mixer.conv.shape[1] != 4 or not same_format(mixer.qkv, mixer.z):
            return None
        window = WindowWeights(mixer.conv, mixer.dt_bias, mixer.a_log, mixer.norm)
        small = (mixer.b, mixer.a)
        if all(same_format(mixer.qkv, w) for w in small) and not isinstance(mixer.qkv, Fp8Weight):
            project = cat((mixer.qkv, mixer.z, *small))
        else:  # a few rows: as dense ones they need no block to end where they begin
            project = cat((mixer.qkv, mixer.z))
            tail = torch.cat([dequantize(w, block.mixer_norm.dtype) for w in small])
    else:
        assert isinstance(mixer, AttentionWeights)
        if not (same_format(mixer.q, mixer.k) and same_format(mixer.q, mixer.v)):
            return None
        project, head_norms = cat((mixer.q, mixer.k, mixer.v)), (mixer.q_norm, mixer.k_norm)
    layer = DecodeLayer(
        mixer_norm=block.mixer_norm,
        project=project,
        tail=tail,
        out=mixer.out,
        window=window,
        head_norms=head_norms,
        mlp_norm=block.mlp_norm,
        router=mlp.router,
        shared_gate=mlp.shared_gate,
        gate_up=mlp.gate_up,
        down=mlp.down,
        shared_gate_up=cat((mlp.shared.gate, mlp.shared.up)),
        shared_down=mlp.shared.down,
    )
    weights = (layer.project, layer.out, layer.gate_up, layer.down, layer.shared_gate_up, layer.shared_down)
    return layer if all(readable(w) for w in weights) else None


@dataclass(frozen=True)
class Window:
    """Where a window's rows stand: the part of a Batch that the kernels read, all on the device."""

    positions: Tensor
    query_start: Tensor
    context_len: Tensor
    page_table: Tensor
    kv_slot: Tensor
    state_slot: Tensor
    commit: Tensor
    max_query: int


def decode_layers(
    h: Residual,
    layers: Sequence[DecodeLayer],
    final_norm: Tensor,
    window: Window,
    states: Sequence[WindowState],
    pages: Sequence[Tensor],
    rope: tuple[Tensor, Tensor],
    spec: Spec,
    workspace: linear.Workspace,
    kv_start: int = 0,
    counts: list[Tensor] | None = None,
) -> Tensor:
    """Rows h through `layers` and the norm after them: [T, H]. States and pages move as `Batch` says of a window.

    `h` is ahead of the first layer's mixer norm. `counts` collects each layer's number of slots (experts met plus one).
    """
    eps, gdn, attention = spec.norm_eps, iter(states), iter(pages)
    for n, layer in enumerate(layers):
        paired, squares = linear.wants_pairs(layer.out), None
        mixed = linear.project(h, layer.project, layer.tail, eps)
        if layer.window is not None:
            y, squares = gated_delta.window(
                mixed, layer.window, next(gdn), window.query_start, window.state_slot, window.commit,
                window.context_len, paired,
            )  # fmt: skip
        else:
            assert layer.head_norms is not None
            y = paged_attention.gated_attention(
                mixed, *layer.head_norms, rope, next(attention), window.page_table, window.kv_slot, window.positions,
                window.query_start, window.max_query, spec.n_heads, eps, workspace, kv_start, paired,
            )  # fmt: skip
        h = linear.project_add(y, layer.out, h, layer.mlp_norm, workspace, squares, eps, paired)
        pairs = linear.wants_pairs(layer.down), linear.wants_pairs(layer.shared_down)
        routing, hidden = moe.route(
            h, layer.router, layer.shared_gate, layer.shared_gate_up, spec.top_k, eps, workspace, pairs[1]
        )
        if counts is not None:
            counts.append(routing.count)
        z, added = moe.gate_up(h, routing, layer.gate_up, hidden, layer.shared_down, eps, pairs)
        norm = layers[n + 1].mixer_norm if n + 1 < len(layers) else final_norm
        h = moe.down(z, added, routing, layer.down, h, norm, workspace, pairs[0])
    return linear.normalize(h, eps)
