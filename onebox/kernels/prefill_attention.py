"""Attention of prompts' chunks over KV pages: the chunk's rows and every page before them, a tile of rows a program.

A row goes through its pages in order, 64 entries at a time, with a running maximum (Dao: FlashAttention-2, arXiv
2307.08691). Its sums therefore depend neither on the other rows of its tile nor on the chunk it came in: what a tile's
other rows make it read is masked, and adds nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels import configs
from onebox.kernels.linear import inline_asm
from onebox.kernels.paged_attention import operands, rotate_and_write, turns_values
from onebox.kernels.paged_attention_ref import PAGE_SIZE, Pages, heads_of
from onebox.kernels.row_tiles import RowTiles
from onebox.kernels.turboquant import load_scales, load_tile, turn_back
from onebox.kernels.turboquant_ref import QuantizedPages

LOG2_E = 1.4426950408889634


@triton.jit
def attend_entries(
    q, best, total, acc, pages_ptr, levels_ptr, page, entry, inside, position, scale, hkv, KEYS: tl.constexpr,
    VALUES: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Entries [N] up to `position` into the running sums of a tile of rows q [M, D]. They lie in `page` (int64; one, or
    one an entry); those that are not `inside` may hold anything."""
    d, e = tl.arange(0, D), entry % PAGE
    k_page, v_page = page, page
    if len(page.shape) == 1:
        k_page, v_page = page[None, :], page[:, None]
    k = load_tile(
        pages_ptr, levels_ptr, k_page, e[None, :], hkv, d[:, None], inside[None, :], 0, KEYS, VALUES, HKV, D, PAGE,
        q.dtype, ASM,
    )  # fmt: skip
    v = load_tile(
        pages_ptr, levels_ptr, v_page, e[:, None], hkv, d[None, :], inside[:, None], 1, KEYS, VALUES, HKV, D, PAGE,
        q.dtype, ASM,
    )  # fmt: skip
    s = tl.dot(q, k) * scale
    if KEYS > 0:
        s = s * load_scales(pages_ptr, page, e, hkv, inside, 0, KEYS, VALUES, HKV, D, PAGE)[None, :]
    s = tl.where(inside[None, :] & (entry[None, :] <= position[:, None]), s, float("-inf"))
    top = tl.maximum(best, tl.max(s, axis=1))
    safe = tl.where(top == float("-inf"), 0.0, top)  # a row that may not see anything yet
    w = tl.exp2(s - safe[:, None])
    keep = tl.exp2(best - safe)
    total = total * keep + tl.sum(w, axis=1)
    if VALUES > 0:
        w = w * load_scales(pages_ptr, page, e, hkv, inside, 1, KEYS, VALUES, HKV, D, PAGE)[None, :]
    acc = tl.dot(w.to(q.dtype), v, acc * keep[:, None])
    return top, total, acc


