"""Causal attention over paged keys and values, as plain mathematics."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from onebox.kernels.turboquant_ref import QuantizedPages

PAGE_SIZE = 64
Pages = Tensor | QuantizedPages  # one layer's: [P, 2, PAGE_SIZE, Hkv, D], or in a format of fewer bits


def heads_of(pages: Pages) -> tuple[int, int]:
    """Hkv and D."""
    if isinstance(pages, QuantizedPages):
        return pages.format.n_kv_heads, pages.format.head_dim
    return pages.shape[3], pages.shape[4]


def write_kv_ref(k: Tensor, v: Tensor, pages: Pages, kv_slot: Tensor) -> None:
    """Store k, v [T, Hkv, D] at kv_slot [T] (page * PAGE_SIZE + entry) of the pages, in place."""
    if isinstance(pages, QuantizedPages):
        pages.write(k, v, kv_slot)
        return
    page, entry = kv_slot // PAGE_SIZE, kv_slot % PAGE_SIZE
    pages[page, 0, entry] = k.to(pages.dtype)
    pages[page, 1, entry] = v.to(pages.dtype)


def paged_attention_ref(
    q: Tensor,
    pages: Pages,
    page_table: Tensor,
    positions: Tensor,
    query_start: list[int],
    kv_start: int = 0,
) -> Tensor:
    """Each row attends to entries [kv_start, position] of its sequence.

    q [T, H, D], pages [P, 2, PAGE_SIZE, Hkv, D] or in a format, page_table [B, n], positions [T]; rows of sequence b
    are [query_start[b], query_start[b+1]). Gives [T, H, D]. A row with no entry to attend to gives zeros.
    Keys and values stay rotated as they are stored: the queries are turned instead, and the sums turned back.
    """
    q = turned_queries(q, pages)
    out = torch.zeros_like(q)
    for b, (start, end) in enumerate(pairwise(query_start)):
        if start == end:
            continue
        length = int(positions[end - 1]) + 1  # positions rise within a sequence
        both = entries(pages, page_table[b, : -(-length // PAGE_SIZE)])
        k, v = (x[kv_start:length].transpose(0, 1).to(q.dtype) for x in both)
        rows = q[start:end].transpose(0, 1)
        entry = torch.arange(kv_start, length, device=q.device)
        mask = entry[None, :] <= positions[start:end, None]
        if end - start == 1:
            if length > kv_start:
                out[start] = F.scaled_dot_product_attention(rows[None], k[None], v[None], enable_gqa=True)[0, :, 0]
            continue
        attended = F.scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]
        out[start:end] = torch.where(mask.any(-1)[:, None, None], attended.transpose(0, 1), 0.0)
    return turned_back(out, pages)


def turned_queries(q: Tensor, pages: Pages) -> Tensor:
    """Queries [..., D] turned as the pages' keys are stored."""
    if isinstance(pages, QuantizedPages) and pages.k_turn is not None:
        return (q.float() @ pages.k_turn).to(q.dtype)
    return q


def turned_back(out: Tensor, pages: Pages) -> Tensor:
    """Sums of stored values [..., D], as they were before the pages turned them."""
    if isinstance(pages, QuantizedPages) and pages.v_turn is not None:
        return (out.float() @ pages.v_turn.T).to(out.dtype)
    return out


def entries(pages: Pages, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [n * PAGE_SIZE, Hkv, D] of pages ids [n], in order."""
    if isinstance(pages, QuantizedPages):
        return pages.read(ids)
    kv = pages[ids]
    return kv[:, 0].flatten(0, 1), kv[:, 1].flatten(0, 1)


def gated_attention_ref(
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
    kv_start: int = 0,
) -> Tensor:
    """Head norms, rotary positions, KV write, attention and output gate. qkv [T, 2 H D + 2 Hkv D] -> [T, H D]."""
    n_kv, d = heads_of(pages)
    half = rope[0].shape[-1]
    q, k, v = qkv.split((2 * n_heads * d, n_kv * d, n_kv * d), dim=-1)
    q, gate = q.unflatten(-1, (n_heads, 2, d)).unbind(-2)
    k, v = k.unflatten(-1, (n_kv, d)), v.unflatten(-1, (n_kv, d))

    def turned(x: Tensor, norm: Tensor) -> Tensor:
        y = x.float()
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * (1.0 + norm.float())).to(x.dtype).float()
        cos, sin = (r.float() for r in rope)
        a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)

    write_kv_ref(turned(k, k_norm), v, pages, kv_slot)
    starts = [int(s) for s in query_start]
    out = paged_attention_ref(turned(q, q_norm), pages, page_table, positions, starts, kv_start)
    return (out.float() * gate.float().sigmoid()).to(qkv.dtype).flatten(-2)
