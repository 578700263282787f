"""What the decode kernels are made of: weight tiles by format, rows times tile, ordered split sums, launch overlap.

A weight reaches a kernel as (q, scale) and a FORMAT; activations are bf16 on a GPU and fp16 in the interpreter. A
dequantised weight and an activation have at most 8 significant bits each, so products are exact in the fp32 sums;
scales
multiply those sums (NVFP4's block scales multiply the weight, which bf16 holds exactly).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BF16 = tl.constexpr(0)
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)
INT4 = tl.constexpr(3)
NVFP4_ROWS = tl.constexpr(5)  # one global scale a row
NVFP4 = tl.constexpr(4)  # from INT4 on, a byte holds two weights


@triton.jit
def launch_next(PDL: tl.constexpr):
    """At a kernel's start: let the next kernel in the stream start its own prologue (PDL = 1)."""
    if PDL == 1:
        gdc_launch_dependents()


@triton.jit
def launch_next_late(PDL: tl.constexpr):
    """Before a kernel's last stores: the same, once the bulk of its loads is done (PDL = 2)."""
    if PDL == 2:
        gdc_launch_dependents()


@triton.jit
def wait_previous(PDL: tl.constexpr):
    """Afterwards all that the kernels before this one wrote is visible. Every kernel calls it, so waits chain."""
    if PDL > 0:
        gdc_wait()


# Packed bytes to bf16 without integer-to-float conversions: the bits go where a bf16 of a known exponent has its
# mantissa, and an exact fma removes the offset (INT4) or the exponent bias (FP8, NVFP4). Four bytes a call.
_INT4 = tl.constexpr("""{
.reg .b32 a, c, m, one;
mov.b32 m, 0xC308C308;
mov.b32 one, 0x3F803F80;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 c, $4, 0, 0x4342;
lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $1, c, 0x000F000F, 0x43004300, 0xEA;
shr.b32 a, a, 4;
shr.b32 c, c, 4;
lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $3, c, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, $0, one, m;
fma.rn.bf16x2 $1, $1, one, m;
fma.rn.bf16x2 $2, $2, one, m;
fma.rn.bf16x2 $3, $3, one, m;
}""")
_INT4_S8 = tl.constexpr("""{
.reg .b32 s;
shl.b32 s, $2, 4;
lop3.b32 $0, s, 0x80808080, 0xF0F0F0F0, 0x28;
lop3.b32 $1, $2, 0x80808080, 0xF0F0F0F0, 0x28;
}""")
_INT4_DP4A = tl.constexpr("""{
.reg .b32 s, l, h, a, b;
shl.b32 s, $1, 4;
lop3.b32 l, s, 0x80808080, 0xF0F0F0F0, 0x28;
lop3.b32 h, $1, 0x80808080, 0xF0F0F0F0, 0x28;
mov.b32 a, 0;
mov.b32 b, 0;
dp4a.s32.s32 a, l, $2, a;
dp4a.s32.s32 a, h, $3, a;
dp4a.s32.s32 b, l, $4, b;
dp4a.s32.s32 b, h, $5, b;
mad.lo.s32 $0, a, 256, b;
}""")
_NVFP4 = tl.constexpr("""{
.reg .b32 a, c, t, s, m, z;
mov.b32 m, 0x7E807E80;
mov.b32 z, 0x80008000;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 c, $4, 0, 0x4342;
shl.b32 t, a, 6;
shl.b32 s, a, 12;
and.b32 t, t, 0x01C001C0;
lop3.b32 $0, s, z, t, 0xEA;
shl.b32 t, c, 6;
shl.b32 s, c, 12;
and.b32 t, t, 0x01C001C0;
lop3.b32 $1, s, z, t, 0xEA;
shl.b32 t, a, 2;
shl.b32 s, a, 8;
and.b32 t, t, 0x01C001C0;
lop3.b32 $2, s, z, t, 0xEA;
shl.b32 t, c, 2;
shl.b32 s, c, 8;
and.b32 t, t, 0x01C001C0;
lop3.b32 $3, s, z, t, 0xEA;
fma.rn.bf16x2 $0, $0, m, z;
fma.rn.bf16x2 $1, $1, m, z;
fma.rn.bf16x2 $2, $2, m, z;
fma.rn.bf16x2 $3, $3, m, z;
}""")
_FP8 = tl.constexpr("""{
.reg .b32 a, c, m, z;
mov.b32 m, 0x7B807B80;
mov.b32 z, 0x80008000;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 c, $2, 0, 0x3424;
shr.b32 $0, a, 4;
shr.b32 $1, c, 4;
and.b32 $0, $0, 0x07F007F0;
and.b32 $1, $1, 0x07F007F0;
lop3.b32 $0, a, z, $0, 0xEA;
lop3.b32 $1, c, z, $1, 0xEA;
fma.rn.bf16x2 $0, $0, m, z;
fma.rn.bf16x2 $1, $1, m, z;
}""")
_INT8 = tl.constexpr("""{
.reg .b32 a, p, q, magic;
.reg .f32 f, g, off;
mov.b32 magic, 0x4B000000;
mov.b32 off, 0xCB000080;
xor.b32 a, $2, 0x80808080;
prmt.b32 p, a, magic, 0x7440;
prmt.b32 q, a, magic, 0x7441;
mov.b32 f, p;
mov.b32 g, q;
add.f32 f, f, off;
add.f32 g, g, off;
cvt.rn.bf16x2.f32 $0, g, f;
prmt.b32 p, a, magic, 0x7442;
prmt.b32 q, a, magic, 0x7443;
mov.b32 f, p;
mov.b32 g, q;
add.f32 f, f, off;
add.f32 g, g, off;
cvt.rn.bf16x2.f32 $1, g, f;
}""")


