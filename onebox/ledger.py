"""The byte ledger: what one decode step reads and writes, and what stays in memory.

Takes a Spec, a Build (a format for each component), a batch, a context and a draft length; gives bytes by component.
The one copy of this arithmetic: `plan` prints it, the engine sizes memory with it, the bench divides by it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from onebox.errors import ConfigError
from onebox.spec import Spec

# bytes a weight, scales included (recipe: INT4 has one 16-bit scale for 128 weights)
WEIGHT_BYTES = {
    "bf16": 2.0,
    "int8": 1.0,  # one fp32 scale a row is below 0.2 %
    "fp8": 1.0 + 4 / (128 * 128),
    "int4": 0.5 + 2 / 128,
    "nvfp4": 0.5 + 1 / 16,
}
# bits of a key's and a value's dimension together, and 16-bit scales of a head's key and value together
KV_FORMATS = {
    "fp32": (64.0, 0),
    "bf16": (32.0, 0),
    "fp8": (16.0, 2),
    "k8v4": (12.0, 2),
    "tq4": (8.0, 2),
    "tq3.5": (6.5, 4),  # a quarter of the dimensions in 4 bits, the rest in 3
    "tq3": (6.0, 2),
    "tq2.5": (4.5, 4),
}
STATE_BYTES = {"fp32": 4.0, "bf16": 2.0}  # bytes an element of a recurrent state


@dataclass(frozen=True)
class Build:
    """Format of each component's weights, and of the KV pages. Names are keys of WEIGHT_BYTES and KV_FORMATS.

    `mlp` is a dense model's, where most of its weights are; a mixture of experts has `experts` and `shared` instead.
    """

    experts: str = "bf16"
    shared: str = "bf16"
    mlp: str = "bf16"
    router: str = "bf16"
    attention: str = "bf16"
    gdn: str = "bf16"
    head: str = "bf16"
    mtp_experts: str = "bf16"
    mtp_dense: str = "bf16"
    kv: str = "bf16"
    state: str = "fp32"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            tables: dict[str, Collection[str]] = {"kv": KV_FORMATS, "state": STATE_BYTES}
            known = tables.get(field.name, WEIGHT_BYTES)
            if value not in known:
                raise ConfigError(f"build: {field.name} format {value!r} is not known. Known: {', '.join(known)}.")

    def every_token(self, spec: Spec) -> str:
        """Format of the MLP that every token passes through: the shared expert, or a dense model's only one."""
        return self.shared if spec.moe else self.mlp


BUILDS = {
    "bf16": Build(),
    "fp8": Build(
        experts="fp8", shared="fp8", mlp="fp8", attention="fp8", gdn="fp8", mtp_experts="fp8", mtp_dense="fp8"
    ),
    "int4": Build(experts="int4", mlp="int4", attention="int4", gdn="int4"),
    "int4-fp8": Build(experts="int4", shared="fp8", mlp="int4", attention="int4", gdn="int4"),
    "hybrid": Build(
        experts="int4",
        shared="fp8",
        mlp="int4",
        attention="int4",
        gdn="int4",
        head="int8",
        mtp_experts="int4",
        mtp_dense="fp8",
    ),
    "nvfp4": Build(
        experts="nvfp4",
        shared="nvfp4",
        mlp="nvfp4",
        attention="nvfp4",
        gdn="nvfp4",
        head="int8",
        mtp_experts="nvfp4",
        mtp_dense="nvfp4",
    ),
}


def _spec(hidden: int, n_layers: int, n_heads: int, gdn_v_heads: int, width: int, *, dense: bool = False) -> Spec:
    mlp: dict[str, Any] = {
        "model_type": "qwen3_5_moe_text",
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }
    if dense:
        mlp = {"model_type": "qwen3_5_text", "num_key_value_heads": 4, "intermediate_size": width}
    return Spec.from_config(
        mlp
        | {
            "hidden_size": hidden,
            "vocab_size": 248_320,
            "num_hidden_layers": n_layers,
            "num_attention_heads": n_heads,
            "head_dim": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            "linear_num_key_heads": 16,
            "linear_num_value_heads": gdn_v_heads,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "mtp_num_hidden_layers": 1,
            "max_position_embeddings": 262_144,
            "eos_token_id": 248_046,
            "dtype": "bfloat16",
        }
    )


