"""KV page formats: bytes, round trips, and distortion against what the theory of the quantiser says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from onebox.kernels.turboquant_ref import (
    FORMATS,
    Group,
    PageFormat,
    QuantizedPages,
    codebook,
    dequantize_ref,
    lloyd_max_error,
    orthogonal,
    pack,
    quantize_ref,
    rotation,
    turned,
    unpack,
)

PAGE = 64
WIDTHS = (64, 128, 256)
# of a Gaussian variable (Max 1960): positive levels and mean square error by bits
GAUSSIAN = {
    1: ((0.7979,), 0.3634),
    2: ((0.4528, 1.5104), 0.1175),
    3: ((0.2451, 0.7560, 1.3439, 2.1519), 0.03455),
    4: ((0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326), 0.00950),
}


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decoded(x: Tensor, groups: tuple[Group, ...], order: Tensor | None = None) -> Tensor:
    """x [..., D] through the bytes and back, rotations undone."""
    turn = rotation(groups, order).float() if turned(groups) else torch.eye(x.shape[-1])
    return dequantize_ref(*quantize_ref(x @ turn, groups), groups) @ turn.T


def error(got: Tensor, want: Tensor) -> float:
    """Squared error over squared length, of all vectors together."""
    return float((got - want).square().sum() / want.square().sum())


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_levels_of_a_very_wide_vector_are_those_of_a_gaussian(bits: int) -> None:
    levels, expected = codebook(bits, 1 << 20), GAUSSIAN[bits]
    assert torch.allclose(levels[1 << (bits - 1) :], torch.tensor(expected[0], dtype=torch.float64), atol=2e-4)
    assert torch.equal(levels, -levels.flip(0))
    assert lloyd_max_error(bits, 1 << 20) == pytest.approx(expected[1], rel=2e-3)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", GAUSSIAN)
def test_distortion_is_what_the_quantiser_promises(bits: int, width: int) -> None:
    groups = (Group(width, bits),)
    x = gaussian(4096, width, seed=bits)
    turn = rotation(groups).float()
    found, levels = error(decoded(x, groups), x), codebook(bits, width).float()
    unit = (x @ turn) * (math.sqrt(width) / x.norm(dim=-1, keepdim=True))
    nearest = levels[torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2)]
    plain = float((nearest - unit).square().mean())
    assert plain == pytest.approx(lloyd_max_error(bits, width), rel=0.03)
    assert found == pytest.approx(plain / (1 - plain), rel=0.05)  # unbiased along the vector, a little longer
    assert 4.0**-bits <= found <= math.sqrt(3) * math.pi / 2 * 4.0**-bits  # the paper's lower and upper bound


@pytest.mark.parametrize("width", WIDTHS)
def test_any_direction_is_as_good_as_a_gaussian_one(width: int) -> None:
    """Keys with a few large channels, which defeat a scale a vector without rotation."""
    x = gaussian(2048, width, seed=3)
    x[:, :4] *= 20
    groups = (Group(width, 4),)
    assert error(decoded(x, groups), x) <= 1.02 * lloyd_max_error(4, width)
    scale = x.abs().amax(-1, keepdim=True) / 7
    plain = (x / scale).round().clamp(-8, 7) * scale  # as many bytes
    assert error(decoded(x, groups), x) < error(plain, x) / 3
    gauss = gaussian(2048, width, seed=4)
    scale = gauss.abs().amax(-1, keepdim=True) / 7
    assert error(decoded(gauss, groups), gauss) < 0.9 * error((gauss / scale).round() * scale, gauss)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("width", WIDTHS)
def test_error_of_every_format(name: str, width: int) -> None:
    form, x = PageFormat.of(name, 1, width, PAGE), gaussian(4096, width, seed=9)
    for groups in (form.k, form.v):
        errors = [6.8e-4 if g.bits == 8 else lloyd_max_error(g.bits, g.width) for g in groups]
        want = sum(g.width / width * e / (1 - e) for g, e in zip(groups, errors, strict=True))
        assert error(decoded(x, groups), x) == pytest.approx(want, rel=0.1 if groups[0].bits == 8 else 0.05)


def test_inner_products_are_off_by_the_share_of_the_error() -> None:
    """<q, k> of unit vectors: a standard deviation of sqrt(error / D), and hardly any bias."""
    width = 256
    q, k = (torch.nn.functional.normalize(gaussian(8192, width, seed=s), dim=-1) for s in (1, 2))
    for bits in (2, 3, 4):
        e = lloyd_max_error(bits, width)
        off = ((decoded(k, (Group(width, bits),)) - k) * q).sum(-1)
        assert float(off.std()) == pytest.approx(math.sqrt(e / (1 - e) / width), rel=0.05)
        near = torch.nn.functional.normalize(q + 2 * k, dim=-1)  # what attends to k
        off = ((decoded(k, (Group(width, bits),)) - k) * near).sum(-1)
        assert abs(float(off.mean())) < 3 * float(off.std()) / math.sqrt(len(off))


def test_outlier_channels_get_the_better_quantiser() -> None:
    x = gaussian(2048, 128, seed=6)
    loud = torch.tensor([5, 17, 40, 63, 64, 90, 111, 127])
    x[:, loud] *= 8
    groups = PageFormat.of("tq2.5", 1, 128, PAGE).k
    order = x.square().mean(0).argsort(descending=True)
    assert error(decoded(x, groups, order), x) < 0.6 * error(decoded(x, groups), x)


@pytest.mark.parametrize("width", [32, 96, 192, 320])
def test_rotations_are_orthogonal_and_spread_one_channel_over_all(width: int) -> None:
    mixed = orthogonal(width)
    assert torch.allclose(mixed @ mixed.T, torch.eye(width, dtype=torch.float64), atol=1e-12)
    assert float((mixed.abs() * math.sqrt(width)).max()) < 2.0
    order = torch.randperm(width, generator=torch.Generator().manual_seed(1))
    turn = rotation((Group(width // 4, 3), Group(width - width // 4, 2)), order)
    assert torch.allclose(turn @ turn.T, torch.eye(width, dtype=torch.float64), atol=1e-12)
    assert not turn[order[0], width // 4 :].any() and not turn[order[-1], : width // 4].any()


def test_signs_never_change() -> None:
    """Pages may outlive a process; other signs would need another VERSION."""
    signs = torch.sign(rotation((Group(64, 4),))[:, 0]).int().tolist()
    assert "".join("+" if s > 0 else "-" for s in signs) == SIGNS_64


SIGNS_64 = "+-+--+----+++--++-+--++-----+--+++++-+-+++-+++-+---+++-+-+-++-+-"


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [32, 96, 256])
def test_codes_survive_packing(bits: int, width: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 5, width), generator=torch.Generator().manual_seed(bits))
    data = pack(codes, bits)
    assert data.shape == (3, 5, width * bits // 8) and data.dtype == torch.uint8
    assert torch.equal(unpack(data, bits), codes.int())


@pytest.mark.parametrize(
    ("name", "per_head"), [("fp8", 516), ("k8v4", 388), ("tq4", 260), ("tq3.5", 216), ("tq3", 196), ("tq2.5", 152)]
)
def test_a_token_takes_the_bytes_that_its_codes_and_scales_take(name: str, per_head: int) -> None:
    form = PageFormat.of(name, 2, 256, PAGE)
    assert form.token_bytes == 2 * per_head and form.page_bytes == 64 * 2 * per_head
    assert QuantizedPages.allocate(form, 3, torch.device("cpu")).data.nbytes == 3 * form.page_bytes


@pytest.mark.parametrize("name", FORMATS)
def test_a_page_gives_back_its_entries_and_leaves_the_others_alone(name: str) -> None:
    form = PageFormat.of(name, 2, 128, PAGE)
    pages = QuantizedPages.allocate(form, 4, torch.device("cpu"))
    k, v = gaussian(3, 2, 128, seed=1), 5 * gaussian(3, 2, 128, seed=2)
    slot = torch.tensor([2 * PAGE + 63, 1 * PAGE, 3 * PAGE + 7])
    pages.write(k, v, slot)
    before = pages.data.clone()
    got_k, got_v = pages.read(torch.arange(4))
    for got, x, turn, groups in ((got_k, k, pages.k_turn, form.k), (got_v, v, pages.v_turn, form.v)):
        want = x if turn is None else x @ turn
        assert error(got[slot], want) < 4 * max(4.0 ** -min(g.bits for g in groups), 3e-4)
        others = torch.ones(4 * PAGE, dtype=torch.bool).index_fill(0, slot, value=False)
        assert not got[others].any()
    pages.write(k[:1] * 100, v[:1], torch.tensor([2 * PAGE + 62]))
    again_k, again_v = pages.read(torch.arange(4))
    assert torch.equal(again_k[slot], got_k[slot]) and torch.equal(again_v[slot], got_v[slot])
    assert not torch.equal(pages.data, before)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_tiny_and_huge_vectors_are_kept(name: str) -> None:
    form = PageFormat.of(name, 1, 64, PAGE)
    for groups in (form.k, form.v):
        for size in (0.0, 1e-3, 1.0, 1e4):
            x = size * gaussian(16, 64, seed=1)
            got = decoded(x, groups)
            assert torch.isfinite(got).all() and float((got - x).norm()) <= 0.35 * float(x.norm())


def test_a_vector_has_the_same_bytes_alone_and_beside_others() -> None:
    x = gaussian(40, 2, 128, seed=8)
    x[7] *= 1000
    for name in FORMATS:
        for groups in (PageFormat.of(name, 2, 128, PAGE).k, PageFormat.of(name, 2, 128, PAGE).v):
            codes, scales = quantize_ref(x, groups)
            alone, scale = quantize_ref(x[3, 1], groups)
            assert torch.equal(codes[3, 1], alone) and torch.equal(scales[3, 1], scale)


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'tq5' is not known\. Known: fp8"):
        PageFormat.of("tq5", 2, 128, PAGE)
    with pytest.raises(ValueError, match="heads of 80 dimensions; a multiple of 32"):
        PageFormat.of("tq4", 2, 80, PAGE)
