"""Decode attention over pages against its mathematics: lengths around page edges, windows, batches, first entries."""

from __future__ import annotations

import pytest
import torch
from kernels_common import DEVICE, DTYPE, assert_close, rows

from onebox.kernels import linear, paged_attention
from onebox.kernels.paged_attention_ref import PAGE_SIZE, gated_attention_ref

EPS = 1e-6
D, HALF = 32, 4


def run_both(
    contexts: list[int], lengths: list[int], heads: tuple[int, int] = (4, 2), kv_start: int = 0, n_table: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    n_heads, n_kv = heads
    total = sum(lengths)
    pages_of = [-(-(c + n) // PAGE_SIZE) for c, n in zip(contexts, lengths, strict=True)]
    n_pages = 1 + sum(pages_of)
    order = 1 + torch.randperm(n_pages - 1, generator=torch.Generator().manual_seed(3))
    table = torch.zeros(len(contexts), max(*pages_of, n_table), dtype=torch.long)
    used = 0
    for b, n in enumerate(pages_of):
        table[b, :n] = order[used : used + n]
        used += n
    positions = torch.cat([torch.arange(c, c + n) for c, n in zip(contexts, lengths, strict=True)])
    sequence = torch.repeat_interleave(torch.arange(len(contexts)), torch.tensor(lengths))
    slot = table[sequence, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    start = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    table, positions, slot, start = (x.to(DEVICE) for x in (table, positions, slot, start))
    pages = rows(n_pages, 2, PAGE_SIZE, n_kv, D, seed=5)
    for b, (c, n) in enumerate(zip(contexts, lengths, strict=True)):  # what lies past a sequence's end is never read
        if (c + n) % PAGE_SIZE:
            pages[table[b, (c + n - 1) // PAGE_SIZE], :, (c + n) % PAGE_SIZE :] = float("nan")
        if kv_start:
            pages[table[b, 0], :, :kv_start] = float("nan")
    qkv = rows(total, (2 * n_heads + 2 * n_kv) * D, seed=6)
    angle = rows(total, 1, HALF, seed=7).float() * 3
    rope = angle.cos().to(DTYPE), angle.sin().to(DTYPE)
    norms = rows(D, seed=8, scale=0.3), rows(D, seed=9, scale=0.3)
    a, b_pages = pages.clone(), pages.clone()
    space = linear.Workspace.allocate(1 << 23, DEVICE)
    common = (table, slot, positions, start, max(lengths), n_heads, EPS)
    got = paged_attention.gated_attention(qkv, *norms, rope, a, *common, space, kv_start=kv_start)
    want = gated_attention_ref(qkv, *norms, rope, b_pages, *common, kv_start=kv_start)
    return got, want, a, b_pages


@pytest.mark.parametrize("context", [0, 1, 62, 63, 64, 100, 300])
def test_one_row_attends_to_its_whole_context(context: int) -> None:
    got, want, a, b = run_both([context], [1])
    assert_close(got, want)
    assert torch.equal(a.isnan(), b.isnan())
    assert_close(a.nan_to_num(), b.nan_to_num(), 1e-3)


@pytest.mark.parametrize(("contexts", "lengths"), [([61], [5]), ([130, 0, 63], [3, 1, 2]), ([5, 200], [1, 1])])
def test_windows_are_causal_within_a_batch(contexts: list[int], lengths: list[int]) -> None:
    got, want, *_ = run_both(contexts, lengths)
    assert_close(got, want)


def test_sixteen_query_heads_share_one_key_head() -> None:
    got, want, *_ = run_both([70], [2], heads=(16, 1))
    assert_close(got, want)


def test_entries_below_the_first_valid_one_are_never_read() -> None:
    got, want, *_ = run_both([1, 66], [2, 1], kv_start=1)
    assert_close(got, want)


def test_more_pages_than_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "MAX_CHUNKS", 2)
    got, want, *_ = run_both([400, 10], [2, 1])
    assert_close(got, want)


def test_a_row_has_the_same_bits_alone_in_a_batch_and_beside_a_longer_table() -> None:
    alone, *_ = run_both([100], [1])
    wide, *_ = run_both([100], [1], n_table=8)
    assert torch.equal(alone, wide)


@pytest.mark.parametrize("heads", [(4, 2), (32, 2)])
@pytest.mark.parametrize("context", [60, 126, 254])
def test_a_row_has_the_same_bits_whatever_its_window(
    context: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of five rows over a page's edge, and over the length at which chunks double."""
    monkeypatch.setattr(paged_attention, "MAX_CHUNKS", 2)
    n_heads, n_kv = heads
    n, n_pages = 5, 6
    qkv = rows(n, (2 * n_heads + 2 * n_kv) * D, seed=6)
    angle = rows(n, 1, HALF, seed=7).float() * 3
    norms = rows(D, seed=8, scale=0.3), rows(D, seed=9, scale=0.3)
    pages = rows(1 + n_pages, 2, PAGE_SIZE, n_kv, D, seed=5)
    table = 1 + torch.arange(n_pages, device=DEVICE)[None]
    space = linear.Workspace.allocate(1 << 23, DEVICE)

    def attend(first: int, end: int) -> torch.Tensor:
        position = context + torch.arange(first, end, device=DEVICE)
        slot = table[0, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        rope = angle[first:end].cos().to(DTYPE), angle[first:end].sin().to(DTYPE)
        start = torch.tensor([0, end - first], device=DEVICE)
        return paged_attention.gated_attention(
            qkv[first:end], *norms, rope, pages, table, slot, position, start, end - first, n_heads, EPS, space
        )

    together = attend(0, n)
    assert torch.equal(together, torch.cat([attend(i, i + 1) for i in range(n)]))
    assert torch.equal(together, torch.cat([attend(0, 2), attend(2, n)]))
