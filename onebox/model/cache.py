"""What a sequence leaves behind on the device: KV pages, recurrent states with their pending windows, hidden states.

One value holds it all; `Batch` says which parts of it a forward reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onebox.kernels.gated_delta_ref import apply_rows_ref
from onebox.kernels.paged_attention_ref import PAGE_SIZE, Pages
from onebox.kernels.turboquant_ref import PageFormat, QuantizedPages
from onebox.spec import Spec


@dataclass(frozen=True)
class GdnState:
    """One gated-delta-net layer's state, a slot a sequence.

    `s` is the state before the pending window; k, v, g, beta are that window's rows. `conv` holds the inputs of the
    `conv_width - 1` rows before the window, then the window's own.
    """

    s: Tensor  # [n_slots, Hv, Dk, Dv] fp32, or 16-bit between steps
    k: Tensor  # [n_slots, W, Hk, Dk], unit vectors
    v: Tensor  # [n_slots, W, Hv, Dv]
    g: Tensor  # [n_slots, W, Hv] fp32, log decay
    beta: Tensor  # [n_slots, W, Hv] fp32
    conv: Tensor  # [n_slots, conv_width - 1 + W, C]


@dataclass(frozen=True)
class GdnSnapshot:
    """One layer's saved states, a row a snapshot: nothing pending."""

    s: Tensor  # [n_snapshots, Hv, Dk, Dv], as a slot's
    conv: Tensor  # [n_snapshots, conv_width - 1, C]


@dataclass(frozen=True)
class KvLayout:
    """What KV pages hold: numbers of a type, or a page format by name. `channels`: each attention layer's dimensions of
    keys and of values, outliers first; none: as they are."""

    format: torch.dtype | str
    channels: tuple[tuple[Tensor, Tensor], ...] = ()

    def allocate(self, spec: Spec, n_layers: int, n_pages: int, device: torch.device) -> tuple[Pages, ...]:
        """Zeroed pages of `n_layers` layers."""
        n_kv, d = spec.n_kv_heads, spec.head_dim
        if isinstance(self.format, torch.dtype):
            shape = n_pages, 2, PAGE_SIZE, n_kv, d
            return tuple(torch.zeros(shape, dtype=self.format, device=device) for _ in range(n_layers))
        form = PageFormat.of(self.format, n_kv, d, PAGE_SIZE)
        orders = self.channels or ((None, None),) * n_layers
        return tuple(QuantizedPages.allocate(form, n_pages, device, *order) for order in orders)