@triton.jit
def e2m1(n):
    """Four bits as sign, two exponent bits, one mantissa bit -> fp32."""
    exponent, mantissa = ((n >> 1) & 3).to(tl.float32), (n & 1).to(tl.float32)
    size = tl.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * tl.exp2(exponent - 1))
    return tl.where((n & 8) != 0, -size, size)


@triton.jit
def unpack(b, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """uint8 of two nibbles -> (low, high) as exact DTYPE values without their scales."""
    if FORMAT == INT4:
        if ASM:
            low, high = tl.inline_asm_elementwise(
                _INT4, "=&r,=&r,=&r,=&r,r", [b], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            low = ((b & 15).to(tl.float32) - 8).to(DTYPE)
            high = ((b >> 4).to(tl.float32) - 8).to(DTYPE)
    else:
        if ASM:
            low, high = tl.inline_asm_elementwise(
                _NVFP4, "=&r,=&r,=&r,=&r,r", [b], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            low, high = e2m1(b & 15).to(DTYPE), e2m1(b >> 4).to(DTYPE)
    return low, high


@triton.jit
def unpack_s8(b, ASM: tl.constexpr):
    """uint8 of two nibbles -> (16 (low - 8), 16 (high - 8)) as int8: three instructions for eight weights."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            _INT4_S8, "=&r,=&r,r", [b], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        low, high = (((b & 15).to(tl.int32) - 8) * 16).to(tl.int8), (((b >> 4).to(tl.int32) - 8) * 16).to(tl.int8)
    return low, high


@triton.jit
def widen(b, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """One-byte weights -> exact DTYPE values without their scales."""
    if ASM:
        if FORMAT == FP8:
            w = tl.inline_asm_elementwise(
                _FP8, "=&r,=&r,r", [b.to(tl.uint8, bitcast=True)], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            w = tl.inline_asm_elementwise(_INT8, "=&r,=&r,r", [b], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        w = b.to(tl.float32).to(DTYPE)
    return w


@triton.jit
def scale_at(s_ptr, rows, K: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr):
    """Where the first scale of each weight row lies (FP8 shares one over 128 rows)."""
    if FORMAT == INT4:
        at = s_ptr + rows * (K // BK)
    elif FORMAT == NVFP4:
        at = s_ptr + rows * (K // 16)
    elif FORMAT == FP8:
        at = s_ptr + rows // 128 * ((K + BK - 1) // BK)
    else:
        at = s_ptr + rows
    return at


@triton.jit
def row_bytes(K: tl.constexpr, FORMAT: tl.constexpr):
    """Elements of q in `K` columns."""
    return K // 2 if FORMAT >= INT4 else K


@triton.jit
def times_rows(
    q_ptr,
    s_ptr,
    g_ptr,
    rows,
    x_ptr,
    xt,
    x_mask,
    n_rows,
    start,
    squares_ptr,
    eps,
    SPAN: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    PAIRED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Weight rows `rows` [BN] times activation rows `xt` [T] over columns [start, start + SPAN): fp32 [BN, T].

    BK is the columns a scale covers (INT4, FP8: 128). Activation rows where `x_mask` is false count as zero.
    PAIRED: every 128 columns of x lie as the even ones, then the odd ones, as INT4's nibbles do.
    PARTS > 0: every BK columns of an x row still lack a factor 1 / rms, from PARTS sums of squares [block, PARTS,
    n_rows].
    """
    acc = tl.zeros([BN, T], tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # several groups an iteration: independent chains for the tensor cores, one barrier for all
    U: tl.constexpr = UNROLL if SPAN % (BK * UNROLL) == 0 else 1
    half, columns = tl.arange(0, BK // 2), tl.arange(0, BK)
    q_at = q_ptr + rows[:, None] * (K // 2 if FORMAT >= INT4 else K)
    x_at = x_ptr + xt[None, :] * K
    mask = x_mask[None, :]
    # two 16-bit scales in one load: four bytes are the least that is fetched ahead of its use
    SCALE_PAIRS: tl.constexpr = FORMAT == INT4 and U % 2 == 0 and (K // BK) % 2 == 0
    for k_first in tl.range(start, start + SPAN, BK * U, num_stages=STAGES):
        for u in tl.static_range(U):
            k0 = k_first + u * BK
            if FORMAT == INT4:
                if SCALE_PAIRS:
                    if u % 2 == 0:
                        both = tl.load(s_ptr.to(tl.pointer_type(tl.int32)) + (rows * (K // BK) + k0 // BK) // 2)
                        one = both & 0xFFFF
                    else:
                        one = both >> 16
                    scale = one.to(tl.int16).to(s_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
                else:
                    scale = tl.load(s_ptr + rows * (K // BK) + k0 // BK).to(tl.float32)
            if FORMAT == FP8:
                scale = tl.load(s_ptr + rows // 128 * ((K + BK - 1) // BK) + k0 // BK)
            if PARTS > 0:
                square = tl.zeros([T], tl.float32)
                for p in tl.static_range(PARTS):
                    square += tl.load(squares_ptr + (k0 // BK * PARTS + p) * n_rows + xt, mask=x_mask, other=0.0)
                rms = tl.rsqrt(square / BK + eps)
            if FORMAT >= INT4:
                b = tl.load(q_at + (k0 // 2 + half)[None, :])
                if PAIRED:
                    even = tl.load(x_at + (k0 + half)[:, None], mask=mask, other=0.0)
                    odd = tl.load(x_at + (k0 + BK // 2 + half)[:, None], mask=mask, other=0.0)
                else:
                    pairs = x_at.to(tl.pointer_type(tl.int32))  # even and odd columns of 16-bit activations in one load
                    pair = tl.load(pairs + (k0 // 2 + half)[:, None], mask=mask, other=0)
                    even = (pair & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
                    odd = (pair >> 16).to(tl.int16).to(dtype, bitcast=True)
                if FORMAT >= NVFP4:
                    low, high = unpack(b, FORMAT, dtype, ASM)
                    block = tl.load(s_ptr + rows[:, None] * (K // 16) + (k0 // 16 + tl.arange(0, BK // 16))[None, :])
                    block = block.to(tl.float32).to(dtype)
                    block = tl.reshape(tl.broadcast_to(block[:, :, None], [BN, BK // 16, 8]), [BN, BK // 2])
                    part = tl.dot(low * block, even) + tl.dot(high * block, odd)
                else:
                    low, high = unpack(b, FORMAT, dtype, ASM)
                    part = (tl.dot(low, even) + tl.dot(high, odd)) * scale[:, None]
            else:
                if K % BK == 0:
                    b = tl.load(q_at + (k0 + columns)[None, :])
                    x = tl.load(x_at + (k0 + columns)[:, None], mask=mask, other=0.0)
                else:
                    inside = k0 + columns < K
                    b = tl.load(q_at + (k0 + columns)[None, :], mask=inside[None, :], other=0)
                    x = tl.load(x_at + (k0 + columns)[:, None], mask=mask & inside[:, None], other=0.0)
                if FORMAT == BF16:
                    part = tl.dot(b.to(dtype), x)
                else:
                    part = tl.dot(widen(b, FORMAT, dtype, ASM), x)
                    if FORMAT == FP8:
                        part = part * scale[:, None]
            if PARTS > 0:
                part = part * rms[None, :]
            acc += part
    if FORMAT == INT8:
        acc = acc * tl.load(s_ptr + rows)[:, None]
    if FORMAT == NVFP4:
        acc = acc * tl.load(g_ptr)
    if FORMAT == NVFP4_ROWS:
        acc = acc * tl.load(g_ptr + rows)[:, None]
    return acc


@triton.jit
def times_int4(
    q_ptr,
    s_ptr,
    rows,
    digits_ptr,
    steps_ptr,
    n_rows,
    K: tl.constexpr,
    T: tl.constexpr,
    BN: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """INT4 rows (groups of 128) times activations as 16-bit whole numbers: fp32 [BN, T], exact inside a group.

    An activation is steps [K / 128, n_rows] times (256 high + low); digits [n_rows, 2, K] holds high and low as int8,
    every
    128 columns as the even ones, then the odd ones. Less work for a weight than any way through bf16.
    """
    acc = tl.zeros([BN, T], tl.float32)
    U: tl.constexpr = UNROLL if K % (128 * UNROLL) == 0 else 1
    SCALE_PAIRS: tl.constexpr = U % 2 == 0
    c, j, t = tl.arange(0, 64), tl.arange(0, 2 * T), tl.arange(0, T)
    q_at = q_ptr + rows[:, None] * (K // 2) + c[None, :]
    x_at = digits_ptr + j[None, :] * K + c[:, None]
    mask = (j < 2 * n_rows)[None, :]
    for k_first in tl.range(0, K, 128 * U, num_stages=STAGES):
        for u in tl.static_range(U):
            k0 = k_first + u * 128
            if SCALE_PAIRS:  # four bytes are the least that is fetched ahead of its use
                if u % 2 == 0:
                    both = tl.load(s_ptr.to(tl.pointer_type(tl.int32)) + (rows * (K // 128) + k0 // 128) // 2)
                    one = both & 0xFFFF
                else:
                    one = both >> 16
                scale = one.to(tl.int16).to(s_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
            else:
                scale = tl.load(s_ptr + rows * (K // 128) + k0 // 128).to(tl.float32)
            step = tl.load(steps_ptr + k0 // 128 * n_rows + t, mask=t < n_rows, other=0.0)
            low, high = unpack_s8(tl.load(q_at + k0 // 2), ASM)
            part = tl.dot(low, tl.load(x_at + k0, mask=mask, other=0), out_dtype=tl.int32)
            part = tl.dot(high, tl.load(x_at + (k0 + 64), mask=mask, other=0), part, out_dtype=tl.int32)
            upper, lower = tl.split(tl.reshape(part, [BN, T, 2]))
            acc += (upper * 256 + lower).to(tl.float32) * (scale[:, None] * (step * 0.0625)[None, :])
    return acc


@triton.jit
def dot_words(w, high_even, high_odd, low_even, low_odd, ASM: tl.constexpr):
    """16 times eight INT4 weights a word times eight activations' digits, four to a word: int32."""
    if ASM:
        whole = tl.inline_asm_elementwise(
            _INT4_DP4A, "=r,r,r,r,r,r", [w, high_even, high_odd, low_even, low_odd], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        whole = w * 0
        for i in tl.static_range(4):
            even = (high_even << (24 - 8 * i) >> 24) * 256 + (low_even << (24 - 8 * i) >> 24)
            odd = (high_odd << (24 - 8 * i) >> 24) * 256 + (low_odd << (24 - 8 * i) >> 24)
            whole += ((w >> 8 * i & 15) - 8) * 16 * even + ((w >> (8 * i + 4) & 15) - 8) * 16 * odd
    return whole


@triton.jit
def add_row_times_int4(
    acc, q_ptr, s_ptr, rows, digits_ptr, steps_ptr, step_stride, factor, K: tl.constexpr, BN: tl.constexpr,
    WORDS: tl.constexpr, STEP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [WORDS / 4, BN] fp32 plus INT4 rows (groups of 128) times one activation row of digits, times `factor`.

    No tensor cores and no shared memory: a thread's four words are 32 columns of a row, exact as whole numbers. The sum
    over acc's first dimension is left to the caller. STEP is the columns an activation step covers: 32 or 128.
    """
    i, part = tl.arange(0, WORDS), tl.arange(0, WORDS // 4)
    q_at = q_ptr.to(tl.pointer_type(tl.int32)) + i[:, None] + rows[None, :] * (K // 8)
    x_at = digits_ptr.to(tl.pointer_type(tl.int32)) + (i // 16 * 32 + i % 16)
    for first in tl.static_range(0, K // 8, WORDS):
        w = tl.load(q_at + first)
        x = x_at + 2 * first
        whole = dot_words(
            w, tl.load(x)[:, None], tl.load(x + 16)[:, None], tl.load(x + K // 4)[:, None],
            tl.load(x + K // 4 + 16)[:, None], ASM,
        )  # fmt: skip
        whole = tl.sum(tl.reshape(whole, [WORDS // 4, 4, BN]), axis=1).to(tl.float32)
        group = first // 16 + part // 4
        scale = tl.load(s_ptr + group[:, None] + rows[None, :] * (K // 128)).to(tl.float32)
        step = tl.load(steps_ptr + (first // 4 + part if STEP == 32 else group) * step_stride)
        acc += whole * (scale * (step * (factor * 0.0625))[:, None])
    return acc


@triton.jit
def store_digits(x, n, mask, tile, xt, x_mask, n_rows, digits_ptr, steps_ptr, H: tl.constexpr):
    """A [128, T] tile of activations as `times_int4` reads them. The largest of a row's 128 sets their step."""
    step = tl.max(tl.where(mask, tl.abs(x), 0.0), axis=0) * (1.0 / 32512.0)
    step = tl.where(step > 0, step, 1.0)
    whole = tl.floor(x / step[None, :] + 0.5).to(tl.int32)
    upper = (whole + 128) >> 8
    at = digits_ptr + xt[None, :] * (2 * H) + paired_column(n)[:, None]
    tl.store(at, upper.to(tl.int8), mask=mask)
    tl.store(at + H, (whole - upper * 256).to(tl.int8), mask=mask)
    tl.store(steps_ptr + tile * n_rows + xt, step, mask=x_mask)


@triton.jit
def positioned(x, y, weight, other, rms, cos, sin, low, DTYPE: tl.constexpr):
    """Dimensions x of a head, whose partners are y, normed by `weight` (y by `other`) and turned to their position."""
    x = (x * rms * (1.0 + weight)).to(DTYPE).to(tl.float32)
    y = (y * rms * (1.0 + other)).to(DTYPE).to(tl.float32)
    return x * cos + tl.where(low, -y, y) * sin


@triton.jit
def paired_column(n):
    """Where column n lies when every 128 columns are stored as the even ones, then the odd ones."""
    return n // 128 * 128 + n % 2 * 64 + n % 128 // 2


@triton.jit
def gate_up_rows(tile, I: tl.constexpr, BN: tl.constexpr):
    """Rows of a tile of BN from I gate rows and then I up rows: gate and up in turn."""
    r = tl.arange(0, BN)
    return tl.minimum(tile * (BN // 2) + r // 2, I - 1) + (r % 2) * I


@triton.jit
def gated(acc, BN: tl.constexpr, T: tl.constexpr):
    """SiLU(gate) * up of a [BN, T] tile whose rows take turns: [BN / 2, T]."""
    gate, up = tl.split(tl.permute(tl.reshape(acc, [BN // 2, 2, T]), [0, 2, 1]))
    return gate * tl.sigmoid(gate) * up


@triton.jit
def prefetch_rows(q_ptr, rows, K: tl.constexpr, FORMAT: tl.constexpr, PREFETCH: tl.constexpr):
    """Ask L2 for the first 256 bytes of weight rows: worth it while the previous kernel still runs."""
    if PREFETCH:
        row_bytes: tl.constexpr = K // 2 if FORMAT >= INT4 else (2 * K if FORMAT == BF16 else K)
        address = (q_ptr.to(tl.pointer_type(tl.uint8)) + rows * row_bytes).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; prefetch.global.L2 [$1+128]; mov.b32 $0, 0;",
            "=r,l",
            [address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def last_of(counter_ptr, expected):
    """True in the one program of `expected` that arrives last; what the others stored before is visible to it.

    The counter is left at zero for the next launch.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == expected - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def keep_rows(acc, BN: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr):
    """The first ROWS columns of [BN, T]; the others are zero. What follows a product then works on real rows only."""
    return acc if ROWS == T else tl.sum(tl.reshape(acc, [BN, T // ROWS, ROWS]), axis=1)


@triton.jit
def load_squares(squares_ptr, xt, x_mask, n_parts, n_rows, PARTS: tl.constexpr):
    """The sums of squares a residual stream's producers left, [PARTS, T]: loaded before a loop, summed after it."""
    parts = tl.arange(0, PARTS)
    at = squares_ptr + parts[:, None] * n_rows + xt[None, :]
    return tl.load(at, mask=(parts < n_parts)[:, None] & x_mask[None, :], other=0.0)


@triton.jit
def inverse_rms(squares, H: tl.constexpr, eps):
    """1 / rms of each residual row. In fp64: the order of the sum, which the tile's shape sets, leaves no trace."""
    return tl.rsqrt(tl.sum(squares.to(tl.float64), axis=0).to(tl.float32) / H + eps)


@triton.jit
def load_residual(x_in_ptr, norm_ptr, n, n_mask, xt, x_mask, H: tl.constexpr):
    """What `add_to_residual` adds to, and the next norm's weight: loaded before the wait for the other parts."""
    mask = n_mask[:, None] & x_mask[None, :]
    x = tl.load(x_in_ptr + xt[None, :] * H + n[:, None], mask=mask, other=0.0)
    return x, tl.load(norm_ptr + n, mask=n_mask, other=0.0)


@triton.jit
def add_to_residual(
    y,
    x,
    norm,
    tile,
    n,
    n_mask,
    xt,
    x_mask,
    n_rows,
    x_ptr,
    scaled_ptr,
    digits_ptr,
    squares_ptr,
    steps_ptr,
    H: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """x + y for a [BN, T] tile of the residual stream, and what the next norm needs (`Residual`)."""
    where = xt[None, :] * H + n[:, None]
    mask = n_mask[:, None] & x_mask[None, :]
    x = (x.to(tl.float32) + y).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + where, x, mask=mask)
    x = x.to(tl.float32)
    scaled = x * (1.0 + norm.to(tl.float32))[:, None]
    tl.store(scaled_ptr + where, scaled.to(scaled_ptr.dtype.element_ty), mask=mask)
    square = tl.sum(tl.where(mask, x * x, 0.0).to(tl.float64), axis=0)  # fp64: see inverse_rms
    tl.store(squares_ptr + tile * n_rows + xt, square.to(tl.float32), mask=x_mask)
    if DIGITS:
        store_digits(scaled, n, mask, tile, xt, x_mask, n_rows, digits_ptr, steps_ptr, H)
