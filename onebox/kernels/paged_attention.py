"""Decode attention over KV pages: head norms, rotary positions and KV write in one launch, then split attention.

A sequence's pages are read once for TILE query rows (heads that share keys, times window rows). They are cut into
chunks by the row's own position alone, tiles have one height, and chunks are merged in order: a row's sums depend
neither on its neighbours in the batch nor on how many rows its window has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels import configs
from onebox.kernels.linear import Workspace, inline_asm, launch
from onebox.kernels.paged_attention_ref import PAGE_SIZE, Pages, heads_of
from onebox.kernels.tile import launch_next, paired_column, positioned, wait_previous
from onebox.kernels.turboquant import bits_of, load_scales, load_tile, rotate_and_code, turn_back
from onebox.kernels.turboquant_ref import QuantizedPages

MAX_CHUNKS = 128
TILE = 64  # query rows of a program, whatever the window: another height is another order of sums in the tensor cores


@triton.jit
def _rotate_kernel(
    qkv_ptr, qkv_stride, q_ptr, pages_ptr, kv_slot_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    t, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    wait_previous(PDL)
    slot = tl.load(kv_slot_ptr + t).to(tl.int64)
    row = qkv_ptr + t.to(tl.int64) * qkv_stride  # passes 2**31 in a long prompt
    if head < HQ + HKV:
        is_q = head < HQ
        source = row + tl.where(is_q, head * 2 * D, HQ * 2 * D + (head - HQ) * D)
        norm_ptr = q_norm_ptr if is_q else k_norm_ptr
        other = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))  # the rotation's partner dimension
        x, y = tl.load(source + d).to(tl.float32), tl.load(source + other).to(tl.float32)
        rms = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        dtype = q_ptr.dtype.element_ty
        weight, partner = tl.load(norm_ptr + d).to(tl.float32), tl.load(norm_ptr + other).to(tl.float32)
        turn = t * HALF + d % HALF
        cos = tl.load(cos_ptr + turn, mask=d < 2 * HALF, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + turn, mask=d < 2 * HALF, other=0.0).to(tl.float32)
        x = positioned(x, y, weight, partner, rms, cos, sin, d < HALF, dtype)
        if is_q:
            tl.store(q_ptr + (t.to(tl.int64) * HQ + head) * D + d, x.to(dtype))
        else:
            at = (slot // PAGE * 2 * PAGE + slot % PAGE) * HKV + head - HQ
            tl.store(pages_ptr + at * D + d, x.to(pages_ptr.dtype.element_ty))
    else:
        v = tl.load(row + HQ * 2 * D + (head - HQ) * D + d)
        at = ((slot // PAGE * 2 + 1) * PAGE + slot % PAGE) * HKV + head - HQ - HKV
        tl.store(pages_ptr + at * D + d, v.to(pages_ptr.dtype.element_ty))


@triton.jit
def _pages_a_chunk(n_pages, CHUNKS: tl.constexpr):
    """Least power of two that cuts a sequence's pages into at most CHUNKS chunks."""
    size = 1
    while size * CHUNKS < n_pages:
        size *= 2
    return size


