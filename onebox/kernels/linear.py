"""Decode projections for up to 64 rows: every weight byte is read once, whatever the number of rows.

`project` reads a normed residual stream, `project_add` adds into it; between them the norm costs no launch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels import configs
from onebox.kernels.fp8_ref import Fp8Weight
from onebox.kernels.int4_ref import Int4Weight
from onebox.kernels.int8_ref import Int8Weight
from onebox.kernels.linear_ref import Residual
from onebox.kernels.nvfp4_ref import Nvfp4Weight
from onebox.kernels.tile import (
    BF16,
    FP8,
    INT4,
    INT8,
    NVFP4,
    NVFP4_ROWS,
    add_to_residual,
    inverse_rms,
    keep_rows,
    last_of,
    launch_next,
    launch_next_late,
    load_residual,
    load_squares,
    prefetch_rows,
    store_digits,
    times_int4,
    times_rows,
    wait_previous,
)
from onebox.kernels.weights import Weight

MAX_ROWS = 64


@dataclass(frozen=True)
class Operand:
    """A weight as kernels take it: bytes, scales, a global scale, a format, and columns a step."""

    q: Tensor
    scale: Tensor
    extra: Tensor
    format: int
    step: int
    n: int
    k: int

    @classmethod
    def of(cls, w: Weight) -> Operand:
        n, k = w.shape[-2:]
        if isinstance(w, Tensor):
            return cls(w, w, w, BF16.value, 128, n, k)
        if isinstance(w, Int4Weight):
            assert w.zero is None, "kernels read symmetric INT4"
            return cls(w.q, w.scale, w.scale, INT4.value, w.group, n, k)
        if isinstance(w, Nvfp4Weight):
            by_row = w.global_scale.ndim == w.q.ndim - 1
            return cls(w.q, w.scale, w.global_scale, (NVFP4_ROWS if by_row else NVFP4).value, 128, n, k)
        if isinstance(w, Fp8Weight):
            assert w.block == (128, 128), "kernels read FP8 in blocks of 128 x 128"
            return cls(w.q, w.scale, w.scale, FP8.value, 128, n, k)
        assert isinstance(w, Int8Weight)
        return cls(w.q, w.scale, w.scale, INT8.value, 128, n, k)


def readable(w: Weight) -> bool:
    """Whether the kernels read this weight as it is."""
    if isinstance(w, Int4Weight):
        return w.zero is None and w.scale.element_size() == 2
    if isinstance(w, Nvfp4Weight):
        return w.shape[-1] % 128 == 0
    return w.block == (128, 128) if isinstance(w, Fp8Weight) else True


@dataclass(frozen=True)
class Workspace:
    """Scratch for ordered split sums, one a stream. Kernels leave the counters at zero."""

    partial: Tensor  # fp32
    counters: Tensor  # int32

    @classmethod
    def allocate(cls, n_bytes: int, device: torch.device) -> Workspace:
        return cls(
            torch.empty(n_bytes // 4, dtype=torch.float32, device=device),
            torch.zeros(16_384, dtype=torch.int32, device=device),
        )


def row_tile(rows: int, w: Weight | None = None) -> int:
    """Rows a kernel computes for: the tensor cores' least, or the next power of two. Digits are two columns a row."""
    assert 1 <= rows <= MAX_ROWS, f"{rows} rows in a decode kernel"
    return max(4 if w is not None and reads_digits(w) else 8, int(triton.next_power_of_2(rows)))


def inline_asm(x: Tensor) -> bool:
    return not configs.INTERPRET and x.dtype == torch.bfloat16


def wants_pairs(w: Weight) -> bool:
    """Whether a weight's kernels read activations whose 128 columns lie as the even ones, then the odd ones."""
    return isinstance(w, Int4Weight) and w.group == 128


def reads_digits(w: Weight) -> bool:
    """Whether a weight's kernels read the residual stream as whole numbers."""
    return wants_pairs(w)


