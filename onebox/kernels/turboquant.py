"""Keys and values in few bits on a GPU: entries coded as they are made, page tiles decoded in registers.

What `turboquant_ref` says in plain PyTorch. A vector's bits are one number, `10 * outliers + others` (44, 88, 32), and
0 stands for pages of plain 16-bit numbers: so one attention kernel reads every kind of page. Rotations are products
with two 16-bit parts of the matrix, which together are as exact as fp32; queries and sums are turned once a row, keys
and values never after they are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.linear import launch
from onebox.kernels.paged_attention_ref import PAGE_SIZE
from onebox.kernels.tile import FP8, launch_next, paired_column, positioned, wait_previous, widen
from onebox.kernels.turboquant_ref import E4M3_MAX, FP16_MAX, LEVELS, Group, QuantizedPages

M = 16  # rows of a product with a rotation: the least that tensor cores take
BLOCK = 32  # its columns a step
_E4M3_MAX, _FP16_MAX, _LEVELS = tl.constexpr(E4M3_MAX), tl.constexpr(FP16_MAX), tl.constexpr(LEVELS)


def bits_of(groups: tuple[Group, ...]) -> int:
    """Bits of a vector's outliers and of its other coordinates, as kernels take them."""
    return 10 * groups[0].bits + groups[-1].bits


@triton.constexpr_function
def vector_bytes(bits, d):
    """Bytes of a vector's codes."""
    return d // 4 * (bits // 10) // 8 + d // 4 * 3 * (bits % 10) // 8


@triton.constexpr_function
def n_groups(bits):
    return 1 if bits // 10 == bits % 10 else 2


@triton.constexpr_function
def root(x):
    return x**0.5


