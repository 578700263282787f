"""Containers: packing loses nothing, quantising stays within the format's step, whatever the numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebox.checkpoint.autoround import gptq_to_int4, int4_to_gptq, quantize_int4
from onebox.checkpoint.fp8_block import quantize_fp8
from onebox.checkpoint.int8_head import quantize_int8
from onebox.checkpoint.nvfp4 import quantize_nvfp4
from onebox.errors import CheckpointError
from onebox.kernels.fp8_ref import Fp8Weight
from onebox.kernels.int4_ref import Int4Weight
from onebox.kernels.nvfp4_ref import E2M1_VALUES
from onebox.kernels.weights import Packed, cat, dequantize, nbytes, rows, stack

FEW = settings(max_examples=60, deadline=None)
GROUPS = st.sampled_from([32, 64, 128])
SEEDS = st.integers(0, 2**31)
# zeros, tiny, ordinary and large magnitudes; -0.0 and whole groups of zeros come with them
SCALES = st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 300.0])


def random_matrix(seed: int, n: int, k: int, scale: float, block: int = 32) -> Tensor:
    """Rows of very different size, some blocks all zero, some zeros negative."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=g) * scale * 10.0 ** torch.randint(-2, 2, (n, 1), generator=g)
    w = w.unflatten(1, (-1, block) if k % block == 0 else (1, k))
    w = w * (torch.rand(w.shape[:2], generator=g) > 0.2)[..., None]
    return torch.where(torch.rand(w.shape, generator=g) < 0.05, -0.0, w).flatten(1).bfloat16()


