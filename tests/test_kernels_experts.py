"""A row's own experts, one row of one expert at a time, against the mathematics."""

from __future__ import annotations

import pytest
import torch
from kernels_common import DEVICE, assert_close, make_weight, rows

from onebox.kernels import experts, linear, moe
from onebox.kernels.linear_ref import Residual, normalized_ref, residual_ref
from onebox.kernels.moe_ref import chosen_ref, route_slots_ref, slots_ref
from onebox.kernels.weights import Weight, dequantize

EPS = 1e-6


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh tensors are full of NaN, so that an unwritten output shows."""
    empty = torch.empty

    def fill(t: torch.Tensor) -> torch.Tensor:
        return t.fill_(float("nan")) if t.is_floating_point() else t

    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))


def residual(t: int, h: int, seed: int = 1) -> Residual:
    return residual_ref(rows(t, h, seed=seed, scale=2.0), rows(h, seed=2, scale=0.1))


def space() -> linear.Workspace:
    return linear.Workspace.allocate(1 << 23, DEVICE)


def layer(h: int, inner: int, e: int, shared: str) -> tuple[torch.Tensor, torch.Tensor, Weight, Weight, Weight, Weight]:
    """Router, shared gate, experts' gate and up, their down, the shared expert's two."""
    return (
        rows(e, h, seed=3, scale=h**-0.5),
        rows(1, h, seed=4, scale=h**-0.5),
        make_weight("int4", e, 2 * inner, h),
        make_weight("int4", e, h, inner, seed=5),
        make_weight(shared, 2 * inner, h, seed=6),
        make_weight(shared, h, inner, seed=7),
    )


def run(x: Residual, w: tuple[torch.Tensor, ...], k: int, norm: torch.Tensor) -> Residual:
    router, gate, up_w, down_w, shared_up, shared_down = w
    work, paired = space(), linear.wants_pairs(shared_down)
    chosen, hidden = moe.choose(x, router, gate, shared_up, k, EPS, work, paired)
    digits, steps, added = experts.gate_up(x, chosen, up_w, hidden, shared_down, EPS, paired)
    out = experts.down(digits, steps, added, chosen, down_w, x, norm, work)
    assert int(work.counters.abs().sum()) == 0
    return out


@pytest.mark.parametrize(("t", "h", "e", "k"), [(1, 256, 64, 8), (3, 384, 20, 4), (9, 256, 33, 3)])
def test_every_row_gets_its_best_experts_in_order(t: int, h: int, e: int, k: int) -> None:
    x, router, gate = residual(t, h), rows(e, h, seed=3, scale=h**-0.5), rows(1, h, seed=4, scale=h**-0.5)
    got, _ = moe.choose(x, router, gate, make_weight("bf16", 64, h), k, EPS, space())
    want = chosen_ref(normalized_ref(x, EPS), router, gate, k)
    assert torch.equal(got.expert, want.expert)
    assert int(got.count) == 1 + want.expert.unique().numel()
    assert_close(got.weight, want.weight, 2e-3)
    assert_close(got.gate, want.gate, 2e-3)
    assert_close(got.weight.sum(1), torch.ones(t, device=DEVICE), 1e-5)


@pytest.mark.parametrize(
    ("shared", "t", "h", "inner"), [("fp8", 1, 384, 128), ("int4", 3, 256, 384), ("bf16", 9, 512, 128)]
)
def test_experts_equal_the_weighted_sum_beside_the_shared_expert(shared: str, t: int, h: int, inner: int) -> None:
    k, norm, x = 2, rows(h, seed=8, scale=0.1), residual(t, h)
    w = layer(h, inner, 8, shared)
    got = run(x, w, k, norm)
    normed = normalized_ref(x, EPS)
    want = slots_ref(
        normed,
        route_slots_ref(normed, w[0], w[1], k),
        dequantize(w[2]),
        dequantize(w[3]),
        (dequantize(w[4]), dequantize(w[5])),
    )
    assert_close(got.x.float() - x.x.float(), want, 8e-3)
    again = residual_ref(got.x, norm)
    assert_close(normalized_ref(got, EPS), normalized_ref(again, EPS), 2e-3)
    high, low = got.digits.to(torch.int32).unbind(1)
    want_high, want_low = again.digits.to(torch.int32).unbind(1)
    steps, want_steps = (s.T.repeat_interleave(128, dim=1) for s in (got.steps, again.steps))
    assert_close((256 * high + low) * steps, (256 * want_high + want_low) * want_steps, 1e-3)


def test_a_row_has_the_same_bits_alone_and_among_eight() -> None:
    h, k = 256, 2
    w, norm, eight = layer(h, 128, 10, "fp8"), rows(h, seed=8, scale=0.1), residual(8, h)
    together = run(eight, w, k, norm).x
    for i in (0, 5):
        one = Residual(
            *(v[i : i + 1] for v in (eight.x, eight.scaled)),
            eight.squares[:, i : i + 1].contiguous(),
            eight.digits[i : i + 1],
            eight.steps[:, i : i + 1].contiguous(),
        )
        assert torch.equal(run(one, w, k, norm).x[0], together[i])