SHAPES = {
    "qwen3.5-122b-a10b": _spec(hidden=3072, n_layers=48, n_heads=32, gdn_v_heads=64, width=1024),
    "qwen3.5-35b-a3b": _spec(hidden=2048, n_layers=40, n_heads=16, gdn_v_heads=32, width=512),
    "qwen3.5-27b": _spec(hidden=5120, n_layers=64, n_heads=24, gdn_v_heads=48, width=17_408, dense=True),
}


@dataclass(frozen=True)
class Box:
    """A machine one can buy: memory bandwidth as its data sheet says, memory as its driver reports it, in bytes.

    `taken` is what system and driver hold before anything is loaded.
    """

    title: str
    bytes_per_s: float
    memory: float
    capability: tuple[int, int]
    unified: bool = False
    taken: float = 0.6e9


BOXES = {
    "dgx-spark": Box("DGX Spark (GB10)", 273e9, 128e9, (12, 1), unified=True, taken=5e9),
    "rtx-pro-6000": Box("RTX PRO 6000 Blackwell", 1.792e12, 102e9, (12, 0)),
    "rtx-5090": Box("GeForce RTX 5090", 1.792e12, 34.1e9, (12, 0)),
    "rtx-4090": Box("GeForce RTX 4090", 1.008e12, 25.7e9, (8, 9)),
    "rtx-3090": Box("GeForce RTX 3090", 0.936e12, 25.7e9, (8, 6)),
    "l40s": Box("L40S", 0.864e12, 48.3e9, (8, 9)),
    "a100": Box("A100 80 GB SXM", 2.039e12, 85.5e9, (8, 0)),
    "h100": Box("H100 80 GB SXM", 3.35e12, 85.5e9, (9, 0)),
    "h200": Box("H200 SXM", 4.8e12, 150e9, (9, 0)),
    "b200": Box("B200", 8.0e12, 192e9, (10, 0)),
}


@dataclass(frozen=True)
class Rung:
    """One technique of the ladder on top of those below it."""

    name: str
    build: Build
    k: int = 0


def ladder(kv: Sequence[str] = ("fp8", "tq4")) -> tuple[Rung, ...]:
    """The published techniques, each on top of the last: weight formats, drafts, drafter, KV formats of a build."""
    plain, shared, full = BUILDS["int4"], BUILDS["int4-fp8"], BUILDS["hybrid"]
    head = replace(shared, head="int8")
    return (
        Rung("INT4", plain),
        Rung("+ FP8 shared expert", shared),
        Rung("+ INT8 head", head),
        *(Rung(f"+ MTP-{k}", head, k) for k in (1, 2, 3)),
        Rung("+ quantised drafter", full, 3),
        *(Rung(f"+ {name} KV", replace(full, kv=name), 3) for name in kv),
    )


@dataclass(frozen=True)
class Efficiency:
    """How long a decode step of the engine takes beyond its bytes, fitted to measured steps.

    A step reads its bytes at `share` of the data sheet's bandwidth and takes `layer_s` a layer; each of its rows above
    `rows` costs as much as reading `row_bytes` a layer.
    """

    share: float
    layer_s: float
    row_bytes: float
    device: str
    rows: int = 32

    def step_s(self, spec: Spec, step: StepBytes, box: Box, *, batch: int, k: int) -> float:
        """Seconds of one step; a draft is one more layer."""
        layers, beyond = spec.n_layers + k, max(batch * (k + 1) - self.rows, 0)
        return (step.total + layers * beyond * self.row_bytes) / (self.share * box.bytes_per_s) + layers * self.layer_s


# `onebox bench efficiency` fits these to results/engine.jsonl; docs/benchmarks.md has prediction beside measurement
MEASURED = Efficiency(share=0.478, layer_s=21.4e-6, row_bytes=41.6e6, device="NVIDIA H200")


