"""Routing and experts against their mathematics."""

from __future__ import annotations

import pytest
import torch
from kernels_common import DEVICE, assert_close, make_weight, rows

from onebox.kernels import linear, moe
from onebox.kernels.linear_ref import Residual, normalized_ref, residual_ref
from onebox.kernels.moe_ref import route_slots_ref, slots_ref
from onebox.kernels.weights import dequantize

EPS = 1e-6


def residual(t: int, h: int, seed: int = 1) -> Residual:
    return residual_ref(rows(t, h, seed=seed, scale=2.0), rows(h, seed=2, scale=0.1))


def space() -> linear.Workspace:
    return linear.Workspace.allocate(1 << 23, DEVICE)


@pytest.mark.parametrize(("t", "h", "e", "k"), [(1, 256, 64, 8), (3, 384, 20, 4), (8, 128, 8, 2), (9, 256, 33, 3)])
def test_route_picks_renormalised_experts_and_lists_each_once(t: int, h: int, e: int, k: int) -> None:
    x, router, gate = residual(t, h), rows(e, h, seed=3, scale=h**-0.5), rows(1, h, seed=4, scale=h**-0.5)
    got, _ = moe.route(x, router, gate, make_weight("bf16", 64, h), k, EPS, space())
    want = route_slots_ref(normalized_ref(x, EPS), router, gate, k)
    n = int(want.count)
    assert int(got.count) == n
    assert torch.equal(got.expert[1:n], want.expert[1:])
    assert_close(got.weight[:n], want.weight, 2e-3)
    assert_close(got.weight[1:n].sum(0), torch.ones(t, device=DEVICE), 1e-5)


@pytest.mark.parametrize(
    ("kind", "shared", "t"),
    [
        ("int4", "fp8", 1),
        ("int4", "fp8", 9),
        ("fp8", "fp8", 1),
        ("nvfp4", "bf16", 1),
        ("bf16", "int4", 2),
        ("int8", "int8", 1),
    ],
)
def test_experts_equal_the_weighted_sum_beside_the_shared_expert(kind: str, shared: str, t: int) -> None:
    h, inner, e, k = 512, 128, 8, 2
    x, router, gate = residual(t, h), rows(e, h, seed=3, scale=h**-0.5), rows(1, h, seed=4, scale=h**-0.5)
    up_w, down_w = make_weight(kind, e, 2 * inner, h), make_weight(kind, e, h, inner, seed=5)
    shared_w = make_weight(shared, 2 * inner, h, seed=6), make_weight(shared, h, inner, seed=7)
    norm, work = rows(h, seed=8, scale=0.1), space()
    pairs = linear.wants_pairs(down_w), linear.wants_pairs(shared_w[1])
    routing, hidden = moe.route(x, router, gate, shared_w[0], k, EPS, work, pairs[1])
    y, added = moe.gate_up(x, routing, up_w, hidden, shared_w[1], EPS, pairs)
    got = moe.down(y, added, routing, down_w, x, norm, work, pairs[0])
    normed = normalized_ref(x, EPS)
    want = slots_ref(
        normed,
        route_slots_ref(normed, router, gate, k),
        dequantize(up_w),
        dequantize(down_w),
        (dequantize(shared_w[0]), dequantize(shared_w[1])),
    )
    assert_close(got.x.float() - x.x.float(), want, 8e-3)
    assert_close(normalized_ref(got, EPS), normalized_ref(residual_ref(got.x, norm), EPS), 2e-3)
    assert int(work.counters.abs().sum()) == 0


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_row_has_the_same_bits_alone_and_among_eight(kind: str) -> None:
    h, inner, e, k = 256, 128, 10, 2
    router, gate = rows(e, h, seed=3, scale=h**-0.5), rows(1, h, seed=4, scale=h**-0.5)
    up_w, down_w = make_weight(kind, e, 2 * inner, h), make_weight(kind, e, h, inner, seed=5)
    shared = make_weight("fp8", 2 * inner, h, seed=6), make_weight("fp8", h, inner, seed=7)
    norm, eight = rows(h, seed=8, scale=0.1), residual(8, h)

    def run(x: Residual) -> torch.Tensor:
        work = space()
        routing, hidden = moe.route(x, router, gate, shared[0], k, EPS, work)
        y, added = moe.gate_up(x, routing, up_w, hidden, shared[1], EPS)
        return moe.down(y, added, routing, down_w, x, norm, work).x

    together = run(eight)
    for i in (0, 5):
        one = Residual(
            *(v[i : i + 1] for v in (eight.x, eight.scaled)),
            eight.squares[:, i : i + 1].contiguous(),
            eight.digits[i : i + 1],
            eight.steps[:, i : i + 1].contiguous(),
        )
        assert torch.equal(run(one)[0], together[i])
