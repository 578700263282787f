"""Decode projections against their mathematics, in every format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels_common import DEVICE, DTYPE, FORMATS, GPU, assert_close, make_weight, rows

from onebox.kernels import linear
from onebox.kernels.linear_ref import (
    embed_ref,
    normalize_ref,
    normalized_ref,
    pair_columns,
    project_add_ref,
    project_ref,
    residual_ref,
)
from onebox.kernels.nvfp4_ref import Nvfp4Weight
from onebox.kernels.weights import cat

EPS = 1e-6
pytestmark = pytest.mark.skipif(not GPU and torch.bfloat16 == DTYPE, reason="needs fp16 in the interpreter")


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh tensors are full of NaN, so that an unwritten output shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(t: torch.Tensor) -> torch.Tensor:
        return t.fill_(float("nan")) if t.is_floating_point() else t

    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: fill(empty_like(*a, **k)))


def workspace() -> linear.Workspace:
    return linear.Workspace.allocate(1 << 22, DEVICE)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("t", "n", "k"), [(1, 63, 256), (7, 100, 256), (9, 200, 384)])
def test_project_equals_the_norm_and_the_product(kind: str, t: int, n: int, k: int) -> None:
    h = residual_ref(rows(t, k, scale=3.0), rows(k, seed=2, scale=0.1))
    w = make_weight(kind, n, k)
    assert_close(linear.project(h, w, None, EPS), project_ref(h, w, None, EPS))


@pytest.mark.parametrize(("kind", "tail"), [("int4", "bf16"), ("fp8", "int4")])
def test_project_reads_two_formats_in_one_launch(kind: str, tail: str) -> None:
    h = residual_ref(rows(3, 256, scale=0.2), rows(256, seed=2, scale=0.1))
    a, b = make_weight(kind, 130, 256), make_weight(tail, 20, 256, seed=9)
    assert_close(linear.project(h, a, b, EPS), project_ref(h, a, b, EPS))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("t", "n", "k"), [(1, 63, 128), (5, 100, 1024), (8, 128, 512)])
def test_project_add_leaves_the_next_norm_half_done(kind: str, t: int, n: int, k: int) -> None:
    norm = rows(n, seed=2, scale=0.1)
    h, y, w = residual_ref(rows(t, n), norm), rows(t, k, seed=3), make_weight(kind, n, k)
    got, want = linear.project_add(y, w, h, norm, workspace()), project_add_ref(y, w, h, norm)
    assert_close(got.x, want.x)
    assert_close(normalized_ref(got, EPS), normalized_ref(want, EPS))


@pytest.mark.parametrize("kind", FORMATS)
def test_project_add_finishes_a_norm_a_head(kind: str) -> None:
    norm, w = rows(100, seed=2, scale=0.1), make_weight(kind, 100, 512)
    h, y = residual_ref(rows(3, 100), norm), rows(3, 512, seed=3)
    squares = rows(4, 2, 3, seed=4).float().square() * 64 + 1
    got, want = (
        linear.project_add(y, w, h, norm, workspace(), squares, EPS),
        project_add_ref(y, w, h, norm, squares, EPS),
    )
    assert_close(got.x, want.x)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_has_the_same_bits_alone_and_among_eight(kind: str) -> None:
    norm, w, v = rows(256, seed=2, scale=0.1), make_weight(kind, 96, 256), make_weight(kind, 256, 512, seed=4)
    x, y = rows(8, 256), rows(8, 512, seed=5)
    eight = residual_ref(x, norm)
    for i in (0, 7):
        one = residual_ref(x[i : i + 1], norm)
        assert torch.equal(linear.project(one, w, None, EPS)[0], linear.project(eight, w, None, EPS)[i])
        a = linear.project_add(y[i : i + 1], v, one, norm, workspace())
        b = linear.project_add(y, v, eight, norm, workspace())
        assert torch.equal(a.x[0], b.x[i]) and torch.equal(a.scaled[0], b.scaled[i])
        assert torch.equal(a.squares[:, 0], b.squares[:, i])


def test_project_add_takes_paired_columns_and_gives_them() -> None:
    norm, w, next_w = rows(256, seed=2, scale=0.1), make_weight("int4", 256, 512), make_weight("int4", 90, 256, seed=8)
    h, y = residual_ref(rows(3, 256), norm), rows(3, 512, seed=3)
    got = linear.project_add(pair_columns(y), w, h, norm, workspace(), paired=True)
    want = project_add_ref(y, w, h, norm)
    assert_close(got.x, want.x)
    whole = got.digits[:, 0].int() * 256 + got.digits[:, 1].int()
    assert_close(whole * got.steps.T.repeat_interleave(128, dim=1), pair_columns(got.scaled).float(), 3e-3)
    assert_close(linear.project(got, next_w, None, EPS), project_ref(want, next_w, None, EPS))


def test_nvfp4_rows_of_several_weights_keep_their_global_scales() -> None:
    a, b = make_weight("nvfp4", 40, 256), make_weight("nvfp4", 24, 256, seed=5)
    assert isinstance(b, Nvfp4Weight)
    w = cat((a, replace(b, global_scale=b.global_scale * 7)))
    h = residual_ref(rows(2, 256), rows(256, seed=2, scale=0.1))
    assert_close(linear.project(h, w, None, EPS), project_ref(h, w, None, EPS))


def test_embed_and_normalize() -> None:
    table, norm = rows(50, 1100, seed=6), rows(1100, seed=2, scale=0.1)
    tokens = torch.tensor([3, 49, 0], device=DEVICE)
    got, want = linear.embed(tokens, table, norm), embed_ref(tokens, table, norm)
    assert torch.equal(got.x, want.x)
    assert_close(linear.normalize(got, EPS), normalize_ref(want, EPS))