@triton.jit
def _plane(at, c, mask, N: tl.constexpr, P: tl.constexpr):
    """P bits of coordinates c of a group of N whose plane begins at `at`."""
    BYTES: tl.constexpr = N * P // 8
    byte = tl.load(at + c % BYTES, mask=mask, other=0).to(tl.int32)
    return (byte >> (P * (c // BYTES))) & ((1 << P) - 1)


@triton.jit
def _codes(at, c, mask, N: tl.constexpr, BITS: tl.constexpr):
    """Codes of coordinates c of a group of N that begins at `at`."""
    if BITS == 3:
        return _plane(at, c, mask, N, 2) | (_plane(at + N // 4, c, mask, N, 1) << 2)
    else:
        return _plane(at, c, mask, N, BITS)


@triton.jit
def _scale_at(pages_ptr, page, entry, hkv, V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
              HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """Where the first scale of a key (V = 0) or value stands: a pointer to fp16."""
    GROUPS: tl.constexpr = n_groups(VALUES if V else KEYS)
    CODES: tl.constexpr = vector_bytes(KEYS, D) + vector_bytes(VALUES, D)
    SCALES: tl.constexpr = 2 * n_groups(KEYS) if V else 0
    SIZE: tl.constexpr = PAGE * HKV * (CODES + 2 * n_groups(KEYS) + 2 * n_groups(VALUES))
    first = pages_ptr + page * SIZE + PAGE * HKV * (CODES + SCALES)
    return first.to(tl.pointer_type(tl.float16)) + (entry * HKV + hkv) * GROUPS


@triton.jit
def _codes_at(pages_ptr, page, entry, hkv, V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
              HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """Where the codes of a key (V = 0) or value stand."""
    BYTES: tl.constexpr = vector_bytes(VALUES if V else KEYS, D)
    FIRST: tl.constexpr = PAGE * HKV * vector_bytes(KEYS, D) if V else 0
    CODES: tl.constexpr = vector_bytes(KEYS, D) + vector_bytes(VALUES, D)
    SIZE: tl.constexpr = PAGE * HKV * (CODES + 2 * n_groups(KEYS) + 2 * n_groups(VALUES))
    return pages_ptr + page * SIZE + FIRST + (entry * HKV + hkv) * BYTES


@triton.jit
def load_tile(
    pages_ptr, levels_ptr, page, entry, hkv, d, mask, V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Keys (V = 0) or values of entries `entry` of `page` (int64; one, or one an entry) at dimensions d, as DTYPE.

    entry, d and mask broadcast to the tile, either way up. `load_scales` are still to be multiplied with, but for
    vectors of two groups, whose scales are in; what is masked is zero then.
    """
    BITS: tl.constexpr = VALUES if V else KEYS
    if BITS == 0:
        # int64: page * stride passes 2**31 at 256k tokens
        at = pages_ptr + ((page * 2 + V) * (PAGE * HKV * D) + (entry * HKV + hkv) * D)
        return tl.load(at + d, mask=mask, other=0.0).to(DTYPE)
    else:
        at = _codes_at(pages_ptr, page, entry, hkv, V, KEYS, VALUES, HKV, D, PAGE)
        if BITS == 88:
            byte = tl.load(at + d, mask=mask, other=0)
            return widen(byte if ASM else byte.to(tl.float8e4nv, bitcast=True), FP8, DTYPE, ASM)
        else:
            levels = levels_ptr + V * 2 * _LEVELS
            if n_groups(BITS) == 1:
                code = _codes(at, d, mask, D, BITS % 10)
                return tl.load(levels + code)
            else:
                N: tl.constexpr = D // 4
                loud = d < N
                first = _codes(at, d, mask & loud, N, BITS // 10)
                other = _codes(at + N * (BITS // 10) // 8, d - N, mask & (d >= N), 3 * N, BITS % 10)
                scale_at = _scale_at(pages_ptr, page, entry, hkv, V, KEYS, VALUES, HKV, D, PAGE)
                loud_scale = tl.load(scale_at, mask=mask, other=0.0).to(tl.float32)
                scale = tl.where(loud, loud_scale, tl.load(scale_at + 1, mask=mask, other=0.0).to(tl.float32))
                level = tl.load(levels + tl.where(loud, first, other + _LEVELS)).to(tl.float32)
                return (level * scale).to(DTYPE)


@triton.jit
def load_scales(
    pages_ptr, page, entry, hkv, mask, V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, HKV: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """What `load_tile` leaves to multiply keys or values of entries [N] with: fp32 [N], zero where masked."""
    BITS: tl.constexpr = VALUES if V else KEYS
    if BITS == 0 or n_groups(BITS) == 2:
        return tl.where(mask, 1.0, 0.0)
    else:
        at = _scale_at(pages_ptr, page, entry, hkv, V, KEYS, VALUES, HKV, D, PAGE)
        return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _e4m3(x):
    """fp32 within +-448 -> e4m3 as int32, ties to even: arithmetic alone, since not every chip converts."""
    whole = x.to(tl.int32, bitcast=True)
    size = whole & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # in steps of 2**-9
    return tl.where(size < 0x3C800000, tiny, normal) | ((whole >> 24) & 0x80)  # 2**-6 is the least normal one


@triton.jit
def _nearest(x, here, tables_ptr, N: tl.constexpr, BITS: tl.constexpr):
    """Codes [M, D] of the group of N coordinates that are `here`, and its scale [M]. tables: levels, then midpoints."""
    x = tl.where(here, x, 0.0)
    square = tl.sum(x * x, axis=1)
    unit = x * (root(N) / tl.maximum(tl.sqrt_rn(square), 1e-30))[:, None]
    code = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range((1 << BITS) - 1):
        code += (unit > tl.load(tables_ptr + _LEVELS + i)).to(tl.int32)
    product = tl.sum(x * tl.load(tables_ptr + code), axis=1)
    scale = tl.where(product > 0, square / tl.where(product > 0, product, 1.0), 0.0)
    return code, tl.minimum(scale, _FP16_MAX)


@triton.jit
def _store_plane(code, at, live, FIRST: tl.constexpr, N: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr):
    """Bits [SHIFT, SHIFT + P) of codes [M, D] at coordinates [FIRST, FIRST + N), packed to `at` [M]."""
    BYTES: tl.constexpr = N * P // 8
    j = tl.arange(0, triton.next_power_of_2(BYTES))
    byte = tl.zeros([code.shape[0], triton.next_power_of_2(BYTES)], tl.int32)
    for s in tl.static_range(8 // P):
        c = tl.minimum(FIRST + s * BYTES + j, code.shape[1] - 1)
        part = tl.gather(code, tl.broadcast_to(c[None, :], byte.shape), axis=1)
        byte |= ((part >> SHIFT) & ((1 << P) - 1)) << (P * s)
    tl.store(at[:, None] + j[None, :], byte.to(tl.uint8), mask=live[:, None] & (j < BYTES)[None, :])


@triton.jit
def _store_group(code, at, live, FIRST: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr):
    if BITS == 3:
        _store_plane(code, at, live, FIRST, N, 2, 0)
        _store_plane(code, at + N // 4, live, FIRST, N, 1, 2)
    else:
        _store_plane(code, at, live, FIRST, N, BITS, 0)


@triton.jit
def store_entries(
    x, pages_ptr, tables_ptr, slot, hkv, live, V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Code keys (V = 0) or values x [M, D] fp32, turned where their bits want it, into entries slot [M] (int64)."""
    BITS: tl.constexpr = VALUES if V else KEYS
    d = tl.arange(0, D)[None, :]
    at = _codes_at(pages_ptr, slot // PAGE, slot % PAGE, hkv, V, KEYS, VALUES, HKV, D, PAGE)
    scale_at = _scale_at(pages_ptr, slot // PAGE, slot % PAGE, hkv, V, KEYS, VALUES, HKV, D, PAGE)
    tables = tables_ptr + V * 4 * _LEVELS
    if BITS == 88:
        scale = tl.minimum(tl.div_rn(tl.max(tl.abs(x), axis=1), _E4M3_MAX), _FP16_MAX).to(tl.float16)
        wide = scale.to(tl.float32)[:, None]
        exact = tl.where(wide > 0, tl.div_rn(x, tl.where(wide > 0, tl.broadcast_to(wide, x.shape), 1.0)), 0.0)
        exact = tl.minimum(tl.maximum(exact, -_E4M3_MAX), _E4M3_MAX)
        tl.store(at[:, None] + d, _e4m3(exact).to(tl.uint8), mask=live[:, None])
        tl.store(scale_at, scale, mask=live)
    elif n_groups(BITS) == 1:
        code, scale = _nearest(x, d < D, tables, D, BITS % 10)
        _store_group(code, at, live, 0, D, BITS % 10)
        tl.store(scale_at, scale.to(tl.float16), mask=live)
    else:
        N: tl.constexpr = D // 4
        code, scale = _nearest(x, d < N, tables, N, BITS // 10)
        _store_group(code, at, live, 0, N, BITS // 10)
        tl.store(scale_at, scale.to(tl.float16), mask=live)
        code, scale = _nearest(x, d >= N, tables + 2 * _LEVELS, 3 * N, BITS % 10)
        _store_group(code, at + N * (BITS // 10) // 8, live, N, 3 * N, BITS % 10)
        tl.store(scale_at + 1, scale.to(tl.float16), mask=live)


@triton.jit
def _columns(
    row, c, norm_ptr, rms, turn, live, cos_ptr, sin_ptr, NORMED: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Dimensions c [N] of queries or keys after norm and rotary positions, or of values as they are: fp32 [M, N]."""
    mask = live[:, None]
    x = tl.load(row[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        partner = tl.where(c < HALF, c + HALF, tl.where(c < 2 * HALF, c - HALF, c))
        y = tl.load(row[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        weight, other = tl.load(norm_ptr + c).to(tl.float32), tl.load(norm_ptr + partner).to(tl.float32)
        angle, turns = turn[:, None] + (c % HALF)[None, :], mask & (c < 2 * HALF)[None, :]
        cos = tl.load(cos_ptr + angle, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0).to(tl.float32)
        x = positioned(x, y, weight[None, :], other[None, :], rms[:, None], cos, sin, (c < HALF)[None, :], DTYPE)
        x = x.to(DTYPE).to(tl.float32)
    return x


@triton.jit
def _turned(
    row, norm_ptr, eps, turn, live, cos_ptr, sin_ptr, parts_ptr, NORMED: tl.constexpr, TURN: tl.constexpr,
    HALF: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows at `row` [M] after norm, positions and, if TURN, the rotation of `parts_ptr` [2, D, D]: fp32 [M, D]."""
    d = tl.arange(0, D)
    dtype: tl.constexpr = row.dtype.element_ty
    rms = tl.zeros([M], tl.float32)
    if NORMED:
        whole = tl.load(row[:, None] + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        rms = tl.rsqrt(tl.sum(whole * whole, axis=1) / D + eps)
    if TURN:
        acc = tl.zeros([M, D], tl.float32)
        for first in range(0, D, BLOCK):
            c = first + tl.arange(0, BLOCK)
            x = _columns(row, c, norm_ptr, rms, turn, live, cos_ptr, sin_ptr, NORMED, HALF, dtype).to(dtype)
            at = parts_ptr + c[:, None] * D + d[None, :]
            acc = tl.dot(x, tl.load(at), acc)
            acc = tl.dot(x, tl.load(at + D * D), acc)
        return acc
    else:
        return _columns(row, d, norm_ptr, rms, turn, live, cos_ptr, sin_ptr, NORMED, HALF, dtype)


@triton.jit
def _code_kernel(
    qkv_ptr, qkv_stride, q_ptr, pages_ptr, kv_slot_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, k_parts_ptr,
    v_parts_ptr, tables_ptr, n_rows, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    head, d = tl.program_id(1), tl.arange(0, D)
    t = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    live, turn = t < n_rows, t * HALF
    wait_previous(PDL)
    row = qkv_ptr + t * qkv_stride
    slot = tl.load(kv_slot_ptr + t, mask=live, other=0).to(tl.int64)
    if head < HQ:
        row += head * 2 * D
        x = _turned(row, q_norm_ptr, eps, turn, live, cos_ptr, sin_ptr, k_parts_ptr, True, KEYS < 88, HALF, D, M, BLOCK)
        at = q_ptr + ((t * HQ + head) * D)[:, None] + d[None, :]
        tl.store(at, x.to(q_ptr.dtype.element_ty), mask=live[:, None])
    elif head < HQ + HKV:
        row += HQ * 2 * D + (head - HQ) * D
        x = _turned(row, k_norm_ptr, eps, turn, live, cos_ptr, sin_ptr, k_parts_ptr, True, KEYS < 88, HALF, D, M, BLOCK)
        store_entries(x, pages_ptr, tables_ptr, slot, head - HQ, live, 0, KEYS, VALUES, HKV, D, PAGE)
    else:
        row += HQ * 2 * D + (head - HQ) * D
        x = _turned(
            row, k_norm_ptr, eps, turn, live, cos_ptr, sin_ptr, v_parts_ptr, False, VALUES < 88, HALF, D, M, BLOCK
        )
        store_entries(x, pages_ptr, tables_ptr, slot, head - HQ - HKV, live, 1, KEYS, VALUES, HKV, D, PAGE)


@triton.jit
def _turn_back_kernel(
    sums_ptr, parts_ptr, gate_ptr, gate_stride, out_ptr, n_rows, HQ: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    r, d = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M), tl.arange(0, D)
    live = r < n_rows
    t, head = r // HQ, (r % HQ).to(tl.int32)
    acc = tl.zeros([M, D], tl.float32)
    wait_previous(PDL)
    for first in range(0, D, BLOCK):
        c = first + tl.arange(0, BLOCK)
        x = tl.load(sums_ptr + (r * D)[:, None] + c[None, :], mask=live[:, None], other=0.0)
        at = parts_ptr + c[:, None] + d[None, :] * D  # transposed: back is the other way round
        acc = tl.dot(x, tl.load(at), acc)
        acc = tl.dot(x, tl.load(at + D * D), acc)
    gate_at = gate_ptr + (t * gate_stride + head * 2 * D + D)[:, None] + d[None, :]
    out = acc * tl.sigmoid(tl.load(gate_at, mask=live[:, None], other=0.0).to(tl.float32))
    column = head[:, None] * D + d[None, :]
    column = paired_column(column) if PAIRED else column
    tl.store(out_ptr + (t * HQ * D)[:, None] + column, out.to(out_ptr.dtype.element_ty), mask=live[:, None])


def rotate_and_code(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rope: tuple[Tensor, Tensor],
    pages: QuantizedPages,
    kv_slot: Tensor,
    n_heads: int,
    eps: float,
) -> Tensor:
    """`paged_attention.rotate_and_write` for pages in a format, in one launch: q [T, H, D], turned as keys are."""
    form, (cos, sin), n_rows = pages.format, rope, qkv.shape[0]
    d, operands = form.head_dim, pages.operands(qkv.dtype)
    q = torch.empty(n_rows, n_heads, d, dtype=qkv.dtype, device=qkv.device)
    _code_kernel[(triton.cdiv(n_rows, M), n_heads + 2 * form.n_kv_heads)](
        qkv, qkv.stride(0), q, pages.data, kv_slot, cos, sin, q_norm, k_norm, operands.k_parts, operands.v_parts,
        operands.tables, n_rows, eps,
        HQ=n_heads, HKV=form.n_kv_heads, D=d, HALF=cos.shape[-1], PAGE=PAGE_SIZE, KEYS=bits_of(form.k),
        VALUES=bits_of(form.v), M=M, BLOCK=BLOCK, **launch(qkv.device, 4),
    )  # fmt: skip
    return q


def turn_back(sums: Tensor, pages: QuantizedPages, qkv: Tensor, paired: bool = False) -> Tensor:
    """Sums of turned values [T, H, D], as they were before the pages turned them, times the gates of qkv: [T, H D]."""
    n_rows, n_heads, d = sums.shape
    out = torch.empty(n_rows, n_heads * d, dtype=sums.dtype, device=sums.device)
    _turn_back_kernel[(triton.cdiv(n_rows * n_heads, M),)](
        sums, pages.operands(sums.dtype).v_parts, qkv, qkv.stride(0), out, n_rows * n_heads,
        HQ=n_heads, D=d, M=M, BLOCK=BLOCK, PAIRED=paired, **launch(sums.device, 4),
    )  # fmt: skip
    return out
