"""Gated delta rule over a decode window with lazy commit: the state is read and written once at any draft length.

The convolution's programs own their channels and move the inputs on; the delta rule's programs apply the committed rows
of the last window to the state, write it, run the new rows in registers and leave them pending.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels import configs
from onebox.kernels.gated_delta_ref import WindowState, WindowWeights
from onebox.kernels.linear import launch
from onebox.kernels.tile import launch_next, launch_next_late, paired_column, wait_previous


@triton.jit
def _gates(
    b_ptr, mixed_stride, first, end, commit, b, slot, g_ptr, beta_ptr, gates_ptr, old_gates_ptr, dt_bias_ptr, a_log_ptr,
    HV: tl.constexpr, HEADS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Log decay and beta of every head: the pending window's move to `old_gates`, the new rows' take their place."""
    hv = tl.arange(0, HEADS)
    inside = hv < HV
    for i in range(commit):
        at = (slot * W + i) * HV + hv
        to = old_gates_ptr + (b * W + i) * 2 * HV + hv
        tl.store(to, tl.load(g_ptr + at, mask=inside), mask=inside)
        tl.store(to + HV, tl.load(beta_ptr + at, mask=inside), mask=inside)
    a_rate = -tl.exp(tl.load(a_log_ptr + hv, mask=inside, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias_ptr + hv, mask=inside, other=0.0).to(tl.float32)
    tl.debug_barrier()  # the stores below overwrite what was loaded above
    for i in range(end - first):
        row = b_ptr + (first + i) * mixed_stride + hv
        beta = tl.sigmoid(tl.load(row, mask=inside, other=0.0).to(tl.float32))
        x = tl.load(row + HV, mask=inside, other=0.0).to(tl.float32) + bias
        g = a_rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        at = (slot * W + i) * HV + hv
        tl.store(g_ptr + at, g, mask=inside)
        tl.store(beta_ptr + at, beta, mask=inside)
        tl.store(gates_ptr + (first + i) * 2 * HV + hv, g, mask=inside)
        tl.store(gates_ptr + ((first + i) * 2 + 1) * HV + hv, beta, mask=inside)


@triton.jit
def _convolve_kernel(
    mixed_ptr, mixed_stride, out_ptr, query_start_ptr, slot_ptr, commit_ptr, context_ptr, conv_ptr, weight_ptr,
    k_ptr, old_k_ptr, g_ptr, beta_ptr, gates_ptr, old_gates_ptr, dt_bias_ptr, a_log_ptr,
    HV: tl.constexpr, HEADS: tl.constexpr, HK: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    b, block = tl.program_id(0), tl.program_id(1)
    wait_previous(PDL)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    commit = tl.load(commit_ptr + b).to(tl.int32)
    first, end = tl.load(query_start_ptr + b).to(tl.int32), tl.load(query_start_ptr + b + 1).to(tl.int32)
    kept = tl.load(context_ptr + b) != 0
    if block * BLOCK >= C:
        _gates(
            mixed_ptr + C + (C - 2 * HK * BLOCK), mixed_stride, first, end, commit, b, slot, g_ptr, beta_ptr, gates_ptr,
            old_gates_ptr, dt_bias_ptr, a_log_ptr, HV, HEADS, W,
        )  # fmt: skip
    else:
        channel = block * BLOCK + tl.arange(0, BLOCK)
        w0 = tl.load(weight_ptr + channel * 4).to(tl.float32)
        w1 = tl.load(weight_ptr + channel * 4 + 1).to(tl.float32)
        w2 = tl.load(weight_ptr + channel * 4 + 2).to(tl.float32)
        w3 = tl.load(weight_ptr + channel * 4 + 3).to(tl.float32)
        conv = conv_ptr + slot * (3 + W) * C + channel
        x0 = tl.where(kept, tl.load(conv + commit * C), 0.0)
        x1 = tl.where(kept, tl.load(conv + (commit + 1) * C), 0.0)
        x2 = tl.where(kept, tl.load(conv + (commit + 2) * C), 0.0)
        is_k = (block >= HK) & (block < 2 * HK)
        key = (block - HK) * BLOCK + tl.arange(0, BLOCK)
        if is_k:  # the pending keys make room; the delta rule's programs read the copy
            for i in range(commit):
                k = tl.load(k_ptr + (slot * W + i) * (HK * BLOCK) + key)
                tl.store(old_k_ptr + (b * W + i) * (HK * BLOCK) + key, k)
        tl.debug_barrier()  # what is stored below was loaded above, by other threads too
        tl.store(conv, x0)
        tl.store(conv + C, x1)
        tl.store(conv + 2 * C, x2)
        f0, f1, f2 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32)
        for i in range(end - first):
            x = tl.load(mixed_ptr + (first + i) * mixed_stride + channel)
            tl.store(conv + (3 + i) * C, x.to(conv_ptr.dtype.element_ty))
            f3 = x.to(tl.float32)
            y = f0 * w0 + f1 * w1 + f2 * w2 + f3 * w3
            y = (y * tl.sigmoid(y)).to(mixed_ptr.dtype.element_ty).to(tl.float32)
            if block < 2 * HK:
                y = y * tl.rsqrt(tl.sum(y * y, axis=0) + 1e-6)
            if is_k:  # rounded for this window too: a row must not know whether it was committed by the next one
                kept_y = y.to(k_ptr.dtype.element_ty)
                tl.store(k_ptr + (slot * W + i) * (HK * BLOCK) + key, kept_y)
                y = kept_y.to(tl.float32)
            tl.store(out_ptr + (first + i) * C + channel, y)
            f0, f1, f2 = f1, f2, f3


@triton.jit
def _delta_row(
    rows_ptr, mixed_ptr, mixed_stride, gates_ptr, t, C, at_k, at_v, hv,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """q, k, v of the convolution, z of the projection, log decay and beta."""
    row, extra = rows_ptr + t * C, mixed_ptr + t * mixed_stride + C
    q, k, v = tl.load(row + at_k), tl.load(row + HK * DK + at_k), tl.load(row + 2 * HK * DK + at_v)
    z = tl.load(extra + at_v).to(tl.float32)
    gates = gates_ptr + t * 2 * HV + hv
    return q, k, v, z, tl.load(gates), tl.load(gates + HV)


@triton.jit
def _pending_row(
    old_k_ptr, v_ptr, old_gates_ptr, b, slot, i, at_k, at_v, hv,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    k = tl.load(old_k_ptr + (b * W + i) * (HK * DK) + at_k).to(tl.float32)
    v = tl.load(v_ptr + (slot * W + i) * (HV * DV) + at_v).to(tl.float32)
    gates = old_gates_ptr + (b * W + i) * 2 * HV + hv
    return k, v, tl.load(gates), tl.load(gates + HV)


@triton.jit
def _delta_kernel(
    mixed_ptr, mixed_stride, rows_ptr, out_ptr, query_start_ptr, slot_ptr, commit_ptr, context_ptr,
    state_ptr, old_k_ptr, v_ptr, gates_ptr, old_gates_ptr, norm_ptr, squares_ptr, n_rows,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, W: tl.constexpr,
    PAIRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    part, hv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    hk = hv // (HV // HK)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    dk, dv = tl.arange(0, DK), part * BV + tl.arange(0, BV)
    at_k, at_v = hk * DK + dk, hv * DV + dv
    wait_previous(PDL)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    commit = tl.load(commit_ptr + b).to(tl.int32)
    first, end = tl.load(query_start_ptr + b).to(tl.int32), tl.load(query_start_ptr + b + 1).to(tl.int32)
    kept = tl.load(context_ptr + b) != 0
    state_at = state_ptr + (slot * HV + hv) * (DK * DV) + dk[:, None] * DV + dv[None, :]
    s = tl.where(kept, tl.load(state_at), 0.0)
    norm = tl.load(norm_ptr + dv).to(tl.float32)
    # every load of a row is issued before the row ahead of it is worked on
    q, k, v, z, g, beta = _delta_row(
        rows_ptr, mixed_ptr, mixed_stride, gates_ptr, first, C, at_k, at_v, hv, HK, HV, DK, DV
    )
    old_k, old_v, old_g, old_beta = _pending_row(
        old_k_ptr, v_ptr, old_gates_ptr, b, slot, 0, at_k, at_v, hv, HK, HV, DK, DV, W
    )
    for i in range(commit):  # rows the last step accepted
        decay = tl.exp(old_g)
        delta = (old_v - decay * tl.sum(s * old_k[:, None], axis=0)) * old_beta
        s = s * decay + old_k[:, None] * delta[None, :]
        following = tl.minimum(i + 1, W - 1)
        old_k, old_v, old_g, old_beta = _pending_row(
            old_k_ptr, v_ptr, old_gates_ptr, b, slot, following, at_k, at_v, hv, HK, HV, DK, DV, W
        )
    launch_next_late(PDL)
    tl.store(state_at, s)
    for i in range(end - first):
        q = q * (DK**-0.5)
        decay = tl.exp(g)
        read_k = tl.sum(s * k[:, None], axis=0)
        read_q = tl.sum(s * q[:, None], axis=0)
        delta = (v - decay * read_k) * beta
        o = decay * read_q + delta * tl.sum(q * k, axis=0)
        square = squares_ptr + (hv * (DV // BV) + part) * n_rows + first + i
        tl.store(square, tl.sum(o * o, axis=0))
        o = o * norm * z * tl.sigmoid(z)
        column = paired_column(at_v) if PAIRED else at_v
        tl.store(out_ptr + (first + i) * (HV * DV) + column, o.to(out_ptr.dtype.element_ty))
        # pending values of this part of the head are read by this program alone
        tl.store(v_ptr + (slot * W + i) * (HV * DV) + at_v, v.to(v_ptr.dtype.element_ty))
        if first + i + 1 < end:
            s = s * decay + k[:, None] * delta[None, :]
            q, k, v, z, g, beta = _delta_row(
                rows_ptr, mixed_ptr, mixed_stride, gates_ptr, first + i + 1, C, at_k, at_v, hv, HK, HV, DK, DV
            )


def window(
    mixed: Tensor,
    w: WindowWeights,
    state: WindowState,
    query_start: Tensor,
    state_slot: Tensor,
    commit: Tensor,
    context_len: Tensor,
    paired: bool = False,
) -> tuple[Tensor, Tensor]:
    """Window rows through convolution, gates and delta rule, up to each head's norm. `state` moves in place.

    mixed [T, C + Hv Dv + 2 Hv] holds each row's qkv, z, b and a. Rows of sequence b are [query_start[b],
    query_start[b+1]), at most W of them, and become slot state_slot[b]'s pending window. Gives y [T, Hv Dv], the norm's
    weight and the gate applied, and squares [Hv, parts, T], whose sum over parts is what the norm divides by
    (`project_add` finishes it: a head's columns are in several programs here). `paired` lays y's columns out as
    `wants_pairs` says.
    """
    _, hv, dk, dv = state.s.shape
    width, hk = state.k.shape[1], state.k.shape[2]
    batch, rows, device = state_slot.shape[0], mixed.shape[0], mixed.device
    assert w.conv.shape[1] == 4, "the window kernel is written for convolutions of width 4"
    assert dk == dv, "key and value heads are of one width"
    c, channels = configs.config("gated_delta", device), 2 * hk * dk + hv * dv
    block = min(c.block_n, dv)
    out = torch.empty(rows, hv * dv, dtype=mixed.dtype, device=device)
    squares = torch.empty(hv, dv // block, rows, dtype=torch.float32, device=device)
    inner = torch.empty(rows, channels, dtype=torch.float32, device=device)
    gates = torch.empty(rows, 2, hv, dtype=torch.float32, device=device)
    old_k = torch.empty(batch, width, hk * dk, dtype=state.k.dtype, device=device)
    old_gates = torch.empty(batch, width, 2, hv, dtype=torch.float32, device=device)
    _convolve_kernel[(batch, channels // dk + 1)](
        mixed, mixed.stride(0), inner, query_start, state_slot, commit, context_len, state.conv, w.conv,
        state.k, old_k, state.g, state.beta, gates, old_gates, w.dt_bias, w.a_log, HV=hv,
        HEADS=triton.next_power_of_2(hv), HK=hk, C=channels, BLOCK=dk, W=width, enable_fp_fusion=False,
        **launch(device, 4),
    )  # fmt: skip
    _delta_kernel[(dv // block, hv, batch)](
        mixed, mixed.stride(0), inner, out, query_start, state_slot, commit, context_len,
        state.s, old_k, state.v, gates, old_gates, w.norm, squares, rows,
        HK=hk, HV=hv, DK=dk, DV=dv, BV=block, W=width, PAIRED=paired,
        enable_fp_fusion=False, **launch(device, c.warps),  # a row is worked on by two loops, which must round alike
    )  # fmt: skip
    return out, squares
