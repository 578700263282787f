"""Sparse attention of prompts: the index by hand-made attention, the sums by masks, the kernel by both."""

from __future__ import annotations

import pytest
import torch
from kernels_common import DEVICE, DTYPE, assert_close, rows
from torch import Tensor

from onebox.kernels.sparse_attention import page_lists, sparse_attend
from onebox.kernels.sparse_attention_ref import (
    PAGE,
    SPAN,
    HeadPattern,
    SparseIndex,
    reads_ref,
    retained_ref,
    sparse_attention_ref,
    sparse_index_ref,
)

H, HKV, D = 4, 2, 32
PATTERNS = (
    HeadPattern("vertical_slash", columns=100, pages=3),
    HeadPattern("a_shape", pages=3, sink=2),
    HeadPattern("block_sparse", pages=4),
    HeadPattern(),
)


def heads(length: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q [length - first, H, D], k, v [length, Hkv, D]; rows of a position are always the same."""
    q = rows(4096, H, D, seed=1)[first:length]
    return q, rows(4096, HKV, D, seed=2)[:length], rows(4096, HKV, D, seed=3)[:length]


def test_dense_heads_read_everything() -> None:
    q, k, v = heads(200)
    index = sparse_index_ref(q, k, 0, [HeadPattern()] * H)
    assert torch.equal(reads_ref(index, 200), torch.ones(H, 200, 200, device=DEVICE).tril().bool())
    full = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    assert_close(sparse_attention_ref(q, k, v, index), full, 2e-3)


def test_more_columns_than_keys_read_everything() -> None:
    q, k, v = heads(SPAN + 200)
    every = [HeadPattern("vertical_slash", columns=4 * SPAN, pages=1)] * H
    for length in (150, 300, SPAN + 200):
        index = sparse_index_ref(q[:length], k[:length], 0, every)
        assert torch.equal(reads_ref(index, length), torch.ones(H, length, length, device=DEVICE).tril().bool())
        assert sparse_attention_ref(q[:length], k[:length], v[:length], index).isfinite().all()


def test_each_pattern_reads_what_its_name_says() -> None:
    length = 3 * SPAN
    q, k, _ = heads(length)
    reads = reads_ref(sparse_index_ref(q, k, 0, PATTERNS), length).cpu()
    row = 2 * SPAN + 5 * PAGE + 7  # inside a span, and not among the rows that are observed
    page = row // PAGE
    vertical, a_shape, block, dense = reads[:, row]
    assert dense[: row + 1].all() and not dense[row + 1 :].any()
    want = torch.zeros(length, dtype=torch.bool)
    want[: 2 * PAGE] = True
    want[(page - 2) * PAGE : row + 1] = True
    assert torch.equal(a_shape, want)
    pages = block[: page * PAGE].view(-1, PAGE).any(-1)
    assert pages.sum() in range(4, 7) and pages[0] and pages[page - 1]  # four chosen, the first, the one before
    assert 100 <= vertical[: row + 1].sum() <= 100 + 6 * PAGE + 8


def test_the_last_rows_of_every_span_and_of_the_prompt_are_dense() -> None:
    length = 2 * SPAN + 300
    q, k, _ = heads(length)
    reads = reads_ref(sparse_index_ref(q, k, 0, [PATTERNS[1]] * H), length)
    position = torch.arange(length, device=DEVICE)
    dense = (reads.sum(-1) == position + 1).all(0)
    for end in (SPAN, 2 * SPAN, length):
        assert dense[end - 64 : end].all()
    assert not dense[SPAN + 5 * PAGE] and not dense[2 * SPAN + 10]


def test_spans_below_the_threshold_are_dense() -> None:
    q, k, _ = heads(3 * SPAN)
    reads = reads_ref(sparse_index_ref(q, k, 0, [PATTERNS[1]] * H, sparse_from=SPAN + 1), 3 * SPAN)
    count = reads[0].sum(-1).cpu()
    assert torch.equal(count[: 2 * SPAN], torch.arange(2 * SPAN) + 1)
    assert (count[2 * SPAN + 2 * PAGE : 3 * SPAN - 64] < SPAN).all()


def test_a_column_and_a_diagonal_that_hold_the_weight_are_found() -> None:
    """Keys made so that late rows look at one far position, and every row at what stood ten pages before it."""
    length, far, lag = 2 * SPAN, 333, 10 * PAGE
    g = torch.Generator().manual_seed(5)
    own = torch.nn.functional.normalize(torch.randn(length, 1, D, generator=g), dim=-1)
    beacon = torch.nn.functional.normalize(torch.randn(D, generator=g), dim=0)
    k = own.clone()
    k[far] = beacon
    q = 150 * (own.roll(lag, 0) + beacon)
    index = sparse_index_ref(q, k, 0, [HeadPattern("vertical_slash", columns=1, pages=1)])
    tile = (SPAN + 4 * PAGE) // PAGE
    assert index.columns[1, 0].tolist() == [far]
    assert index.seen[tile, 0].nonzero().flatten().tolist() == [0, tile - 10, tile - 1, tile]
    assert float(retained_ref(q[SPAN:], k, sparse_index_ref(q[SPAN:], k, SPAN, [PATTERNS[0]]))[0]) > 0.9


def test_an_index_does_not_depend_on_where_a_prompt_was_cut_at_spans() -> None:
    length = 3 * SPAN + 100
    q, k, v = heads(length)
    whole = sparse_attention_ref(q, k, v, sparse_index_ref(q, k, 0, PATTERNS))
    at, done = 0, []
    for end in (2 * SPAN, length):
        index = sparse_index_ref(q[at:end], k[:end], at, PATTERNS)
        done.append(sparse_attention_ref(q[at:end], k[:end], v[:end], index))
        at = end
    assert_close(torch.cat(done), whole, 1e-3)


@pytest.mark.parametrize("length", [1, 63, 64, 65, SPAN - 1, SPAN + 1])
def test_odd_lengths(length: int) -> None:
    q, k, v = heads(length)
    index = sparse_index_ref(q, k, 0, PATTERNS)
    out = sparse_attention_ref(q, k, v, index)
    assert out.shape == q.shape and torch.isfinite(out).all()
    assert reads_ref(index, length).diagonal(dim1=1, dim2=2).all()  # every row reads its own position


@pytest.mark.parametrize("length", [65, 130, 300])
def test_more_columns_and_pages_than_there_are_keys(length: int) -> None:
    """A prompt shorter than its pattern's columns reads what it has."""
    q, k, v = heads(length)
    for kind in ("vertical_slash", "block_sparse", "a_shape"):
        index = sparse_index_ref(q, k, 0, (HeadPattern(kind, columns=1024, pages=32),) * q.shape[1])
        assert_close(sparse_attention_ref(q, k, v, index), sparse_attention_ref(q, k, v, whole(q, k)), 1e-2)


def whole(q: Tensor, k: Tensor) -> SparseIndex:
    return sparse_index_ref(q, k, 0, (HeadPattern(),) * q.shape[1])


def run_kernel(index: SparseIndex, q: Tensor, k: Tensor, v: Tensor, kv_start: int = 0) -> tuple[Tensor, Tensor]:
    """The kernel's and the reference's gated outputs; pages in random order, NaN past the end."""
    n = -(-len(k) // PAGE)
    table = 1 + torch.randperm(n, generator=torch.Generator().manual_seed(7))
    pages = torch.full((n + 1, 2, PAGE, HKV, D), float("nan"), dtype=DTYPE, device=DEVICE)
    key = torch.arange(len(k))
    for i, x in enumerate((k, v)):
        pages[table[key // PAGE], i, key % PAGE] = x
    qkv = rows(len(q), 2 * H * D + 2 * HKV * D, seed=11)
    out = torch.full((len(q), H * D), float("nan"), dtype=DTYPE, device=DEVICE)
    sparse_attend(q.contiguous(), qkv, pages, table.to(DEVICE), index, out, kv_start)
    gate = qkv[:, : 2 * H * D].unflatten(-1, (H, 2, D))[:, :, 1].float().sigmoid()
    want = sparse_attention_ref(q, k, v, index, kv_start).float() * gate
    return out, want.to(DTYPE).flatten(-2)


@pytest.mark.parametrize(("first", "length"), [(0, 70), (130, 400), (SPAN - 64, SPAN + 300)])
@pytest.mark.parametrize("kv_start", [0, 1])
def test_the_kernel_equals_its_mathematics(first: int, length: int, kv_start: int) -> None:
    q, k, v = heads(length, first)
    index = sparse_index_ref(q, k, first, PATTERNS)
    assert_close(*run_kernel(index, q, k, v, kv_start))


def test_the_kernel_counts_a_column_inside_a_listed_page_once() -> None:
    """Columns everywhere, some in pages that the tile reads whole, some past the rows."""
    length = 3 * PAGE
    q, k, v = heads(length, PAGE)
    seen = torch.zeros(2, H, 3, dtype=torch.bool, device=DEVICE)
    seen[:, :, 0] = True
    columns = torch.arange(0, length, 2, device=DEVICE).expand(1, H, -1).contiguous()
    index = SparseIndex(PAGE, seen, columns, torch.full((2, H), columns.shape[-1], device=DEVICE))
    assert_close(*run_kernel(index, q, k, v))


def test_lists_hold_every_seen_page_in_order() -> None:
    seen = torch.rand(5, H, 17, generator=torch.Generator().manual_seed(2)) < 0.4
    lists, counts = page_lists(seen)
    for tile in range(5):
        for head in range(H):
            found = lists[tile, head, : counts[tile, head]].tolist()
            assert found == seen[tile, head].nonzero().flatten().tolist()


@pytest.mark.parametrize("bad", [{"kind": "spiral"}, {"kind": "a_shape", "pages": -1}, {"columns": 1.5}])
def test_a_pattern_that_means_nothing_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"spiral|pages|columns"):
        HeadPattern(**bad)  # type: ignore[arg-type]
