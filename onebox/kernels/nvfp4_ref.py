"""NVFP4 weights: e2m1 values in blocks of 16 with an e4m3 scale each and one fp32 scale for the whole tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits; bit 3 is the sign
NVFP4_BLOCK = 16


@dataclass(frozen=True)
class Nvfp4Weight:
    """w[n, k] = e2m1(nibble) * scale[n, k // 16] * global_scale; byte j holds column 2j in its low nibble.

    `global_scale` multiplies: ModelOpt's `weight_scale_2`, the reciprocal of compressed-tensors' `weight_global_scale`.
    Leading dimensions (experts) are free; `global_scale` then has one entry an expert, or one a row where matrices of
    different global scale were joined (kernels take the first form only).
    """

    q: Tensor  # [..., N, K/2] uint8
    scale: Tensor  # [..., N, K/16] float8_e4m3fn
    global_scale: Tensor  # [...] or [..., N] float32

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.q.shape[-1] * 2)


def nvfp4_dequantize_ref(w: Nvfp4Weight, dtype: torch.dtype = torch.float32) -> Tensor:  # -> [..., N, K]
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=w.q.device)
    nibbles = torch.stack((w.q & 15, w.q >> 4), dim=-1).flatten(-2).long()
    g = w.global_scale.float()
    scale = w.scale.float() * (g[..., None] if g.ndim == w.q.ndim - 1 else g[..., None, None])
    return (values[nibbles].unflatten(-1, (-1, NVFP4_BLOCK)) * scale.unsqueeze(-1)).flatten(-2).to(dtype)


def nvfp4_matmul_ref(x: Tensor, w: Nvfp4Weight) -> Tensor:  # x [T, K], w [N, K] -> [T, N]
    return (x.float() @ nvfp4_dequantize_ref(w).T).to(x.dtype)
