"""Gated delta rule over chunks of prompts: convolution, tiles' triangular systems, the walk over tiles, the gated norm.

Inside a tile of 64 rows the updates are one triangular system (the WY form: Yang, Wang, Zhang, Shen, Kim:
Parallelizing Linear Transformers with the Delta Rule, arXiv 2406.06484; with decay: arXiv 2412.06464). All systems are
inverted side by side; one program a head and part of its values then walks over a sequence's tiles with the state in
registers. Products that reach the state are as good as fp32: keys are 16-bit, so a state or an update in two 16-bit
parts times keys loses nothing above 2^-16. Tiles end at multiples of 64 of a sequence's own positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels import configs
from onebox.kernels.gated_delta_ref import CHUNK, WindowState, WindowWeights
from onebox.kernels.row_tiles import RowTiles


@triton.jit
def _tile_rows(tile, sequence_ptr, first_ptr, query_start_ptr, skipped, SIZE: tl.constexpr):
    """A tile's sequence (-1: none), SIZE of its rows, which of them are the sequence's, and that one's first row."""
    b = tl.load(sequence_ptr + tile)
    at = tl.maximum(b, 0)
    begin, end = tl.load(query_start_ptr + at).to(tl.int32), tl.load(query_start_ptr + at + 1).to(tl.int32)
    t = tl.load(first_ptr + tile) + skipped + tl.arange(0, SIZE)
    return b, t, (t >= begin) & (t < end), begin


@triton.jit
def _input(
    mixed_ptr, mixed_stride, history, t, back: tl.constexpr, live, begin, kept, channel, C: tl.constexpr,
):  # fmt: skip
    """The convolution's inputs `back` rows before `t`: the chunk's own rows, before them the sequence's last three."""
    row = t - back
    own = live & (row >= begin)
    x = tl.load(mixed_ptr + row.to(tl.int64)[:, None] * mixed_stride + channel[None, :], mask=own[:, None], other=0.0)
    if back > 0:
        before = live & (row < tl.where(kept, begin, -3))
        at = history + (row - begin + 3)[:, None] * C + channel[None, :]
        x += tl.load(at, mask=before[:, None], other=0.0).to(x.dtype)  # the other one is zero
    return x.to(tl.float32)


