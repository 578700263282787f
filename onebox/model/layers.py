"""What every layer is made of: matrix products by weight format, norms, rotary positions, the SwiGLU MLP."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onebox.kernels.weights import Weight, dequantize
from onebox.spec import Spec


def on_gpu(x: Tensor) -> bool:
    """Whether the Triton kernels take these rows: 16-bit, on a GPU."""
    return x.is_cuda and x.element_size() == 2


def linear(x: Tensor, w: Weight) -> Tensor:
    """x [..., K] times w [N, K] transposed, in x's dtype. Without kernels a packed weight is unpacked for the call."""
    if on_gpu(x):
        from onebox.kernels.gemm import matmul  # triton, which a CPU run never imports

        return matmul(x, w)
    return F.linear(x, w.to(x.dtype) if isinstance(w, Tensor) else dequantize(w, x.dtype))


def mean_square(x: Tensor) -> Tensor:
    """Over the last dimension, kept. In fp64 on a GPU, where the order of a sum depends on how many rows there are."""
    wide = x.double() if x.is_cuda else x
    return wide.square().mean(-1, keepdim=True).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMSNorm over the last dimension: x / rms(x) * (1 + weight). For the residual stream, q and k."""
    if on_gpu(x) and x.ndim == 2:
        from onebox.kernels import norm  # triton, which a CPU run never imports

        return norm.rms_norm(x, weight, eps)
    y = x.float()
    return (y * torch.rsqrt(mean_square(y) + eps) * (1.0 + weight.float())).to(x.dtype)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream x [T, H] with y added, and its norm."""
    if on_gpu(x):
        from onebox.kernels import norm

        return norm.add_rms_norm(x, y, weight, eps)
    x = x + y
    return x, rms_norm(x, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain RMSNorm over the last dimension times SiLU(gate): the gated delta net's output norm."""
    y = x.float()
    y = y * torch.rsqrt(mean_square(y) + eps) * weight.float()
    return (y * F.silu(gate.float())).to(gate.dtype)


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies of the first `2 * len(inv_freq)` dimensions; `scale` multiplies cos and sin (YaRN)."""

    inv_freq: Tensor  # [rope_dims / 2] fp32
    scale: float = 1.0

    @classmethod
    def from_spec(cls, spec: Spec, device: torch.device) -> Rope:
        """Default or YaRN frequencies (Peng et al., arXiv 2309.00071) as config.json's rope_parameters ask."""
        dims, base = spec.rope_dims, spec.rope_theta
        inv_freq = base ** (-torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims)
        parameters = dict(spec.rope_parameters)
        if parameters.get("rope_type", parameters.get("type", "default")) != "yarn":
            return cls(inv_freq)
        factor = float(parameters["factor"])
        original = float(parameters.get("original_max_position_embeddings", spec.max_positions / factor))
        fast, slow = float(parameters.get("beta_fast", 32)), float(parameters.get("beta_slow", 1))

        def dim_of(rotations: float) -> float:  # the dimension that turns `rotations` times over the original length
            return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(dim_of(fast)), 0), min(math.ceil(dim_of(slow)), dims - 1)
        span = torch.arange(dims // 2, dtype=torch.float32, device=device)
        interpolate = ((span - low) / max(high - low, 0.001)).clamp(0, 1)
        scale = float(parameters.get("attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0))
        return cls(inv_freq / factor * interpolate + inv_freq * (1 - interpolate), scale)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, rope_dims / 2] at `positions` [T]."""
        angle = positions.float()[:, None, None] * self.inv_freq
        return (angle.cos() * self.scale).to(dtype), (angle.sin() * self.scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate dimension pairs (i, i + rope_dims/2) of x [T, H, D]; dimensions past rope_dims pass through."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


@dataclass(frozen=True)
class MlpWeights:
    """A SwiGLU MLP: a dense model's, or the shared expert."""

    gate: Weight  # [I, H]
    up: Weight  # [I, H]
    down: Weight  # [H, I]


def mlp(x: Tensor, w: MlpWeights) -> Tensor:
    return linear(F.silu(linear(x, w.gate)) * linear(x, w.up), w.down)
