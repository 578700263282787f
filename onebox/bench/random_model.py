"""A model of real shapes with random weights, made on the device, and its decode step.

Statistics are healthy: weights of zero mean (nibbles too: a mean of -0.5 would send every token to the same experts)
and
variance 1 / K, so activations neither vanish nor explode and experts are spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from onebox.kernels import head, linear
from onebox.kernels.fp8_ref import Fp8Weight
from onebox.kernels.gated_delta_ref import WindowState, WindowWeights, window_ref
from onebox.kernels.int4_ref import Int4Weight
from onebox.kernels.int8_ref import Int8Weight
from onebox.kernels.linear_ref import (
    embed_ref,
    normalize_ref,
    normalized_ref,
    project_add_ref,
    project_ref,
    residual_ref,
)
from onebox.kernels.moe_ref import route_slots_ref, slots_ref
from onebox.kernels.nvfp4_ref import Nvfp4Weight
from onebox.kernels.paged_attention_ref import PAGE_SIZE, Pages, entries, gated_attention_ref
from onebox.kernels.turboquant_ref import FORMATS, PageFormat, QuantizedPages
from onebox.kernels.weights import Weight, dequantize, pick
from onebox.ledger import Build
from onebox.model.attention import AttentionWeights
from onebox.model.block import BlockWeights
from onebox.model.decode import DecodeLayer, Fused, Window, decode_layers, merge
from onebox.model.gated_delta import GatedDeltaWeights
from onebox.model.layers import MlpWeights, Rope
from onebox.model.moe import MoeWeights
from onebox.model.mtp import MtpWeights
from onebox.model.qwen3_5 import Qwen35
from onebox.spec import Spec

GROUP = 128


def random_weight(kind: str, *shape: int, device: torch.device) -> Weight:
    """A weight [..., N, K] of variance 1 / K in one of the ledger's formats."""
    *lead, n, k = shape
    std = k**-0.5

    def scales(value: float, *size: int) -> Tensor:
        return torch.empty(*lead, *size, device=device).uniform_(0.75 * value, 1.25 * value)

    if kind == "bf16":
        return torch.empty(*shape, dtype=torch.bfloat16, device=device).normal_(0, std)
    if kind == "int8":
        q = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
        return Int8Weight(q, scales(std / 73.3, n))
    if kind == "fp8":
        q = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 40).to(torch.float8_e4m3fn)
        return Fp8Weight(q, scales(std / 40, -(-n // 128), -(-k // 128)))
    q = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8, device=device)
    if kind == "int4":
        q = torch.where((q & 15) == 0, q | 8, q)  # nibbles 1..15 are -7..7
        q = torch.where((q >> 4) == 0, q | 128, q)
        return Int4Weight(q, scales(std / 4.32, n, k // GROUP).to(torch.bfloat16), None, GROUP)
    assert kind == "nvfp4", kind
    return Nvfp4Weight(q, scales(8.0, n, k // 16).to(torch.float8_e4m3fn), scales(std / 8 / 2.92))


def random_layer(spec: Spec, build: Build, kind: str, device: torch.device) -> DecodeLayer:
    h, i, e = spec.hidden, spec.expert_width, spec.n_experts
    assert spec.shared_width == i, "the shared expert is as wide as a routed one"

    def norm(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.bfloat16, device=device).normal_(0, 0.05)

    if kind == "linear_attention":
        n = spec.conv_channels + spec.gdn_value_width + 2 * spec.gdn_v_heads
        hv = spec.gdn_v_heads
        window = WindowWeights(
            conv=torch.empty(spec.conv_channels, 4, dtype=torch.bfloat16, device=device).normal_(0, 0.5),
            dt_bias=torch.empty(hv, device=device).uniform_(-4, 0),
            a_log=torch.empty(hv, device=device).uniform_(0, math.log(16)),
            norm=1 + norm(spec.gdn_v_dim),
        )
        project, out_k, norms, fmt = n, spec.gdn_value_width, None, build.gdn
    else:
        d = spec.head_dim
        window, norms, fmt = None, (norm(d), norm(d)), build.attention
        project, out_k = 2 * spec.n_heads * d + 2 * spec.n_kv_heads * d, spec.n_heads * d
    return DecodeLayer(
        mixer_norm=norm(h),
        project=random_weight(fmt, project, h, device=device),
        tail=None,
        out=random_weight(fmt, h, out_k, device=device),
        window=window,
        head_norms=norms,
        mlp_norm=norm(h),
        router=torch.empty(spec.n_experts, h, dtype=torch.bfloat16, device=device).normal_(0, 2 * h**-0.5),
        shared_gate=torch.empty(1, h, dtype=torch.bfloat16, device=device).normal_(0, h**-0.5),
        gate_up=random_weight(build.experts, e, 2 * i, h, device=device),
        down=random_weight(build.experts, e, h, i, device=device),
        shared_gate_up=random_weight(build.shared, 2 * i, h, device=device),
        shared_down=random_weight(build.shared, h, i, device=device),
    )


@dataclass(frozen=True)
class Rows:
    """Where the step's rows stand; the step's last kernels move it on."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_start: Tensor  # [B+1] int64
    context_len: Tensor  # [B] int64
    page_table: Tensor  # [B, P] int64
    kv_slot: Tensor  # [T] int64
    state_slot: Tensor  # [B] int64
    commit: Tensor  # [B] int64

    @classmethod
    def make(cls, batch: int, window: int, context: int, n_pages_each: int, vocab: int, device: torch.device) -> Rows:
        """`batch` sequences at `context` tokens with pages of their own (page 0 and slot 0 stay free)."""
        table = 1 + torch.randperm(batch * n_pages_each, device=device).view(batch, n_pages_each)
        position = (context + torch.arange(window, device=device)).repeat(batch)
        sequence = torch.arange(batch, device=device).repeat_interleave(window)
        return cls(
            tokens=torch.randint(0, vocab, (batch * window,), device=device),
            positions=position,
            query_start=torch.arange(batch + 1, device=device) * window,
            context_len=torch.full((batch,), context, device=device),
            page_table=table,
            kv_slot=table[sequence, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE,
            state_slot=1 + torch.arange(batch, device=device),
            commit=torch.ones(batch, dtype=torch.long, device=device),
        )


@dataclass(frozen=True)
class RandomModel:
    """All layers, states, pages, embedding and head of one random model."""

    spec: Spec
    build: Build
    layers: tuple[DecodeLayer, ...]
    states: tuple[WindowState, ...]
    pages: tuple[Pages, ...]
    embedding: Tensor
    norm: Tensor
    head: Weight
    inv_freq: Tensor
    workspace: linear.Workspace

    @classmethod
    def make(
        cls,
        spec: Spec,
        build: Build,
        *,
        batch: int,
        context: int,
        window: int,
        device: torch.device,
        n_layers: int | None = None,
        experts: int | None = None,
    ) -> RandomModel:
        """A whole model, or its first `n_layers` layers with the first `experts` experts."""
        torch.manual_seed(0)
        spec = replace(spec, layer_types=spec.layer_types[:n_layers], n_experts=experts or spec.n_experts)
        slots, hv, hk = batch + 1, spec.gdn_v_heads, spec.gdn_k_heads
        n_pages = 1 + batch * pages_each(context)

        def state() -> WindowState:
            k = torch.randn(slots, window, hk, spec.gdn_k_dim, device=device)
            return WindowState(
                s=torch.randn(slots, hv, spec.gdn_k_dim, spec.gdn_v_dim, device=device) * 0.1,
                k=(k / k.norm(dim=-1, keepdim=True)).bfloat16(),
                v=torch.randn(slots, window, hv, spec.gdn_v_dim, device=device).bfloat16(),
                g=-torch.rand(slots, window, hv, device=device),
                beta=torch.rand(slots, window, hv, device=device),
                conv=torch.randn(slots, 3 + window, spec.conv_channels, device=device).bfloat16(),
            )

        half = spec.rope_dims // 2
        return cls(
            spec=spec,
            build=build,
            layers=tuple(random_layer(spec, build, kind, device) for kind in spec.layer_types),
            states=tuple(state() for _ in range(spec.n_gdn_layers)),
            pages=tuple(random_pages(spec, build.kv, n_pages, device) for _ in range(spec.n_attention_layers)),
            embedding=torch.empty(spec.vocab, spec.hidden, dtype=torch.bfloat16, device=device).normal_(),
            norm=torch.empty(spec.hidden, dtype=torch.bfloat16, device=device).normal_(0, 0.05),
            head=random_weight(build.head, spec.vocab, spec.hidden, device=device),
            inv_freq=spec.rope_theta ** (-torch.arange(half, device=device) / half),
            workspace=linear.Workspace.allocate(1 << 28, device),
        )

    def forward(self, rows: Rows, max_query: int, counts: list[Tensor] | None = None) -> Tensor:
        """Hidden states [T, H] after the final norm. `counts` collects each layer's number of slots."""
        angle = rows.positions.float()[:, None, None] * self.inv_freq
        rope = angle.cos().bfloat16(), angle.sin().bfloat16()
        window = Window(
            rows.positions, rows.query_start, rows.context_len, rows.page_table, rows.kv_slot, rows.state_slot,
            rows.commit, max_query,
        )  # fmt: skip
        h = linear.embed(rows.tokens, self.embedding, self.layers[0].mixer_norm)
        return decode_layers(
            h, self.layers, self.norm, window, self.states, self.pages, rope, self.spec, self.workspace, counts=counts
        )

    def step(self, rows: Rows) -> None:
        """One greedy step of every sequence, k = 0; `rows` moves to the next position in place."""
        best, _ = head.head(self.forward(rows, 1), self.head, self.workspace, with_logits=False)
        rows.tokens.copy_(best)
        rows.positions.add_(1)
        rows.context_len.add_(1)
        page = rows.page_table.gather(1, (rows.positions // PAGE_SIZE)[:, None])[:, 0]
        rows.kv_slot.copy_(page * PAGE_SIZE + rows.positions % PAGE_SIZE)


def random_pages(spec: Spec, kv: str, n_pages: int, device: torch.device) -> Pages:
    """One layer's pages in a format of the ledger, full of numbers of variance about 1."""
    if kv not in FORMATS:
        shape = (n_pages, 2, PAGE_SIZE, spec.n_kv_heads, spec.head_dim)
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
    pages = QuantizedPages.allocate(PageFormat.of(kv, spec.n_kv_heads, spec.head_dim, PAGE_SIZE), n_pages, device)
    pages.data.random_(0, 256)
    k, v, k_scale, v_scale = pages.format.parts(pages.data)
    for codes, scale, groups in ((k, k_scale, pages.format.k), (v, v_scale, pages.format.v)):
        if groups[0].bits == 8:
            codes.bitwise_and_(0xF7)  # no NaN
        scale.fill_(1 / 64 if groups[0].bits == 8 else 1.0)
    return pages


def pages_each(context: int, steps: int = 512) -> int:
    """Pages a sequence needs from `context` on for a benchmark's steps."""
    return -(-(context + steps) // PAGE_SIZE)


def forward_ref(model: RandomModel, rows: Rows, max_query: int) -> Tensor:
    """`RandomModel.forward` through the references alone; states and pages move the same way."""
    spec, eps = model.spec, model.spec.norm_eps
    angle = rows.positions.float()[:, None, None] * model.inv_freq
    rope = angle.cos().bfloat16(), angle.sin().bfloat16()
    h = embed_ref(rows.tokens, model.embedding, model.layers[0].mixer_norm)
    gdn = attention = 0
    for n, (kind, layer) in enumerate(zip(spec.layer_types, model.layers, strict=True)):
        mixed = project_ref(h, layer.project, None, eps)
        if kind == "linear_attention":
            assert layer.window is not None
            y, squares = window_ref(
                mixed, layer.window, model.states[gdn], rows.query_start, rows.state_slot, rows.commit,
                rows.context_len,
            )  # fmt: skip
            gdn += 1
        else:
            assert layer.head_norms is not None
            squares = None
            y = gated_attention_ref(
                mixed, *layer.head_norms, rope, model.pages[attention], rows.page_table, rows.kv_slot, rows.positions,
                rows.query_start, max_query, spec.n_heads, eps,
            )  # fmt: skip
            attention += 1
        h = project_add_ref(y, layer.out, h, layer.mlp_norm, squares, eps)
        normed = normalized_ref(h, eps)
        routing = route_slots_ref(normed, layer.router, layer.shared_gate, spec.top_k)
        met = routing.expert[1:].long()
        local = replace(routing, expert=torch.arange(-1, met.numel(), device=met.device))
        shared = dequantize(layer.shared_gate_up), dequantize(layer.shared_down)
        moved = slots_ref(
            normed, local, dequantize(pick(layer.gate_up, met)), dequantize(pick(layer.down, met)), shared
        )
        norm = model.layers[n + 1].mixer_norm if n + 1 < len(model.layers) else model.norm
        h = residual_ref((h.x.float() + moved).to(h.x.dtype), norm)
    return normalize_ref(h, eps)


def random_block(spec: Spec, build: Build, kind: str, device: torch.device) -> BlockWeights:
    """A layer as a checkpoint gives it, before any merging."""
    h, d, hv = spec.hidden, spec.head_dim, spec.gdn_v_heads

    def small(*shape: int, std: float) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, std)

    def w(fmt: str, *shape: int) -> Weight:
        return random_weight(fmt, *shape, device=device)

    if kind == "linear_attention":
        mixer: GatedDeltaWeights | AttentionWeights = GatedDeltaWeights(
            qkv=w(build.gdn, spec.conv_channels, h),
            z=w(build.gdn, spec.gdn_value_width, h),
            b=small(hv, h, std=h**-0.5),
            a=small(hv, h, std=h**-0.5),
            conv=small(spec.conv_channels, 4, std=0.5),
            dt_bias=torch.empty(hv, device=device).uniform_(-4, 0),
            a_log=torch.empty(hv, device=device).uniform_(0, math.log(16)),
            norm=1 + small(spec.gdn_v_dim, std=0.05),
            out=w(build.gdn, h, spec.gdn_value_width),
        )
    else:
        mixer = AttentionWeights(
            q=w(build.attention, 2 * spec.n_heads * d, h),
            k=w(build.attention, spec.n_kv_heads * d, h),
            v=w(build.attention, spec.n_kv_heads * d, h),
            out=w(build.attention, h, spec.n_heads * d),
            q_norm=small(d, std=0.05),
            k_norm=small(d, std=0.05),
        )
    mlp = MoeWeights(
        router=small(spec.n_experts, h, std=2 * h**-0.5),
        gate_up=w(build.experts, spec.n_experts, 2 * spec.expert_width, h),
        down=w(build.experts, spec.n_experts, h, spec.expert_width),
        shared=MlpWeights(
            gate=w(build.shared, spec.shared_width, h),
            up=w(build.shared, spec.shared_width, h),
            down=w(build.shared, h, spec.shared_width),
        ),
        shared_gate=small(1, h, std=h**-0.5),
    )
    return BlockWeights(small(h, std=0.05), mixer, small(h, std=0.05), mlp)


def random_model_weights(spec: Spec, build: Build, device: torch.device) -> Qwen35:
    """What `load_model` would give for a checkpoint of this shape, MTP head included."""
    blocks, packed = [], []
    for kind in spec.layer_types:
        block, layer = merge(random_block(spec, build, kind, device))
        blocks.append(block)
        packed.append(layer)
    drafter = replace(build, experts=build.mtp_experts, shared=build.mtp_dense, attention=build.mtp_dense)
    drafter_block, drafter_layer = merge(random_block(spec, drafter, "full_attention", device))
    model = Qwen35(
        spec=spec,
        embedding=torch.empty(spec.vocab, spec.hidden, dtype=torch.bfloat16, device=device).normal_(),
        layers=tuple(blocks),
        norm=torch.empty(spec.hidden, dtype=torch.bfloat16, device=device).normal_(0, 0.05),
        head=random_weight(build.head, spec.vocab, spec.hidden, device=device),
        mtp=MtpWeights(
            fc=random_weight(build.mtp_dense, spec.hidden, 2 * spec.hidden, device=device),
            embedding_norm=torch.empty(spec.hidden, dtype=torch.bfloat16, device=device).normal_(0, 0.05),
            hidden_norm=torch.empty(spec.hidden, dtype=torch.bfloat16, device=device).normal_(0, 0.05),
            block=drafter_block,
            norm=torch.empty(spec.hidden, dtype=torch.bfloat16, device=device).normal_(0, 0.05),
        ),
        rope=Rope.from_spec(spec, device),
        dtype=torch.bfloat16,
        device=device,
    )
    return replace(model, fused=Fused.of(model, packed, drafter_layer))


def relative_rms(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).square().mean().sqrt() / want.float().square().mean().sqrt())


def check(shape_spec: Spec, build: Build, device: torch.device, batch: int = 2, window: int = 3) -> dict[str, float]:
    """Four layers of a shape against the references: relative RMS of the hidden states and of what the layers keep."""
    model = RandomModel.make(
        shape_spec, build, batch=batch, context=200, window=window, device=device, n_layers=4, experts=32
    )
    other = replace(
        model,
        states=tuple(replace(s, **{f.name: getattr(s, f.name).clone() for f in fields(s)}) for s in model.states),
        pages=tuple(p.clone() if isinstance(p, Tensor) else replace(p, data=p.data.clone()) for p in model.pages),
    )
    rows = Rows.make(batch, window, 200, pages_each(200), model.spec.vocab, device)
    errors = {"hidden": relative_rms(model.forward(rows, window), forward_ref(other, rows, window))}
    for name in ("s", "k", "v", "g", "beta", "conv"):
        got, want = (torch.stack([getattr(s, name).float() for s in m.states]) for m in (model, other))
        errors[name] = relative_rms(got, want)
    every = torch.arange(int(rows.page_table.max()) + 1, device=device)
    kept = [torch.stack([torch.stack(entries(p, every)) for p in m.pages]) for m in (model, other)]
    errors["pages"] = relative_rms(*kept)
    return errors
