"""Gated DeltaNet layer. Rows in, rows out; the sequences' states move in `GdnState`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from onebox.kernels.gated_delta_ref import (
    apply_rows_ref,
    causal_conv_ref,
    delta_rule_chunked_ref,
    delta_rule_window_ref,
    l2_normalize_ref,
)
from onebox.kernels.weights import Weight
from onebox.model.cache import GdnState
from onebox.model.layers import gated_rms_norm, linear
from onebox.request import Batch
from onebox.spec import Spec

if TYPE_CHECKING:  # the kernels need triton, which a CPU run never imports
    from onebox.model.prefill import Tiles


@dataclass(frozen=True)
class GatedDeltaWeights:
    """Projections, convolution and gates of one layer. Hk key heads serve Hv value heads."""

    qkv: Weight  # [2 Hk Dk + Hv Dv, H]
    z: Weight  # [Hv Dv, H]
    b: Weight  # [Hv, H]
    a: Weight  # [Hv, H]
    conv: Tensor  # [C, conv_width]
    dt_bias: Tensor  # [Hv] fp32
    a_log: Tensor  # [Hv] fp32
    norm: Tensor  # [Dv]
    out: Weight  # [H, Hv Dv]


def gated_delta(
    x: Tensor, w: GatedDeltaWeights, batch: Batch, state: GdnState, spec: Spec, tiles: Tiles | None = None
) -> Tensor:
    """x [T, H] -> [T, H]; `state` is updated in place as `batch` says (decision 5: lazy commit)."""
    if tiles is not None:
        from onebox.model.prefill import gated_delta_rows

        return gated_delta_rows(x, w, batch, state, spec, tiles.recurrent)
    beta = linear(x, w.b).float().sigmoid()
    g = -w.a_log.float().exp() * F.softplus(linear(x, w.a).float() + w.dt_bias.float())
    mixed = linear(x, w.qkv)
    run = _window if batch.window else _prefill
    out = run(mixed, g, beta, w, batch, state, spec)
    z = linear(x, w.z).unflatten(-1, (spec.gdn_v_heads, spec.gdn_v_dim))
    return linear(gated_rms_norm(out, z, w.norm, spec.norm_eps).flatten(-2), w.out)


def _split(mixed: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """Convolved rows [..., C] -> unit q, k [..., Hk, Dk] and v [..., Hv, Dv]."""
    q, k, v = mixed.split((spec.gdn_key_width, spec.gdn_key_width, spec.gdn_value_width), dim=-1)
    heads = (spec.gdn_k_heads, spec.gdn_k_dim)
    return (
        l2_normalize_ref(q.unflatten(-1, heads)),
        l2_normalize_ref(k.unflatten(-1, heads)),
        v.unflatten(-1, (spec.gdn_v_heads, spec.gdn_v_dim)),
    )


def _prefill(
    mixed: Tensor, g: Tensor, beta: Tensor, w: GatedDeltaWeights, batch: Batch, state: GdnState, spec: Spec
) -> Tensor:
    """Rows of each sequence after its committed state; afterwards nothing is pending."""
    history = spec.conv_width - 1
    out = torch.empty(mixed.shape[0], spec.gdn_v_heads, spec.gdn_v_dim, device=mixed.device)
    starts = batch.query_start.tolist()
    for b, (start, end) in enumerate(pairwise(starts)):
        slot, commit, fresh = int(batch.state_slot[b]), int(batch.commit[b]), int(batch.context_len[b]) == 0
        before = state.conv[slot, commit : commit + history]
        inputs = torch.cat((torch.zeros_like(before) if fresh else before, mixed[start:end]))
        pending = (state.k[slot, None], state.v[slot, None], state.g[slot, None], state.beta[slot, None])
        s = apply_rows_ref(state.s[slot, None].float(), pending, batch.commit[b, None])[0]
        q, k, v = _split(causal_conv_ref(inputs[history:], inputs[:history], w.conv), spec)
        s = torch.zeros_like(s) if fresh else s
        out[start:end], state.s[slot] = delta_rule_chunked_ref(q, k, v, g[start:end], beta[start:end], s)
        state.conv[slot, :history] = inputs[-history:]
    return out


def _window(
    mixed: Tensor, g: Tensor, beta: Tensor, w: GatedDeltaWeights, batch: Batch, state: GdnState, spec: Spec
) -> Tensor:
    """All sequences side by side, padded to the widest window; their rows stay pending."""
    history, width, slot = spec.conv_width - 1, batch.max_query, batch.state_slot
    column = torch.arange(width, device=mixed.device)
    rows = batch.query_start[:-1, None] + column  # [B, width]
    valid = rows < batch.query_start[1:, None]
    rows = torch.where(valid, rows, 0)
    inputs = torch.where(valid[..., None], mixed[rows], 0.0)
    taken = batch.commit[:, None] + torch.arange(history, device=mixed.device)
    before = state.conv[slot[:, None], taken]
    q, k, v = _split(causal_conv_ref(inputs, before, w.conv), spec)
    k, v = k.to(state.k.dtype).float(), v.to(state.v.dtype).float()  # as the next window will read them
    g, beta = torch.where(valid[..., None], g[rows], 0.0), torch.where(valid[..., None], beta[rows], 0.0)
    pending = (state.k[slot], state.v[slot], state.g[slot], state.beta[slot])
    out, s = delta_rule_window_ref(q, k, v, g, beta, state.s[slot].float(), pending, batch.commit)
    state.s[slot] = s.to(state.s.dtype)
    state.k[slot, :width] = k.to(state.k.dtype)
    state.v[slot, :width] = v.to(state.v.dtype)
    state.g[slot, :width] = g
    state.beta[slot, :width] = beta
    state.conv[slot, :history] = before
    state.conv[slot, history : history + width] = inputs
    return out[valid]
