"""Mixture of experts for up to 64 rows: route, gate and up, down. Each distinct expert of the rows is read once.

The shared expert waits for no routing, so it runs one launch ahead: its gate and up beside the router, its down beside
the chosen experts' gate and up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels import configs
from onebox.kernels.linear import Operand, Workspace, empty_residual, inline_asm, launch, reads_digits, row_tile
from onebox.kernels.linear_ref import Residual
from onebox.kernels.moe_ref import Chosen, Routing
from onebox.kernels.tile import (
    BF16,
    add_to_residual,
    gate_up_rows,
    gated,
    inverse_rms,
    keep_rows,
    last_of,
    launch_next,
    launch_next_late,
    load_residual,
    load_squares,
    paired_column,
    prefetch_rows,
    times_int4,
    times_rows,
    wait_previous,
)
from onebox.kernels.weights import Weight


@triton.jit
def _row_logits(
    partial_ptr, squares_ptr, t, n_parts, n_rows, eps, E, H: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr,
    EXPERTS: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The parts of row t's logits summed, -inf past the last expert, and its shared expert's gate."""
    e, one = tl.arange(0, EXPERTS), tl.arange(0, 1)
    inside = e < E
    logits = tl.zeros([EXPERTS], tl.float32)
    gate = 0.0
    for s in tl.static_range(SPLITS):
        row = partial_ptr + (s * T + t) * WIDE
        logits += tl.load(row + e, mask=inside, other=0.0, cache_modifier=".cg")
        gate += tl.load(row + EXPERTS, cache_modifier=".cg")
    rms = tl.max(inverse_rms(load_squares(squares_ptr, t + one, one == 0, n_parts, n_rows, PARTS), H, eps), axis=0)
    return tl.where(inside, logits * rms, float("-inf")), tl.sigmoid(gate * rms)


