"""A checkpoint folder -> a model on its device, with nothing missing and nothing left over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onebox.checkpoint.reader import LoadReport, WeightReader
from onebox.errors import CheckpointError
from onebox.kernels.weights import Weight, dequantize, to
from onebox.model.attention import AttentionWeights
from onebox.model.block import BlockWeights
from onebox.model.gated_delta import GatedDeltaWeights
from onebox.model.layers import MlpWeights, Rope
from onebox.model.moe import MoeWeights
from onebox.model.mtp import MtpWeights
from onebox.model.qwen3_5 import Qwen35
from onebox.spec import Spec

if TYPE_CHECKING:
    from onebox.model.decode import DecodeLayer


@dataclass(frozen=True)
class Loaded:
    """A model and what was met while reading it."""

    model: Qwen35
    report: LoadReport


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    mtp: bool | None = None,
    unpack: bool | None = None,
    fused: bool = False,
) -> Loaded:
    """Read every text tensor of the checkpoint at `path`.

    `mtp`: True insists on an MTP head, False leaves it out, None takes it when it is there. `unpack` turns packed
    weights into dense ones of `dtype` once, at load (None: on a CPU, where a packed product would unpack them anew at
    every step). `fused` runs decode windows through the Triton kernels, on CUDA, where they can read the weights.
    Raises CheckpointError naming the tensor or the field at fault.
    """
    device = torch.device(device)
    reader = WeightReader.open(path)
    spec = Spec.from_config(reader.config)
    if mtp is True and not (spec.n_mtp_layers and reader.has_mtp()):
        found = "no 'mtp.' tensors" if spec.n_mtp_layers else "mtp_num_hidden_layers 0"
        raise CheckpointError(f"{path}: speculation by MTP was asked for, but the checkpoint has {found}; use k = 0.")
    if mtp is None and reader.has_mtp() and not spec.n_mtp_layers:
        raise CheckpointError(
            f"config.json: mtp_num_hidden_layers is 0, but {path} has 'mtp.' tensors; set it to 1, or serve without "
            "drafts (num_speculative_tokens 0)."
        )
    with_mtp = bool(spec.n_mtp_layers) and reader.has_mtp() and mtp is not False
    if spec.n_mtp_layers > 1 and with_mtp:
        raise CheckpointError(f"config.json: mtp_num_hidden_layers {spec.n_mtp_layers} is not supported; expected 1.")
    unpack = device.type == "cpu" if unpack is None else unpack
    build = _Builder(reader, spec, lambda w: _place(w, device, dtype, unpack=unpack), device, dtype)
    if fused:
        from onebox.model import decode  # needs triton
    embedding = build.tensor("embed_tokens.weight", spec.vocab, spec.hidden)
    packed: list[DecodeLayer | None] = []

    def merged(weights: BlockWeights) -> BlockWeights:
        """For the kernels a layer's projections are merged as soon as it is read: no two layers are there twice."""
        if fused:
            weights, layer = decode.merge(weights)
            packed.append(layer)
        return weights

    model = Qwen35(
        spec=spec,
        embedding=embedding,
        layers=tuple(merged(build.block(f"layers.{i}", kind)) for i, kind in enumerate(spec.layer_types)),
        norm=build.tensor("norm.weight", spec.hidden),
        head=embedding if spec.tied else build.linear("lm_head", spec.vocab, spec.hidden),
        mtp=build.mtp() if with_mtp else None,
        rope=Rope.from_spec(spec, device),
        dtype=dtype,
        device=device,
    )
    if fused:
        if model.mtp is not None:
            model = replace(model, mtp=replace(model.mtp, block=merged(model.mtp.block)))
        drafter = packed[-1] if model.mtp is not None else None
        model = replace(model, fused=decode.Fused.of(model, packed[: len(model.layers)], drafter))
    return Loaded(model, reader.finish(ignore_mtp=not with_mtp))


def _place(w: Weight, device: torch.device, dtype: torch.dtype, *, unpack: bool) -> Weight:
    if isinstance(w, Tensor):
        return w.to(device=device, dtype=dtype)
    return to(dequantize(w, dtype), device) if unpack else to(w, device)


