"""The decode window of the gated delta rule against its mathematics: outputs, states and what stays pending."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from kernels_common import DEVICE, DTYPE, assert_close, rows

from onebox.kernels import gated_delta
from onebox.kernels.gated_delta_ref import WindowState, WindowWeights, window_ref

EPS = 1e-6
HK, HV, DK, DV, W = 2, 4, 64, 64, 3
C = 2 * HK * DK + HV * DV


def weights() -> WindowWeights:
    return WindowWeights(
        conv=rows(C, 4, seed=10, scale=0.5),
        dt_bias=rows(HV, seed=11).float(),
        a_log=rows(HV, seed=12, scale=0.5).float(),
        norm=1 + rows(DV, seed=13, scale=0.1),
    )


def state(n_slots: int = 5, poison: bool = True) -> WindowState:
    k = rows(n_slots, W, HK, DK, seed=21).float()
    s = WindowState(
        s=rows(n_slots, HV, DK, DV, seed=20).float() * 0.3,
        k=(k / k.norm(dim=-1, keepdim=True)).to(DTYPE),
        v=rows(n_slots, W, HV, DV, seed=22),
        g=-rows(n_slots, W, HV, seed=23).float().abs() * 0.3,
        beta=rows(n_slots, W, HV, seed=24).float().sigmoid(),
        conv=rows(n_slots, 3 + W, C, seed=25),
    )
    return s


def normed(y: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    rms = torch.rsqrt(squares.sum(1).T / DV + EPS)
    return y.float() * rms.repeat_interleave(DV, dim=1)


def copy(s: WindowState) -> WindowState:
    return replace(s, **{f.name: getattr(s, f.name).clone() for f in fields(s)})


def run_both(
    lengths: list[int], slots: list[int], commits: list[int], contexts: list[int], s: WindowState, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, WindowState, WindowState]:
    start = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=DEVICE)
    slot, commit, context = (torch.tensor(x, device=DEVICE) for x in (slots, commits, contexts))
    mixed = rows(sum(lengths), C + HV * DV + 2 * HV, seed=seed)
    a, b = copy(s), copy(s)
    got = normed(*gated_delta.window(mixed, weights(), a, start, slot, commit, context))
    want = normed(*window_ref(mixed, weights(), b, start, slot, commit, context))
    return got, want, a, b


def assert_states_close(a: WindowState, b: WindowState) -> None:
    for f in fields(a):
        assert_close(getattr(a, f.name), getattr(b, f.name), 2e-3)


@pytest.mark.parametrize(
    ("lengths", "commits"), [([1], [1]), ([1], [0]), ([3], [2]), ([1, 3, 2], [3, 0, 1]), ([2, 1, 1], [1, 2, 3])]
)
def test_a_window_equals_row_by_row_arithmetic(lengths: list[int], commits: list[int]) -> None:
    slots = [4, 1, 2][: len(lengths)]
    got, want, a, b = run_both(lengths, slots, commits, [70, 9, 3][: len(lengths)], state())
    assert_close(got, want)
    assert_states_close(a, b)


def test_a_new_sequence_starts_from_zeros_whatever_its_slot_holds() -> None:
    s = state()
    s.s[1] = 1e30
    s.conv[1] = 9.0
    got, want, a, b = run_both([2], [1], [0], [0], s)
    assert_close(got, want)
    assert_close(a.s[1], torch.zeros_like(a.s[1]), 1e-6)
    assert_close(a.conv[1, :5], b.conv[1, :5])


def test_slots_of_other_sequences_do_not_move() -> None:
    s = state()
    *_, a, _ = run_both([1, 1], [3, 1], [1, 1], [5, 5], s)
    for f in fields(a):
        before, after = getattr(s, f.name), getattr(a, f.name)
        assert torch.equal(after[[0, 2, 4]], before[[0, 2, 4]])


def test_rows_past_the_commit_may_hold_anything() -> None:
    s = state()
    s.k[2, 1:] = s.v[2, 1:] = float("nan")
    got, want, a, b = run_both([2], [2], [1], [8], s)
    assert_close(got, want)
    assert_close(a.s[2], b.s[2])


def test_committing_every_row_of_a_window_equals_three_single_steps() -> None:
    s, w = state(), weights()
    mixed = rows(4, C + HV * DV + 2 * HV, seed=31)
    slot, context = torch.tensor([2], device=DEVICE), torch.tensor([6], device=DEVICE)

    def step(at: WindowState, first: int, end: int, commit: int) -> torch.Tensor:
        start = torch.tensor([0, end - first], device=DEVICE)
        return normed(
            *gated_delta.window(mixed[first:end], w, at, start, slot, torch.tensor([commit], device=DEVICE), context)
        )

    one, many = copy(s), copy(s)
    singles = torch.cat([step(one, i, i + 1, 0 if i == 0 else 1) for i in range(4)])
    wide = torch.cat((step(many, 0, 3, 0), step(many, 3, 4, 3)))
    assert torch.equal(wide, singles), "the text must not depend on how many drafts a window carries"
    assert torch.equal(many.s[2], one.s[2])
