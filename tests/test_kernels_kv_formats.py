"""Attention kernels over pages in fewer bits: against the format's own mathematics, and within its bound of fp32's."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from kernels_common import DEVICE, DTYPE, assert_close, rows
from torch import Tensor

from onebox.kernels import linear, paged_attention, prefill_attention
from onebox.kernels.paged_attention_ref import PAGE_SIZE, gated_attention_ref, turned_queries
from onebox.kernels.row_tiles import row_tiles
from onebox.kernels.sparse_attention import sparse_attend
from onebox.kernels.sparse_attention_ref import HeadPattern, sparse_attention_ref, sparse_index_ref
from onebox.kernels.turboquant_ref import FORMATS, Group, PageFormat, QuantizedPages, dequantize_ref, lloyd_max_error

EPS, HALF = 1e-6, 4
HIGH = ("fp8", "k8v4", "tq4")


class Case:
    """Sequences whose pages hold coded random keys and values up to their windows, and bytes of NaN behind."""

    def __init__(
        self, name: str, contexts: list[int], lengths: list[int], heads: tuple[int, int] = (4, 2), width: int = 64,
        kv_start: int = 0,
    ) -> None:  # fmt: skip
        self.n_heads, self.n_kv, self.width, self.kv_start = *heads, width, kv_start
        g = torch.Generator().manual_seed(5)
        n_pages = [-(-(c + n) // PAGE_SIZE) for c, n in zip(contexts, lengths, strict=True)]
        order = iter((1 + torch.randperm(sum(n_pages), generator=g)).split(n_pages))
        table = torch.zeros(len(contexts), max(n_pages), dtype=torch.long)
        for b, n in enumerate(n_pages):
            table[b, :n] = next(order)
        positions = torch.cat([torch.arange(c, c + n) for c, n in zip(contexts, lengths, strict=True)])
        owner = torch.repeat_interleave(torch.arange(len(contexts)), torch.tensor(lengths))
        slot = table[owner, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        self.lengths, self.start = lengths, torch.tensor([0, *accumulate(lengths)], device=DEVICE)
        self.table, self.positions, self.slot = (x.to(DEVICE) for x in (table, positions, slot))
        self.qkv = rows(len(positions), (2 * self.n_heads + 2 * self.n_kv) * width, seed=6)
        angle = rows(len(positions), 1, HALF, seed=7).float() * 3
        self.rope = angle.cos().to(DTYPE), angle.sin().to(DTYPE)
        self.norms = rows(width, seed=8, scale=0.3), rows(width, seed=9, scale=0.3)
        form = PageFormat.of(name, self.n_kv, width, PAGE_SIZE)
        channels = torch.randperm(width, generator=g)
        self.pages = QuantizedPages.allocate(form, 1 + sum(n_pages), DEVICE, channels, channels.flip(0))
        self.pages.data[1:] = 255  # fresh memory: e4m3 and fp16 read it as NaN
        self.plain = torch.zeros(1 + sum(n_pages), 2, PAGE_SIZE, self.n_kv, width, device=DEVICE)
        for b, c in enumerate(contexts):
            if c > kv_start:
                at = torch.arange(kv_start, c, device=DEVICE)
                here = self.table[b, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
                k, v = (rows(c - kv_start, self.n_kv, width, seed=20 + 2 * b + i).float() for i in (0, 1))
                self.pages.write(k, v, here)
                self.plain[here // PAGE_SIZE, 0, here % PAGE_SIZE] = k
                self.plain[here // PAGE_SIZE, 1, here % PAGE_SIZE] = v

    def arguments(self, pages: Tensor | QuantizedPages) -> tuple[object, ...]:
        return (
            self.qkv, *self.norms, self.rope, pages, self.table, self.slot, self.positions, self.start,
            max(self.lengths), self.n_heads, EPS,
        )  # fmt: skip

    def fresh(self) -> QuantizedPages:
        return replace(self.pages, data=self.pages.data.clone())

    def kernel(self, pages: QuantizedPages, paired: bool = False) -> Tensor:
        space = linear.Workspace.allocate(1 << 24, DEVICE)
        space.partial.fill_(float("nan"))
        found: Tensor = paged_attention.gated_attention(
            *self.arguments(pages),
            space,
            kv_start=self.kv_start,
            paired=paired,  # type: ignore[arg-type]
        )
        return found

    def reference(self, pages: Tensor | QuantizedPages) -> Tensor:
        found: Tensor = gated_attention_ref(*self.arguments(pages), kv_start=self.kv_start)  # type: ignore[arg-type]
        return found

    def check(self) -> None:
        a, b = self.fresh(), self.fresh()
        got, want = self.kernel(a), self.reference(b)
        assert_close(got, want, 2e-3)
        page, entry = self.slot // PAGE_SIZE, self.slot % PAGE_SIZE
        form, read = self.pages.format, []
        for pages in (a, b):
            k, v, k_scales, v_scales = (x[page, entry] for x in form.parts(pages.data))
            read.append((dequantize_ref(k, k_scales, form.k), dequantize_ref(v, v_scales, form.v)))
        for x, y in zip(*read, strict=True):
            assert_close(x, y, 1e-2)
        kept = torch.ones(len(a.data) * PAGE_SIZE, dtype=torch.bool, device=DEVICE).index_fill(0, self.slot, False)
        for x, y in zip(form.parts(a.data), form.parts(self.pages.data), strict=True):
            whole = x.flatten(0, 1).view(torch.uint8)[kept], y.flatten(0, 1).view(torch.uint8)[kept]
            assert torch.equal(*whole), "an entry beside the rows' own has changed"
        exact = self.reference(self.plain.clone())
        off = float((got.float() - exact.float()).square().mean().sqrt() / exact.float().square().mean().sqrt())
        assert off < bound(form), f"{off:.4f} off fp32, above {bound(form):.4f}"


def bound(form: PageFormat) -> float:
    """Relative RMS that a format may cost attention over random entries: to first order scores are off by the keys'
    error and sums by the values', and twice that leaves room for a few heads that are worse than the rest."""

    def error(groups: tuple[Group, ...]) -> float:
        parts = [6.8e-4 if g.bits == 8 else lloyd_max_error(g.bits, g.width) for g in groups]
        return sum(g.width / form.head_dim * e / (1 - e) for g, e in zip(groups, parts, strict=True))

    return 2.0 * math.sqrt(error(form.k) + error(form.v))