@triton.jit
def _embed_kernel(
    tokens_ptr, table_ptr, norm_ptr, x_ptr, scaled_ptr, digits_ptr, squares_ptr, steps_ptr, n_rows,
    H: tl.constexpr, BLOCK: tl.constexpr, DIGITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t, part = tl.program_id(0), tl.program_id(1)
    launch_next(PDL)
    wait_previous(PDL)
    n = part * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + t).to(tl.int64)
    x = tl.load(table_ptr + token * H + n, mask=n < H, other=0.0).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + t * H + n, x, mask=n < H)
    x = x.to(tl.float32)
    w = 1.0 + tl.load(norm_ptr + n, mask=n < H, other=0.0).to(tl.float32)
    scaled = x * w
    tl.store(scaled_ptr + t * H + n, scaled.to(scaled_ptr.dtype.element_ty), mask=n < H)
    tl.store(squares_ptr + part * n_rows + t, tl.sum(x * x, axis=0))
    if DIGITS:
        row = t + tl.arange(0, 1)
        live = row < n_rows
        store_digits(
            scaled[:, None], n, (n < H)[:, None] & live[None, :], part, row, live, n_rows, digits_ptr, steps_ptr, H
        )


def embed(tokens: Tensor, embedding: Tensor, norm: Tensor) -> Residual:
    """Rows of the embedding [V, H] for tokens [T], ahead of the first norm."""
    rows, h = tokens.shape[0], embedding.shape[1]
    out = empty_residual(rows, h, 128, norm)
    _embed_kernel[(rows, triton.cdiv(h, 128))](
        tokens, embedding, norm, out.x, out.scaled, out.digits, out.squares, out.steps, rows,
        H=h, BLOCK=128, DIGITS=h % 128 == 0, **launch(tokens.device, 1),
    )  # fmt: skip
    return out


