"""A model's decode window through the fused kernels against the same model through the references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels_common import DEVICE, DTYPE, assert_close, make_weight, rows

from onebox.kernels.int4_ref import Int4Weight
from onebox.kernels.paged_attention_ref import PAGE_SIZE
from onebox.kernels.turboquant_ref import FORMATS
from onebox.kernels.weights import Weight, tensors
from onebox.model.attention import AttentionWeights
from onebox.model.block import BlockWeights
from onebox.model.cache import Cache, KvLayout
from onebox.model.decode import MAX_ROWS, Fused, merge, pack, parts
from onebox.model.gated_delta import GatedDeltaWeights
from onebox.model.layers import MlpWeights, Rope
from onebox.model.moe import MoeWeights
from onebox.model.mtp import MtpWeights
from onebox.model.qwen3_5 import Qwen35
from onebox.request import Batch
from onebox.spec import Spec

H, HEADS, KV, D, HK, HV, G, E, I = 256, 4, 2, 64, 1, 2, 128, 6, 128
SPEC = Spec.from_config(
    {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": H,
        "vocab_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "linear_num_key_heads": HK,
        "linear_num_value_heads": HV,
        "linear_key_head_dim": G,
        "linear_value_head_dim": G,
        "linear_conv_kernel_dim": 4,
        "num_experts": E,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": I,
        "shared_expert_intermediate_size": I,
        "max_position_embeddings": 1024,
        "mtp_num_hidden_layers": 1,
    }
)


def block(kind: str, dense: str, seed: int) -> BlockWeights:
    def w(n: int, k: int, i: int, of: str = dense) -> Weight:
        return make_weight(of, n, k, seed=seed + i)

    if kind == "linear_attention":
        mixer: GatedDeltaWeights | AttentionWeights = GatedDeltaWeights(
            qkv=w(2 * HK * G + HV * G, H, 0),
            z=w(HV * G, H, 1),
            b=w(HV, H, 2, "bf16"),
            a=w(HV, H, 3, "bf16"),
            conv=rows(2 * HK * G + HV * G, 4, seed=seed + 4, scale=0.5),
            dt_bias=rows(HV, seed=seed + 5).float(),
            a_log=rows(HV, seed=seed + 6, scale=0.3).float(),
            norm=1 + rows(G, seed=seed + 7, scale=0.1),
            out=w(H, HV * G, 8),
        )
    else:
        mixer = AttentionWeights(
            q=w(2 * HEADS * D, H, 0),
            k=w(KV * D, H, 1),
            v=w(KV * D, H, 2),
            out=w(H, HEADS * D, 3),
            q_norm=rows(D, seed=seed + 4, scale=0.1),
            k_norm=rows(D, seed=seed + 5, scale=0.1),
        )
    mlp = MoeWeights(
        router=rows(E, H, seed=seed + 10, scale=2 * H**-0.5),
        gate_up=make_weight("int4", E, 2 * I, H, seed=seed + 11),
        down=make_weight("int4", E, H, I, seed=seed + 12),
        shared=MlpWeights(*(make_weight("fp8", I, H, seed=seed + 13 + i) for i in (0, 1)), w(H, I, 15, "fp8")),
        shared_gate=rows(1, H, seed=seed + 16, scale=H**-0.5),
    )
    norms = (rows(H, seed=seed + 20 + i, scale=0.1) for i in (0, 1))
    return BlockWeights(next(norms), mixer, next(norms), mlp)


def model(dense: str) -> Qwen35:
    return Qwen35(
        spec=SPEC,
        embedding=rows(64, H, seed=90),
        layers=tuple(block(kind, dense, 100 * i) for i, kind in enumerate(SPEC.layer_types)),
        norm=rows(H, seed=91, scale=0.1),
        head=rows(64, H, seed=92),
        mtp=MtpWeights(
            fc=make_weight(dense, H, 2 * H, seed=93),
            embedding_norm=rows(H, seed=94, scale=0.1),
            hidden_norm=rows(H, seed=95, scale=0.1),
            block=block("full_attention", dense, 700),
            norm=rows(H, seed=96, scale=0.1),
        ),
        rope=Rope.from_spec(SPEC, DEVICE),
        dtype=DTYPE,
        device=DEVICE,
    )


def batch(context: int, width: int, commit: int, seed: int, sequences: int = 2) -> Batch:
    ids = torch.randint(0, 64, (sequences * width,), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(context, context + width).repeat(sequences)
    table = torch.arange(1, 1 + 2 * sequences).view(sequences, 2)
    owner = torch.arange(sequences).repeat_interleave(width)
    slot = table[owner, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    tensors = (
        ids,
        positions,
        torch.arange(sequences + 1) * width,
        torch.full((sequences,), context),
        table,
        slot,
        torch.arange(1, 1 + sequences),
        torch.full((sequences,), commit),
    )
    return Batch(*(t.to(DEVICE) for t in tensors), window=context > 0, max_query=width, max_context=context + width)


def fused(m: Qwen35) -> Qwen35:
    """The same model with its windows through the kernels."""
    pairs = [merge(each) for each in m.layers]
    half = None
    if m.mtp is not None:
        drafter, half = merge(m.mtp.block)
        m = replace(m, mtp=replace(m.mtp, block=drafter))
    m = replace(m, layers=tuple(views for views, _ in pairs))
    m = replace(m, fused=Fused.of(m, [layer for _, layer in pairs], half))
    assert m.fused is not None
    return m


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["int4", "fp8"])
def test_windows_after_a_prompt_equal_the_reference_path(dense: str) -> None:
    m = model(dense)
    kernels = fused(m)
    caches = [
        Cache.allocate(SPEC, n_pages=5, n_slots=3, n_snapshots=0, window=3, dtype=DTYPE, device=DEVICE, mtp=True)
        for _ in range(2)
    ]
    for each, cache in zip((m, kernels), caches, strict=True):
        each.forward(batch(0, 62, 0, seed=1), cache)
    context, commit = 62, 0
    for step, width in enumerate((3, 1, 2)):  # a window, all of it kept; one row; two rows over a page edge
        b = batch(context, width, commit, seed=5 + step)
        want, got = m.forward(b, caches[0]), kernels.forward(b, caches[1])
        assert_close(got, want, 1e-2)
        assert_close(kernels.logits(got), m.logits(want), 1e-2)
        assert_close(kernels.draft_forward(b, got, caches[1]), m.draft_forward(b, want, caches[0]), 1e-2)
        for a, c in zip(caches[1].gdn, caches[0].gdn, strict=True):
            assert_close(a.s[1:], c.s[1:], 1e-2)
        context, commit = context + width, width


def caches_of(name: str) -> list[Cache]:
    """Two for one sequence."""
    options = {"n_pages": 3, "n_slots": 2, "n_snapshots": 0, "window": 2, "mtp": True, "kv": KvLayout(name)}
    return [Cache.allocate(SPEC, dtype=DTYPE, device=DEVICE, **options) for _ in range(2)]  # type: ignore[arg-type]


def assert_same_entries(caches: list[Cache], pages: torch.Tensor) -> None:
    for a, c in zip(caches[1].kv, caches[0].kv, strict=True):
        assert not isinstance(a, torch.Tensor) and not isinstance(c, torch.Tensor)
        for x, y in zip(a.read(pages), c.read(pages), strict=True):
            assert_close(x, y, 5e-2)  # a number next to the middle of two levels may be coded as either


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_windows_over_pages_in_fewer_bits_equal_the_reference_path(name: str) -> None:
    """The main model and the drafter, whose pages are of the same format, after a prompt that both read alike."""
    m, caches = model("fp8"), caches_of(name)
    kernels = fused(m)
    for each, cache in zip((m, kernels), caches, strict=True):
        each.forward(batch(0, 63, 0, seed=1, sequences=1), cache)
    b = batch(63, 2, 0, seed=5, sequences=1)
    want, got = m.forward(b, caches[0]), kernels.forward(b, caches[1])
    assert_close(got, want, 2e-2)
    assert_close(kernels.draft_forward(b, got, caches[1]), m.draft_forward(b, want, caches[0]), 2e-2)
    assert_same_entries(caches, b.page_table[0])


@pytest.mark.parametrize("name", ["tq4", "fp8"])
def test_the_drafters_window_over_pages_in_fewer_bits(name: str) -> None:
    m, caches = model("bf16"), caches_of(name)
    b = batch(1, 2, 0, seed=5, sequences=1)
    hidden = rows(2, H, seed=3)
    want = m.draft_forward(b, hidden, caches[0])
    assert_close(fused(m).draft_forward(b, hidden, caches[1]), want, 1e-2)
    assert_same_entries(caches, b.page_table[0, :1])


def test_merged_weights_are_in_memory_once() -> None:
    m = fused(model("int4"))
    assert m.fused is not None
    for views, packed in zip(m.layers, m.fused.layers, strict=True):
        whole = {t.untyped_storage().data_ptr() for t in tensors(packed.project).values()}
        mixer = views.mixer
        parts_ = (mixer.q, mixer.k, mixer.v) if isinstance(mixer, AttentionWeights) else (mixer.qkv, mixer.z)
        assert {t.untyped_storage().data_ptr() for p in parts_ for t in tensors(p).values()} == whole


@pytest.mark.parametrize("width", [3, 5])
def test_a_wide_window_goes_through_in_parts_of_whole_sequences(width: int) -> None:
    whole = batch(62, width, 0, seed=3, sequences=30)
    split = parts(whole)
    assert [p.tokens.shape[0] for p, _ in split] == [64 // width * width, 30 * width - 64 // width * width] or width > 4
    assert all(p.tokens.shape[0] <= MAX_ROWS and int(p.query_start[0]) == 0 for p, _ in split)
    assert torch.cat([p.tokens for p, _ in split]).equal(whole.tokens)
    assert torch.cat([p.state_slot for p, _ in split]).equal(whole.state_slot)
    assert torch.cat([p.query_start.diff() for p, _ in split]).equal(whole.query_start.diff())
    assert torch.cat([whole.kv_slot[at] for _, at in split]).equal(whole.kv_slot)


def test_a_weight_with_zero_points_is_left_to_the_reference_path() -> None:
    whole = block("full_attention", "int4", 0)
    assert isinstance(whole.mlp, MoeWeights) and isinstance(whole.mlp.down, Int4Weight)
    zero = torch.full_like(whole.mlp.down.scale, 7).to(torch.uint8)
    odd = replace(whole, mlp=replace(whole.mlp, down=replace(whole.mlp.down, zero=zero)))
    assert pack(whole) is not None and pack(odd) is None