@triton.jit
def _chunk_size(n_pages, size, CHUNKS: tl.constexpr):
    """`size` where it is what `_pages_a_chunk` gives for [M] numbers of pages, else something else."""
    enough = size * CHUNKS >= n_pages
    needed = (size == 1) | ((size // 2) * CHUNKS < n_pages)
    return tl.where(enough & needed, size, 0)


@triton.jit
def _attend_kernel(
    q_ptr, pages_ptr, levels_ptr, page_table_ptr, n_table, positions_ptr, query_start_ptr, kv_start, partial_ptr, scale,
    KEYS: tl.constexpr, VALUES: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    PAGE: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    chunk, b = tl.program_id(0), tl.program_id(2)
    hkv, tile = tl.program_id(1) % HKV, tl.program_id(1) // HKV
    G: tl.constexpr = HQ // HKV
    wait_previous(PDL)
    first, end = tl.load(query_start_ptr + b).to(tl.int32), tl.load(query_start_ptr + b + 1).to(tl.int32)
    m, d, e = tl.arange(0, M), tl.arange(0, D), tl.arange(0, PAGE)
    t = first + (tile * M + m) // G
    head = hkv * G + (tile * M + m) % G
    inside_window = t < end
    position = tl.load(positions_ptr + t, mask=inside_window, other=-1).to(tl.int32)
    most = tl.max(position, axis=0)
    if most >= 0:
        least = tl.min(tl.where(inside_window, position, 2147483647), axis=0)
        size = _pages_a_chunk(least // PAGE + 1, CHUNKS)
        largest = _pages_a_chunk(most // PAGE + 1, CHUNKS)
        while size <= largest:  # once, but for a window that reaches over the length where chunks double
            live = inside_window & (_chunk_size(position // PAGE + 1, size, CHUNKS) == size)
            length = tl.max(tl.where(live, position, -1), axis=0) + 1
            n_pages = (length + PAGE - 1) // PAGE
            if chunk * size < n_pages:
                q = tl.load(q_ptr + (t * HQ + head)[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
                best = tl.full([M], float("-inf"), tl.float32)
                total = tl.zeros([M], tl.float32)
                acc = tl.zeros([M, D], tl.float32)
                for p in tl.range(chunk * size, tl.minimum((chunk + 1) * size, n_pages), num_stages=STAGES):
                    page = tl.load(page_table_ptr + b * n_table + p).to(tl.int64)
                    entry = p * PAGE + e
                    inside = (entry < length) & (entry >= kv_start)
                    k = load_tile(
                        pages_ptr, levels_ptr, page, e[None, :], hkv, d[:, None], inside[None, :], 0, KEYS, VALUES,
                        HKV, D, PAGE, q.dtype, ASM,
                    )  # fmt: skip
                    v = load_tile(
                        pages_ptr, levels_ptr, page, e[:, None], hkv, d[None, :], inside[:, None], 1, KEYS, VALUES,
                        HKV, D, PAGE, q.dtype, ASM,
                    )  # fmt: skip
                    s = tl.dot(q, k) * scale
                    if KEYS > 0:
                        k_scale = load_scales(pages_ptr, page, e, hkv, inside, 0, KEYS, VALUES, HKV, D, PAGE)
                        s = s * k_scale[None, :]
                    s = tl.where(inside[None, :] & (entry[None, :] <= position[:, None]), s, float("-inf"))
                    top = tl.maximum(best, tl.max(s, axis=1))
                    safe = tl.where(top == float("-inf"), 0.0, top)  # a row that may not see anything yet
                    w = tl.exp2(s - safe[:, None])
                    keep = tl.exp2(best - safe)
                    total = total * keep + tl.sum(w, axis=1)
                    if VALUES > 0:
                        v_scale = load_scales(pages_ptr, page, e, hkv, inside, 1, KEYS, VALUES, HKV, D, PAGE)
                        w = w * v_scale[None, :]
                    acc = tl.dot(w.to(q.dtype), v, acc * keep[:, None])
                    best = top
                at = ((t * HQ + head) * CHUNKS + chunk) * (D + 2)
                tl.store(partial_ptr + at[:, None] + d[None, :], acc, mask=live[:, None])
                tl.store(partial_ptr + at + D, best, mask=live)
                tl.store(partial_ptr + at + D + 1, total, mask=live)
            size *= 2


@triton.jit
def _merge_kernel(
    partial_ptr, qkv_ptr, qkv_stride, out_ptr, positions_ptr,
    HQ: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    PAIRED: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    t, head = tl.program_id(0), tl.program_id(1)
    d, c = tl.arange(0, D), tl.arange(0, BLOCK)
    wait_previous(PDL)
    n_pages = tl.load(positions_ptr + t).to(tl.int32) // PAGE + 1
    size = _pages_a_chunk(n_pages, CHUNKS)
    n_chunks = (n_pages + size - 1) // size
    row = partial_ptr + (t * HQ + head) * CHUNKS * (D + 2)
    best = float("-inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for first in range(0, n_chunks, BLOCK):
        at = row + (first + c) * (D + 2)
        here = first + c < n_chunks
        tops = tl.load(at + D, mask=here, other=float("-inf"))
        top = tl.maximum(best, tl.max(tops, axis=0))
        safe = tl.where(top == float("-inf"), 0.0, top)
        w = tl.exp2(tops - safe)
        keep = tl.exp2(best - safe)
        sums = tl.load(at + D + 1, mask=here, other=0.0)
        values = tl.load(at[:, None] + d[None, :], mask=here[:, None], other=0.0)
        total = total * keep + tl.sum(sums * w, axis=0)
        acc = acc * keep + tl.sum(values * w[:, None], axis=0)
        best = top
    out = tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), 0.0)
    if GATED:
        out *= tl.sigmoid(tl.load(qkv_ptr + t * qkv_stride + head * 2 * D + D + d).to(tl.float32))
    column = head * D + d
    column = paired_column(column) if PAIRED else column
    tl.store(out_ptr + t * HQ * D + column, out.to(out_ptr.dtype.element_ty))


def rotate_and_write(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rope: tuple[Tensor, Tensor],
    pages: Pages,
    kv_slot: Tensor,
    n_heads: int,
    eps: float,
) -> Tensor:
    """Head norms and rotary positions of qkv [T, 2 H D + 2 Hkv D]; keys and values go to `pages`.

    Gives q [T, H, D], turned as the pages' keys are.
    """
    if isinstance(pages, QuantizedPages):
        return rotate_and_code(qkv, q_norm, k_norm, rope, pages, kv_slot, n_heads, eps)
    rows, (n_kv, d), (cos, sin) = qkv.shape[0], heads_of(pages), rope
    q = torch.empty(rows, n_heads, d, dtype=qkv.dtype, device=qkv.device)
    _rotate_kernel[(rows, n_heads + 2 * n_kv)](
        qkv, qkv.stride(0), q, pages, kv_slot, cos, sin, q_norm, k_norm, eps,
        HQ=n_heads, HKV=n_kv, D=d, HALF=cos.shape[-1], PAGE=PAGE_SIZE, **launch(qkv.device, 2),
    )  # fmt: skip
    return q


def gated_attention(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rope: tuple[Tensor, Tensor],
    pages: Pages,
    page_table: Tensor,
    kv_slot: Tensor,
    positions: Tensor,
    query_start: Tensor,
    max_query: int,
    n_heads: int,
    eps: float,
    workspace: Workspace,
    kv_start: int = 0,
    paired: bool = False,
) -> Tensor:
    """Everything between an attention layer's projections: [T, H D], already gated.

    qkv [T, 2 H D + 2 Hkv D] holds each head's query and gate, then keys, then values; rope = cos, sin [T, 1, half];
    pages [P, 2, PAGE_SIZE, Hkv, D], or in a format, get the rows' keys and values first. Entries below `kv_start` are
    never read. Rows of a sequence rise in position; at most `max_query` of them. `paired` lays the result's columns out
    as `wants_pairs` says. A format that turns values takes a launch more.
    """
    rows, (n_kv, d) = qkv.shape[0], heads_of(pages)
    device, batch = qkv.device, page_table.shape[0]
    c = configs.config("attention" if isinstance(pages, Tensor) else "attention_coded", device)
    q = rotate_and_write(qkv, q_norm, k_norm, rope, pages, kv_slot, n_heads, eps)
    out = torch.empty(rows, n_heads * d, dtype=qkv.dtype, device=device)
    chunks = min(MAX_CHUNKS, page_table.shape[1])
    chunks = triton.next_power_of_2(chunks)
    needed = rows * n_heads * chunks * (d + 2)
    assert needed <= workspace.partial.numel(), f"workspace holds {workspace.partial.numel()} of {needed} floats"
    tiles = triton.cdiv(max_query * (n_heads // n_kv), TILE)
    data, levels, format_of = operands(pages, qkv.dtype)
    _attend_kernel[(chunks, n_kv * tiles, batch)](
        q, data, levels, page_table, page_table.shape[1], positions, query_start, kv_start, workspace.partial,
        d**-0.5 * 1.4426950408889634,
        **format_of, HQ=n_heads, HKV=n_kv, D=d, M=TILE, PAGE=PAGE_SIZE, CHUNKS=chunks, STAGES=c.stages,
        ASM=inline_asm(qkv), **launch(device, c.warps),
    )  # fmt: skip
    turned = turns_values(pages)
    _merge_kernel[(rows, n_heads)](
        workspace.partial, qkv, qkv.stride(0), out, positions,
        HQ=n_heads, D=d, PAGE=PAGE_SIZE, CHUNKS=chunks, BLOCK=min(chunks, 16), PAIRED=paired and not turned,
        GATED=not turned, **launch(device, 4),
    )  # fmt: skip
    if turned:
        assert isinstance(pages, QuantizedPages)
        return turn_back(out.view(rows, n_heads, d), pages, qkv, paired)
    return out


def operands(pages: Pages, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, int]]:
    """What an attention kernel reads pages by: their data, levels, and the format as its constants."""
    if isinstance(pages, Tensor):
        return pages, pages, {"KEYS": 0, "VALUES": 0}
    return (
        pages.data,
        pages.operands(dtype).levels,
        {"KEYS": bits_of(pages.format.k), "VALUES": bits_of(pages.format.v)},
    )


def turns_values(pages: Pages) -> bool:
    """Whether sums of the pages' values are still to be turned back."""
    return isinstance(pages, QuantizedPages) and pages.v_turn is not None
