"""Decode windows through the fused kernels: packed layers, a Batch and a Cache in, hidden states out.

What `Qwen35.forward` computes, for windows on a GPU. Packing merges the projections that read the same rows; the merged
weights replace the ones they were made of, and prefill reads its parts as views of them (`merge`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from onebox.kernels import experts, gated_delta, head, linear, moe, paged_attention
from onebox.kernels.fp8_ref import Fp8Weight
from onebox.kernels.gated_delta_ref import WindowState, WindowWeights
from onebox.kernels.linear_ref import Residual
from onebox.kernels.moe_ref import Chosen, Routing
from onebox.kernels.paged_attention_ref import Pages
from onebox.kernels.weights import Weight, cat, dequantize, rows, same_format
from onebox.model.attention import AttentionWeights
from onebox.model.block import BlockWeights
from onebox.model.cache import Cache
from onebox.model.gated_delta import GatedDeltaWeights
from onebox.model.moe import MoeWeights
from onebox.model.mtp import FIRST_ENTRY, joined
from onebox.model.qwen3_5 import Qwen35
from onebox.request import Batch
from onebox.spec import Spec

MAX_ROWS = linear.MAX_ROWS


@dataclass(frozen=True)
class DecodeLayer:
    """One layer as the decode kernels take it. Exactly one of `window` and `head_norms` is there."""

    mixer_norm: Tensor
    project: Weight  # GDN: qkv, z (b, a) rows; attention: q with gate, k, v rows
    tail: Weight | None  # GDN: b, a rows where their format is another
    out: Weight
    window: WindowWeights | None  # GDN
    head_norms: tuple[Tensor, Tensor] | None  # attention: q, k
    mlp_norm: Tensor
    router: Tensor
    shared_gate: Tensor
    gate_up: Weight
    down: Weight
    shared_gate_up: Weight
    shared_down: Weight


def pack(block: BlockWeights) -> DecodeLayer | None:
    """A layer for the kernels, or None where they cannot read its weights or shapes (a dense MLP, zero points)."""
    mixer, mlp = block.mixer, block.mlp
    if not isinstance(mlp, MoeWeights) or not same_format(mlp.shared.gate, mlp.shared.up):
        return None
    tail: Weight | None = None
    window, head_norms = None, None
    if isinstance(mixer, GatedDeltaWeights):
        if mixer.conv.shape[1] != 4 or not same_format(mixer.qkv, mixer.z):
            return None
        window = WindowWeights(mixer.conv, mixer.dt_bias, mixer.a_log, mixer.norm)
        small = (mixer.b, mixer.a)
        if all(same_format(mixer.qkv, w) for w in small) and not isinstance(mixer.qkv, Fp8Weight):
            project = cat((mixer.qkv, mixer.z, *small))
        else:  # a few rows: as dense ones they need no block to end where they begin
            project = cat((mixer.qkv, mixer.z))
            tail = torch.cat([dequantize(w, block.mixer_norm.dtype) for w in small])
    else:
        assert isinstance(mixer, AttentionWeights)
        if not (same_format(mixer.q, mixer.k) and same_format(mixer.q, mixer.v)):
            return None
        project, head_norms = cat((mixer.q, mixer.k, mixer.v)), (mixer.q_norm, mixer.k_norm)
    layer = DecodeLayer(
        mixer_norm=block.mixer_norm,
        project=project,
        tail=tail,
        out=mixer.out,
        window=window,
        head_norms=head_norms,
        mlp_norm=block.mlp_norm,
        router=mlp.router,
        shared_gate=mlp.shared_gate,
        gate_up=mlp.gate_up,
        down=mlp.down,
        shared_gate_up=cat((mlp.shared.gate, mlp.shared.up)),
        shared_down=mlp.shared.down,
    )
    weights = (layer.project, layer.out, layer.gate_up, layer.down, layer.shared_gate_up, layer.shared_down)
    if not all(linear.readable(w) for w in weights):
        return None
    if window is not None and window.norm.shape[0] != linear.Operand.of(layer.out).step:
        return None  # `out` divides by a head's rms once a group of columns
    return layer


def merge(block: BlockWeights) -> tuple[BlockWeights, DecodeLayer | None]:
    """The layer packed, and the block with its projections as views of the packed ones: no weight is there twice."""
    layer = pack(block)
    if layer is None:
        return block, None
    mixer, mlp = block.mixer, block.mlp
    assert isinstance(mlp, MoeWeights)

    def split(w: Weight, *parts: Weight) -> list[Weight]:
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + part.shape[-2])
        return [rows(w, slice(start, end)) for start, end in pairwise(ends)]

    if isinstance(mixer, AttentionWeights):
        q, k, v = split(layer.project, mixer.q, mixer.k, mixer.v)
        views: AttentionWeights | GatedDeltaWeights = replace(mixer, q=q, k=k, v=v)
    elif layer.tail is None:
        qkv, z, b, a = split(layer.project, mixer.qkv, mixer.z, mixer.b, mixer.a)
        views = replace(mixer, qkv=qkv, z=z, b=b, a=a)
    else:
        (qkv, z), (b, a) = split(layer.project, mixer.qkv, mixer.z), split(layer.tail, mixer.b, mixer.a)
        views = replace(mixer, qkv=qkv, z=z, b=b, a=a)
    gate, up = split(layer.shared_gate_up, mlp.shared.gate, mlp.shared.up)
    shared = replace(mlp.shared, gate=gate, up=up)
    return replace(block, mixer=views, mlp=replace(mlp, shared=shared)), layer


def fits(spec: Spec, dtype: torch.dtype) -> bool:
    """Whether the kernels are written for these widths: 16-bit activations, heads of a power of two."""
    widths = [spec.head_dim]
    if spec.n_gdn_layers:
        widths.append(spec.gdn_v_dim)
    square = not spec.n_gdn_layers or (spec.gdn_k_dim == spec.gdn_v_dim and spec.conv_width == 4)
    return dtype.itemsize == 2 and square and spec.n_experts > 0 and all(d >= 16 and d & (d - 1) == 0 for d in widths)


@dataclass(frozen=True)
class Window:
    """Where a window's rows stand: the part of a Batch that the kernels read, all on the device."""

    positions: Tensor
    query_start: Tensor
    context_len: Tensor
    page_table: Tensor
    kv_slot: Tensor
    state_slot: Tensor
    commit: Tensor
    max_query: int