@triton.jit
def _convolve_kernel(
    mixed_ptr, mixed_stride, rows_ptr, gates_ptr, sequence_ptr, first_ptr, query_start_ptr, slot_ptr, commit_ptr,
    context_ptr, conv_ptr, weight_ptr, dt_bias_ptr, a_log_ptr,
    HK: tl.constexpr, HV: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, Z: tl.constexpr, BLOCK: tl.constexpr,
    W: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0), tl.program_id(1)
    b, t, live, begin = _tile_rows(tile, sequence_ptr, first_ptr, query_start_ptr, tl.program_id(2) * SIZE, SIZE)
    if b >= 0:
        wide = t.to(tl.int64)  # row * stride passes 2**31 in a long prompt
        if block * BLOCK >= C:  # log decay and beta of every head
            hv = tl.arange(0, HEADS)
            mask = live[:, None] & (hv < HV)[None, :]
            gate = mixed_ptr + wide[:, None] * mixed_stride + (C + Z + hv)[None, :]
            beta = tl.sigmoid(tl.load(gate, mask=mask, other=0.0).to(tl.float32))
            bias = tl.load(dt_bias_ptr + hv, mask=hv < HV, other=0.0).to(tl.float32)
            a = tl.load(gate + HV, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
            a_rate = -tl.exp(tl.load(a_log_ptr + hv, mask=hv < HV, other=0.0).to(tl.float32))
            g = a_rate[None, :] * tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
            gates = gates_ptr + wide[:, None] * (2 * HV) + hv[None, :]
            tl.store(gates, g, mask=mask)
            tl.store(gates + HV, beta, mask=mask)
        else:
            slot = tl.load(slot_ptr + b).to(tl.int64)
            commit = tl.load(commit_ptr + b).to(tl.int32)
            kept = tl.load(context_ptr + b) != 0
            channel = block * BLOCK + tl.arange(0, BLOCK)
            history = conv_ptr + (slot * (3 + W) + commit) * C
            y = tl.zeros([SIZE, BLOCK], tl.float32)
            for i in tl.static_range(4):  # in the order of the decode window
                x = _input(mixed_ptr, mixed_stride, history, t, 3 - i, live, begin, kept, channel, C)
                y += x * tl.load(weight_ptr + channel * 4 + i).to(tl.float32)[None, :]
            y = (y * tl.sigmoid(y)).to(mixed_ptr.dtype.element_ty).to(tl.float32)
            if block < 2 * HK:
                y = y * tl.rsqrt(tl.sum(y * y, axis=1) + 1e-6)[:, None]
            to = rows_ptr + wide[:, None] * C + channel[None, :]
            tl.store(to, y.to(rows_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def _decays(gates_ptr, t, live, hv, HV: tl.constexpr):
    """Log decay from a tile's beginning to behind each row, and beta [SIZE]. Rows that are not there change nothing."""
    at = gates_ptr + t.to(tl.int64) * (2 * HV) + hv
    g = tl.cumsum(tl.load(at, mask=live, other=0.0), axis=0)
    return g, tl.load(at + HV, mask=live, other=0.0)


@triton.jit
def _invert_kernel(
    rows_ptr, gates_ptr, sequence_ptr, first_ptr, query_start_ptr, inverse_ptr, scores_ptr,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    tile, hv = tl.program_id(0), tl.program_id(1)
    b, t, live, _ = _tile_rows(tile, sequence_ptr, first_ptr, query_start_ptr, 0, SIZE)
    if b >= 0:
        hk = hv // (HV // HK)
        d, r = tl.arange(0, D), tl.arange(0, SIZE)
        row = rows_ptr + t.to(tl.int64)[:, None] * C + (hk * D + d)[None, :]
        q = tl.load(row, mask=live[:, None], other=0.0)
        k = tl.load(row + HK * D, mask=live[:, None], other=0.0)
        g, beta = _decays(gates_ptr, t, live, hv, HV)
        below = r[:, None] >= r[None, :]
        decay = tl.where(below, tl.exp(tl.where(below, g[:, None] - g[None, :], 0.0)), 0.0)
        keys = tl.trans(k)
        scores = tl.dot(q, keys) * decay * (D**-0.5)
        system = tl.where(r[:, None] > r[None, :], tl.dot(k, keys) * decay * beta[:, None], 0.0)
        inverse = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
        for i in range(SIZE - 1):  # forward substitution: stable where keys repeat, as sums of powers are not
            solved = tl.sum(tl.where((r == i)[:, None], inverse, 0.0), axis=0)
            column = tl.sum(tl.where((r == i)[None, :], system, 0.0), axis=1)
            inverse -= column[:, None] * solved[None, :]
        at = (tile * HV + hv).to(tl.int64) * (SIZE * SIZE) + r[:, None] * SIZE + r[None, :]
        twice = inverse_ptr + (tile * HV + hv).to(tl.int64) * (2 * SIZE * SIZE) + r[:, None] * SIZE + r[None, :]
        high = inverse.to(inverse_ptr.dtype.element_ty)
        low = (inverse - high.to(tl.float32)).to(inverse_ptr.dtype.element_ty)
        tl.store(twice, high)
        tl.store(twice + SIZE * SIZE, low)
        tl.store(scores_ptr + at, scores.to(scores_ptr.dtype.element_ty))


@triton.jit
def _walk_kernel(
    rows_ptr, gates_ptr, inverse_ptr, scores_ptr, out_ptr, mixed_ptr, mixed_stride, tile_start_ptr, first_ptr,
    query_start_ptr, slot_ptr, commit_ptr, context_ptr,
    state_ptr, old_k_ptr, old_v_ptr, old_g_ptr, old_beta_ptr, conv_ptr,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, W: tl.constexpr,
    SIZE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part, hv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(query_start_ptr + b).to(tl.int32), tl.load(query_start_ptr + b + 1).to(tl.int32)
    if begin < end:
        hk = hv // (HV // HK)
        d, v_d, r = tl.arange(0, D), part * BV + tl.arange(0, BV), tl.arange(0, SIZE)
        slot = tl.load(slot_ptr + b).to(tl.int64)
        commit, kept = tl.load(commit_ptr + b).to(tl.int32), tl.load(context_ptr + b) != 0
        state = state_ptr + (slot * HV + hv) * (D * D) + d[:, None] * D + v_d[None, :]
        s = tl.where(kept, tl.load(state).to(tl.float32), 0.0)
        for i in range(tl.where(kept, commit, 0)):  # rows that a window left pending
            old = slot * W + i
            key = tl.load(old_k_ptr + (old * HK + hk) * D + d).to(tl.float32)
            value = tl.load(old_v_ptr + (old * HV + hv) * D + v_d).to(tl.float32)
            decay = tl.exp(tl.load(old_g_ptr + old * HV + hv))
            delta = (value - decay * tl.sum(s * key[:, None], axis=0)) * tl.load(old_beta_ptr + old * HV + hv)
            s = s * decay + key[:, None] * delta[None, :]
        start, stop = tl.load(tile_start_ptr + b), tl.load(tile_start_ptr + b + 1)
        first = tl.load(first_ptr + start)
        dtype = rows_ptr.dtype.element_ty
        for tile in tl.range(start, stop, num_stages=STAGES):
            t = first + (tile - start) * SIZE + r
            live = (t >= begin) & (t < end)
            wide = t.to(tl.int64)
            row = rows_ptr + wide[:, None] * C
            q = tl.load(row + (hk * D + d)[None, :], mask=live[:, None], other=0.0)
            k = tl.load(row + ((HK + hk) * D + d)[None, :], mask=live[:, None], other=0.0)
            v = tl.load(row + (2 * HK * D + hv * D + v_d)[None, :], mask=live[:, None], other=0.0).to(tl.float32)
            at = (tile * HV + hv).to(tl.int64) * (SIZE * SIZE)
            square = r[:, None] * SIZE + r[None, :]
            inverse, rest = inverse_ptr + 2 * at + square, inverse_ptr + 2 * at + SIZE * SIZE + square
            g, beta = _decays(gates_ptr, t, live, hv, HV)
            reach = tl.exp(g)
            high = s.to(dtype)
            low = (s - high.to(tl.float32)).to(dtype)
            known = tl.dot(k, low, tl.dot(k, high))
            out = tl.dot(q, high) * (reach * (D**-0.5))[:, None]
            told = (v - known * reach[:, None]) * beta[:, None]
            high = told.to(dtype)
            low = (told - high.to(tl.float32)).to(dtype)
            solved = tl.load(inverse)
            new = tl.dot(solved, low, tl.dot(tl.load(rest), high))
            new = tl.dot(solved, high, new)
            out = tl.dot(tl.load(scores_ptr + at + square), new.to(dtype), out)
            tl.store(out_ptr + wide[:, None] * (HV * D) + (hv * D + v_d)[None, :], out.to(dtype), mask=live[:, None])
            total = tl.sum(tl.where(r == SIZE - 1, g, 0.0), axis=0)
            new = new * tl.exp(total - g)[:, None]
            high = new.to(dtype)
            low = (new - high.to(tl.float32)).to(dtype)
            keys = tl.trans(k)
            s = tl.dot(keys, low, tl.dot(keys, high, s * tl.exp(total)))
        tl.store(state, s.to(state_ptr.dtype.element_ty))
        # The convolution's last inputs, a part of the channels each. Nobody reads what is overwritten here any more,
        # but for the rows before a short chunk, and those are of the same channels: loaded before they are stored.
        at = (hv * (D // BV) + part) * SIZE
        while at < C:
            channel = at + r
            history = conv_ptr + slot * ((3 + W) * C) + channel
            inside = channel < C
            x0 = _last_input(mixed_ptr, mixed_stride, history, commit, kept, begin, end - 3, channel, inside, C)
            x1 = _last_input(mixed_ptr, mixed_stride, history, commit, kept, begin, end - 2, channel, inside, C)
            x2 = _last_input(mixed_ptr, mixed_stride, history, commit, kept, begin, end - 1, channel, inside, C)
            tl.debug_barrier()
            tl.store(history, x0, mask=inside)
            tl.store(history + C, x1, mask=inside)
            tl.store(history + 2 * C, x2, mask=inside)
            at += HV * (D // BV) * SIZE


@triton.jit
def _last_input(mixed_ptr, mixed_stride, history, commit, kept, begin, row, channel, inside, C: tl.constexpr):
    row += channel * 0
    own = inside & (row >= begin)
    x = tl.load(mixed_ptr + row.to(tl.int64) * mixed_stride + channel, mask=own, other=0.0)
    before = inside & (row < tl.where(kept, begin, -3))
    return x + tl.load(history + (commit + row - begin + 3) * C, mask=before, other=0.0).to(x.dtype)


@triton.jit
def _norm_kernel(
    x_ptr, mixed_ptr, mixed_stride, norm_ptr, out_ptr, n_rows, eps,
    HV: tl.constexpr, D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    hv = tl.program_id(1)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    live, wide = (t < n_rows)[:, None], t.to(tl.int64)[:, None]
    at = wide * (HV * D) + (hv * D + d)[None, :]
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    z = tl.load(mixed_ptr + wide * mixed_stride + (C + hv * D + d)[None, :], mask=live, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None] * tl.load(norm_ptr + d).to(tl.float32)[None, :]
    tl.store(out_ptr + at, (y * (z * tl.sigmoid(z))).to(out_ptr.dtype.element_ty), mask=live)


def prefill(
    mixed: Tensor,
    w: WindowWeights,
    state: WindowState,
    query_start: Tensor,
    state_slot: Tensor,
    commit: Tensor,
    context_len: Tensor,
    eps: float,
    tiles: RowTiles,
) -> Tensor:
    """Rows of prompts through convolution, gates, delta rule and gated norm: [T, Hv Dv]. `state` moves in place.

    mixed [T, C + Hv Dv + 2 Hv] holds each row's qkv, z, b and a. `commit[b]` rows pending in slot state_slot[b] are
    applied first, then the rows of sequence b; nothing is pending afterwards. A sequence with context_len 0 starts from
    zeros. `tiles` are `row_tiles` of CHUNK for this batch. Four launches. A row's result is the same bits in any
    company, and for any chunks that end at multiples of CHUNK.
    """
    _, hv, d, dv = state.s.shape
    width, hk = state.k.shape[1], state.k.shape[2]
    batch, n_rows, device = state_slot.shape[0], mixed.shape[0], mixed.device
    assert w.conv.shape[1] == 4 and d == dv, "the kernel is written for convolutions of 4 and heads of one width"
    assert tiles.size == CHUNK and mixed.stride(1) == 1
    c, channels = configs.config("gated_delta_prefill", device, hv * d), 2 * hk * d + hv * d
    part = min(c.block_n, d)
    rows = torch.empty(n_rows, channels, dtype=mixed.dtype, device=device)
    gates = torch.empty(n_rows, 2, hv, dtype=torch.float32, device=device)
    inverse = torch.empty(tiles.n, hv, 2, CHUNK, CHUNK, dtype=mixed.dtype, device=device)  # in two parts
    scores = torch.empty(tiles.n, hv, CHUNK, CHUNK, dtype=mixed.dtype, device=device)
    raw = torch.empty(n_rows, hv * d, dtype=mixed.dtype, device=device)
    out = torch.empty(n_rows, hv * d, dtype=mixed.dtype, device=device)
    _convolve_kernel[(tiles.n, channels // d + 1, CHUNK // 16)](
        mixed, mixed.stride(0), rows, gates, tiles.sequence, tiles.first, query_start, state_slot, commit, context_len,
        state.conv, w.conv, w.dt_bias, w.a_log, HK=hk, HV=hv, HEADS=triton.next_power_of_2(hv), C=channels, Z=hv * d,
        BLOCK=d, W=width, SIZE=16, num_warps=4,
    )  # fmt: skip
    _invert_kernel[(tiles.n, hv)](
        rows, gates, tiles.sequence, tiles.first, query_start, inverse, scores,
        HK=hk, HV=hv, D=d, C=channels, SIZE=CHUNK, num_warps=4,
    )  # fmt: skip
    _walk_kernel[(d // part, hv, batch)](
        rows, gates, inverse, scores, raw, mixed, mixed.stride(0), tiles.start, tiles.first, query_start, state_slot,
        commit, context_len, state.s, state.k, state.v, state.g, state.beta, state.conv,
        HK=hk, HV=hv, D=d, C=channels, BV=part, W=width, SIZE=CHUNK, STAGES=c.stages, num_warps=c.warps,
    )  # fmt: skip
    _norm_kernel[(triton.cdiv(n_rows, 16), hv)](
        raw, mixed, mixed.stride(0), w.norm, out, n_rows, eps, HV=hv, D=d, C=channels, ROWS=16, num_warps=4,
    )  # fmt: skip
    return out