@triton.jit
def _normalize_kernel(
    scaled_ptr,
    squares_ptr,
    out_ptr,
    n_parts,
    n_rows,
    eps,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    launch_next(PDL)
    wait_previous(PDL)
    parts = tl.arange(0, PARTS)
    squares = tl.load(squares_ptr + parts * n_rows + t, mask=parts < n_parts, other=0.0)
    rms = tl.rsqrt(tl.sum(squares.to(tl.float64), axis=0).to(tl.float32) / H + eps)
    y = tl.load(scaled_ptr + t * H + n, mask=n < H, other=0.0).to(tl.float32) * rms
    tl.store(out_ptr + t * H + n, y.to(out_ptr.dtype.element_ty), mask=n < H)


def normalize(h: Residual, eps: float) -> Tensor:
    """The finished norm, [T, H]."""
    rows, width = h.x.shape
    out = torch.empty_like(h.x)
    _normalize_kernel[(rows, triton.cdiv(width, 1024))](
        h.scaled, h.squares, out, h.squares.shape[0], rows, eps,
        H=width, PARTS=triton.next_power_of_2(h.squares.shape[0]), BLOCK=1024, **launch(h.x.device, 4),
    )  # fmt: skip
    return out


@triton.jit
def _project_tile(
    q_ptr, s_ptr, g_ptr, N, tile, column, x_ptr, digits_ptr, steps_ptr, out_ptr, out_stride, squares_ptr, n_parts,
    n_rows,
    eps, H: tl.constexpr, PARTS: tl.constexpr, DIGITS: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
    FORMAT: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tile * BN + tl.arange(0, BN)
    rows = tl.minimum(n, N - 1)
    prefetch_rows(q_ptr, rows, H, FORMAT, PREFETCH)
    wait_previous(PDL)
    xt = tl.arange(0, T)
    x_mask = xt < n_rows
    real = tl.arange(0, ROWS)
    squares = load_squares(squares_ptr, real, real < n_rows, n_parts, n_rows, PARTS)
    if DIGITS:
        acc = times_int4(q_ptr, s_ptr, rows, digits_ptr, steps_ptr, n_rows, H, T, BN, ASM, STAGES, UNROLL)
    else:
        acc = times_rows(
            q_ptr, s_ptr, g_ptr, rows, x_ptr, xt, x_mask, n_rows, 0, x_ptr, 0.0,
            H, H, T, BN, BK, FORMAT, ASM, STAGES, UNROLL, False, 0,
        )  # fmt: skip
    launch_next_late(PDL)
    acc = keep_rows(acc, BN, T, ROWS) * inverse_rms(squares, H, eps)[None, :]
    where = out_ptr + real[None, :] * out_stride + (column + n)[:, None]
    tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (real < n_rows)[None, :])


@triton.jit
def _project_kernel(
    x_ptr, digits_ptr, steps_ptr, squares_ptr, n_parts, n_rows, eps, out_ptr, q_ptr, s_ptr, g_ptr, N, q2_ptr, s2_ptr,
    g2_ptr, N2, H: tl.constexpr, PARTS: tl.constexpr, DIGITS: tl.constexpr, DIGITS2: tl.constexpr, T: tl.constexpr,
    T2: tl.constexpr, ROWS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, BK2: tl.constexpr, FORMAT2: tl.constexpr,
    ASM: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    tile, tiles = tl.program_id(0), tl.cdiv(N, BN)
    if tile < tiles:
        _project_tile(
            q_ptr, s_ptr, g_ptr, N, tile, 0, x_ptr, digits_ptr, steps_ptr, out_ptr, N + N2, squares_ptr, n_parts,
            n_rows,
            eps, H, PARTS, DIGITS, T, ROWS, BN, BK, FORMAT, ASM, STAGES, UNROLL, PREFETCH, PDL,
        )  # fmt: skip
    else:
        _project_tile(
            q2_ptr, s2_ptr, g2_ptr, N2, tile - tiles, N, x_ptr, digits_ptr, steps_ptr, out_ptr, N + N2, squares_ptr,
            n_parts, n_rows, eps, H, PARTS, DIGITS2, T2, ROWS, BN, BK2, FORMAT2, ASM, STAGES, UNROLL, PREFETCH, PDL,
        )  # fmt: skip


def project(h: Residual, w: Weight, tail: Weight | None, eps: float) -> Tensor:
    """norm(h) times the rows of `w` [N, H], then of `tail` [N', H] (another format, or None): [T, N + N']."""
    rows, width = h.x.shape
    a, b = Operand.of(w), Operand.of(w if tail is None else tail)
    n2 = 0 if tail is None else b.n
    c = configs.config("linear", h.x.device, width)
    out = torch.empty(rows, a.n + n2, dtype=h.x.dtype, device=h.x.device)
    grid = (triton.cdiv(a.n, c.block_n) + triton.cdiv(n2, c.block_n),)
    _project_kernel[grid](
        h.scaled, h.digits, h.steps, h.squares, h.squares.shape[0], rows, eps, out, a.q, a.scale, a.extra, a.n,
        b.q, b.scale, b.extra, n2, H=width, PARTS=triton.next_power_of_2(h.squares.shape[0]), DIGITS=reads_digits(w),
        DIGITS2=tail is not None and reads_digits(tail), T=row_tile(rows, w),
        T2=row_tile(rows, w if tail is None else tail), ROWS=triton.next_power_of_2(rows), BN=c.block_n, BK=a.step,
        FORMAT=a.format,
        BK2=b.step, FORMAT2=b.format, ASM=inline_asm(h.x), STAGES=c.stages, UNROLL=c.unroll, PREFETCH=c.prefetch,
        **launch(h.x.device, c.warps),
    )  # fmt: skip
    return out


@triton.jit
def _project_add_kernel(
    y_ptr, y_squares_ptr, eps, q_ptr, s_ptr, g_ptr, x_in_ptr, norm_ptr, x_ptr, scaled_ptr, digits_ptr, squares_ptr,
    steps_ptr, partial_ptr, counter_ptr, n_rows, N,
    K: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    FORMAT: tl.constexpr,
    ASM: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, PAIRED: tl.constexpr, PARTS: tl.constexpr,
    DIGITS: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    n = tile * BN + tl.arange(0, BN)
    n_mask = n < N
    rows = tl.minimum(n, N - 1)
    span: tl.constexpr = K // SPLITS
    prefetch_rows(q_ptr, rows, K, FORMAT, PREFETCH)
    wait_previous(PDL)
    xt = tl.arange(0, T)
    x_mask = xt < n_rows
    acc = times_rows(
        q_ptr, s_ptr, g_ptr, rows, y_ptr, xt, x_mask, n_rows, split * span, y_squares_ptr, eps,
        span, K, T, BN, BK, FORMAT, ASM, STAGES, UNROLL, PAIRED, PARTS,
    )  # fmt: skip
    launch_next_late(PDL)
    acc = keep_rows(acc, BN, T, ROWS)
    xt = tl.arange(0, ROWS)
    x_mask = xt < n_rows
    x, norm = load_residual(x_in_ptr, norm_ptr, n, n_mask, xt, x_mask, N)
    if SPLITS > 1:
        where = partial_ptr + xt[None, :] * N + n[:, None]
        mask = n_mask[:, None] & x_mask[None, :]
        tl.store(where + split * n_rows * N, acc, mask=mask)
        if last_of(counter_ptr + tile, SPLITS):
            acc = tl.zeros([BN, ROWS], tl.float32)
            for s in tl.static_range(SPLITS):
                acc += tl.load(where + s * n_rows * N, mask=mask, other=0.0, cache_modifier=".cg")
            add_to_residual(
                acc, x, norm, tile, n, n_mask, xt, x_mask, n_rows, x_ptr, scaled_ptr, digits_ptr, squares_ptr,
                steps_ptr,
                N, DIGITS,
            )  # fmt: skip
    else:
        add_to_residual(
            acc, x, norm, tile, n, n_mask, xt, x_mask, n_rows, x_ptr, scaled_ptr, digits_ptr, squares_ptr, steps_ptr,
            N, DIGITS,
        )  # fmt: skip


def project_add(
    y: Tensor,
    w: Weight,
    h: Residual,
    norm: Tensor,
    workspace: Workspace,
    squares: Tensor | None = None,
    eps: float = 0.0,
    paired: bool = False,
) -> Residual:
    """h + y w^T ahead of a norm with weight `norm` [H]. y [T, K], w [H, K]. K is summed in parts of fixed order.

    With `squares` [blocks, parts, T], every block of K / blocks columns of a row of y still lacks its factor 1 / rms,
    where the parts sum to the block's sum of squares: a norm a head, finished here. `paired`: every 128 columns of y
    lie
    as the even ones, then the odd ones (what `wants_pairs(w)` asks for).
    """
    rows = y.shape[0]
    a, c = Operand.of(w), configs.config("linear_add", y.device, w.shape[-2])
    assert squares is None or squares.shape[0] * a.step == a.k, "one norm for each group of columns"
    assert not paired or wants_pairs(w), "paired columns are for INT4 in groups of 128"
    tiles = triton.cdiv(a.n, c.block_n)
    splits = configs.splits(tiles, a.k // a.step, y.device, c.programs) if a.k % a.step == 0 else 1
    out = empty_residual(rows, a.n, c.block_n, norm, h.x.dtype)
    _project_add_kernel[(tiles * splits,)](
        y, y if squares is None else squares, eps, a.q, a.scale, a.extra, h.x, norm, out.x, out.scaled, out.digits,
        out.squares, out.steps, workspace.partial, workspace.counters, rows, a.n,
        K=a.k, T=row_tile(rows), ROWS=triton.next_power_of_2(rows), BN=c.block_n, BK=a.step, SPLITS=splits,
        FORMAT=a.format, ASM=inline_asm(y),
        STAGES=c.stages, UNROLL=c.unroll, PAIRED=paired, PARTS=0 if squares is None else squares.shape[1],
        DIGITS=a.n % 128 == 0, PREFETCH=c.prefetch, **launch(y.device, c.warps),
    )  # fmt: skip
    return out


def empty_residual(rows: int, width: int, tile: int, like: Tensor, dtype: torch.dtype | None = None) -> Residual:
    """Room for a residual stream whose producer's programs have `tile` columns each."""
    dtype, device = dtype or like.dtype, like.device
    assert tile == 128 or width % 128, "a residual stream's steps are for 128 columns"
    parts = triton.cdiv(width, tile)
    return Residual(
        x=torch.empty(rows, width, dtype=dtype, device=device),
        scaled=torch.empty(rows, width, dtype=dtype, device=device),
        squares=torch.empty(parts, rows, dtype=torch.float32, device=device),
        digits=torch.empty(rows, 2, width, dtype=torch.int8, device=device),
        steps=torch.empty(parts, rows, dtype=torch.float32, device=device),
    )


def launch(device: torch.device, warps: int, registers: int = 0) -> dict[str, int | bool]:
    """Launch options common to all kernels."""
    mode = configs.pdl(device)
    options: dict[str, int | bool] = {"PDL": mode, "num_warps": warps}
    if registers:
        options["maxnreg"] = registers
    if mode:
        options["launch_pdl"] = True
    return options