def decode_layers(
    h: Residual,
    layers: Sequence[DecodeLayer],
    final_norm: Tensor,
    window: Window,
    states: Sequence[WindowState],
    pages: Sequence[Pages],
    rope: tuple[Tensor, Tensor],
    spec: Spec,
    workspace: linear.Workspace,
    kv_start: int = 0,
    counts: list[Tensor] | None = None,
) -> Tensor:
    """Rows h through `layers` and the norm after them: [T, H]. States and pages move as `Batch` says of a window.

    `h` is ahead of the first layer's mixer norm. `counts` collects each layer's number of slots (experts met plus one).
    """
    eps, gdn, attention = spec.norm_eps, iter(states), iter(pages)
    for n, layer in enumerate(layers):
        paired, squares = linear.wants_pairs(layer.out), None
        mixed = linear.project(h, layer.project, layer.tail, eps)
        if layer.window is not None:
            y, squares = gated_delta.window(
                mixed, layer.window, next(gdn), window.query_start, window.state_slot, window.commit,
                window.context_len, paired,
            )  # fmt: skip
        else:
            assert layer.head_norms is not None
            y = paged_attention.gated_attention(
                mixed, *layer.head_norms, rope, next(attention), window.page_table, window.kv_slot, window.positions,
                window.query_start, window.max_query, spec.n_heads, eps, workspace, kv_start, paired,
            )  # fmt: skip
        h = linear.project_add(y, layer.out, h, layer.mlp_norm, workspace, squares, eps, paired)
        pairs = linear.wants_pairs(layer.down), linear.wants_pairs(layer.shared_down)
        router = h, layer.router, layer.shared_gate, layer.shared_gate_up, spec.top_k, eps, workspace, pairs[1]
        norm = layers[n + 1].mixer_norm if n + 1 < len(layers) else final_norm
        found: Chosen | Routing
        if experts.takes(layer.gate_up, layer.down):
            chosen, hidden = moe.choose(*router)
            digits, steps, added = experts.gate_up(h, chosen, layer.gate_up, hidden, layer.shared_down, eps, pairs[1])
            h, found = experts.down(digits, steps, added, chosen, layer.down, h, norm, workspace), chosen
        else:
            routing, hidden = moe.route(*router)
            z, added = moe.gate_up(h, routing, layer.gate_up, hidden, layer.shared_down, eps, pairs)
            h, found = moe.down(z, added, routing, layer.down, h, norm, workspace, pairs[0]), routing
        if counts is not None:
            counts.append(found.count)
    return linear.normalize(h, eps)


