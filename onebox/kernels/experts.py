"""INT4 experts for up to 64 rows, a program a row, expert and tile: no list of experts met, no tensor cores.

In a few rows nearly every expert is chosen by one row alone, and a tensor core's tile would stand empty but for it. A
program multiplies whole numbers (four to an instruction) that it loads straight into registers. Programs of one tile
run side by side for all rows, so an expert that several rows chose is read from memory once and from L2 after that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels import configs
from onebox.kernels.linear import Operand, Workspace, empty_residual, inline_asm, launch, row_tile, wants_pairs
from onebox.kernels.linear_ref import Residual
from onebox.kernels.moe import _shared_down
from onebox.kernels.moe_ref import Chosen
from onebox.kernels.tile import (
    add_row_times_int4,
    add_to_residual,
    gate_up_rows,
    inverse_rms,
    last_of,
    launch_next,
    launch_next_late,
    load_residual,
    load_squares,
    paired_column,
    wait_previous,
)
from onebox.kernels.weights import Weight

STEP = 32  # hidden columns that share a step of their digits: what a thread of `down` multiplies


def takes(gate_up: Weight, down: Weight) -> bool:
    """Whether these kernels read the experts [E, 2I, H] and [E, H, I]."""
    return wants_pairs(gate_up) and wants_pairs(down) and all(w.shape[-1] % 128 == 0 for w in (gate_up, down))


def words(k: int) -> int:
    """Four-byte words of a row that a program takes at once: a power of two that divides the row."""
    return min(128, (k // 8) & -(k // 8))


@triton.jit
def _gate_up_kernel(
    digits_ptr, steps_ptr, squares_ptr, n_parts, n_rows, eps, expert_ptr, out_ptr, out_steps_ptr, q_ptr, s_ptr,
    q_stride, s_stride, gate_ptr, hidden_ptr, shared_q_ptr, shared_s_ptr, shared_g_ptr, added_ptr,
    H: tl.constexpr, I: tl.constexpr, SHARED_I: tl.constexpr, PARTS: tl.constexpr, TOP_K: tl.constexpr,
    BN: tl.constexpr, WORDS: tl.constexpr, SHARED_T: tl.constexpr, SHARED_BN: tl.constexpr, SHARED_BK: tl.constexpr,
    SHARED_FORMAT: tl.constexpr, SHARED_UNROLL: tl.constexpr, SHARED_PAIRED: tl.constexpr, ASM: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    pid = tl.program_id(0)
    shared_tiles: tl.constexpr = (H + SHARED_BN - 1) // SHARED_BN
    if pid < shared_tiles:
        _shared_down(
            pid, hidden_ptr, gate_ptr, added_ptr, n_rows, shared_q_ptr, shared_s_ptr, shared_g_ptr, H, SHARED_I,
            SHARED_T, SHARED_BN, SHARED_BK, SHARED_FORMAT, STAGES, SHARED_UNROLL, SHARED_PAIRED, ASM, PREFETCH, PDL,
        )  # fmt: skip
    else:
        wait_previous(PDL)
        tile, pair = (pid - shared_tiles) // (n_rows * TOP_K), (pid - shared_tiles) % (n_rows * TOP_K)
        t, one = pair // TOP_K, tl.arange(0, 1)
        expert = tl.load(expert_ptr + pair).to(tl.int64)
        squares = load_squares(squares_ptr, t + one, one == 0, n_parts, n_rows, PARTS)
        acc = add_row_times_int4(
            tl.zeros([WORDS // 4, BN], tl.float32), q_ptr + expert * q_stride, s_ptr + expert * s_stride,
            gate_up_rows(tile, I, BN), digits_ptr + t * 2 * H, steps_ptr + t, n_rows, 1.0, H, BN, WORDS, 128, ASM,
        )  # fmt: skip
        launch_next_late(PDL)
        rms = tl.max(inverse_rms(squares, H, eps), axis=0)
        gate, up = tl.split(tl.reshape(tl.sum(acc, axis=0) * rms, [BN // 2, 2]))
        y = gate * tl.sigmoid(gate) * up
        step = tl.max(tl.abs(y), axis=0) * (1.0 / 32512.0)
        step = tl.where(step > 0, step, 1.0)
        whole = tl.floor(y / step + 0.5).to(tl.int32)
        upper = (whole + 128) >> 8
        at = out_ptr + pair * (2 * I) + paired_column(tile * (BN // 2) + tl.arange(0, BN // 2))
        tl.store(at, upper.to(tl.int8))
        tl.store(at + I, (whole - upper * 256).to(tl.int8))
        tl.store(out_steps_ptr + pair * (2 * I // BN) + tile, step)


def gate_up(
    h: Residual, chosen: Chosen, w: Weight, hidden: Tensor, shared: Weight, eps: float, paired: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """SiLU(gate) * up of norm(h) for each row's experts as digits [T k, 2, I] and steps [T k, I / 32].

    Beside it the shared expert's part of the layer's sum, [T, H] fp32: hidden [T, I] (its columns paired if `paired`)
    times shared [H, I] times its gate. w [E, 2I, H], gate rows before up rows.
    """
    rows, width = h.x.shape
    top_k, device = chosen.expert.shape[1], h.x.device
    a, b = Operand.of(w), Operand.of(shared)
    c, sc = configs.config("row_gate_up", device, width), configs.config("shared", device, width)
    assert c.block_n == 2 * STEP, "a tile of hidden columns has one step"
    out = torch.empty(rows * top_k, 2, a.n // 2, dtype=torch.int8, device=device)
    steps = torch.empty(rows * top_k, a.n // 2 // STEP, dtype=torch.float32, device=device)
    added = torch.empty(rows, width, dtype=torch.float32, device=device)
    _gate_up_kernel[(triton.cdiv(width, sc.block_n) + rows * top_k * (a.n // c.block_n),)](
        h.digits, h.steps, h.squares, h.squares.shape[0], rows, eps, chosen.expert, out, steps, a.q, a.scale,
        a.q.stride(0), a.scale.stride(0), chosen.gate, hidden, b.q, b.scale, b.extra, added,
        H=width, I=a.n // 2, SHARED_I=b.k, PARTS=triton.next_power_of_2(h.squares.shape[0]), TOP_K=top_k,
        BN=c.block_n, WORDS=words(a.k), SHARED_T=row_tile(rows), SHARED_BN=sc.block_n, SHARED_BK=b.step,
        SHARED_FORMAT=b.format, SHARED_UNROLL=sc.unroll, SHARED_PAIRED=paired, ASM=inline_asm(h.x), STAGES=c.stages,
        PREFETCH=c.prefetch, **launch(device, c.warps, c.registers),
    )  # fmt: skip
    return out, steps, added


@triton.jit
def _down_kernel(
    digits_ptr, steps_ptr, added_ptr, expert_ptr, weight_ptr, x_in_ptr, norm_ptr, x_ptr, scaled_ptr, out_digits_ptr,
    squares_ptr, out_steps_ptr, partial_ptr, counter_ptr, n_rows, q_ptr, s_ptr, q_stride, s_stride,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr, WORDS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    tile, t = tl.program_id(0) // n_rows, tl.program_id(0) % n_rows
    rows = tile * BN + tl.arange(0, BN)
    wait_previous(PDL)
    acc = tl.zeros([WORDS // 4, BN], tl.float32)
    for i in tl.static_range(TOP_K):
        pair = t * TOP_K + i
        expert = tl.load(expert_ptr + pair).to(tl.int64)
        acc = add_row_times_int4(
            acc, q_ptr + expert * q_stride, s_ptr + expert * s_stride, rows, digits_ptr + pair * (2 * I),
            steps_ptr + pair * (I // 32), 1, tl.load(weight_ptr + pair), I, BN, WORDS, 32, ASM,
        )  # fmt: skip
    launch_next_late(PDL)
    tl.store(partial_ptr + t * H + rows, tl.sum(acc, axis=0) + tl.load(added_ptr + t * H + rows))
    # the next norm's digits share a step over 128 columns: the last of their programs adds them to the stream
    block = tile * BN // 128
    if last_of(counter_ptr + t * (H // 128) + block, 128 // BN):
        n, row = block * 128 + tl.arange(0, 128), t + tl.arange(0, 1)
        n_mask, live = n < H, row < n_rows
        total = tl.load(partial_ptr + t * H + n, cache_modifier=".cg")[:, None]
        x, norm = load_residual(x_in_ptr, norm_ptr, n, n_mask, row, live, H)
        add_to_residual(
            total, x, norm, block, n, n_mask, row, live, n_rows, x_ptr, scaled_ptr, out_digits_ptr, squares_ptr,
            out_steps_ptr, H, True,
        )  # fmt: skip


def down(
    digits: Tensor,
    steps: Tensor,
    added: Tensor,
    chosen: Chosen,
    w: Weight,
    h: Residual,
    norm: Tensor,
    workspace: Workspace,
) -> Residual:
    """h + added + each row's weighted sum over its experts, best first, ahead of a norm with weight `norm`.

    digits [T k, 2, I] and steps [T k, I / 32] as `gate_up` gives them, added [T, H] fp32, w [E, H, I].
    """
    rows, top_k = chosen.expert.shape
    a, c = Operand.of(w), configs.config("row_down", added.device, h.x.shape[1])
    assert 128 % c.block_n == 0 and rows * a.n <= workspace.partial.numel()
    assert rows * (a.n // 128) <= workspace.counters.numel()
    out = empty_residual(rows, a.n, 128, norm, h.x.dtype)
    _down_kernel[(a.n // c.block_n * rows,)](
        digits, steps, added, chosen.expert, chosen.weight, h.x, norm, out.x, out.scaled, out.digits, out.squares,
        out.steps, workspace.partial, workspace.counters, rows, a.q, a.scale, a.q.stride(0), a.scale.stride(0),
        H=a.n, I=a.k, TOP_K=top_k, BN=c.block_n, WORDS=words(a.k), ASM=inline_asm(h.x),
        **launch(added.device, c.warps, c.registers),
    )  # fmt: skip
    return out
