"""Matrix products for prefill: any number of rows, weights read packed, a row's result independent of its company.

A program multiplies a tile of weight rows with a tile of activation rows over all of K, in one order. So a row's bits
are the same in any batch, any chunk of a prompt and any tile height, which cuBLAS does not promise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels import configs
from onebox.kernels.linear import Operand, inline_asm, readable
from onebox.kernels.tile import INT4, gate_up_rows, gated, times_rows
from onebox.kernels.weights import Weight, dequantize

GROUP = 8  # tiles of activation rows that go through the weight tiles together: they stay in L2


def row_tile(rows: int) -> int:
    """Activation rows of a program."""
    return 16 if rows <= 16 else 64 if rows <= 256 else 128


@triton.jit
def _matmul_kernel(
    x_ptr, q_ptr, s_ptr, g_ptr, out_ptr, out_stride, n_rows, N, K: tl.constexpr, T: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
    PAIRED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    pid, tiles_n, tiles_t = tl.program_id(0), tl.cdiv(N, BN), tl.cdiv(n_rows, T)
    group = pid // (GROUP * tiles_n)
    height = tl.minimum(tiles_t - group * GROUP, GROUP)
    tile_t, tile_n = group * GROUP + pid % (GROUP * tiles_n) % height, pid % (GROUP * tiles_n) // height
    n = tile_n * BN + tl.arange(0, BN)
    t = (tile_t * T + tl.arange(0, T)).to(tl.int64)  # row * K passes 2**31 in a long prompt
    live = t < n_rows
    acc = times_rows(
        q_ptr, s_ptr, g_ptr, tl.minimum(n, N - 1), x_ptr, t, live, 0, 0, x_ptr, 0.0,
        K, K, T, BN, BK, FORMAT, ASM, STAGES, UNROLL, PAIRED, 0,
    )  # fmt: skip
    where = out_ptr + t[None, :] * out_stride + n[:, None]
    tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & live[None, :])


def matmul(x: Tensor, w: Weight) -> Tensor:
    """x [..., K] times w [N, K] transposed: [..., N] in x's dtype."""
    if x.ndim != 2:
        return matmul(x.reshape(-1, x.shape[-1]), w).view(*x.shape[:-1], -1)
    return matmul_side_by_side(x, (w,))


def matmul_side_by_side(x: Tensor, weights: Sequence[Weight]) -> Tensor:
    """x [T, K] times each of `weights` [N, K] transposed, results side by side: [T, sum of N]."""
    operands = [Operand.of(w if readable(w) else dequantize(w, x.dtype)) for w in weights]
    out = torch.empty(x.shape[0], sum(a.n for a in operands), dtype=x.dtype, device=x.device)
    laid: dict[bool, Tensor] = {}
    at = 0
    for a in operands:
        paired = reads_pairs(a)
        if paired not in laid:
            laid[paired] = _laid_out(x, a)[0]
        _matmul_into(out[:, at : at + a.n], laid[paired], a, paired)
        at += a.n
    return out


def _matmul_into(out: Tensor, x: Tensor, a: Operand, paired: bool) -> None:
    rows, c = x.shape[0], configs.config("matmul", x.device, a.k)
    tile = row_tile(rows)
    _matmul_kernel[(triton.cdiv(a.n, c.block_n) * triton.cdiv(rows, tile),)](
        x, a.q, a.scale, a.extra, out, out.stride(0), rows, a.n, K=a.k, T=tile, BN=c.block_n, BK=a.step,
        FORMAT=a.format, ASM=inline_asm(x), STAGES=c.stages, UNROLL=c.unroll, PAIRED=paired, GROUP=GROUP,
        num_warps=c.warps,
    )  # fmt: skip


def reads_pairs(a: Operand) -> bool:
    """Whether a weight's kernel reads every 128 columns of its activations as the even ones, then the odd ones."""
    return a.format == INT4.value and a.step == 128


def _laid_out(x: Tensor, a: Operand) -> tuple[Tensor, bool]:
    """Rows as the weight's kernel reads them best: for INT4, every 128 columns as the even ones, then the odd ones."""
    if not reads_pairs(a):
        return x.contiguous(), False
    return x.unflatten(-1, (-1, 64, 2)).transpose(-1, -2).reshape(x.shape), True