@dataclass(frozen=True)
class _Builder:
    """Names and shapes of the published layout, one method a part."""

    reader: WeightReader
    spec: Spec
    place: Callable[[Weight], Weight]
    device: torch.device
    dtype: torch.dtype

    def tensor(self, name: str, *shape: int, fp32: bool = False) -> Tensor:
        dtype = torch.float32 if fp32 else self.dtype
        return self.reader.tensor(name, shape).to(device=self.device, dtype=dtype)

    def linear(self, name: str, n: int, k: int) -> Weight:
        return self.place(self.reader.linear(name, n, k))

    def block(self, name: str, kind: str) -> BlockWeights:
        spec = self.spec
        mixer = self.attention(f"{name}.self_attn") if kind == "full_attention" else self.gdn(f"{name}.linear_attn")
        return BlockWeights(
            mixer_norm=self.tensor(f"{name}.input_layernorm.weight", spec.hidden),
            mixer=mixer,
            mlp_norm=self.tensor(f"{name}.post_attention_layernorm.weight", spec.hidden),
            mlp=self.moe(f"{name}.mlp") if spec.moe else self.mlp(f"{name}.mlp"),
        )

    def attention(self, name: str) -> AttentionWeights:
        h, d, heads, kv_heads = self.spec.hidden, self.spec.head_dim, self.spec.n_heads, self.spec.n_kv_heads
        return AttentionWeights(
            q=self.linear(f"{name}.q_proj", heads * 2 * d, h),
            k=self.linear(f"{name}.k_proj", kv_heads * d, h),
            v=self.linear(f"{name}.v_proj", kv_heads * d, h),
            out=self.linear(f"{name}.o_proj", h, heads * d),
            q_norm=self.tensor(f"{name}.q_norm.weight", d),
            k_norm=self.tensor(f"{name}.k_norm.weight", d),
        )

    def gdn(self, name: str) -> GatedDeltaWeights:
        spec = self.spec
        h, heads, value = spec.hidden, spec.gdn_v_heads, spec.gdn_value_width
        return GatedDeltaWeights(
            qkv=self.linear(f"{name}.in_proj_qkv", spec.conv_channels, h),
            z=self.linear(f"{name}.in_proj_z", value, h),
            b=self.linear(f"{name}.in_proj_b", heads, h),
            a=self.linear(f"{name}.in_proj_a", heads, h),
            conv=self.tensor(f"{name}.conv1d.weight", spec.conv_channels, 1, spec.conv_width).squeeze(1),
            dt_bias=self.tensor(f"{name}.dt_bias", heads, fp32=True),
            a_log=self.tensor(f"{name}.A_log", heads, fp32=True),
            norm=self.tensor(f"{name}.norm.weight", spec.gdn_v_dim),
            out=self.linear(f"{name}.out_proj", h, value),
        )

    def mlp(self, name: str) -> MlpWeights:
        h, width = self.spec.hidden, self.spec.shared_width
        return MlpWeights(
            gate=self.linear(f"{name}.gate_proj", width, h),
            up=self.linear(f"{name}.up_proj", width, h),
            down=self.linear(f"{name}.down_proj", h, width),
        )

    def moe(self, name: str) -> MoeWeights:
        spec = self.spec
        gate_up, down = self.reader.experts(f"{name}.experts", spec.n_experts, spec.expert_width, spec.hidden)
        return MoeWeights(
            router=self.tensor(f"{name}.gate.weight", spec.n_experts, spec.hidden),
            gate_up=self.place(gate_up),
            down=self.place(down),
            shared=self.mlp(f"{name}.shared_expert"),
            shared_gate=self.tensor(f"{name}.shared_expert_gate.weight", 1, spec.hidden),
        )

    def mtp(self) -> MtpWeights:
        h = self.spec.hidden
        return MtpWeights(
            fc=self.linear("mtp.fc", h, 2 * h),
            embedding_norm=self.tensor("mtp.pre_fc_norm_embedding.weight", h),
            hidden_norm=self.tensor("mtp.pre_fc_norm_hidden.weight", h),
            block=self.block("mtp.layers.0", "full_attention"),
            norm=self.tensor("mtp.norm.weight", h),
        )