@triton.jit
def store_gated(
    acc, total, gate_ptr, gate_stride, out_ptr, t, live, head, HQ: tl.constexpr, D: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """acc / total, times the sigmoid of the head's gate if GATED. A row that saw nothing gives zeros."""
    d = tl.arange(0, D)
    wide = t.to(tl.int64)[:, None]
    total = total[:, None]
    out = tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), 0.0)
    if GATED:
        gate = tl.load(gate_ptr + wide * gate_stride + (head * 2 * D + D + d)[None, :], mask=live[:, None], other=0.0)
        out *= tl.sigmoid(gate.to(tl.float32))
    at = out_ptr + wide * (HQ * D) + (head * D + d)[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def _attend_kernel(
    q_ptr, pages_ptr, levels_ptr, page_table_ptr, n_table, sequence_ptr, first_ptr, query_start_ptr, context_ptr,
    kv_start, gate_ptr, gate_stride, out_ptr, scale, n_tiles,
    KEYS: tl.constexpr, VALUES: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    PAGE: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    # heads of one tile side by side, so that they find its pages in L2; the latest tiles, which read most, first
    head, tile = tl.program_id(0), n_tiles - 1 - tl.program_id(1)
    b = tl.load(sequence_ptr + tile)
    if b >= 0:
        begin, end = tl.load(query_start_ptr + b).to(tl.int32), tl.load(query_start_ptr + b + 1).to(tl.int32)
        context = tl.load(context_ptr + b).to(tl.int32)
        t = tl.load(first_ptr + tile) + tl.arange(0, M)
        live = (t >= begin) & (t < end)
        position = tl.where(live, context + t - begin, -1)
        d, e = tl.arange(0, D), tl.arange(0, PAGE)
        wide = t.to(tl.int64)[:, None]
        q = tl.load(q_ptr + (wide * HQ + head) * D + d[None, :], mask=live[:, None], other=0.0)
        best = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D], tl.float32)
        table = page_table_ptr + b.to(tl.int64) * n_table
        most = tl.max(position, axis=0)
        for p in tl.range(0, most // PAGE + 1, num_stages=STAGES):
            page, entry = tl.load(table + p).to(tl.int64), p * PAGE + e
            inside = (entry >= kv_start) & (entry <= most)
            best, total, acc = attend_entries(
                q, best, total, acc, pages_ptr, levels_ptr, page, entry, inside, position, scale, head // (HQ // HKV),
                KEYS, VALUES, HKV, D, PAGE, ASM,
            )  # fmt: skip
        store_gated(acc, total, gate_ptr, gate_stride, out_ptr, t, live, head, HQ, D, GATED)


def tile_rows(device: torch.device) -> int:
    """Query rows of a program. One height a device: another is another order of sums in the tensor cores."""
    return configs.config("prefill_attention", device).block_n


def launch_config(pages: Pages, device: torch.device) -> configs.Config:
    """Warps and stages; tiles that are decoded pass through more shared memory."""
    return configs.config("prefill_attention" if isinstance(pages, Tensor) else "prefill_attention_coded", device)


def gated_prefill_attention(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rope: tuple[Tensor, Tensor],
    pages: Pages,
    page_table: Tensor,
    kv_slot: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    n_heads: int,
    eps: float,
    tiles: RowTiles,
    kv_start: int = 0,
) -> Tensor:
    """What `gated_attention_ref` gives for prompts: [T, H D]. Two launches, three where the pages turn values.

    qkv [T, 2 H D + 2 Hkv D] holds each head's query and gate, then keys, then values; rope = cos, sin [T, 1, half];
    pages [P, 2, PAGE_SIZE, Hkv, D], or in a format, get the rows' keys and values first. Rows of sequence b are
    [query_start[b], query_start[b+1]) at positions context_len[b] and up. `tiles` are `row_tiles` of `tile_rows`.
    Entries below `kv_start` are never read.
    """
    q = rotate_and_write(qkv, q_norm, k_norm, rope, pages, kv_slot, n_heads, eps)
    return attend(q, qkv, pages, page_table, query_start, context_len, tiles, kv_start)


def attend(
    q: Tensor,
    qkv: Tensor,
    pages: Pages,
    page_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    tiles: RowTiles,
    kv_start: int = 0,
) -> Tensor:
    """Turned queries q [T, H, D] over pages that hold their keys already, times the gates of qkv: [T, H D]."""
    (n_rows, n_heads, d), (n_kv, _), device = q.shape, heads_of(pages), q.device
    c = launch_config(pages, device)
    assert tiles.size == tile_rows(device) and qkv.stride(1) == 1 and page_table.is_contiguous()
    out = torch.empty(n_rows, n_heads * d, dtype=q.dtype, device=device)
    data, levels, format_of = operands(pages, q.dtype)
    turned = turns_values(pages)
    _attend_kernel[(n_heads, tiles.n)](
        q, data, levels, page_table, page_table.shape[1], tiles.sequence, tiles.first, query_start, context_len,
        kv_start, qkv, qkv.stride(0), out, d**-0.5 * LOG2_E, tiles.n,
        **format_of, HQ=n_heads, HKV=n_kv, D=d, M=tiles.size, PAGE=PAGE_SIZE, STAGES=c.stages, ASM=inline_asm(q),
        GATED=not turned, num_warps=c.warps,
    )  # fmt: skip
    if turned:
        assert isinstance(pages, QuantizedPages)
        return turn_back(out.view(q.shape), pages, qkv)
    return out
