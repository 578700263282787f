"""Products for any number of rows against their mathematics, in every format; a row's bits whatever its company."""

from __future__ import annotations

import pytest
import torch
from kernels_common import DEVICE, FORMATS, assert_close, make_weight, rows

from onebox.kernels import gemm
from onebox.kernels.gemm_ref import experts_matmul_ref, matmul_ref


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh tensors are full of NaN, so that an unwritten output shows."""
    empty = torch.empty

    def fill(t: torch.Tensor) -> torch.Tensor:
        return t.fill_(float("nan")) if t.is_floating_point() else t

    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("t", "n", "k"), [(1, 100, 256), (63, 128, 128), (100, 63, 384)])
def test_a_product_equals_its_mathematics(kind: str, t: int, n: int, k: int) -> None:
    x, w = rows(t, k), make_weight(kind, n, k)
    assert_close(gemm.matmul(x, w), matmul_ref(x, w))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_a_thousand_rows(kind: str) -> None:
    x, w = rows(1000, 256), make_weight(kind, 300, 256)
    assert_close(gemm.matmul(x, w), matmul_ref(x, w))


def choices(t: int, e: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(4)
    experts = torch.stack([torch.randperm(e, generator=g)[:top_k] for _ in range(t)])
    weights = torch.rand(t, top_k, generator=g)
    return (weights / weights.sum(-1, keepdim=True)).to(DEVICE), experts.to(DEVICE)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("t", "inner"), [(1, 128), (37, 128), (20, 256)])
def test_experts_equal_their_mathematics(kind: str, t: int, inner: int) -> None:
    e, top_k, h = 5, 3, 256
    x, (weights, experts) = rows(t, h), choices(t, e, top_k)
    gate_up, down = make_weight(kind, e, 2 * inner, h), make_weight(kind, e, h, inner, seed=3)
    got = gemm.experts_matmul(x, gate_up, down, weights, experts)
    assert_close(got, experts_matmul_ref(x, gate_up, down, weights, experts))


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_row_has_the_same_bits_whatever_its_company(kind: str) -> None:
    x, w = rows(70, 256), make_weight(kind, 100, 256)
    together = gemm.matmul(x, w)
    assert torch.equal(together[:1], gemm.matmul(x[:1], w))
    assert torch.equal(together[50:], gemm.matmul(x[50:], w))
    weights, experts = choices(70, 5, 2)
    gate_up, down = make_weight(kind, 5, 256, 256), make_weight(kind, 5, 256, 128, seed=3)
    together = gemm.experts_matmul(x, gate_up, down, weights, experts)
    for some in (slice(0, 1), slice(20, 45)):
        assert torch.equal(together[some], gemm.experts_matmul(x[some], gate_up, down, weights[some], experts[some]))


@pytest.mark.parametrize(("t", "tile"), [(1, 16), (40, 16), (200, 64)])
def test_tiles_hold_every_choice_once_and_one_expert_each(t: int, tile: int) -> None:
    _, experts = choices(t, 7, 3)
    choice, expert, first, end = (x.tolist() for x in gemm.sorted_tiles(experts, 7, tile))
    seen = []
    for e, start, stop in zip(expert, first, end, strict=True):
        assert 0 <= stop - start <= tile
        assert all(experts.reshape(-1)[choice[i]] == e for i in range(start, stop))
        seen += choice[start:stop]
    assert sorted(seen) == list(range(3 * t))
