"""Names and shapes of the published layout: from a reader's tensors to the parts of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onebox.checkpoint.reader import WeightReader
from onebox.kernels.weights import Weight, dequantize, to
from onebox.model.attention import AttentionWeights
from onebox.model.block import BlockWeights
from onebox.model.gated_delta import GatedDeltaWeights
from onebox.model.layers import MlpWeights
from onebox.model.moe import MoeWeights
from onebox.model.mtp import MtpWeights
from onebox.spec import Spec


def place(w: Weight, device: torch.device, dtype: torch.dtype, *, unpack: bool) -> Weight:
    """A weight on its device: 16-bit in `dtype`, packed as it is or, with `unpack`, dense."""
    if isinstance(w, Tensor):
        return w.to(device=device, dtype=dtype)
    return to(dequantize(w, dtype), device) if unpack else to(w, device)


@dataclass(frozen=True)
class Published:
    """Reads a model from `reader`, one method a part; `place` decides where and how a matrix is kept.

    Raises CheckpointError naming a tensor that is missing or misshapen.
    """

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