@dataclass(frozen=True)
class Params:
    """Weights by component, in numbers of elements. An `expert` is one routed expert of one layer."""

    expert: int
    shared: int  # of one layer (a dense model's MLP)
    router: int  # of one layer, with the shared expert's gate
    attention: int  # projections of one attention layer
    gdn: int  # projections of one gated-delta-net layer
    head: int
    embedding: int
    mtp_fc: int

    @classmethod
    def of(cls, spec: Spec) -> Params:
        h = spec.hidden
        q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        return cls(
            expert=3 * spec.expert_width * h,
            shared=3 * spec.shared_width * h,
            router=(spec.n_experts + 1) * h if spec.moe else 0,
            attention=(2 * q + 2 * kv + q) * h,  # query and gate, k and v, out
            gdn=(spec.conv_channels + 2 * spec.gdn_value_width + 2 * spec.gdn_v_heads) * h,
            head=spec.vocab * h,
            embedding=spec.vocab * h,
            mtp_fc=2 * h * h,
        )


def distinct_experts(n_experts: int, top_k: int, rows: int) -> float:
    """Experts met by `rows` rows when each picks `top_k` of `n_experts` on its own: an upper bound for real text."""
    return n_experts * (1 - (1 - top_k / n_experts) ** rows) if n_experts else 0.0


def tokens_per_step(acceptance: Sequence[float]) -> float:
    """Mean tokens a step when draft i is kept with probability acceptance[i] given that those before it were."""
    total, reach = 1.0, 1.0
    for a in acceptance:
        reach *= a
        total += reach
    return total


@dataclass(frozen=True)
class StepBytes:
    """Bytes one step moves, by component."""

    routed: float
    shared: float
    router: float
    attention: float
    gdn: float
    head: float
    state: float
    kv: float
    mtp: float  # k passes of the MTP block with its KV, no head
    draft_head: float

    @property
    def total(self) -> float:
        return sum(float(getattr(self, field.name)) for field in fields(self))

    def roof_tok_s(self, bytes_per_s: float, tokens: float = 1.0) -> float:
        """Tokens a second if nothing but these bytes took time."""
        return bytes_per_s / self.total * tokens


def kv_bytes_per_token(spec: Spec, build: Build, *, mtp: bool = False) -> float:
    """K and V of one token over all attention layers; `mtp` adds the drafter's layers."""
    layers = spec.n_attention_layers + (spec.n_mtp_layers if mtp else 0)
    bits, scales = KV_FORMATS[build.kv]
    return layers * spec.n_kv_heads * (spec.head_dim * bits / 8 + 2 * scales)


def state_bytes(spec: Spec, build: Build | None = None) -> float:
    """Recurrent state of one sequence over all gated-delta-net layers; fp32 without a build."""
    element = STATE_BYTES[build.state if build else "fp32"]
    return spec.n_gdn_layers * spec.gdn_v_heads * spec.gdn_k_dim * spec.gdn_v_dim * element


