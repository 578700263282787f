"""Small checkpoints in every published layout, from one random twin.

Each format is stated here on its own, integer by integer in numpy, and files are written by the safetensors library:
nothing of onebox.checkpoint is used. `write` gives what every matrix means, as fp32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

Encoded = tuple[dict[str, Tensor], Tensor]  # stored tensors by suffix, and the matrix they mean

HIDDEN, WIDTH, SHARED, VOCAB, EXPERTS, LAYERS = 128, 128, 128, 320, 4, 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32


def config(*, moe: bool = True, mtp: bool = True, tied: bool = False) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "mtp_num_hidden_layers": 1 if mtp else 0,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "dtype": "bfloat16",
        "eos_token_id": 0,
    }
    if moe:
        values |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
        values |= {"shared_expert_intermediate_size": SHARED}
    else:
        values["intermediate_size"] = 2 * SHARED
    return values


@dataclass
class Twin:
    """Canonical module -> matrix [N, K] (experts one by one), and the tensors that are no matrix."""

    config: dict[str, Any]
    matrices: dict[str, Tensor]
    tensors: dict[str, Tensor]


def make_twin(seed: int = 0, *, moe: bool = True, mtp: bool = True, tied: bool = False) -> Twin:
    g = torch.Generator().manual_seed(seed)
    matrices: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, n: int, k: int) -> None:
        matrices[name] = (torch.randn(n, k, generator=g) * k**-0.5).bfloat16()

    def vector(name: str, *shape: int, std: float = 0.1) -> None:
        tensors[name] = (torch.randn(*shape, generator=g) * std).bfloat16()

    def block(name: str, full: bool) -> None:
        vector(f"{name}.input_layernorm.weight", HIDDEN)
        vector(f"{name}.post_attention_layernorm.weight", HIDDEN)
        if full:
            matrix(f"{name}.self_attn.q_proj", HEADS * 2 * HEAD_DIM, HIDDEN)
            matrix(f"{name}.self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN)
            matrix(f"{name}.self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN)
            matrix(f"{name}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
            vector(f"{name}.self_attn.q_norm.weight", HEAD_DIM)
            vector(f"{name}.self_attn.k_norm.weight", HEAD_DIM)
        else:
            matrix(f"{name}.linear_attn.in_proj_qkv", 256, HIDDEN)
            matrix(f"{name}.linear_attn.in_proj_z", 128, HIDDEN)
            matrix(f"{name}.linear_attn.in_proj_b", 4, HIDDEN)
            matrix(f"{name}.linear_attn.in_proj_a", 4, HIDDEN)
            matrix(f"{name}.linear_attn.out_proj", HIDDEN, 128)
            vector(f"{name}.linear_attn.conv1d.weight", 256, 1, 4, std=0.5)
            vector(f"{name}.linear_attn.dt_bias", 4)
            tensors[f"{name}.linear_attn.A_log"] = torch.rand(4, generator=g)
            tensors[f"{name}.linear_attn.norm.weight"] = 1 + torch.randn(32, generator=g) * 0.1
        if not moe:
            mlp(f"{name}.mlp", 2 * SHARED)
            return
        matrix(f"{name}.mlp.gate", EXPERTS, HIDDEN)
        matrix(f"{name}.mlp.shared_expert_gate", 1, HIDDEN)
        mlp(f"{name}.mlp.shared_expert", SHARED)
        for e in range(EXPERTS):
            mlp(f"{name}.mlp.experts.{e}", WIDTH)

    def mlp(name: str, width: int) -> None:
        matrix(f"{name}.gate_proj", width, HIDDEN)
        matrix(f"{name}.up_proj", width, HIDDEN)
        matrix(f"{name}.down_proj", HIDDEN, width)

    vector("embed_tokens.weight", VOCAB, HIDDEN, std=1.0)
    vector("norm.weight", HIDDEN)
    for i in range(LAYERS):
        block(f"layers.{i}", full=(i + 1) % 4 == 0)
    if not tied:
        matrix("lm_head", VOCAB, HIDDEN)
    if mtp:
        matrix("mtp.fc", HIDDEN, 2 * HIDDEN)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            vector(f"mtp.{name}.weight", HIDDEN)
        block("mtp.layers.0", full=True)
    return Twin(config(moe=moe, mtp=mtp, tied=tied), matrices, tensors)


def left_16_bit(name: str) -> bool:
    """What published quantised checkpoints leave alone."""
    return name.startswith(("lm_head", "mtp.")) or name.endswith((".gate", "shared_expert_gate", "proj_a", "proj_b"))


# --- formats, each stated on its own ---


def _int32(words: np.ndarray) -> Tensor:
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def _pack_rows(values: np.ndarray) -> np.ndarray:
    """[8A, B] -> [A, B]: value 8a + i in bits [4i, 4i + 4)."""
    a = values.reshape(-1, 8, values.shape[1]).astype(np.uint32)
    return sum(a[:, i] << np.uint32(4 * i) for i in range(8))  # type: ignore[return-value]


def _random_int4(w: Tensor, group: int, sym: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """Values [N, K], zero points and fp16 scales [N, K/group] near the matrix, and what they mean."""
    n, k = w.shape
    g = w.float().numpy().reshape(n, k // group, group)
    rng = np.random.default_rng(n * k + group)
    zero = np.full((n, k // group), 8) if sym else rng.integers(1, 16, (n, k // group))
    scale = (np.abs(g).max(-1) / 7).astype(np.float16)
    q = np.clip(np.rint(g / scale[..., None].astype(np.float32)) + zero[..., None], 0, 15).astype(np.int64)
    meaning = (q - zero[..., None]).astype(np.float32) * scale[..., None].astype(np.float32)
    return q.reshape(n, k), zero, scale, torch.from_numpy(meaning.reshape(n, k))


def gptq(w: Tensor, group: int = 128, sym: bool = True, stored_less: int = 1, g_idx: bool = False) -> Encoded:
    q, zero, scale, meaning = _random_int4(w, group, sym)
    stored = {
        "qweight": _int32(_pack_rows(q.T)),
        "qzeros": _int32(_pack_rows((zero - stored_less) % 16).T),
        "scales": torch.from_numpy(scale.T.copy()),
    }
    if g_idx:
        stored["g_idx"] = torch.arange(w.shape[1], dtype=torch.int32) // group
    return stored, meaning


def awq(w: Tensor, group: int = 128) -> Encoded:
    q, zero, scale, meaning = _random_int4(w, group, sym=False)

    def pack(values: np.ndarray) -> Tensor:  # [A, 8B] -> [A, B]
        v = values.reshape(values.shape[0], -1, 8).astype(np.uint32)
        return _int32(sum(v[..., column] << np.uint32(4 * i) for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7))))  # type: ignore[arg-type]

    return {"qweight": pack(q.T), "qzeros": pack(zero.T), "scales": torch.from_numpy(scale.T.copy())}, meaning


def packed_int4(w: Tensor, group: int = 128, sym: bool = True) -> Encoded:
    q, zero, scale, meaning = _random_int4(w, group, sym)
    stored = {
        "weight_packed": _int32(_pack_rows(q.T).T),
        "weight_scale": torch.from_numpy(scale.copy()).bfloat16(),
        "weight_shape": torch.tensor(list(w.shape)),
    }
    exact = stored["weight_scale"].float().repeat_interleave(group, dim=1)
    if not sym:
        stored["weight_zero_point"] = _int32(_pack_rows(zero))
    meaning = torch.from_numpy((q - zero.repeat(group, axis=1)).astype(np.float32)) * exact
    return stored, meaning


def fp8(w: Tensor, block: tuple[int, int] = (128, 128), scale_dtype: torch.dtype = torch.float32) -> Encoded:
    n, k = w.shape
    scale = torch.empty(-(-n // block[0]), -(-k // block[1]))
    q = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    meaning = torch.empty(n, k)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            s = (w[part].float().abs().max() / 448).to(scale_dtype).float()
            scale[i, j] = s
            q[part] = (w[part].float() / s).clamp(-448, 448).to(torch.float8_e4m3fn)
            meaning[part] = q[part].float() * s
    return {"weight": q, "weight_scale_inv": scale.to(scale_dtype)}, meaning


def int8(w: Tensor) -> Encoded:
    scale = w.float().abs().amax(1, keepdim=True) / 127
    q = (w.float() / scale).round().to(torch.int8)
    return {"weight": q, "weight_scale": scale}, q.float() * scale


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def _random_nvfp4(w: Tensor, global_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Packed values, block scales, and what they mean (times `global_scale`)."""
    n, k = w.shape
    blocks = w.float().reshape(n, k // 16, 16)
    scale = (blocks.abs().amax(-1) / 6 / global_scale).to(torch.float8_e4m3fn)
    ratio = blocks / (scale.float() * global_scale)[..., None].clamp_min(1e-20)
    code = np.abs(ratio.numpy()[..., None] - E2M1).argmin(-1).reshape(n, k)
    packed = torch.from_numpy((code[:, 0::2] | (code[:, 1::2] << 4)).astype(np.uint8))
    meaning = torch.from_numpy(E2M1[code]) * (scale.float() * torch.tensor(global_scale)).repeat_interleave(16, dim=1)
    return packed, scale, meaning


def _global(w: Tensor) -> float:
    return 2.0 ** float(np.floor(np.log2(float(w.float().abs().max()) / 448 / 6)))  # a power of two: 1 / x is exact


def nvfp4_modelopt(w: Tensor) -> Encoded:
    g = _global(w)
    packed, scale, meaning = _random_nvfp4(w, g)
    return {
        "weight": packed,
        "weight_scale": scale,
        "weight_scale_2": torch.tensor(g),
        "input_scale": torch.tensor(0.01),
    }, meaning


def nvfp4_compressed(w: Tensor) -> Encoded:
    g = _global(w)
    packed, scale, meaning = _random_nvfp4(w, g)
    return {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_global_scale": torch.tensor([1 / g]),
        "input_global_scale": torch.tensor([100.0]),
    }, meaning


def plain(w: Tensor) -> Encoded:
    return {"weight": w}, w.float()


# --- layouts: a format for each module, and how config.json says so ---


@dataclass(frozen=True)
class Layout:
    """`encode(name)` is the format of a module; `quantization` what config.json declares."""

    encode: Callable[[str], Callable[[Tensor], Encoded]]
    quantization: dict[str, Any] | None = None
    fused: Literal["", "body", "all"] = ""  # whose experts are in one tensor a layer


def body(fmt: Callable[[Tensor], Encoded]) -> Callable[[str], Callable[[Tensor], Encoded]]:
    return lambda name: plain if left_16_bit(name) else fmt


def _auto_round(group: int, sym: bool) -> Layout:
    def encode(name: str) -> Callable[[Tensor], Encoded]:
        if left_16_bit(name) or ".shared_expert." in name or name.endswith("layers.3.self_attn.o_proj"):
            return plain
        return lambda w: gptq(w, group, sym)

    extra: dict[str, Any] = {r".*shared_expert\..*": {"bits": 16, "data_type": "float"}}
    extra["model.language_model.layers.3.self_attn.o_proj"] = {"bits": 16, "data_type": "float"}
    return Layout(
        encode,
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": group,
            "sym": sym,
            "extra_config": extra,
        },
    )


