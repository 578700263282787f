"""Prompts through the gated delta rule in chunks against its mathematics row by row: outputs, states, inputs kept."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from kernels_common import DEVICE, DTYPE, assert_close, rows
from torch import Tensor

from onebox.kernels import gated_delta_prefill
from onebox.kernels.gated_delta_ref import CHUNK, WindowState, WindowWeights, prefill_ref
from onebox.kernels.row_tiles import row_tiles

EPS = 1e-6
HK, HV, D, W = 1, 2, 32, 3
C = 2 * HK * D + HV * D


def use_shape(patch: pytest.MonkeyPatch, hk: int, hv: int, d: int) -> None:
    for name, value in (("HK", hk), ("HV", hv), ("D", d), ("C", 2 * hk * d + hv * d)):
        patch.setitem(globals(), name, value)


def weights() -> WindowWeights:
    return WindowWeights(
        conv=rows(C, 4, seed=10, scale=0.5),
        dt_bias=rows(HV, seed=11).float(),
        a_log=rows(HV, seed=12, scale=0.5).float(),
        norm=1 + rows(D, seed=13, scale=0.1),
    )


def state(n_slots: int = 5) -> WindowState:
    k = rows(n_slots, W, HK, D, seed=21).float()
    return WindowState(
        s=rows(n_slots, HV, D, D, seed=20).float() * 0.3,
        k=(k / k.norm(dim=-1, keepdim=True)).to(DTYPE),
        v=rows(n_slots, W, HV, D, seed=22),
        g=-rows(n_slots, W, HV, seed=23).float().abs() * 0.3,
        beta=rows(n_slots, W, HV, seed=24).float().sigmoid(),
        conv=rows(n_slots, 3 + W, C, seed=25),
    )


def copy(s: WindowState) -> WindowState:
    return replace(s, **{f.name: getattr(s, f.name).clone() for f in fields(s)})


def mixed_rows(n: int, seed: int = 1, slow: bool = False) -> Tensor:
    """Rows of the projection. `slow`: decays near one and beta near one, where the triangular systems are hardest."""
    x = rows(n, C + HV * D + 2 * HV, seed=seed)
    if slow:
        x[:, -2 * HV : -HV], x[:, -HV:] = 8.0, -8.0
    return x


def run(
    mixed: Tensor, s: WindowState, lengths: list[int], slots: list[int], contexts: list[int], commits: list[int]
) -> tuple[Tensor, WindowState]:
    """The kernels over a copy of `s`."""
    s = copy(s)
    start = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=DEVICE)
    slot, context, commit = (torch.tensor(x, device=DEVICE) for x in (slots, contexts, commits))
    tiles = row_tiles(start, context, len(mixed), CHUNK)
    out = gated_delta_prefill.prefill(mixed, weights(), s, start, slot, commit, context, EPS, tiles)
    return out, s


def reference(
    mixed: Tensor, s: WindowState, lengths: list[int], slots: list[int], contexts: list[int], commits: list[int]
) -> tuple[Tensor, WindowState]:
    s = copy(s)
    start = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=DEVICE)
    slot, context, commit = (torch.tensor(x, device=DEVICE) for x in (slots, contexts, commits))
    return prefill_ref(mixed, weights(), s, start, slot, commit, context, EPS), s


@pytest.mark.parametrize(
    ("lengths", "contexts", "slow"),
    [
        ([1], [0], False),
        ([63], [0], False),
        ([64], [64], True),
        ([65], [0], False),
        ([100], [30], True),
        ([3, 0, 70], [0, 5, 127], False),
    ],
)
def test_prompts_equal_row_by_row_arithmetic(lengths: list[int], contexts: list[int], slow: bool) -> None:
    n, slots, commits = len(lengths), [4, 3, 1, 2], [0, 0, 0, 0]
    x = mixed_rows(sum(lengths), slow=slow)
    got, a = run(x, state(), lengths, slots[:n], contexts, commits[:n])
    want, b = reference(x, state(), lengths, slots[:n], contexts, commits[:n])
    assert_close(got, want)
    assert_close(a.s, b.s, 2e-3)
    assert torch.equal(a.conv, b.conv)


def test_key_heads_serve_consecutive_value_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    use_shape(monkeypatch, 2, 6, 16)
    got, a = run(mixed_rows(5), state(), [5], [1], [62], [0])
    want, b = reference(mixed_rows(5), state(), [5], [1], [62], [0])
    assert_close(got, want)
    assert_close(a.s, b.s, 2e-3)


def test_the_same_key_64_times_does_not_blow_up() -> None:
    """The worst system: every entry below the diagonal near one. Sums of its powers lose all digits."""
    x = mixed_rows(1, slow=True).repeat(70, 1)
    got, a = run(x, state(), [70], [1], [0], [0])
    want, b = reference(x, state(), [70], [1], [0], [0])
    assert_close(got, want)
    assert_close(a.s[1], b.s[1], 2e-3)


def test_rows_that_a_window_left_pending_come_first() -> None:
    x = mixed_rows(10)
    s = state()
    s.k[2, 2:] = s.v[2, 2:] = float("nan")  # rows past the commit may hold anything
    got, a = run(x, s, [8, 2], [2, 1], [70, 9], [2, 0])
    want, b = reference(x, s, [8, 2], [2, 1], [70, 9], [2, 0])
    assert_close(got, want)
    assert_close(a.s, b.s, 2e-3)
    assert torch.equal(a.conv[2, :3], b.conv[2, :3])


def test_a_new_sequence_starts_from_zeros_whatever_its_slot_holds() -> None:
    s = state()
    s.s[1] = 1e30
    s.conv[1] = 9.0
    x = mixed_rows(2)
    got, a = run(x, s, [2], [1], [0], [0])
    want, b = reference(x, s, [2], [1], [0], [0])
    assert_close(got, want)
    assert_close(a.s[1], b.s[1], 2e-3)
    assert torch.equal(a.conv[1, :3], b.conv[1, :3])


def test_slots_of_other_sequences_do_not_move() -> None:
    s = state()
    _, a = run(mixed_rows(70), s, [69, 1], [3, 1], [5, 5], [0, 0])
    for f in fields(a):
        assert torch.equal(getattr(a, f.name)[[0, 2, 4]], getattr(s, f.name)[[0, 2, 4]])


def test_a_row_has_the_same_bits_in_any_company_and_for_chunks_that_end_at_tiles() -> None:
    x, s, n = mixed_rows(140, seed=3), state(), 140
    whole, after = run(x, s, [n], [2], [0], [0])
    beside, _ = run(torch.cat((mixed_rows(7, seed=4), x)), s, [7, n], [1, 2], [70, 0], [0, 0])
    assert torch.equal(beside[7:], whole)
    at, now, done = 0, s, []
    for end in (64, 128, n):
        out, now = run(x[at:end], now, [end - at], [2], [at], [0])
        done.append(out)
        at = end
    assert torch.equal(torch.cat(done), whole)
    assert torch.equal(now.s[2], after.s[2]) and torch.equal(now.conv[2, :3], after.conv[2, :3])


def test_chunks_that_end_inside_a_tile_move_the_state_by_rounding_alone() -> None:
    x, s, n = mixed_rows(100, seed=3), state(), 100
    whole, after = run(x, s, [n], [2], [0], [0])
    at, now, done = 0, s, []
    for end in (17, 50, n):
        out, now = run(x[at:end], now, [end - at], [2], [at], [0])
        done.append(out)
        at = end
    assert_close(torch.cat(done), whole, 2e-3)
    assert_close(now.s[2], after.s[2], 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize(("hv", "n"), [(64, 1000), (32, 2048)], ids=["122b", "35b"])
def test_published_shapes_in_16_bits(hv: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_shape(monkeypatch, 16, hv, 128)
    x = mixed_rows(n)
    got, a = run(x, state(), [n - 3, 3], [1, 2], [0, 70], [0, 0])
    want, b = reference(x, state(), [n - 3, 3], [1, 2], [0, 70], [0, 0])
    assert_close(got, want, 1e-2)
    assert_close(a.s, b.s, 1e-3)
