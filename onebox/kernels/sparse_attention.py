"""Sparse attention of prompts over KV pages: a tile of a page's rows reads the pages on its list, then single columns.

The index comes from `sparse_attention_ref`, which is a small part of the work; this is the large one. Columns that lie
in a page of the list are masked, so that nothing counts twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.linear import inline_asm
from onebox.kernels.paged_attention import operands, turns_values
from onebox.kernels.paged_attention_ref import PAGE_SIZE, Pages, heads_of
from onebox.kernels.prefill_attention import LOG2_E, attend_entries, launch_config, store_gated
from onebox.kernels.sparse_attention_ref import PAGE, SparseIndex
from onebox.kernels.turboquant import turn_back
from onebox.kernels.turboquant_ref import QuantizedPages

assert PAGE == PAGE_SIZE


@triton.jit
def _sparse_kernel(
    q_ptr, pages_ptr, levels_ptr, table_ptr, list_ptr, count_ptr, n_list, seen_ptr, n_pages, columns_ptr,
    n_columns_ptr, span_ptr, most_columns, first, n_rows, kv_start, gate_ptr, gate_stride, out_ptr, scale, n_tiles,
    KEYS: tl.constexpr, VALUES: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    # heads of one tile side by side, the latest tiles first
    head, tile = tl.program_id(0), n_tiles - 1 - tl.program_id(1)
    hkv: tl.constexpr = HQ // HKV
    d, e = tl.arange(0, D), tl.arange(0, PAGE)
    t = tile * PAGE - first % PAGE + e
    live = (t >= 0) & (t < n_rows)
    position = tl.where(live, first + t, -1)
    most = tl.max(position, axis=0)
    wide = t.to(tl.int64)[:, None]
    q = tl.load(q_ptr + (wide * HQ + head) * D + d[None, :], mask=live[:, None], other=0.0)
    best = tl.full([PAGE], float("-inf"), tl.float32)
    total = tl.zeros([PAGE], tl.float32)
    acc = tl.zeros([PAGE, D], tl.float32)
    mine = (tile * HQ + head).to(tl.int64)
    for i in tl.range(0, tl.load(count_ptr + mine), num_stages=STAGES):
        p = tl.load(list_ptr + mine * n_list + i)
        page, entry = tl.load(table_ptr + p).to(tl.int64), p * PAGE + e
        inside = (entry >= kv_start) & (entry <= most)
        best, total, acc = attend_entries(
            q, best, total, acc, pages_ptr, levels_ptr, page, entry, inside, position, scale, head // hkv, KEYS, VALUES,
            HKV, D, PAGE, ASM,
        )  # fmt: skip
    n_columns = tl.load(n_columns_ptr + mine).to(tl.int32)
    at = columns_ptr + (tl.load(span_ptr + tile).to(tl.int64) * HQ + head) * most_columns
    for c in tl.range(0, n_columns, PAGE, num_stages=STAGES):
        key = tl.load(at + c + e, mask=c + e < n_columns, other=0)
        inside = (c + e < n_columns) & (key >= kv_start) & (key <= most)
        inside &= tl.load(seen_ptr + mine * n_pages + key // PAGE, mask=inside, other=1) == 0
        page = tl.load(table_ptr + key // PAGE, mask=inside, other=0).to(tl.int64)
        best, total, acc = attend_entries(
            q, best, total, acc, pages_ptr, levels_ptr, page, key, inside, position, scale, head // hkv, KEYS, VALUES,
            HKV, D, PAGE, ASM,
        )  # fmt: skip
    store_gated(acc, total, gate_ptr, gate_stride, out_ptr, t, live, head, HQ, D, GATED)


def page_lists(seen: Tensor) -> tuple[Tensor, Tensor]:
    """The pages that are seen [tiles, H, pages], rising, as int32 [tiles, H, pages], and how many [tiles, H]."""
    place = seen.cumsum(-1, dtype=torch.int32)
    n = seen.shape[-1]
    lists = torch.zeros(*seen.shape[:-1], n + 1, dtype=torch.int32, device=seen.device)
    at = torch.where(seen, place - 1, n).long()
    page = torch.arange(n, dtype=torch.int32, device=seen.device).expand_as(at)
    return lists.scatter_(-1, at, page)[..., :n].contiguous(), place[..., -1].contiguous()


def sparse_attend(
    q: Tensor, qkv: Tensor, pages: Pages, page_table: Tensor, index: SparseIndex, out: Tensor, kv_start: int = 0
) -> None:
    """One sequence's turned queries q [T, H, D] over its pages, times the gates of qkv, into out [T, H D].

    pages [P, 2, PAGE_SIZE, Hkv, D], or in a format, hold the rows' keys already; page_table [n] is the sequence's.
    """
    (n_rows, n_heads, d), device = q.shape, q.device
    assert q.is_contiguous() and out.is_contiguous() and qkv.stride(1) == 1 and page_table.is_contiguous()
    lists, counts = page_lists(index.seen)
    c = launch_config(pages, device)
    n_tiles, _, n_pages = index.seen.shape
    data, levels, format_of = operands(pages, q.dtype)
    turned = turns_values(pages)
    _sparse_kernel[(n_heads, n_tiles)](
        q, data, levels, page_table, lists, counts, n_pages, index.seen.to(torch.uint8), n_pages,
        index.columns.to(torch.int32), index.n_columns.to(torch.int32), index.tile_span.to(torch.int32),
        index.columns.shape[-1], index.first, n_rows, kv_start, qkv, qkv.stride(0), out, d**-0.5 * LOG2_E, n_tiles,
        **format_of, HQ=n_heads, HKV=heads_of(pages)[0], D=d, PAGE=PAGE_SIZE, STAGES=c.stages, ASM=inline_asm(q),
        GATED=not turned, num_warps=c.warps,
    )  # fmt: skip
    if turned:
        assert isinstance(pages, QuantizedPages)
        out.copy_(turn_back(out.view(q.shape), pages, qkv))