def _ct(weights: dict[str, Any], fmt: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$", r"re:.*in_proj_[ab]$", "re:^mtp.*"],
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_EXEMPT = ["lm_head", "gate", "shared_expert_gate", "in_proj_a", "in_proj_b", "mtp"]

LAYOUTS: dict[str, Layout] = {
    "bf16": Layout(lambda name: plain),
    "bf16-fused": Layout(lambda name: plain, fused="body"),
    "bf16-fused-mtp": Layout(lambda name: plain, fused="all"),
    "autoround": _auto_round(128, True),
    "autoround-g64": _auto_round(64, True),
    "autoround-g32-asym": _auto_round(32, False),
    "gptq": Layout(
        body(lambda w: gptq(w, 128, True, g_idx=True)),
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    ),
    "gptq-v2-asym": Layout(
        body(lambda w: gptq(w, 64, False, stored_less=0)),
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-dynamic": Layout(
        lambda name: plain if left_16_bit(name) or "shared_expert" in name else (lambda w: gptq(w, 128)),
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "dynamic": {"lm_head": {}, r"-:.*shared_expert.*": {}, r"-:.*mtp.*": {}},
        },
    ),
    "awq": Layout(
        body(awq),
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": _EXEMPT,
        },
    ),
    "fp8": Layout(
        body(fp8),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": _EXEMPT},
    ),
    "fp8-ragged": Layout(
        body(lambda w: fp8(w, (48, 96), torch.bfloat16)),
        {"quant_method": "fp8", "weight_block_size": [48, 96], "modules_to_not_convert": _EXEMPT},
    ),
    "ct-int4": Layout(body(packed_int4), _ct(_INT4 | {"symmetric": True}, "pack-quantized")),
    "ct-int4-asym": Layout(
        body(lambda w: packed_int4(w, sym=False)), _ct(_INT4 | {"symmetric": False}, "pack-quantized")
    ),
    "nvfp4-ct": Layout(body(nvfp4_compressed), _ct(_NVFP4, "nvfp4-pack-quantized")),
    "nvfp4-modelopt": Layout(
        body(nvfp4_modelopt),
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": ["lm_head", "*mlp.gate", "*shared_expert_gate", "*in_proj_a", "*in_proj_b", "mtp*"],
        },
    ),
    "int8-head": Layout(
        lambda name: int8 if name == "lm_head" else plain,
        {
            "quant_method": "auto-round",
            "bits": 16,
            "extra_config": {"lm_head": {"bits": 8, "data_type": "int", "group_size": -1}},
        },
    ),
}