@triton.jit
def _choose(
    partial_ptr, squares_ptr, n_parts, n_rows, eps, weight_ptr, expert_ptr, count_ptr, E,
    H: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SPLITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Choose and weigh experts row by row, list the experts met."""
    e = tl.arange(0, EXPERTS)
    inside = e < E
    met = tl.zeros([EXPERTS], tl.int32)
    # a row at a time, in one warp's registers: a tile of rows would cross warps eight times for its eight best
    for t in range(n_rows):
        left, gate = _row_logits(
            partial_ptr, squares_ptr, t, n_parts, n_rows, eps, E, H, PARTS, T, EXPERTS, SPLITS, WIDE
        )
        best = tl.max(left, axis=0)
        total = 0.0
        weight = tl.zeros([EXPERTS], tl.float32)
        for _ in tl.static_range(TOP_K):
            top, index = tl.max(left, axis=0, return_indices=True)
            share = tl.exp(top - best)
            weight = tl.where(e == index, share, weight)
            left = tl.where(e == index, float("-inf"), left)
            total += share
        weight = weight / total
        met = tl.maximum(met, (weight > 0).to(tl.int32))
        # kept where this row's first part was
        tl.store(partial_ptr + t * WIDE + e, weight, mask=inside)
        tl.store(weight_ptr + t, gate)
    tl.debug_barrier()
    slot = tl.cumsum(met, axis=0)  # slot 0 is the shared expert
    tl.store(expert_ptr + slot, e, mask=met > 0)
    tl.store(count_ptr, 1 + tl.sum(met, axis=0))
    for t in range(n_rows):
        weight = tl.load(partial_ptr + t * WIDE + e, mask=inside, other=0.0)
        tl.store(weight_ptr + slot * n_rows + t, weight, mask=met > 0)


@triton.jit
def _choose_row(
    partial_ptr, squares_ptr, t, n_parts, n_rows, eps, gate_ptr, share_ptr, choice_ptr, E,
    H: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SPLITS: tl.constexpr, WIDE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Choose and weigh row t's experts, best first."""
    e, j = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    left, gate = _row_logits(partial_ptr, squares_ptr, t, n_parts, n_rows, eps, E, H, PARTS, T, EXPERTS, SPLITS, WIDE)
    best = tl.max(left, axis=0)
    total = 0.0
    shares, choices = tl.zeros([SLOTS], tl.float32), tl.zeros([SLOTS], tl.int32)
    for i in tl.static_range(TOP_K):
        top, index = tl.max(left, axis=0, return_indices=True)
        share = tl.exp(top - best)
        shares, choices = tl.where(j == i, share, shares), tl.where(j == i, index, choices)
        left = tl.where(e == index, float("-inf"), left)
        total += share
    tl.store(share_ptr + t * TOP_K + j, shares / total, mask=j < TOP_K)
    tl.store(choice_ptr + t * TOP_K + j, choices, mask=j < TOP_K)
    tl.store(gate_ptr + t, gate)


@triton.jit
def _choose_kernel(
    partial_ptr, squares_ptr, n_parts, n_rows, eps, gate_ptr, share_ptr, choice_ptr, E,
    H: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SPLITS: tl.constexpr, WIDE: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    wait_previous(PDL)
    launch_next_late(PDL)
    _choose_row(
        partial_ptr, squares_ptr, tl.program_id(0), n_parts, n_rows, eps, gate_ptr, share_ptr, choice_ptr, E,
        H, PARTS, T, EXPERTS, TOP_K, SPLITS, WIDE, SLOTS,
    )  # fmt: skip


@triton.jit
def _shared_hidden(
    pid, x_ptr, digits_ptr, steps_ptr, squares_ptr, n_parts, n_rows, eps, q_ptr, s_ptr, g_ptr, hidden_ptr, partial_ptr,
    counter_ptr, H: tl.constexpr, I: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, FORMAT: tl.constexpr, SPLITS: tl.constexpr, DIGITS: tl.constexpr, STAGES: tl.constexpr,
    UNROLL: tl.constexpr, ASM: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of the shared expert's hidden row, or a part of its sum."""
    tile, split = pid // SPLITS, pid % SPLITS
    rows = gate_up_rows(tile, I, BN)
    xt = tl.arange(0, T)
    x_mask = xt < n_rows
    span: tl.constexpr = H // SPLITS
    wait_previous(PDL)
    squares = load_squares(squares_ptr, xt, x_mask, n_parts, n_rows, PARTS)
    if DIGITS:
        acc = times_int4(
            q_ptr, s_ptr, rows, digits_ptr, steps_ptr, n_rows, H, T, BN, ASM, STAGES,
            UNROLL,
        )  # fmt: skip
    else:
        acc = times_rows(
            q_ptr, s_ptr, g_ptr, rows, x_ptr, xt, x_mask, n_rows, split * span, x_ptr, 0.0,
            span, H, T, BN, BK, FORMAT, ASM, STAGES, UNROLL, False, 0,
        )  # fmt: skip
    launch_next_late(PDL)
    n = tile * (BN // 2) + tl.arange(0, BN // 2)
    column = paired_column(n) if PAIRED else n
    at = hidden_ptr + xt[None, :] * I + column[:, None]
    mask = (n < I)[:, None] & x_mask[None, :]
    rms = inverse_rms(squares, H, eps)
    if SPLITS > 1:
        r = tile * BN + tl.arange(0, BN)
        part_mask = (r < 2 * I)[:, None] & x_mask[None, :]
        where = partial_ptr + xt[None, :] * (2 * I) + r[:, None]
        tl.store(where + split * n_rows * (2 * I), acc, mask=part_mask)
        if last_of(counter_ptr + tile, SPLITS):
            acc = tl.zeros([BN, T], tl.float32)
            for s in tl.static_range(SPLITS):
                part = where + s * n_rows * (2 * I)
                acc += tl.load(part, mask=part_mask, other=0.0, cache_modifier=".cg")
            tl.store(at, gated(acc * rms[None, :], BN, T).to(hidden_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(at, gated(acc * rms[None, :], BN, T).to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _route_kernel(
    x_ptr, digits_ptr, steps_ptr, squares_ptr, n_parts, n_rows, eps, router_ptr, gate_ptr, weight_ptr, expert_ptr,
    share_ptr, count_ptr, partial_ptr, counter_ptr, E, shared_q_ptr, shared_s_ptr, shared_g_ptr, hidden_ptr,
    H: tl.constexpr, I: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, UNROLL: tl.constexpr, LISTED: tl.constexpr, CHOOSE: tl.constexpr,
    SHARED_T: tl.constexpr, SHARED_BN: tl.constexpr, SHARED_BK: tl.constexpr,
    SHARED_FORMAT: tl.constexpr, SHARED_SPLITS: tl.constexpr, SHARED_DIGITS: tl.constexpr,
    SHARED_UNROLL: tl.constexpr, ASM: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    pid = tl.program_id(0)
    programs: tl.constexpr = ((EXPERTS + BN - 1) // BN + 1) * SPLITS
    wide: tl.constexpr = EXPERTS + BN  # a partial row: every expert's logit, then the shared expert's gate
    if pid < programs:
        tile, split = pid // SPLITS, pid % SPLITS
        n = tile * BN + tl.arange(0, BN)
        xt = tl.arange(0, T)
        x_mask = xt < n_rows
        span: tl.constexpr = H // SPLITS
        is_gate = tile * BN >= EXPERTS
        base = gate_ptr if is_gate else router_ptr
        rows = tl.where(is_gate, 0, tl.minimum(n, E - 1))
        wait_previous(PDL)
        acc = times_rows(
            base, base, base, rows, x_ptr, xt, x_mask, n_rows, split * span, x_ptr, 0.0,
            span, H, T, BN, BK, BF16, False, STAGES, UNROLL, False, 0,
        )  # fmt: skip
        launch_next_late(PDL)
        where = partial_ptr + (split * T + xt[None, :]) * wide + n[:, None]
        tl.store(where, acc, mask=(n < wide)[:, None] & x_mask[None, :])
        if CHOOSE:  # noqa: SIM102 (a constant: without it the arrival is not compiled)
            if last_of(counter_ptr, programs):
                if LISTED:
                    _choose(
                        partial_ptr, squares_ptr, n_parts, n_rows, eps, weight_ptr, expert_ptr, count_ptr, E,
                        H, PARTS, T, EXPERTS, TOP_K, SPLITS, wide,
                    )  # fmt: skip
                else:
                    _choose_row(
                        partial_ptr, squares_ptr, 0, n_parts, n_rows, eps, weight_ptr, share_ptr, expert_ptr, E,
                        H, PARTS, T, EXPERTS, TOP_K, SPLITS, wide, SLOTS,
                    )  # fmt: skip
    else:
        _shared_hidden(
            pid - programs, x_ptr, digits_ptr, steps_ptr, squares_ptr, n_parts, n_rows, eps, shared_q_ptr, shared_s_ptr,
            shared_g_ptr, hidden_ptr, partial_ptr + SPLITS * T * wide, counter_ptr + 1, H, I, PARTS, SHARED_T,
            SHARED_BN,
            SHARED_BK, SHARED_FORMAT, SHARED_SPLITS, SHARED_DIGITS, STAGES, SHARED_UNROLL, ASM, PAIRED, PDL,
        )  # fmt: skip


def route(
    h: Residual,
    router: Tensor,
    shared_gate: Tensor,
    shared: Weight,
    top_k: int,
    eps: float,
    workspace: Workspace,
    paired: bool = False,
) -> tuple[Routing, Tensor]:
    """Routing of norm(h), and beside it the shared expert's hidden row SiLU(gate) * up: [T, I].

    router [E, H], shared_gate [1, H], shared [2I, H] (gate rows before up rows). `paired` lays the hidden row's columns
    out as the shared down projection wants them.
    """
    rows, n_experts, device = h.x.shape[0], router.shape[0], h.x.device
    cap = 1 + min(n_experts, rows * top_k)
    out = Routing(
        torch.empty(cap, rows, dtype=torch.float32, device=device),
        torch.empty(cap, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    return out, _route(h, router, shared_gate, shared, top_k, eps, workspace, paired, out)


def choose(
    h: Residual,
    router: Tensor,
    shared_gate: Tensor,
    shared: Weight,
    top_k: int,
    eps: float,
    workspace: Workspace,
    paired: bool = False,
) -> tuple[Chosen, Tensor]:
    """`route` for the kernels that take a row's experts by themselves."""
    rows, device = h.x.shape[0], h.x.device
    out = Chosen(
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, top_k, dtype=torch.float32, device=device),
        torch.empty(rows, top_k, dtype=torch.int32, device=device),
    )
    return out, _route(h, router, shared_gate, shared, top_k, eps, workspace, paired, out)


def _route(
    h: Residual,
    router: Tensor,
    shared_gate: Tensor,
    shared: Weight,
    top_k: int,
    eps: float,
    workspace: Workspace,
    paired: bool,
    out: Routing | Chosen,
) -> Tensor:
    """Fill `out`; gives the shared expert's hidden row."""
    rows, width = h.x.shape
    n_experts, c, device = router.shape[0], configs.config("route", h.x.device, width), h.x.device
    b, sc = Operand.of(shared), configs.config("shared", device, width)
    hidden = torch.empty(rows, b.n // 2, dtype=h.x.dtype, device=device)
    experts = max(triton.next_power_of_2(n_experts), c.block_n)
    tiles = experts // c.block_n + 1
    splits = configs.splits(tiles, width // 128, device, c.programs) if width % 128 == 0 else 1
    shared_splits = sc.programs if not reads_digits(shared) and width % (sc.programs * b.step) == 0 else 1
    listed = isinstance(out, Routing)
    gate = out.weight if isinstance(out, Routing) else out.gate
    share, count = out.weight, out.count if isinstance(out, Routing) else out.weight
    n_parts, parts = h.squares.shape[0], triton.next_power_of_2(h.squares.shape[0])
    at_once = listed or rows == 1  # several rows that need no list are chosen for side by side, one launch later
    _route_kernel[(tiles * splits + triton.cdiv(b.n, sc.block_n) * shared_splits,)](
        h.scaled, h.digits, h.steps, h.squares, n_parts, rows, eps, router, shared_gate, gate,
        out.expert, share, count, workspace.partial, workspace.counters, n_experts, b.q, b.scale, b.extra, hidden,
        H=width, I=b.n // 2, PARTS=parts, T=row_tile(rows),
        EXPERTS=experts, TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k), SPLITS=splits, BN=c.block_n, BK=128,
        STAGES=c.stages, UNROLL=c.unroll, LISTED=listed, CHOOSE=at_once, SHARED_T=row_tile(rows, shared),
        SHARED_BN=sc.block_n, SHARED_BK=b.step,
        SHARED_FORMAT=b.format, SHARED_SPLITS=shared_splits, SHARED_DIGITS=reads_digits(shared),
        SHARED_UNROLL=sc.unroll, ASM=inline_asm(h.x), PAIRED=paired, **launch(device, c.warps),
    )  # fmt: skip
    if not at_once:
        _choose_kernel[(rows,)](
            workspace.partial, h.squares, n_parts, rows, eps, gate, share, out.expert, n_experts,
            H=width, PARTS=parts, T=row_tile(rows), EXPERTS=experts, TOP_K=top_k,
            SLOTS=triton.next_power_of_2(top_k), SPLITS=splits, WIDE=experts + c.block_n, **launch(device, 1),
        )  # fmt: skip
    return hidden


@triton.jit
def _shared_down(
    pid, hidden_ptr, weight_ptr, added_ptr, n_rows, q_ptr, s_ptr, g_ptr, H: tl.constexpr, I: tl.constexpr,
    T: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, STAGES: tl.constexpr,
    UNROLL: tl.constexpr, PAIRED: tl.constexpr, ASM: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of the shared expert's part of the layer's sum."""
    n = pid * BN + tl.arange(0, BN)
    rows = tl.minimum(n, H - 1)
    xt = tl.arange(0, T)
    x_mask = xt < n_rows
    prefetch_rows(q_ptr, rows, I, FORMAT, PREFETCH)
    wait_previous(PDL)
    acc = times_rows(
        q_ptr, s_ptr, g_ptr, rows, hidden_ptr, xt, x_mask, n_rows, 0, hidden_ptr, 0.0,
        I, I, T, BN, BK, FORMAT, ASM, STAGES, UNROLL,
        PAIRED, 0,
    )  # fmt: skip
    launch_next_late(PDL)
    acc = acc * tl.load(weight_ptr + xt, mask=x_mask, other=0.0)[None, :]
    tl.store(added_ptr + xt[None, :] * H + n[:, None], acc, mask=(n < H)[:, None] & x_mask[None, :])


@triton.jit
def _gate_up_kernel(
    x_ptr, digits_ptr, steps_ptr, squares_ptr, n_parts, n_rows, eps, weight_ptr, expert_ptr, count_ptr, out_ptr,
    q_ptr, s_ptr, g_ptr, q_stride, s_stride, g_stride, hidden_ptr, shared_q_ptr, shared_s_ptr, shared_g_ptr, added_ptr,
    H: tl.constexpr, I: tl.constexpr, SHARED_I: tl.constexpr, PARTS: tl.constexpr, DIGITS: tl.constexpr,
    T: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, PAIRED: tl.constexpr,
    SHARED_T: tl.constexpr, SHARED_BN: tl.constexpr, SHARED_BK: tl.constexpr, SHARED_FORMAT: tl.constexpr,
    SHARED_UNROLL: tl.constexpr, SHARED_PAIRED: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
    UNROLL: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    pid = tl.program_id(0)
    shared_tiles: tl.constexpr = (H + SHARED_BN - 1) // SHARED_BN
    tiles: tl.constexpr = (I * 2 + BN - 1) // BN
    if pid < shared_tiles:
        _shared_down(
            pid, hidden_ptr, weight_ptr, added_ptr, n_rows, shared_q_ptr, shared_s_ptr, shared_g_ptr, H, SHARED_I,
            SHARED_T, SHARED_BN, SHARED_BK, SHARED_FORMAT, STAGES, SHARED_UNROLL, SHARED_PAIRED, ASM, PREFETCH, PDL,
        )  # fmt: skip
    else:
        wait_previous(PDL)
        slot, tile = 1 + (pid - shared_tiles) // tiles, (pid - shared_tiles) % tiles
        expert = tl.load(expert_ptr + slot).to(tl.int64)  # means nothing past the count
        if slot < tl.load(count_ptr):
            # int64: expert * stride passes 2**31 for 16-bit experts
            q, s, g = q_ptr + expert * q_stride, s_ptr + expert * s_stride, g_ptr + expert * g_stride
            rows = gate_up_rows(tile, I, BN)
            xt = tl.arange(0, T)
            x_mask = xt < n_rows
            squares = load_squares(squares_ptr, xt, x_mask, n_parts, n_rows, PARTS)
            share = tl.load(weight_ptr + slot * n_rows + xt, mask=x_mask, other=0.0)
            if DIGITS:
                acc = times_int4(q, s, rows, digits_ptr, steps_ptr, n_rows, H, T, BN, ASM, STAGES, UNROLL)
            else:
                acc = times_rows(
                    q, s, g, rows, x_ptr, xt, x_mask, n_rows, 0, x_ptr, 0.0,
                    H, H, T, BN, BK, FORMAT, ASM, STAGES, UNROLL, False, 0,
                )  # fmt: skip
            launch_next_late(PDL)
            y = gated(acc * inverse_rms(squares, H, eps)[None, :], BN, T)
            y = tl.where((share > 0)[None, :], y * share[None, :], 0.0)
            n = tile * (BN // 2) + tl.arange(0, BN // 2)
            column = paired_column(n) if PAIRED else n
            where = out_ptr + (slot * n_rows + xt[None, :]) * I + column[:, None]
            tl.store(where, y.to(out_ptr.dtype.element_ty), mask=(n < I)[:, None] & x_mask[None, :])


def gate_up(
    h: Residual,
    routing: Routing,
    w: Weight,
    hidden: Tensor,
    shared: Weight,
    eps: float,
    pairs: tuple[bool, bool] = (False, False),
) -> tuple[Tensor, Tensor]:
    """SiLU(gate) * up of norm(h) for routed slots, times the slot's weight: [slots, T, I]; rows not routed there are 0.

    Beside it the shared expert's part of the layer's sum, [T, H] fp32: hidden [T, I] times shared [H, I] times its
    gate.
    w [E, 2I, H] (gate rows before up rows). Slot 0 and slots past `routing.count` are not written. `pairs`: whether the
    routed slots' columns are to lie, and the hidden row's do lie, as `wants_pairs` says.
    """
    rows, width = h.x.shape
    a, b, c = Operand.of(w), Operand.of(shared), configs.config("gate_up", h.x.device, width)
    sc, cap, device = configs.config("shared", h.x.device, width), routing.weight.shape[0], h.x.device
    out = torch.empty(cap, rows, a.n // 2, dtype=h.x.dtype, device=device)
    added = torch.empty(rows, width, dtype=torch.float32, device=device)
    _gate_up_kernel[(triton.cdiv(width, sc.block_n) + (cap - 1) * triton.cdiv(a.n, c.block_n),)](
        h.scaled, h.digits, h.steps, h.squares, h.squares.shape[0], rows, eps, routing.weight, routing.expert,
        routing.count, out, a.q, a.scale, a.extra, a.q.stride(0), a.scale.stride(0), a.extra.stride(0),
        hidden, b.q, b.scale, b.extra, added, H=width, I=a.n // 2, SHARED_I=b.k,
        PARTS=triton.next_power_of_2(h.squares.shape[0]), DIGITS=reads_digits(w), T=row_tile(rows, w), BN=c.block_n,
        BK=a.step, FORMAT=a.format, PAIRED=pairs[0], SHARED_T=row_tile(rows), SHARED_BN=sc.block_n, SHARED_BK=b.step,
        SHARED_FORMAT=b.format, SHARED_UNROLL=sc.unroll, SHARED_PAIRED=pairs[1], ASM=inline_asm(h.x), STAGES=c.stages,
        UNROLL=c.unroll, PREFETCH=c.prefetch, **launch(device, c.warps),
    )  # fmt: skip
    return out, added


@triton.jit
def _down_kernel(
    y_ptr, added_ptr, count_ptr, expert_ptr, x_in_ptr, norm_ptr, x_ptr, scaled_ptr, digits_ptr, squares_ptr, steps_ptr,
    partial_ptr, counter_ptr, n_rows, q_ptr, s_ptr, g_ptr, q_stride, s_stride, g_stride,
    H: tl.constexpr, I: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FORMAT: tl.constexpr,
    ASM: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, PAIRED: tl.constexpr, DIGITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    tiles: tl.constexpr = (H + BN - 1) // BN
    slot, tile = 1 + tl.program_id(0) // tiles, tl.program_id(0) % tiles
    n = tile * BN + tl.arange(0, BN)
    n_mask = n < H
    rows = tl.minimum(n, H - 1)
    xt = tl.arange(0, T)
    x_mask = xt < n_rows
    wait_previous(PDL)
    count = tl.load(count_ptr)
    expert = tl.load(expert_ptr + slot).to(tl.int64)  # means nothing past the count
    if slot < count:
        y = y_ptr + slot * n_rows * I
        acc = times_rows(
            q_ptr + expert * q_stride, s_ptr + expert * s_stride, g_ptr + expert * g_stride, rows, y, xt, x_mask,
            n_rows, 0, y, 0.0, I, I, T, BN, BK, FORMAT, ASM, STAGES, UNROLL, PAIRED, 0,
        )  # fmt: skip
        launch_next_late(PDL)
        acc = keep_rows(acc, BN, T, ROWS)
        real = tl.arange(0, ROWS)
        live = real < n_rows
        mask = n_mask[:, None] & live[None, :]
        at = real[None, :] * H + n[:, None]
        x, norm = load_residual(x_in_ptr, norm_ptr, n, n_mask, real, live, H)
        total = tl.load(added_ptr + at, mask=mask, other=0.0)
        tl.store(partial_ptr + slot * n_rows * H + at, acc, mask=mask)
        if last_of(counter_ptr + tile, count - 1):
            for first in range(1, count, 8):  # slots in order; loads of eight in flight
                for i in tl.static_range(8):
                    here = mask & ((real * 0 + (first + i)) < count)[None, :]
                    part = partial_ptr + (first + i) * n_rows * H + at
                    total += tl.load(part, mask=here, other=0.0, cache_modifier=".cg")
            add_to_residual(
                total, x, norm, tile, n, n_mask, real, live, n_rows, x_ptr, scaled_ptr, digits_ptr, squares_ptr,
                steps_ptr, H, DIGITS,
            )  # fmt: skip


def down(
    y: Tensor,
    added: Tensor,
    routing: Routing,
    w: Weight,
    h: Residual,
    norm: Tensor,
    workspace: Workspace,
    paired: bool = False,
) -> Residual:
    """h + added + the sum over routed slots of y[slot] w[slot]^T, in slot order, ahead of a norm with weight `norm`.

    y [slots, T, I] already weighted (columns paired if `paired`), added [T, H] fp32, w [E, H, I].
    """
    cap, rows, inner = y.shape
    a, c = Operand.of(w), configs.config("down", y.device, h.x.shape[1])
    tiles = triton.cdiv(a.n, c.block_n)
    assert cap * rows * a.n <= workspace.partial.numel(), "workspace is too small for these rows"
    out = empty_residual(rows, a.n, c.block_n, norm, h.x.dtype)
    _down_kernel[(tiles * (cap - 1),)](
        y, added, routing.count, routing.expert, h.x, norm, out.x, out.scaled, out.digits, out.squares, out.steps,
        workspace.partial, workspace.counters, rows, a.q, a.scale, a.extra, a.q.stride(0), a.scale.stride(0),
        a.extra.stride(0), H=a.n, I=inner, T=row_tile(rows), ROWS=triton.next_power_of_2(rows), BN=c.block_n,
        BK=a.step, FORMAT=a.format,
        ASM=inline_asm(y), STAGES=c.stages, UNROLL=c.unroll, PAIRED=paired, DIGITS=a.n % 128 == 0,
        **launch(y.device, c.warps),
    )  # fmt: skip
    return out