@pytest.mark.parametrize(
    ("name", "length"), [*((name, n) for name in FORMATS for n in (1, 65, 300)), ("fp8", 63), ("tq4", 63), ("tq4", 64)]
)
def test_one_row_attends_to_its_whole_context(name: str, length: int) -> None:
    Case(name, [length - 1], [1], (2, 1)).check()


@pytest.mark.parametrize(
    ("name", "n_rows"), [*(("tq4", n) for n in range(1, 6)), ("fp8", 5), ("k8v4", 3), ("tq3.5", 4), ("tq2.5", 5)]
)
def test_windows_of_several_sequences_are_causal(name: str, n_rows: int) -> None:
    """Over a page's edge, in an empty sequence, and beside a sequence with fewer rows."""
    Case(name, [62, 0, 130], [n_rows, 1, n_rows], (2, 1)).check()


@pytest.mark.parametrize(
    ("name", "heads"), [("tq4", (2, 2)), ("tq4", (4, 2)), ("tq4", (8, 1)), *((name, (16, 1)) for name in HIGH)]
)
def test_any_number_of_query_heads_shares_a_key_head(name: str, heads: tuple[int, int]) -> None:
    Case(name, [50], [2], heads).check()


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_heads_of_any_power_of_two(name: str, width: int) -> None:
    Case(name, [64], [2], (1, 1), width).check()


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("name", ["k8v4", "tq3.5"])
def test_a_sequence_in_any_number_of_parts(name: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "MAX_CHUNKS", chunks)
    Case(name, [400, 10], [2, 1], (1, 1)).check()


@pytest.mark.parametrize("name", ["k8v4", "tq4"])
def test_entries_below_the_first_valid_one_are_never_read(name: str) -> None:
    """The drafter's entry 0 belongs to nobody; here it is bytes of NaN."""
    Case(name, [1, 66], [2, 1], kv_start=1).check()


