"""Attention of prompts' chunks over pages against its mathematics: chunks, earlier pages, batches, first entries."""

from __future__ import annotations

import pytest
import torch
from kernels_common import DEVICE, DTYPE, assert_close, rows
from torch import Tensor

from onebox.kernels import prefill_attention
from onebox.kernels.paged_attention_ref import PAGE_SIZE, gated_attention_ref
from onebox.kernels.row_tiles import row_tiles

EPS = 1e-6
D, HALF = 32, 4


class Case:
    """Sequences of some length whose pages hold random keys and values up to where their rows begin."""

    def __init__(self, ends: list[int], heads: tuple[int, int] = (4, 2), width: int = D, seed: int = 3) -> None:
        self.n_heads, self.n_kv, self.width, self.longest = *heads, width, max(ends)
        n = [-(-end // PAGE_SIZE) for end in ends]
        order = 1 + torch.randperm(sum(n), generator=torch.Generator().manual_seed(seed))
        self.table = torch.zeros(len(ends), max(n) + 1, dtype=torch.long)
        for b, pages in enumerate(order.split(n)):
            self.table[b, : n[b]] = pages
        self.table = self.table.to(DEVICE)
        self.pages = rows(1 + sum(n), 2, PAGE_SIZE, self.n_kv, width, seed=seed)
        for b, end in enumerate(ends):  # what lies past a sequence's end is never read
            if end % PAGE_SIZE:
                self.pages[self.table[b, end // PAGE_SIZE], :, end % PAGE_SIZE :] = float("nan")
        self.norms = rows(width, seed=8, scale=0.3), rows(width, seed=9, scale=0.3)

    def rows_of(self, b: int, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """qkv and the rotation's angles of positions [first, end) of sequence b, always the same; and their slots."""
        position = torch.arange(end, device=DEVICE)
        qkv = rows(self.longest, (2 * self.n_heads + 2 * self.n_kv) * self.width, seed=60 + b)
        angle = rows(self.longest, 1, HALF, seed=70 + b).float() * 3
        slot = self.table[b, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        return qkv[first:end], angle[first:end], slot[first:]

    def run(self, chunks: list[tuple[int, int, int]], pages: Tensor, kv_start: int = 0, ref: bool = False) -> Tensor:
        """Chunks (sequence, first, end) in one launch, into `pages`: [T, H D]."""
        qkv, angle, slot = (torch.cat(x) for x in zip(*(self.rows_of(*c) for c in chunks), strict=True))
        rope = angle.cos().to(DTYPE), angle.sin().to(DTYPE)
        lengths = torch.tensor([end - first for _, first, end in chunks])
        start = torch.tensor([0, *lengths.cumsum(0).tolist()], device=DEVICE)
        context = torch.tensor([first for _, first, _ in chunks], device=DEVICE)
        table = self.table[[b for b, _, _ in chunks]]
        if ref:
            positions = torch.cat([torch.arange(first, end, device=DEVICE) for _, first, end in chunks])
            most = int(lengths.max())
            return gated_attention_ref(
                qkv, *self.norms, rope, pages, table, slot, positions, start, most, self.n_heads, EPS, kv_start
            )
        tiles = row_tiles(start, context, len(qkv), prefill_attention.tile_rows(DEVICE))
        return prefill_attention.gated_prefill_attention(
            qkv, *self.norms, rope, pages, table, slot, start, context, self.n_heads, EPS, tiles, kv_start
        )


@pytest.mark.parametrize(
    "chunks",
    [[(0, 0, 1)], [(0, 0, 63)], [(0, 0, 65)], [(0, 130, 200)], [(0, 255, 256)], [(1, 3, 3), (0, 60, 140), (2, 0, 5)]],
    ids=["1", "63", "65", "130-200", "255-256", "three"],
)
def test_chunks_equal_attention_written_out(chunks: list[tuple[int, int, int]]) -> None:
    case = Case([max([end for b, _, end in chunks if b == i], default=3) for i in range(3)])
    a, b = case.pages.clone(), case.pages.clone()
    assert_close(case.run(chunks, a), case.run(chunks, b, ref=True))
    assert torch.equal(a.isnan(), b.isnan())
    assert_close(a.nan_to_num(), b.nan_to_num(), 1e-3)


def test_sixteen_query_heads_share_one_key_head() -> None:
    case = Case([70], heads=(16, 1))
    assert_close(case.run([(0, 60, 70)], case.pages.clone()), case.run([(0, 60, 70)], case.pages.clone(), ref=True))


def test_entries_below_the_first_valid_one_are_never_read() -> None:
    """The drafter's entry 0 belongs to nobody; a row that may see nothing gives zeros."""
    case = Case([66])
    a, b = case.pages.clone(), case.pages.clone()
    got, want = case.run([(0, 0, 66)], a, kv_start=1), case.run([(0, 0, 66)], b, kv_start=1, ref=True)
    assert_close(got, want)
    assert not got[0].any()
    poisoned = case.pages.clone()
    poisoned[case.table[0, 0], :, 0] = float("nan")
    assert torch.equal(case.run([(0, 10, 66)], poisoned, kv_start=1), case.run([(0, 10, 66)], case.pages, kv_start=1))


def test_a_row_has_the_same_bits_in_any_chunk_and_company() -> None:
    case, n = Case([150, 20]), 150
    whole = case.run([(0, 0, n)], case.pages.clone())
    for cuts in ([1, 70],):
        pages, at, done = case.pages.clone(), 0, []
        for end in (*cuts, n):
            done.append(case.run([(1, 0, 20), (0, at, end)], pages)[20:])
            at = end
        assert torch.equal(torch.cat(done), whole), cuts


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(32, 2), (16, 2)], ids=["122b", "35b"])
def test_published_shapes_in_16_bits(heads: tuple[int, int]) -> None:
    case = Case([3000, 700], heads=heads, width=256)
    chunks = [(0, 1000, 3000), (1, 0, 700)]
    a, b = case.pages.clone(), case.pages.clone()
    assert_close(case.run(chunks, a), case.run(chunks, b, ref=True), 1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_pages_beyond_two_billion_numbers() -> None:
    """Page ids whose byte and element offsets pass 2**31."""
    case = Case([300], heads=(32, 2), width=256)
    far = torch.zeros(33_000, 2, PAGE_SIZE, 2, 256, dtype=DTYPE, device=DEVICE)
    moved = case.table + 32_900
    far[moved[0, :5]] = case.pages[case.table[0, :5]]
    want = case.run([(0, 100, 300)], case.pages.clone())
    case.table = moved
    assert torch.equal(case.run([(0, 100, 300)], far), want)