def workspace_bytes(spec: Spec) -> int:
    """Scratch that any kernel asks for, for MAX_ROWS rows."""
    slots = 1 + min(spec.n_experts, MAX_ROWS * spec.top_k)
    attention = spec.n_heads * paged_attention.MAX_CHUNKS * (spec.head_dim + 2)
    split_sums = 16 * (spec.hidden + 2 * spec.shared_width + 2 * spec.n_experts + 256)
    return 4 * MAX_ROWS * max(slots * spec.hidden, attention, split_sums, spec.vocab // 4)


@dataclass(frozen=True)
class Fused:
    """The decode half of a model. Same results as its `forward`, `draft_forward` and `logits`, for windows.

    Sums do not depend on a row's company, so a window of more than MAX_ROWS rows goes through in parts.
    """

    model: Qwen35
    layers: tuple[DecodeLayer, ...]
    drafter: DecodeLayer | None  # None: no MTP head, or one that the kernels cannot read
    workspace: linear.Workspace

    @classmethod
    def of(cls, model: Qwen35, layers: Sequence[DecodeLayer | None], drafter: DecodeLayer | None) -> Fused | None:
        """None where a layer, the head or the widths are not for the kernels."""
        packed = tuple(layer for layer in layers if layer is not None)
        if len(packed) < len(layers) or not fits(model.spec, model.dtype) or not linear.readable(model.head):
            return None
        if model.mtp is not None and not linear.readable(model.mtp.fc):
            drafter = None
        space = linear.Workspace.allocate(workspace_bytes(model.spec), model.device)
        return cls(model, packed, drafter, space)

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        """Hidden states [T, H] after the final norm."""
        model = self.model
        states = [WindowState(**{f.name: getattr(s, f.name) for f in fields(s)}) for s in cache.gdn]
        done = []
        for part, _ in parts(batch):
            h = linear.embed(part.tokens, model.embedding, self.layers[0].mixer_norm)
            rope = model.rope.tables(part.positions, model.dtype)
            window, space = window_of(part), self.workspace
            out = decode_layers(h, self.layers, model.norm, window, states, cache.kv, rope, model.spec, space)
            done.append(out)
        return torch.cat(done)

    def draft_forward(self, batch: Batch, hidden: Tensor, cache: Cache) -> Tensor:
        """One pass of the MTP head over hidden [T, H]: [T, H]."""
        model, layer = self.model, self.drafter
        assert model.mtp is not None and layer is not None
        pages = cache.kv[model.spec.n_attention_layers :]
        done = []
        for part, where in parts(batch):
            y = joined(model.embedding[part.tokens], hidden[where], model.mtp, model.spec)
            none = y.new_zeros(y.shape[0], model.spec.hidden)  # fc adds to an empty stream
            h = linear.project_add(
                y, model.mtp.fc, Residual(none, none, none, none, none), layer.mixer_norm, self.workspace
            )
            rope = model.rope.tables((part.positions - 1).clamp(min=0), model.dtype)
            window, space = window_of(part), self.workspace
            out = decode_layers(h, [layer], model.mtp.norm, window, [], pages, rope, model.spec, space, FIRST_ENTRY)
            done.append(out)
        return torch.cat(done)

    def logits(self, hidden: Tensor, w: Weight | None = None) -> Tensor:
        """hidden [R, H] -> logits [R, V] fp32 by the model's head, or by `w`."""
        w = self.model.head if w is None else w
        done = [head.head(part, w, self.workspace)[1] for part in hidden.contiguous().split(MAX_ROWS)]
        return torch.cat([logits for logits in done if logits is not None])


def window_of(batch: Batch) -> Window:
    arrays = {f.name: getattr(batch, f.name) for f in fields(batch)}
    strided = [name for name, t in arrays.items() if isinstance(t, Tensor) and not t.is_contiguous()]
    assert not strided, f"kernels take index arrays as contiguous: {strided}"
    names = (f.name for f in fields(Window))
    return Window(**{name: getattr(batch, name) for name in names})


def parts(batch: Batch) -> list[tuple[Batch, slice]]:
    """The batch in parts of whole sequences and at most MAX_ROWS rows, and where their rows are."""
    if batch.tokens.shape[0] <= MAX_ROWS:
        return [(batch, slice(None))]
    n, n_sequences = batch.tokens.shape[0], batch.state_slot.shape[0]
    if n == n_sequences * batch.max_query:  # as in a captured step, which cannot ask the device
        starts = list(range(0, n + 1, batch.max_query))
    else:
        starts = batch.query_start.tolist()
    cuts = [0]
    for b in range(1, len(starts)):
        if starts[b] - starts[cuts[-1]] > MAX_ROWS:
            cuts.append(b - 1)
    cuts.append(len(starts) - 1)
    found = []
    for first, last in pairwise(cuts):
        at = slice(starts[first], starts[last])
        part = replace(
            batch,
            **{name: getattr(batch, name)[at] for name in ("tokens", "positions", "kv_slot")},
            **{
                name: getattr(batch, name)[first:last] for name in ("context_len", "page_table", "state_slot", "commit")
            },
            query_start=batch.query_start[first : last + 1] - starts[first],
        )
        found.append((part, at))
    return found