@pytest.mark.parametrize("name", ["fp8", "tq4"])
def test_a_row_has_the_same_bits_in_any_window_and_company(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of five rows over the length at which chunks double: text may not depend on how many drafts there are."""
    monkeypatch.setattr(paged_attention, "MAX_CHUNKS", 2)
    case = Case(name, [126, 40], [5, 1], (2, 1), 32)
    together, alone = case.kernel(case.fresh()), case.fresh()
    done = []
    for i in range(5):
        one = Case(name, [126, 40], [5, 1], (2, 1), 32)
        one.qkv, one.positions, one.slot = (x[i : i + 1] for x in (case.qkv, case.positions, case.slot))
        one.rope = case.rope[0][i : i + 1], case.rope[1][i : i + 1]
        one.table, one.lengths, one.start = case.table[:1], [1], torch.tensor([0, 1], device=DEVICE)
        done.append(one.kernel(replace(case.pages, data=alone.data)))
    assert torch.equal(together[:5], torch.cat(done))


def test_numbers_of_eight_bits_are_rounded_as_torch_rounds_them() -> None:
    """Every magnitude that e4m3 has, halves between them, signs, and both ends."""
    case = Case("fp8", [0], [4], (1, 1), 256)
    e4m3 = torch.arange(127, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).float()
    values = torch.cat((e4m3, (e4m3[1:] + e4m3[:-1]) / 2, -e4m3[:3]))
    case.qkv[:, -256:] = values * torch.tensor([1.0, -1.0, 2.0**-7, 0.0], device=DEVICE)[:, None]
    a, b = case.fresh(), case.fresh()
    paged_attention.rotate_and_write(case.qkv, *case.norms, case.rope, a, case.slot, case.n_heads, EPS)
    case.reference(b)
    for x, y in zip(case.pages.format.parts(a.data)[1::2], case.pages.format.parts(b.data)[1::2], strict=True):
        assert torch.equal(x[case.table[0, 0], :4].view(torch.uint8), y[case.table[0, 0], :4].view(torch.uint8))


@pytest.mark.parametrize("name", ["tq4", "tq3", "tq2.5"])
def test_codes_are_the_references(name: str) -> None:
    """Values are not normed, so that all that may differ is the order of a sum."""
    case = Case(name, [0], [64], (1, 1), 64)
    a, b = case.fresh(), case.fresh()
    write = paged_attention.rotate_and_write
    q = write(case.qkv, *case.norms, case.rope, a, case.slot, case.n_heads, EPS)
    case.reference(b)
    (_, x, _, scale), (_, y, _, want) = (case.pages.format.parts(p.data[case.table[0]]) for p in (a, b))
    assert float((x != y).float().mean()) < 2e-3
    assert_close(scale, want, 2e-3)
    rope = case.rope[0][:3], case.rope[1][:3]
    plain = write(case.qkv[:3], *case.norms, rope, case.plain.clone(), case.slot[:3], case.n_heads, EPS)
    assert_close(q[:3], turned_queries(plain, case.pages), 2e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_in_chunks_over_earlier_pages(name: str) -> None:
    case = Case(name, [60, 0], [10, 3], (2, 2), 32)
    a, b = case.fresh(), case.fresh()
    context = torch.tensor([60, 0], device=DEVICE)
    tiles = row_tiles(case.start, context, len(case.qkv), prefill_attention.tile_rows(DEVICE))
    got = prefill_attention.gated_prefill_attention(
        case.qkv, *case.norms, case.rope, a, case.table, case.slot, case.start, context, case.n_heads, EPS, tiles
    )
    assert_close(got, case.reference(b), 2e-3)


@pytest.mark.parametrize("name", ["tq4", "fp8"])
def test_sparse_prompts_over_pages(name: str) -> None:
    """Tiles from a list, then single columns, whose pages differ from one to the next."""
    case = Case(name, [130], [60], (2, 1), 32)
    pages = case.fresh()
    q = paged_attention.rotate_and_write(case.qkv, *case.norms, case.rope, pages, case.slot, case.n_heads, EPS)
    k, v = (x[:190].to(DTYPE) for x in pages.read(case.table[0]))
    pattern = HeadPattern("vertical_slash", columns=16, pages=2)
    index = sparse_index_ref(q, k, 130, (pattern,) * 2, 0)
    out = torch.empty(60, 2 * 32, dtype=DTYPE, device=DEVICE)
    sparse_attend(q, case.qkv, pages, case.table[0], index, out)
    sums = sparse_attention_ref(q, k, v, index).float()
    want = sums if pages.v_turn is None else sums @ pages.v_turn.T
    gate = case.qkv[:, : 4 * 32].unflatten(-1, (2, 2, 32))[:, :, 1].float().sigmoid()
    assert_close(out, (want * gate).flatten(1), 3e-3)


def test_columns_in_pairs_are_the_same_numbers() -> None:
    """As INT4 projections read them: of every 128 the even columns, then the odd ones."""
    case = Case("tq4", [66], [2], (4, 2), 64)
    plain, paired = case.kernel(case.fresh()), case.kernel(case.fresh(), paired=True)
    assert torch.equal(paired.unflatten(1, (2, 2, 64)).transpose(2, 3).flatten(1), plain)


LENGTHS = (1, 63, 64, 65, 4096, 100_001)


def off_by_length(name: str, lengths: tuple[int, ...], chunks: int, heads: tuple[int, int], width: int) -> list[str]:
    """A line a length: relative RMS to the format's mathematics, to fp32, and the bound; checked."""
    lines = []
    for n in lengths:
        case = Case(name, [max(n - 5, 0)], [min(n, 5)], heads, width)
        got, want = case.kernel(case.fresh()), case.reference(case.fresh())
        exact = case.reference(case.plain)
        near, off = (float((got.float() - x.float()).norm() / x.float().norm()) for x in (want, exact))
        lines.append(f"{name:6} {chunks:3} parts {n:7} positions: {near:.1e} to its own, {off:.4f} to fp32")
        assert near < (1e-2 if DEVICE.type == "cuda" else 2e-3), lines[-1]
        assert off < bound(case.pages.format), lines[-1]
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("chunks", [1, 8, 64])
def test_every_length_in_any_number_of_parts(name: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table a length, so that a fault of the merge shows: `-s` prints it."""
    monkeypatch.setattr(paged_attention, "MAX_CHUNKS", chunks)
    print("", *off_by_length(name, LENGTHS[:5], chunks, (2, 1), 64), sep="\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", HIGH)
def test_a_hundred_thousand_positions(name: str) -> None:
    print("", *off_by_length(name, LENGTHS[5:], 128, (1, 1), 64), sep="\n")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (16, 2), (32, 2)], ids=["1", "2", "8", "16"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("name", FORMATS)
def test_every_length_on_a_gpu(
    name: str, chunks: int, width: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "MAX_CHUNKS", chunks)
    print("", *off_by_length(name, LENGTHS, chunks, heads, width), sep="\n")