def step_bytes(
    spec: Spec,
    build: Build,
    *,
    batch: int = 1,
    context: int = 0,
    k: int = 0,
    distinct: float | None = None,
    draft_vocab: int | None = None,
    state_writes: int = 1,
) -> StepBytes:
    """One decode step of `batch` sequences at `context` tokens each with `k` drafts.

    Every weight is read once, each distinct expert once. `distinct` is the measured number of experts a layer meets
    (None: independent choices). Lazy commit writes the state once (`state_writes` 1); k+1 counts a snapshot a row. The
    first draft pass runs the window's rows, later ones a row a sequence. `draft_vocab` shortens the drafter's head.
    """
    p, rows = Params.of(spec), batch * (k + 1)
    weight, n = WEIGHT_BYTES, spec.n_layers
    if distinct is None:
        distinct = distinct_experts(spec.n_experts, spec.top_k, rows)
    kv_layer = kv_bytes_per_token(spec, build) / max(spec.n_attention_layers, 1)
    mtp = 0.0
    for i in range(k):
        met = distinct_experts(spec.n_experts, spec.top_k, rows if i == 0 else batch)
        dense = p.mtp_fc + p.attention + p.shared
        mtp += met * p.expert * weight[build.mtp_experts] + dense * weight[build.mtp_dense]
        mtp += p.router * weight[build.router] + batch * context * kv_layer
    share = 1.0 if draft_vocab is None else min(draft_vocab / spec.vocab, 1.0)
    return StepBytes(
        routed=n * distinct * p.expert * weight[build.experts],
        shared=n * p.shared * weight[build.every_token(spec)],
        router=n * p.router * weight[build.router],
        attention=spec.n_attention_layers * p.attention * weight[build.attention],
        gdn=spec.n_gdn_layers * p.gdn * weight[build.gdn],
        head=p.head * weight[build.head],
        state=batch * state_bytes(spec, build) * (1 + state_writes),
        kv=batch * context * kv_layer * spec.n_attention_layers,
        mtp=mtp,
        draft_head=k * p.head * weight[build.head] * share,
    )


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes that stay on the device, by component."""

    experts: float
    dense: float  # shared experts, routers, projections
    head: float
    embedding: float
    mtp: float
    states: float  # slots and snapshots, with pending windows and convolution inputs
    kv: float

    @property
    def weights(self) -> float:
        return self.experts + self.dense + self.head + self.embedding + self.mtp

    @property
    def total(self) -> float:
        return self.weights + self.states + self.kv


def slot_bytes(spec: Spec, window: int, build: Build | None = None, *, element: float = 2.0) -> float:
    """One sequence's recurrent memory: state, pending window of `window` rows, convolution inputs, hidden states.

    `element` is the bytes of an activation. A window of 0 rows is what a snapshot keeps.
    """
    row = element * (spec.gdn_key_width + spec.gdn_value_width) + 8.0 * spec.gdn_v_heads
    conv = element * (spec.conv_width - 1 + window) * spec.conv_channels
    hidden = element * (1 + window) * spec.hidden
    return state_bytes(spec, build) + spec.n_gdn_layers * (window * row + conv) + hidden


def workspace_bytes(
    spec: Spec,
    *,
    rows: int,
    window_rows: int,
    context: int,
    element: float,
    unpacked_experts: int,
    unpacked_kv: bool = False,
) -> float:
    """Scratch of the largest step: `rows` prefill rows of activations, a mask over `context`, unpacked experts, logits.

    An upper bound by shapes, not a measurement; a logit is counted with the copies that truncated sampling makes.
    `unpacked_kv`: pages are decoded before they are read, through codes and levels.
    """
    gdn = spec.conv_channels + 2 * spec.gdn_value_width
    attention = 3 * spec.n_heads * spec.head_dim + 2 * spec.n_kv_heads * spec.head_dim
    mlp = max(2 * spec.shared_width, 2 * spec.expert_width * spec.top_k)
    activations = rows * (4 * spec.hidden + max(gdn, attention, mlp)) * (element + 4.0)
    mask = rows * context * (1.0 + element)
    keys = 2.0 * context * spec.n_kv_heads * spec.head_dim * (element + (20.0 if unpacked_kv else 0.0))
    experts = min(spec.n_experts, unpacked_experts) * 3.0 * spec.expert_width * spec.hidden * element
    logits = window_rows * spec.vocab * 48.0
    return max(activations + mask + keys + experts, logits)


def resident_bytes(
    spec: Spec,
    build: Build,
    *,
    slots: int = 1,
    window: int = 1,
    kv_tokens: int = 0,
    snapshots: int = 0,
    mtp: bool = True,
) -> ResidentBytes:
    """Weights, `slots` sequences with windows of `window` rows, `snapshots` saved states, `kv_tokens` of KV pages."""
    p, weight, n = Params.of(spec), WEIGHT_BYTES, spec.n_layers
    with_mtp = mtp and spec.n_mtp_layers > 0
    experts = spec.n_experts * p.expert
    mtp_bytes = spec.n_mtp_layers * (
        experts * weight[build.mtp_experts]
        + (p.mtp_fc + p.attention + p.shared) * weight[build.mtp_dense]
        + p.router * weight[build.router]
    )
    return ResidentBytes(
        experts=n * experts * weight[build.experts],
        dense=n * (p.shared * weight[build.every_token(spec)] + p.router * weight[build.router])
        + spec.n_attention_layers * p.attention * weight[build.attention]
        + spec.n_gdn_layers * p.gdn * weight[build.gdn],
        head=0.0 if spec.tied and build.head == "bf16" else p.head * weight[build.head],
        embedding=p.embedding * WEIGHT_BYTES["bf16"],
        mtp=mtp_bytes if with_mtp else 0.0,
        states=slots * slot_bytes(spec, window, build) + snapshots * slot_bytes(spec, 0, build),
        kv=kv_tokens * kv_bytes_per_token(spec, build, mtp=with_mtp),
    )