@dataclass(frozen=True)
class Cache:
    """All device memory that outlives a step. Page 0 and slot 0 belong to nobody: padding rows may write there.

    `hidden` is laid out as `conv` is: the main model's final hidden state of the row before the window, then the
    window's. The drafter's KV (the last of `kv`) keeps the entry of position i at i + 1, because it depends on token
    i + 1: so entries [0, n) always depend on tokens [0, n) alone, for every layer.
    """

    kv: tuple[Pages, ...]  # per attention layer, MTP layers last: [n_pages, 2, PAGE_SIZE, Hkv, D], or in a format
    gdn: tuple[GdnState, ...]
    hidden: Tensor  # [n_slots, 1 + W, H]
    snapshots: tuple[GdnSnapshot, ...]
    snapshot_hidden: Tensor  # [n_snapshots, H]

    @classmethod
    def allocate(
        cls,
        spec: Spec,
        *,
        n_pages: int,
        n_slots: int,
        n_snapshots: int,
        window: int,
        dtype: torch.dtype,
        device: torch.device,
        mtp: bool,
        state_dtype: torch.dtype = torch.float32,
        kv: KvLayout | None = None,
    ) -> Cache:
        """Zeroed memory for `n_pages` pages and `n_slots` slots (both count the null one); `window` rows a slot.

        `kv` says what pages hold; None: `dtype`.
        """

        def zeros(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        hk, hv, dk, dv = spec.gdn_k_heads, spec.gdn_v_heads, spec.gdn_k_dim, spec.gdn_v_dim
        history, channels, fp32 = spec.conv_width - 1, spec.conv_channels, torch.float32
        n_attention = spec.n_attention_layers + (spec.n_mtp_layers if mtp else 0)
        return cls(
            kv=(kv or KvLayout(dtype)).allocate(spec, n_attention, n_pages, device),
            gdn=tuple(
                GdnState(
                    s=zeros(n_slots, hv, dk, dv, of=state_dtype),
                    k=zeros(n_slots, window, hk, dk),
                    v=zeros(n_slots, window, hv, dv),
                    g=zeros(n_slots, window, hv, of=fp32),
                    beta=zeros(n_slots, window, hv, of=fp32),
                    conv=zeros(n_slots, history + window, channels),
                )
                for _ in range(spec.n_gdn_layers)
            ),
            hidden=zeros(n_slots, 1 + window, spec.hidden),
            snapshots=tuple(
                GdnSnapshot(
                    s=zeros(n_snapshots, hv, dk, dv, of=state_dtype), conv=zeros(n_snapshots, history, channels)
                )
                for _ in range(spec.n_gdn_layers)
            ),
            snapshot_hidden=zeros(n_snapshots, spec.hidden),
        )

    def copy_page(self, src: int, dst: int) -> None:
        """Copy one page in every attention layer."""
        for kv in self.kv:
            data = kv if isinstance(kv, Tensor) else kv.data
            data[dst] = data[src]

    def host_pages(self, n: int) -> tuple[Tensor, ...]:
        """Room for `n` pages of every attention layer in host memory, pinned when the device is CUDA."""
        pin = self.hidden.is_cuda
        data = (kv if isinstance(kv, Tensor) else kv.data for kv in self.kv)
        return tuple(torch.empty((n, *d.shape[1:]), dtype=d.dtype, pin_memory=pin) for d in data)

    def page_to_host(self, page: int, pages: tuple[Tensor, ...], host: int) -> None:
        """Copy one page in every attention layer to `host` of `host_pages`."""
        for kv, there in zip(self.kv, pages, strict=True):
            there[host].copy_((kv if isinstance(kv, Tensor) else kv.data)[page], non_blocking=True)

    def page_from_host(self, pages: tuple[Tensor, ...], host: int, page: int) -> None:
        """Undo `page_to_host`, into any page."""
        for kv, there in zip(self.kv, pages, strict=True):
            (kv if isinstance(kv, Tensor) else kv.data)[page].copy_(there[host], non_blocking=True)

    def save_state(self, slot: int, commit: int, snapshot: int) -> None:
        """Keep the state of `slot` as it is after `commit` rows of its pending window. The slot itself is unchanged."""
        rows = torch.tensor([commit], device=self.hidden.device)
        for state, saved in zip(self.gdn, self.snapshots, strict=True):
            pending = (state.k[slot, None], state.v[slot, None], state.g[slot, None], state.beta[slot, None])
            saved.s[snapshot] = apply_rows_ref(state.s[slot, None].float(), pending, rows)[0]
            saved.conv[snapshot] = state.conv[slot, commit : commit + saved.conv.shape[1]]
        self.snapshot_hidden[snapshot] = self.hidden[slot, commit]

    def restore_state(self, snapshot: int, slot: int) -> None:
        """Put a snapshot into `slot`, with nothing pending."""
        for state, saved in zip(self.gdn, self.snapshots, strict=True):
            state.s[slot] = saved.s[snapshot]
            state.conv[slot, : saved.conv.shape[1]] = saved.conv[snapshot]
        self.hidden[slot, 0] = self.snapshot_hidden[snapshot]

    def snapshot_to_host(self, snapshot: int) -> list[Tensor]:
        """A snapshot's tensors in host memory (pinned when the device is CUDA), for `snapshot_from_host`."""
        tensors = [t[snapshot] for saved in self.snapshots for t in (saved.s, saved.conv)]
        pin = self.hidden.is_cuda
        out = []
        for t in (*tensors, self.snapshot_hidden[snapshot]):
            host = torch.empty(t.shape, dtype=t.dtype, pin_memory=pin)
            out.append(host.copy_(t, non_blocking=pin))
        return out

    def snapshot_from_host(self, tensors: list[Tensor], snapshot: int) -> None:
        """Undo `snapshot_to_host` into a device snapshot."""
        rows = [t[snapshot] for saved in self.snapshots for t in (saved.s, saved.conv)]
        for row, host in zip((*rows, self.snapshot_hidden[snapshot]), tensors, strict=True):
            row.copy_(host, non_blocking=True)
