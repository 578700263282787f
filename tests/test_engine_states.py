"""Snapshot slots: who is pushed out, in which order, and what is asked of the device for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.engine.states import LoadState, OffloadState, Snapshot, SnapshotSlots
from onebox.errors import ConfigError
from onebox.request import Request, SamplingParams


def filled(n_device: int, n_host: int, n: int) -> tuple[SnapshotSlots, list[Snapshot], list[Snapshot]]:
    slots, dropped = SnapshotSlots(n_device, n_host), []
    slots.on_drop = dropped.append
    snapshots = [Snapshot(n_tokens=100 + i) for i in range(n)]
    for s in snapshots:
        assert slots.place(s)
        slots.check()
    return slots, snapshots, dropped


def test_the_least_recently_used_snapshot_is_dropped_when_there_is_no_host_room() -> None:
    slots, (a, b), dropped = filled(2, 0, 2)
    slots.touch(a)
    slots.place(Snapshot(n_tokens=7))
    assert dropped == [b] and slots.counts["evicted_snapshots"] == 1 and a.device and not b.device and slots.ops == []


def test_the_least_recently_used_snapshot_moves_to_the_host_before_its_slot_is_filled_again() -> None:
    slots, (a, _, c), dropped = filled(2, 1, 3)
    assert slots.ops == [OffloadState(snapshot=c.device, host=a.host)] and a.device == 0 and dropped == []


def test_a_full_host_drops_its_oldest() -> None:
    _, (a, b, c), dropped = filled(1, 1, 3)
    assert dropped == [a] and b.host and c.device


def test_a_snapshot_comes_back_from_the_host_after_the_other_has_left_the_device() -> None:
    slots, (a, b), dropped = filled(1, 2, 2)
    slots.ops.clear()
    assert slots.place(a)
    slots.check()
    assert slots.ops == [OffloadState(1, b.host), LoadState(host=1, snapshot=1)] and not dropped and a.host == 0


def test_a_snapshot_comes_back_from_a_full_host_at_the_expense_of_the_device_one() -> None:
    slots, (a, b), dropped = filled(1, 1, 2)
    a.pinned = True
    assert slots.place(a)
    slots.check()
    assert dropped == [b] and a.device == 1 and slots.host.n_free == 1


def test_pinned_snapshots_are_not_pushed_out() -> None:
    slots, (a, b), dropped = filled(2, 0, 2)
    a.pinned = b.pinned = True
    assert not slots.place(Snapshot(n_tokens=1)) and not dropped and not slots.evict()


def test_check_finds_a_slot_held_twice() -> None:
    slots, (a, b), _ = filled(2, 0, 2)
    b.device = a.device
    with pytest.raises(AssertionError, match="twice"):
        slots.check()


def test_sixteen_bit_states_are_half_the_bytes_and_are_kept_restored_and_answered_from() -> None:
    tiny = str(Path(__file__).parent.parent / "onebox" / "models" / "tiny")
    prompt, said = tuple(range(100, 230)), []
    for state_dtype in ("float32", "bfloat16"):
        engine = Engine(EngineConfig(tiny, device="cpu", draft_len=2, state_dtype=state_dtype))
        for name in ("cold", "warm"):
            engine.add(Request(name, prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)))
            while engine.has_work:
                outputs = engine.step()
            said.append(outputs[-1].cached_tokens)
        state = engine.runner.cache.gdn[0].s
        assert state.dtype == getattr(torch, state_dtype) and state.isfinite().all() and state.abs().sum() > 0
        assert engine.runner.cache.snapshots[0].s.dtype == state.dtype
        whole = [t for g in engine.runner.cache.gdn for t in (g.s, g.k, g.v, g.g, g.beta, g.conv)]
        whole.append(engine.runner.cache.hidden)
        assert sum(t.numel() * t.element_size() for t in whole) == engine.plan.states
    assert said == [0, 129, 0, 129]


def test_sixteen_bit_states_are_refused_where_kernels_keep_fp32_ones() -> None:
    config = EngineConfig("m", device="cuda", state_dtype="bfloat16")
    with pytest.raises(ConfigError, match="state_dtype bfloat16"):
        config.resolve_device(cuda_devices=1)
    with pytest.raises(ConfigError, match="state_dtype"):
        EngineConfig("m", state_dtype="float8")