@dataclass
class Written:
    """A checkpoint on disk: what its matrices mean, and which file holds which stored tensor."""

    path: Path
    meaning: dict[str, Tensor]
    weight_map: dict[str, str]
    stored: dict[str, Tensor] = field(default_factory=dict)


def write(
    twin: Twin,
    path: Path,
    layout: Layout | str = "bf16",
    *,
    nested: bool = True,
    shards: int = 3,
    mtp: str = "index",
    vision: bool = False,
) -> Written:
    """`nested`: text_config and the prefix model.language_model., else flat. `mtp`: in the index, or a side file."""
    layout = LAYOUTS[layout] if isinstance(layout, str) else layout
    prefix = "model.language_model." if nested else "model."
    tensors: dict[str, Tensor] = {}
    meaning: dict[str, Tensor] = {}

    def stored(name: str) -> str:
        return name if name.startswith(("mtp.", "lm_head")) else prefix + name

    for name, w in twin.matrices.items():
        encoded, meaning[name] = layout.encode(name)(w)
        for suffix, t in encoded.items():
            tensors[f"{stored(name)}.{suffix}"] = t.contiguous()
    for name, t in twin.tensors.items():
        tensors[stored(name)] = t
    if layout.fused:
        blocks = [f"layers.{i}" for i in range(LAYERS)] + (["mtp.layers.0"] if layout.fused == "all" else [])
        for block in blocks:
            experts = stored(f"{block}.mlp.experts")
            each = [
                [tensors.pop(f"{experts}.{e}.{which}_proj.weight") for which in ("gate", "up", "down")]
                for e in range(EXPERTS)
            ]
            tensors[f"{experts}.gate_up_proj"] = torch.stack([torch.cat(w[:2]) for w in each])
            tensors[f"{experts}.down_proj"] = torch.stack([w[2] for w in each])
    if vision:
        tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(12, 4, dtype=torch.bfloat16)
        tensors["model.visual.merger.norm.weight"] = torch.zeros(4, dtype=torch.bfloat16)

    outer = dict(twin.config)
    if nested:
        outer = {"model_type": outer["model_type"].removesuffix("_text"), "text_config": outer}
    if layout.quantization is not None:
        outer["quantization_config"] = layout.quantization
    return write_files(path, outer, tensors, meaning, shards, mtp)


def write_files(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    meaning: dict[str, Tensor] | None = None,
    shards: int = 2,
    mtp: str = "index",
) -> Written:
    path.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Tensor]] = {}
    for i, (name, t) in enumerate(tensors.items()):
        file = f"model-{i * shards // len(tensors) + 1:05d}-of-{shards:05d}.safetensors"
        if name.startswith("mtp.") and mtp == "side":
            file = "model_extra_tensors.safetensors"
        files.setdefault(file, {})[name] = t
    for file, part in files.items():
        save_file(part, path / file, metadata={"format": "pt"})
    weight_map = {
        name: file for file, part in files.items() for name in part if mtp == "index" or not name.startswith("mtp.")
    }
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config))
    return Written(path, meaning or {}, weight_map, tensors)


def meaning_as_fp32(twin: Twin, written: Written, path: Path) -> Written:
    """The dequantised twin as a checkpoint of its own, fp32."""
    exact = Twin(twin.config, written.meaning, {n: t.float() for n, t in twin.tensors.items()})
    return write(exact, path, Layout(lambda name: plain), nested=False, shards=1)
