"""Snapshot slots and the device operations that fill them. Take snapshots, give slots; know no tokens and no tensors.

A snapshot is the recurrent state, the convolution inputs and the last hidden state after exactly `n_tokens` tokens. It
lives in one device slot or in one host slot, never in both. Device operations are a queue: they run in order, before
the forwards of their step. So an id may be handed on at once: whoever reads it later was queued later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from onebox.engine.pages import Pool


@dataclass(frozen=True)
class CopyPage:
    """Copy page `src` to page `dst` in every attention layer, the drafter's included."""

    src: int
    dst: int


@dataclass(frozen=True)
class SaveState:
    """Keep the state of `slot` as it is after `commit` rows of its pending window. The slot is unchanged."""

    slot: int
    commit: int
    snapshot: int


@dataclass(frozen=True)
class RestoreState:
    """Put a snapshot into `slot`, with nothing pending."""

    snapshot: int
    slot: int


@dataclass(frozen=True)
class OffloadState:
    """Move a snapshot from the device to host slot `host`."""

    snapshot: int
    host: int


@dataclass(frozen=True)
class LoadState:
    """Move a snapshot from host slot `host` to the device."""

    host: int
    snapshot: int


@dataclass(frozen=True)
class OffloadPage:
    """Copy page `page` to host page `host` in every attention layer."""

    page: int
    host: int


@dataclass(frozen=True)
class LoadPage:
    """Copy host page `host` to page `page`."""

    host: int
    page: int


DeviceOp = CopyPage | SaveState | RestoreState | OffloadState | LoadState | OffloadPage | LoadPage


@dataclass(eq=False)
class Snapshot:
    """Where one state is kept: exactly one of `device` and `host` is not 0. `pinned` ones are not pushed out."""

    n_tokens: int
    device: int = 0
    host: int = 0
    pinned: bool = False


class SnapshotSlots:
    """Slots 1..n_device on the device and 1..n_host in host memory, each filled with the most recently used snapshots.

    `ops` is the queue that moves are appended to; `on_drop` hears of each snapshot that found no room any more,
    `counts` of evictions and moves.
    """

    def __init__(self, n_device: int, n_host: int = 0) -> None:
        self.device, self.host = Pool(n_device), Pool(n_host)
        self.on_device: dict[Snapshot, None] = {}  # least recently used first
        self.on_host: dict[Snapshot, None] = {}
        self.ops: list[DeviceOp] = []
        self.on_drop: Callable[[Snapshot], None] = lambda snapshot: None
        self.counts: Counter[str] = Counter()

    def place(self, snapshot: Snapshot) -> bool:
        """Give a snapshot a device slot, loading it when it was on the host. False: every slot is pinned."""
        if not self.device.n_free and not self._push_out():
            return False
        [snapshot.device] = self.device.take(1)
        self.on_device[snapshot] = None
        if snapshot.host:
            self.ops.append(LoadState(snapshot.host, snapshot.device))
            self._leave_host(snapshot)
            self.counts["loaded"] += 1
        return True

    def touch(self, snapshot: Snapshot) -> None:
        """Make a snapshot the most recently used of its kind."""
        lru = self.on_device if snapshot.device else self.on_host
        del lru[snapshot]
        lru[snapshot] = None

    def evict(self) -> bool:
        """Drop the snapshot that was not used for longest; those on the host went there first. False: none may go."""
        oldest = _first_free(self.on_host) or _first_free(self.on_device)
        if oldest is not None:
            self._evict(oldest)
        return oldest is not None

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot."""
        if snapshot.device:
            self._leave_device(snapshot)
        if snapshot.host:
            self._leave_host(snapshot)
        self.on_drop(snapshot)

    def check(self) -> None:
        """Assert that each slot is free or holds one snapshot, which knows it."""
        self.device.check(s.device for s in self.on_device)
        self.host.check(s.host for s in self.on_host)
        assert all(not s.host for s in self.on_device) and all(not s.device for s in self.on_host)

    def _push_out(self) -> bool:
        """Free one device slot: the least recently used snapshot goes to the host, or is dropped."""
        snapshot = _first_free(self.on_device)
        if snapshot is None:
            return False
        if not self.host.n_free:
            oldest = _first_free(self.on_host)
            if oldest is not None:
                self._evict(oldest)
        if not self.host.n_free:
            self._evict(snapshot)
            return True
        [snapshot.host] = self.host.take(1)
        self.on_host[snapshot] = None
        self.ops.append(OffloadState(snapshot.device, snapshot.host))
        self._leave_device(snapshot)
        self.counts["offloaded"] += 1
        return True

    def _evict(self, snapshot: Snapshot) -> None:
        self.counts["evicted_snapshots"] += 1
        self.drop(snapshot)

    def _leave_device(self, snapshot: Snapshot) -> None:
        self.device.give([snapshot.device])
        del self.on_device[snapshot]
        snapshot.device = 0

    def _leave_host(self, snapshot: Snapshot) -> None:
        self.host.give([snapshot.host])
        del self.on_host[snapshot]
        snapshot.host = 0


def _first_free(snapshots: dict[Snapshot, None]) -> Snapshot | None:
    return next((s for s in snapshots if not s.pinned), None)
