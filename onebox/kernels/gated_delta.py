"""Gated delta rule over a decode window with lazy commit: one read and one write of the state, whatever the draft length.

`window` applies the committed rows of the last window to the state, writes it, and runs the new rows in registers;
`keep` then makes the new rows the pending window. Between the two, other programs still read what `keep` overwrites.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels import configs
from onebox.kernels.gated_delta_ref import WindowState, WindowWeights
from onebox.kernels.linear import launch
from onebox.kernels.tile import launch_next, wait_previous


@triton.jit
def _input_row(mixed_ptr, mixed_stride, conv_ptr, C, first, commit, j, channel):
    """Input `j` rows after the window's first (negative: before it) for some channels, as fp32."""
    if j < 0:
        x = tl.load(conv_ptr + (commit + 3 + j) * C + channel)
    else:
        x = tl.load(mixed_ptr + (first + j) * mixed_stride + channel)
    return x.to(tl.float32)


@triton.jit
def _convolved(mixed_ptr, mixed_stride, conv_ptr, weight_ptr, C, first, commit, i, channel, fresh):
    """SiLU of the width-4 convolution at row `i` of the window, rounded as the activations are."""
    y = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(4):
        j = i + tap - 3
        x = _input_row(mixed_ptr, mixed_stride, conv_ptr, C, first, commit, j, channel)
        x = tl.where(fresh & (j < 0), 0.0, x)
        y += x * tl.load(weight_ptr + channel * 4 + tap).to(tl.float32)
    return (y * tl.sigmoid(y)).to(mixed_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def _window_kernel(
    mixed_ptr, mixed_stride, out_ptr, query_start_ptr, slot_ptr, commit_ptr, context_ptr,
    state_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, conv_ptr,
    conv_weight_ptr, dt_bias_ptr, a_log_ptr, norm_ptr, eps,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    b, hv = tl.program_id(0), tl.program_id(1)
    hk = hv // (HV // HK)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    dk, dv = tl.arange(0, DK), tl.arange(0, DV)
    gk, gv = hv * DV + dv, hk * DK + dk
    wait_previous(PDL)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    commit = tl.load(commit_ptr + b).to(tl.int32)
    first, end = tl.load(query_start_ptr + b).to(tl.int32), tl.load(query_start_ptr + b + 1).to(tl.int32)
    fresh = tl.load(context_ptr + b) == 0
    state_at = state_ptr + (slot * HV + hv) * (DK * DV) + dk[:, None] * DV + dv[None, :]
    s = tl.load(state_at)
    s = tl.where(fresh, 0.0, s)
    conv = conv_ptr + slot * (3 + W) * C
    for i in range(commit):  # rows the last step accepted
        k = tl.load(k_ptr + ((slot * W + i) * HK) * DK + gv).to(tl.float32)
        v = tl.load(v_ptr + ((slot * W + i) * HV) * DV + gk).to(tl.float32)
        decay = tl.exp(tl.load(g_ptr + (slot * W + i) * HV + hv))
        beta = tl.load(beta_ptr + (slot * W + i) * HV + hv)
        delta = (v - decay * tl.sum(s * k[:, None], axis=0)) * beta
        s = s * decay + k[:, None] * delta[None, :]
    tl.store(state_at, s)
    norm = tl.load(norm_ptr + dv).to(tl.float32)
    a_rate = -tl.exp(tl.load(a_log_ptr + hv).to(tl.float32))
    bias = tl.load(dt_bias_ptr + hv).to(tl.float32)
    for i in range(end - first):
        q = _unit(_convolved(mixed_ptr, mixed_stride, conv, conv_weight_ptr, C, first, commit, i, gv, fresh))
        k = _unit(
            _convolved(mixed_ptr, mixed_stride, conv, conv_weight_ptr, C, first, commit, i, HK * DK + gv, fresh)
        )
        v = _convolved(mixed_ptr, mixed_stride, conv, conv_weight_ptr, C, first, commit, i, 2 * HK * DK + gk, fresh)
        row = mixed_ptr + (first + i) * mixed_stride + C  # z, then b, then a
        z = tl.load(row + gk).to(tl.float32)
        beta = tl.sigmoid(tl.load(row + HV * DV + hv).to(tl.float32))
        x = tl.load(row + HV * DV + HV + hv).to(tl.float32) + bias
        g = a_rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        decay = tl.exp(g)
        q = q * (DK**-0.5)
        read_k = tl.sum(s * k[:, None], axis=0)
        read_q = tl.sum(s * q[:, None], axis=0)
        delta = (v - decay * read_k) * beta
        o = decay * read_q + delta * tl.sum(q * k, axis=0)
        if first + i + 1 < end:
            s = s * decay + k[:, None] * delta[None, :]
        o = o * tl.rsqrt(tl.sum(o * o, axis=0) / DV + eps) * norm * z * tl.sigmoid(z)
        tl.store(out_ptr + (first + i) * (HV * DV) + gk, o.to(out_ptr.dtype.element_ty))
        # v, g and beta of this head belong to this program alone; k and the inputs are `keep`'s
        tl.store(v_ptr + ((slot * W + i) * HV) * DV + gk, v.to(v_ptr.dtype.element_ty))
        tl.store(g_ptr + (slot * W + i) * HV + hv, g)
        tl.store(beta_ptr + (slot * W + i) * HV + hv, beta)


@triton.jit
def _keep_kernel(
    mixed_ptr, mixed_stride, query_start_ptr, slot_ptr, commit_ptr, context_ptr, k_ptr, conv_ptr, conv_weight_ptr,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    b, block = tl.program_id(0), tl.program_id(1)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    channel = block * DK + tl.arange(0, DK)
    inside = channel < C
    channel = tl.minimum(channel, C - 1)
    wait_previous(PDL)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    commit = tl.load(commit_ptr + b).to(tl.int32)
    first, end = tl.load(query_start_ptr + b).to(tl.int32), tl.load(query_start_ptr + b + 1).to(tl.int32)
    fresh = tl.load(context_ptr + b) == 0
    conv = conv_ptr + slot * (3 + W) * C
    if (block >= HK) & (block < 2 * HK):
        for i in range(end - first):
            k = _unit(_convolved(mixed_ptr, mixed_stride, conv, conv_weight_ptr, C, first, commit, i, channel, fresh))
            at = k_ptr + ((slot * W + i) * HK + block - HK) * DK + tl.arange(0, DK)
            tl.store(at, k.to(k_ptr.dtype.element_ty))
    h0 = tl.where(fresh, 0.0, tl.load(conv + commit * C + channel).to(tl.float32))
    h1 = tl.where(fresh, 0.0, tl.load(conv + (commit + 1) * C + channel).to(tl.float32))
    h2 = tl.where(fresh, 0.0, tl.load(conv + (commit + 2) * C + channel).to(tl.float32))
    tl.debug_barrier()  # the stores below overwrite what other threads of this program loaded above
    tl.store(conv + channel, h0.to(conv_ptr.dtype.element_ty), mask=inside)
    tl.store(conv + C + channel, h1.to(conv_ptr.dtype.element_ty), mask=inside)
    tl.store(conv + 2 * C + channel, h2.to(conv_ptr.dtype.element_ty), mask=inside)
    for i in range(end - first):
        x = tl.load(mixed_ptr + (first + i) * mixed_stride + channel)
        tl.store(conv + (3 + i) * C + channel, x.to(conv_ptr.dtype.element_ty), mask=inside)


def window(
    mixed: Tensor,
    w: WindowWeights,
    state: WindowState,
    query_start: Tensor,
    state_slot: Tensor,
    commit: Tensor,
    context_len: Tensor,
    eps: float,
) -> Tensor:
    """Window rows through convolution, gates, delta rule and gated norm: [T, Hv Dv]. `state` moves in place.

    mixed [T, C + Hv Dv + 2 Hv] holds each row's qkv, z, b and a. Rows of sequence b are [query_start[b],
    query_start[b+1]), at most W of them, and become slot state_slot[b]'s pending window.
    """
    n_slots, hv, dk, dv = state.s.shape
    width, hk = state.k.shape[1], state.k.shape[2]
    batch, rows = state_slot.shape[0], mixed.shape[0]
    assert w.conv.shape[1] == 4, "the window kernel is written for convolutions of width 4"
    c = configs.config("gated_delta", mixed.device)
    out = torch.empty(rows, hv * dv, dtype=mixed.dtype, device=mixed.device)
    shape = {"HK": hk, "HV": hv, "DK": dk, "DV": dv, "W": width}
    _window_kernel[(batch, hv)](
        mixed, mixed.stride(0), out, query_start, state_slot, commit, context_len,
        state.s, state.k, state.v, state.g, state.beta, state.conv, w.conv, w.dt_bias, w.a_log, w.norm, eps,
        **shape, **launch(mixed.device, c.warps),
    )  # fmt: skip
    channels = 2 * hk * dk + hv * dv
    _keep_kernel[(batch, triton.cdiv(channels, dk))](
        mixed, mixed.stride(0), query_start, state_slot, commit, context_len, state.k, state.conv, w.conv,
        **shape, **launch(mixed.device, 4),
    )  # fmt: skip
    return out