@FEW
@given(SEEDS, st.integers(1, 9), st.integers(1, 3), GROUPS, st.booleans(), st.sampled_from([0, 1]))
def test_int4_survives_the_gptq_layout_bit_for_bit(
    seed: int, eighths: int, groups: int, group: int, sym: bool, offset: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    n, k = 8 * eighths, group * groups
    zero = None if sym else torch.randint(0, 16, (n, groups), generator=g).to(torch.uint8)
    if zero is not None:
        zero[0, 0] = 3  # all eights would mean symmetric
    w = Int4Weight(
        torch.randint(0, 256, (n, k // 2), generator=g).to(torch.uint8),
        torch.randn(n, groups, generator=g).half(),
        zero,
        group,
    )
    stored = int4_to_gptq(w, offset)
    again = gptq_to_int4(stored["qweight"], stored["scales"], stored["qzeros"], group, offset)
    assert torch.equal(again.q, w.q) and torch.equal(again.scale, w.scale)
    assert (again.zero is None) == sym and (zero is None or torch.equal(again.zero, zero))  # type: ignore[arg-type]


@FEW
@given(SEEDS, st.integers(1, 40), st.integers(1, 3), GROUPS, SCALES)
def test_int4_error_is_at_most_the_plain_rounding_to_nearest(
    seed: int, n: int, groups: int, group: int, scale: float
) -> None:
    x = random_matrix(seed, n, group * groups, scale).float()
    w = quantize_int4(x, group)
    parts = x.unflatten(1, (-1, group))
    plain = (parts.abs().amax(-1, keepdim=True) / 7).half().float()
    rounded = torch.where(plain == 0, 0.0, (parts / plain).round().clamp(-8, 7) * plain)
    ours = (dequantize(w).unflatten(1, (-1, group)) - parts).square().sum(-1)
    assert bool((ours <= (rounded - parts).square().sum(-1) * 1.0001 + 1e-30).all())
    assert bool((dequantize(w)[x.abs().unflatten(1, (-1, group)).amax(-1).repeat_interleave(group, 1) == 0] == 0).all())


@FEW
@given(SEEDS, st.integers(1, 200), st.integers(1, 300), st.sampled_from([(128, 128), (32, 64), (1, 300)]), SCALES)
def test_fp8_error_is_within_its_step_with_ragged_edges(
    seed: int, n: int, k: int, block: tuple[int, int], scale: float
) -> None:
    x = random_matrix(seed, n, k, scale).float()
    w = quantize_fp8(x, block)
    assert w.scale.shape == (-(-n // block[0]), -(-k // block[1]))
    step = w.scale.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    # three mantissa bits: half a step is 1/16 of the value; below 2**-6 the step is 2**-9
    assert bool(((dequantize(w) - x).abs() <= x.abs() / 16 * 1.001 + step * 2**-10 * 1.001).all())


@FEW
@given(SEEDS, st.integers(1, 50), st.integers(1, 200), SCALES)
def test_int8_error_is_within_half_a_step(seed: int, n: int, k: int, scale: float) -> None:
    x = random_matrix(seed, n, k, scale).float()
    w = quantize_int8(x)
    assert int(w.q.min()) >= -127
    assert bool(((dequantize(w) - x).abs() <= w.scale[:, None] * 0.5001).all())


@FEW
@given(SEEDS, st.integers(1, 20), st.integers(1, 8), SCALES)
def test_nvfp4_takes_the_nearest_level_of_its_block(seed: int, n: int, blocks: int, scale: float) -> None:
    x = random_matrix(seed, n, 16 * blocks, scale, block=16).float()
    w = quantize_nvfp4(x)
    step = (w.scale.float() * w.global_scale).repeat_interleave(16, 1)
    levels = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
    nearest = (levels * step[..., None] - x[..., None]).abs().amin(-1)
    assert torch.allclose((dequantize(w) - x).abs(), nearest, rtol=1e-5, atol=1e-12 * max(scale, 1.0))
    relative = float((dequantize(w) - x).norm()) / max(float(x.norm()), 1e-30)
    assert scale == 0.0 or not bool(x.any()) or relative < 0.25


def test_nvfp4_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    blocks = torch.cat((ties[:, None], torch.full((7, 1), 6.0), torch.full((7, 14), 0.5)), dim=1)
    w = quantize_nvfp4(blocks, torch.tensor(1.0))
    assert dequantize(w)[:, 0].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_groups_of_zeros_and_negative_zeros_give_zeros() -> None:
    x = torch.zeros(8, 128)
    x[::2] = -0.0
    for w in (quantize_int4(x, 128), quantize_fp8(x), quantize_int8(x), quantize_nvfp4(x)):
        assert torch.equal(dequantize(w).abs(), torch.zeros(8, 128))
        assert bool(dequantize(w).isfinite().all())


def test_int4_scale_past_half_precision_is_refused() -> None:
    with pytest.raises(CheckpointError, match="16-bit"):
        quantize_int4(torch.full((1, 128), 1e6), 128)


def of_kind(kind: str, seed: int, n: int, k: int) -> Packed:
    x = random_matrix(seed, n, k, 1.0)
    if kind == "int4":
        return quantize_int4(x, 32)
    if kind == "fp8":
        return quantize_fp8(x, (16, 32))
    return quantize_int8(x) if kind == "int8" else quantize_nvfp4(x)


KINDS = st.sampled_from(["int4", "fp8", "int8", "nvfp4"])


@FEW
@given(KINDS, SEEDS, st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 3))
def test_cat_and_rows_are_what_they_are_for_plain_matrices(
    kind: str, seed: int, heights: list[int], groups: int
) -> None:
    parts = [of_kind(kind, seed + i, n, 32 * groups) for i, n in enumerate(heights)]
    whole = cat(parts)
    assert torch.equal(dequantize(whole), torch.cat([dequantize(p) for p in parts]))
    block = whole.block[0] if isinstance(whole, Fp8Weight) else 1
    n = sum(heights)
    start = (n // 2) // block * block
    assert torch.equal(dequantize(rows(whole, slice(start, n))), dequantize(whole)[start:])


@FEW
@given(KINDS, SEEDS, st.integers(1, 5), st.integers(1, 20))
def test_stack_is_what_it_is_for_plain_matrices(kind: str, seed: int, count: int, n: int) -> None:
    parts = [of_kind(kind, seed + i, n, 64) for i in range(count)]
    whole = stack(parts)
    assert torch.equal(dequantize(whole), torch.stack([dequantize(p) for p in parts]))
    assert nbytes(whole) == sum(nbytes(p) for p in parts)
    assert whole.shape == (count, n, 64)
