"""Sparse attention of prompts over KV pages: a tile of a page's rows reads the pages on its list, then single columns.

The index comes from `sparse_attention_ref`, which is a small part of the work; this is the large one. Columns that lie
in a page of the list are masked, so that nothing counts twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels import configs
from onebox.kernels.paged_attention_ref import PAGE_SIZE
from onebox.kernels.prefill_attention import LOG2_E, attend_page, gather_sums, store_gated
from onebox.kernels.sparse_attention_ref import PAGE, SparseIndex

assert PAGE == PAGE_SIZE


@triton.jit
def _sparse_kernel(
    q_ptr, pages_ptr, table_ptr, list_ptr, count_ptr, n_list, seen_ptr, n_pages, columns_ptr, n_columns_ptr,
    span_ptr, most_columns, first, n_rows, kv_start, gate_ptr, gate_stride, out_ptr, scale, n_tiles,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
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
        page = tl.load(table_ptr + p).to(tl.int64)
        best, total, acc = attend_page(
            q, best, total, acc, pages_ptr, page, p * PAGE + e, position, most, kv_start, scale, head // hkv, HKV, D,
            PAGE,
        )  # fmt: skip
    n_columns = tl.load(n_columns_ptr + mine).to(tl.int32)
    at = columns_ptr + (tl.load(span_ptr + tile).to(tl.int64) * HQ + head) * most_columns
    for c in tl.range(0, n_columns, PAGE, num_stages=STAGES):
        key = tl.load(at + c + e, mask=c + e < n_columns, other=0)
        inside = (c + e < n_columns) & (key >= kv_start) & (key <= most)
        inside &= tl.load(seen_ptr + mine * n_pages + key // PAGE, mask=inside, other=1) == 0
        page = tl.load(table_ptr + key // PAGE, mask=inside, other=0).to(tl.int64)
        entry = ((page * 2 * PAGE + key % PAGE) * HKV + head // hkv) * D
        k = tl.load(pages_ptr + entry[None, :] + d[:, None], mask=inside[None, :], other=0.0)
        v = tl.load(pages_ptr + (entry + PAGE * HKV * D)[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        s = tl.dot(q, k.to(q.dtype)) * scale
        best, total, acc = gather_sums(s, inside[None, :] & (key[None, :] <= position[:, None]), v, q, best, total, acc)
    store_gated(acc, total, gate_ptr, gate_stride, out_ptr, t, live, head, HQ, D)


def page_lists(seen: Tensor) -> tuple[Tensor, Tensor]:
    """The pages that are seen [tiles, H, pages], rising, as int32 [tiles, H, pages], and how many [tiles, H]."""
    place = seen.cumsum(-1, dtype=torch.int32)
    n = seen.shape[-1]
    lists = torch.zeros(*seen.shape[:-1], n + 1, dtype=torch.int32, device=seen.device)
    at = torch.where(seen, place - 1, n).long()
    page = torch.arange(n, dtype=torch.int32, device=seen.device).expand_as(at)
    return lists.scatter_(-1, at, page)[..., :n].contiguous(), place[..., -1].contiguous()


def sparse_attend(
    q: Tensor, qkv: Tensor, pages: Tensor, page_table: Tensor, index: SparseIndex, out: Tensor, kv_start: int = 0
) -> None:
    """One sequence's turned queries q [T, H, D] over its pages, times the gates of qkv, into out [T, H D].

    pages [P, 2, PAGE_SIZE, Hkv, D] hold the rows' keys already; page_table [n] is the sequence's.
    """
    (n_rows, n_heads, d), device = q.shape, q.device
    assert q.is_contiguous() and out.is_contiguous() and qkv.stride(1) == 1 and page_table.is_contiguous()
    lists, counts = page_lists(index.seen)
    c = configs.config("prefill_attention", device)
    n_tiles, _, n_pages = index.seen.shape
    _sparse_kernel[(n_heads, n_tiles)](
        q, pages, page_table, lists, counts, n_pages, index.seen.to(torch.uint8), n_pages,
        index.columns.to(torch.int32), index.n_columns.to(torch.int32), index.tile_span.to(torch.int32),
        index.columns.shape[-1], index.first, n_rows, kv_start, qkv, qkv.stride(0), out, d**-0.5 * LOG2_E, n_tiles,
        HQ=n_heads, HKV=pages.shape[3], D=d, PAGE=PAGE_SIZE, STAGES=c.stages, num_warps=c.warps,
    )  # fmt: skip
