"""Mixture of experts for up to 64 rows: route, gate and up, down. Each distinct expert of the rows is read once.

The shared expert is slot 0 beside the chosen experts, in its own format and in the same launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels import configs
from onebox.kernels.linear import Packed, Workspace, empty_residual, inline_asm, launch, reads_digits, row_tile
from onebox.kernels.linear_ref import AnyWeight, Residual
from onebox.kernels.moe_ref import Routing
from onebox.kernels.tile import (
    BF16,
    add_to_residual,
    inverse_rms,
    last_of,
    launch_next,
    launch_next_late,
    paired_column,
    prefetch_rows,
    times_int4,
    times_rows,
    wait_previous,
)

ROUTE_TILE = 16


@triton.jit
def _choose(
    partial_ptr, squares_ptr, n_parts, n_rows, eps, weight_ptr, expert_ptr, count_ptr, E,
    H: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum the parts of the logits, choose and weigh experts row by row, list the experts met."""
    t, e = tl.arange(0, ROWS), tl.arange(0, EXPERTS)
    row_mask = t < n_rows
    mask = row_mask[:, None] & (e < E)[None, :]
    logits = tl.zeros([ROWS, EXPERTS], tl.float32)
    gate = tl.zeros([ROWS], tl.float32)
    for s in tl.static_range(SPLITS):
        row = partial_ptr + (s * T + t) * WIDE
        logits += tl.load(row[:, None] + e[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        gate += tl.load(row + EXPERTS, mask=row_mask, other=0.0, cache_modifier=".cg")
    rms = inverse_rms(squares_ptr, t, row_mask, n_parts, n_rows, H, PARTS, eps)
    left = tl.where((e < E)[None, :], logits * rms[:, None], float("-inf"))
    best = tl.max(left, axis=1)
    total = tl.zeros([ROWS], tl.float32)
    weight = tl.zeros([ROWS, EXPERTS], tl.float32)
    for _ in tl.static_range(TOP_K):
        top, index = tl.max(left, axis=1, return_indices=True)
        share = tl.exp(top - best)
        pick = e[None, :] == index[:, None]
        weight = tl.where(pick & row_mask[:, None], share[:, None], weight)
        left = tl.where(pick, float("-inf"), left)
        total += share
    weight = weight / total[:, None]
    met = tl.max((weight > 0).to(tl.int32), axis=0)
    slot = tl.cumsum(met, axis=0)  # slot 0 is the shared expert
    tl.store(expert_ptr + slot, e, mask=met > 0)
    tl.store(count_ptr, 1 + tl.sum(met, axis=0))
    tl.store(weight_ptr + slot[None, :] * n_rows + t[:, None], weight, mask=(met > 0)[None, :] & row_mask[:, None])
    tl.store(weight_ptr + t, tl.sigmoid(gate * rms), mask=row_mask)


@triton.jit
def _route_kernel(
    x_ptr, squares_ptr, n_parts, n_rows, eps, router_ptr, gate_ptr, weight_ptr, expert_ptr, count_ptr,
    partial_ptr, counter_ptr, E,
    H: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SPLITS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    n = tile * BN + tl.arange(0, BN)
    xt = tl.arange(0, T)
    x_mask = xt < n_rows
    wide: tl.constexpr = EXPERTS + BN  # a partial row: every expert's logit, then the shared expert's gate
    span: tl.constexpr = H // SPLITS
    is_gate = tile * BN >= E
    base = gate_ptr if is_gate else router_ptr
    rows = tl.where(is_gate, 0, tl.minimum(n, E - 1))
    column = tl.where(is_gate, EXPERTS + tl.arange(0, BN), n)
    wait_previous(PDL)
    acc = times_rows(
        base, base, base, rows, x_ptr, xt, x_mask, n_rows, split * span, x_ptr, 0.0,
        span, H, T, BN, BK, BF16, False, STAGES, UNROLL, False, 0,
    )  # fmt: skip
    launch_next_late(PDL)
    where = partial_ptr + (split * T + xt[None, :]) * wide + column[:, None]
    tl.store(where, acc, mask=(column < wide)[:, None] & x_mask[None, :])
    if last_of(counter_ptr, tl.num_programs(0)):
        _choose(
            partial_ptr, squares_ptr, n_parts, n_rows, eps, weight_ptr, expert_ptr, count_ptr, E,
            H, PARTS, T, ROWS, EXPERTS, TOP_K, SPLITS, wide,
        )  # fmt: skip


def route(h: Residual, router: Tensor, shared_gate: Tensor, top_k: int, eps: float, workspace: Workspace) -> Routing:
    """Router logits of norm(h), the best `top_k` renormalised, the shared gate, and the list of experts met."""
    rows, width = h.x.shape
    n_experts, c, device = router.shape[0], configs.config("route", h.x.device, width), h.x.device
    cap = 1 + min(n_experts, rows * top_k)
    out = Routing(
        torch.empty(cap, rows, dtype=torch.float32, device=device),
        torch.empty(cap, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    tiles = triton.cdiv(n_experts, c.block_n) + 1
    step = 128 if width % 128 == 0 else width
    parts = configs.splits(tiles, width // step, device, c.programs) if width % 128 == 0 else 1
    _route_kernel[(tiles * parts,)](
        h.scaled, h.squares, h.squares.shape[0], rows, eps, router, shared_gate, out.weight, out.expert, out.count,
        workspace.partial, workspace.counters, n_experts,
        H=width, PARTS=triton.next_power_of_2(h.squares.shape[0]), T=row_tile(rows),
        ROWS=triton.next_power_of_2(rows), EXPERTS=max(triton.next_power_of_2(n_experts), 16), TOP_K=top_k, SPLITS=parts, BN=c.block_n, BK=128,
        STAGES=c.stages, UNROLL=c.unroll, **launch(device, c.warps),
    )  # fmt: skip
    return out


@triton.jit
def _gate_up_tile(
    q_ptr, s_ptr, g_ptr, slot, tile, x_ptr, digits_ptr, steps_ptr, squares_ptr, weight_ptr, out_ptr, n_parts, n_rows, eps,
    H: tl.constexpr, I: tl.constexpr, PARTS: tl.constexpr, DIGITS: tl.constexpr, T: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
    OUT_PAIRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, BN)
    rows = tl.minimum(tile * (BN // 2) + r // 2, I - 1) + (r % 2) * I  # gate and up rows in turn
    xt = tl.arange(0, T)
    x_mask = xt < n_rows
    if DIGITS:
        acc = times_int4(q_ptr, s_ptr, rows, digits_ptr, steps_ptr, n_rows, H, T, BN, ASM, STAGES, UNROLL)
    else:
        acc = times_rows(
            q_ptr, s_ptr, g_ptr, rows, x_ptr, xt, x_mask, n_rows, 0, x_ptr, 0.0,
            H, H, T, BN, BK, FORMAT, ASM, STAGES, UNROLL, False, 0,
        )  # fmt: skip
    launch_next_late(PDL)
    acc = acc * inverse_rms(squares_ptr, xt, x_mask, n_parts, n_rows, H, PARTS, eps)[None, :]
    gate, up = tl.split(tl.permute(tl.reshape(acc, [BN // 2, 2, T]), [0, 2, 1]))
    share = tl.load(weight_ptr + slot * n_rows + xt, mask=x_mask, other=0.0)
    y = tl.where((share > 0)[None, :], gate * tl.sigmoid(gate) * up * share[None, :], 0.0)
    n = tile * (BN // 2) + tl.arange(0, BN // 2)
    column = paired_column(n) if OUT_PAIRED else n
    where = out_ptr + (slot * n_rows + xt[None, :]) * I + column[:, None]
    tl.store(where, y.to(out_ptr.dtype.element_ty), mask=(n < I)[:, None] & x_mask[None, :])


@triton.jit
def _gate_up_kernel(
    x_ptr, digits_ptr, steps_ptr, squares_ptr, n_parts, n_rows, eps, weight_ptr, expert_ptr, count_ptr, out_ptr,
    q_ptr, s_ptr, g_ptr, q_stride, s_stride, g_stride, shared_q_ptr, shared_s_ptr, shared_g_ptr,
    H: tl.constexpr, I: tl.constexpr, PARTS: tl.constexpr, DIGITS: tl.constexpr, SHARED_DIGITS: tl.constexpr,
    T: tl.constexpr, SHARED_T: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, SHARED_BK: tl.constexpr,
    SHARED_FORMAT: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
    OUT_PAIRED: tl.constexpr, SHARED_OUT_PAIRED: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    tiles: tl.constexpr = (I * 2 + BN - 1) // BN
    slot, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if slot == 0:
        if PREFETCH:
            r = tl.arange(0, BN)
            ahead = tl.minimum(tile * (BN // 2) + r // 2, I - 1) + (r % 2) * I
            prefetch_rows(shared_q_ptr, ahead, H, SHARED_FORMAT, PREFETCH)
        wait_previous(PDL)
        _gate_up_tile(
            shared_q_ptr, shared_s_ptr, shared_g_ptr, 0, tile, x_ptr, digits_ptr, steps_ptr,
            squares_ptr, weight_ptr, out_ptr, n_parts, n_rows, eps, H, I, PARTS, SHARED_DIGITS, SHARED_T, BN, SHARED_BK,
            SHARED_FORMAT, ASM, STAGES, UNROLL, SHARED_OUT_PAIRED, PDL,
        )  # fmt: skip
    else:
        wait_previous(PDL)
        if slot < tl.load(count_ptr):
            # int64: expert * stride passes 2**31 for 16-bit experts
            expert = tl.load(expert_ptr + slot).to(tl.int64)
            _gate_up_tile(
                q_ptr + expert * q_stride, s_ptr + expert * s_stride, g_ptr + expert * g_stride, slot, tile,
                x_ptr, digits_ptr, steps_ptr, squares_ptr, weight_ptr, out_ptr, n_parts, n_rows, eps,
                H, I, PARTS, DIGITS, T, BN, BK, FORMAT, ASM, STAGES, UNROLL, OUT_PAIRED, PDL,
            )  # fmt: skip


def gate_up(
    h: Residual,
    routing: Routing,
    w: AnyWeight,
    shared: AnyWeight,
    eps: float,
    pairs: tuple[bool, bool] = (False, False),
) -> Tensor:
    """SiLU(gate) * up of norm(h) for every slot, times the slot's weight: [slots, T, I]; rows not routed there are 0.

    w [E, 2I, H] (gate rows before up rows), shared [2I, H]. Slots past `routing.count` are not written. `pairs` says for
    the routed slots and for the shared one whether `down` wants their columns paired (`wants_pairs`).
    """
    rows, width = h.x.shape
    a, b, c = Packed.of(w), Packed.of(shared), configs.config("gate_up", h.x.device, width)
    assert a.n == b.n, "the shared expert is as wide as a routed one"
    cap = routing.weight.shape[0]
    out = torch.empty(cap, rows, a.n // 2, dtype=h.x.dtype, device=h.x.device)
    _gate_up_kernel[(cap * triton.cdiv(a.n, c.block_n),)](
        h.scaled, h.digits, h.steps, h.squares, h.squares.shape[0], rows, eps, routing.weight, routing.expert,
        routing.count, out, a.q, a.scale, a.extra, a.q.stride(0), a.scale.stride(0), a.extra.stride(0),
        b.q, b.scale, b.extra, H=width, I=a.n // 2, PARTS=triton.next_power_of_2(h.squares.shape[0]),
        DIGITS=reads_digits(w), SHARED_DIGITS=reads_digits(shared), T=row_tile(rows, w), SHARED_T=row_tile(rows, shared), BN=c.block_n, BK=a.step,
        FORMAT=a.format, SHARED_BK=b.step, SHARED_FORMAT=b.format, ASM=inline_asm(h.x), STAGES=c.stages,
        UNROLL=c.unroll, OUT_PAIRED=pairs[0], SHARED_OUT_PAIRED=pairs[1], PREFETCH=c.prefetch,
        **launch(h.x.device, c.warps),
    )  # fmt: skip
    return out


@triton.jit
def _down_kernel(
    y_ptr, count_ptr, expert_ptr, x_in_ptr, norm_ptr, x_ptr, scaled_ptr, digits_ptr, squares_ptr, steps_ptr, partial_ptr,
    counter_ptr, n_rows, q_ptr, s_ptr, g_ptr, q_stride, s_stride, g_stride, shared_q_ptr, shared_s_ptr, shared_g_ptr,
    H: tl.constexpr, I: tl.constexpr, T: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
    SHARED_BK: tl.constexpr, SHARED_FORMAT: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
    UNROLL: tl.constexpr, PAIRED: tl.constexpr, SHARED_PAIRED: tl.constexpr, DIGITS: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    tiles: tl.constexpr = (H + BN - 1) // BN
    slot, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    n = tile * BN + tl.arange(0, BN)
    n_mask = n < H
    rows = tl.minimum(n, H - 1)
    xt = tl.arange(0, T)
    x_mask = xt < n_rows
    mask = n_mask[:, None] & x_mask[None, :]
    where = partial_ptr + xt[None, :] * H + n[:, None]
    if slot == 0:
        prefetch_rows(shared_q_ptr, rows, I, SHARED_FORMAT, PREFETCH)
    wait_previous(PDL)
    count = tl.load(count_ptr)
    if slot < count:
        x = y_ptr + slot * n_rows * I
        if slot == 0:
            acc = times_rows(
                shared_q_ptr, shared_s_ptr, shared_g_ptr, rows, x, xt, x_mask, n_rows, 0, x, 0.0,
                I, I, T, BN, SHARED_BK, SHARED_FORMAT, ASM, STAGES, UNROLL, SHARED_PAIRED, 0,
            )  # fmt: skip
        else:
            expert = tl.load(expert_ptr + slot).to(tl.int64)
            acc = times_rows(
                q_ptr + expert * q_stride, s_ptr + expert * s_stride, g_ptr + expert * g_stride, rows, x, xt, x_mask,
                n_rows, 0, x, 0.0, I, I, T, BN, BK, FORMAT, ASM, STAGES, UNROLL, PAIRED, 0,
            )  # fmt: skip
        launch_next_late(PDL)
        tl.store(where + slot * n_rows * H, acc, mask=mask)
        if last_of(counter_ptr + tile, count):
            total = tl.zeros([BN, T], tl.float32)
            for first in range(0, count, 8):  # slots in order; loads of eight in flight
                for i in tl.static_range(8):
                    here = mask & ((xt * 0 + (first + i)) < count)[None, :]
                    total += tl.load(where + (first + i) * n_rows * H, mask=here, other=0.0, cache_modifier=".cg")
            add_to_residual(
                total, tile, n, n_mask, xt, x_mask, n_rows, x_in_ptr, x_ptr, scaled_ptr, digits_ptr, squares_ptr,
                steps_ptr, norm_ptr, H, DIGITS,
            )  # fmt: skip


def down(
    y: Tensor,
    routing: Routing,
    w: AnyWeight,
    shared: AnyWeight,
    h: Residual,
    norm: Tensor,
    workspace: Workspace,
    pairs: tuple[bool, bool] = (False, False),
) -> Residual:
    """h + the sum over slots of y[slot] w[slot]^T, in slot order, ahead of a norm with weight `norm`.

    y [slots, T, I] already weighted (columns paired as `pairs` says), w [E, H, I], shared [H, I].
    """
    cap, rows, inner = y.shape
    a, b, c = Packed.of(w), Packed.of(shared), configs.config("down", y.device, h.x.shape[1])
    tiles = triton.cdiv(a.n, c.block_n)
    assert cap * rows * a.n <= workspace.partial.numel(), "workspace is too small for these rows"
    out = empty_residual(rows, a.n, c.block_n, norm, h.x.dtype)
    _down_kernel[(tiles * cap,)](
        y, routing.count, routing.expert, h.x, norm, out.x, out.scaled, out.digits, out.squares, out.steps,
        workspace.partial, workspace.counters, rows, a.q, a.scale, a.extra, a.q.stride(0), a.scale.stride(0),
        a.extra.stride(0), b.q, b.scale, b.extra, H=a.n, I=inner, T=row_tile(rows), BN=c.block_n, BK=a.step,
        FORMAT=a.format, SHARED_BK=b.step, SHARED_FORMAT=b.format, ASM=inline_asm(y), STAGES=c.stages, UNROLL=c.unroll,
        PAIRED=pairs[0], SHARED_PAIRED=pairs[1], DIGITS=a.n % 128 == 0, PREFETCH=c.prefetch,
        **launch(y.device, c.warps),
    )  # fmt: skip
    return out