@triton.jit
def _gate_up_kernel(
    x_ptr, q_ptr, s_ptr, g_ptr, q_stride, s_stride, g_stride, out_ptr, expert_ptr, first_ptr, end_ptr, choice_ptr,
    K: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, T: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FORMAT: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    tile_n, tile = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(first_ptr + tile), tl.load(end_ptr + tile)
    if first < end:
        expert = tl.load(expert_ptr + tile)
        at = first + tl.arange(0, T)
        live = at < end
        t = tl.load(choice_ptr + at, mask=live, other=0) // TOP_K
        acc = times_rows(
            q_ptr + expert * q_stride, s_ptr + expert * s_stride, g_ptr + expert * g_stride,
            gate_up_rows(tile_n, I, BN), x_ptr, t, live, 0, 0, x_ptr, 0.0,
            K, K, T, BN, BK, FORMAT, ASM, STAGES, UNROLL, PAIRED, 0,
        )  # fmt: skip
        n = tile_n * (BN // 2) + tl.arange(0, BN // 2)
        where = out_ptr + at[None, :] * I + n[:, None]
        tl.store(where, gated(acc, BN, T).to(out_ptr.dtype.element_ty), mask=(n < I)[:, None] & live[None, :])


@triton.jit
def _down_kernel(
    y_ptr, q_ptr, s_ptr, g_ptr, q_stride, s_stride, g_stride, out_ptr, expert_ptr, first_ptr, end_ptr, choice_ptr,
    weight_ptr, N, I: tl.constexpr, T: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
    ASM: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    tile_n, tile = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(first_ptr + tile), tl.load(end_ptr + tile)
    if first < end:
        expert = tl.load(expert_ptr + tile)
        at = first + tl.arange(0, T)
        live = at < end
        choice = tl.load(choice_ptr + at, mask=live, other=0)
        n = tile_n * BN + tl.arange(0, BN)
        acc = times_rows(
            q_ptr + expert * q_stride, s_ptr + expert * s_stride, g_ptr + expert * g_stride, tl.minimum(n, N - 1),
            y_ptr, at, live, 0, 0, y_ptr, 0.0,
            I, I, T, BN, BK, FORMAT, ASM, STAGES, UNROLL, PAIRED, 0,
        )  # fmt: skip
        acc = acc * tl.load(weight_ptr + choice, mask=live, other=0.0)[None, :]
        tl.store(out_ptr + choice[None, :] * N + n[:, None], acc, mask=(n < N)[:, None] & live[None, :])


def experts_matmul(x: Tensor, gate_up: Weight, down: Weight, weights: Tensor, experts: Tensor) -> Tensor:
    """Weighted sum of the chosen experts' SwiGLU: [T, H].

    x [T, H], gate_up [E, 2I, H] (gate rows before up rows), down [E, H, I], weights [T, k] fp32, experts [T, k]. Rows
    are sorted by expert, cut into tiles of one expert each, and a row's k parts are summed in the order of `experts`.
    """
    rows, top_k = experts.shape
    a, b, device = Operand.of(gate_up), Operand.of(down), x.device
    n_experts, inner, width = a.q.shape[0], a.n // 2, b.n
    c, d = configs.config("experts_gate_up", device, width), configs.config("experts_down", device, width)
    tile = 16 if rows * top_k <= 16 * n_experts else 64 if rows * top_k <= 128 * n_experts else 128
    choice, expert, first, end = sorted_tiles(experts, n_experts, tile)
    x, paired = _laid_out(x, a)
    y = torch.empty(rows * top_k, inner, dtype=x.dtype, device=device)
    _gate_up_kernel[(triton.cdiv(a.n, c.block_n), len(expert))](
        x, a.q, a.scale, a.extra, a.q.stride(0), a.scale.stride(0), a.extra.stride(0), y, expert, first, end, choice,
        K=a.k, I=inner, TOP_K=top_k, T=tile, BN=c.block_n, BK=a.step, FORMAT=a.format, ASM=inline_asm(x),
        STAGES=c.stages, UNROLL=c.unroll, PAIRED=paired, num_warps=c.warps,
    )  # fmt: skip
    y, paired = _laid_out(y, b)
    parts = torch.empty(rows, top_k, width, dtype=torch.float32, device=device)
    _down_kernel[(triton.cdiv(width, d.block_n), len(expert))](
        y, b.q, b.scale, b.extra, b.q.stride(0), b.scale.stride(0), b.extra.stride(0), parts, expert, first, end,
        choice, weights.contiguous(), width, I=inner, T=tile, BN=d.block_n, BK=b.step, FORMAT=b.format,
        ASM=inline_asm(x), STAGES=d.stages, UNROLL=d.unroll, PAIRED=paired, num_warps=d.warps,
    )  # fmt: skip
    total = parts[:, 0]
    for i in range(1, top_k):  # one order, whatever the number of rows
        total = total + parts[:, i]
    return total.to(x.dtype)


def sorted_tiles(experts: Tensor, n_experts: int, tile: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choices [T k] by rising expert, and tiles of at most `tile` of them: each one's expert, first and end.

    All int64, on the device and without a wait for it; tiles past the last have first = end.
    """
    flat = experts.reshape(-1)
    choice = flat.argsort(stable=True)
    counts = torch.zeros(n_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    ends = counts.cumsum(0)
    tiles = (counts + tile - 1) // tile
    tile_ends = tiles.cumsum(0)
    most = min(len(flat), len(flat) // tile + n_experts)
    i = torch.arange(most, device=flat.device)
    expert = torch.searchsorted(tile_ends, i, right=True).clamp(max=n_experts - 1)
    first = ends[expert] - counts[expert] + (i - tile_ends[expert] + tiles[expert]) * tile
    inside = i < tile_ends[-1]
    first = torch.where(inside, first, 0)
    return choice, expert, first, torch.where(inside, torch.minimum(first + tile, ends[expert]), 0)
