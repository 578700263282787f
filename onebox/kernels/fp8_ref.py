"""FP8 (e4m3) weights with one scale a block: what the bytes mean, and the matmul as plain mathematics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fp8Weight:
    """w[n, k] = q[n, k] * scale[n // block_n, k // block_k]; the last block of a row or column may be ragged.

    `scale` multiplies; checkpoints call it `weight_scale_inv`. Leading dimensions (experts) are free.
    """

    q: Tensor  # [..., N, K] float8_e4m3fn
    scale: Tensor  # [..., ceil(N/block_n), ceil(K/block_k)] float32
    block: tuple[int, int] = (128, 128)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.q.shape)


def fp8_dequantize_ref(w: Fp8Weight, dtype: torch.dtype = torch.float32) -> Tensor:  # -> [..., N, K]
    n, k = w.q.shape[-2:]
    scale = w.scale.repeat_interleave(w.block[0], dim=-2)[..., :n, :].repeat_interleave(w.block[1], dim=-1)[..., :k]
    return (w.q.float() * scale.float()).to(dtype)


def fp8_matmul_ref(x: Tensor, w: Fp8Weight) -> Tensor:  # x [T, K], w [N, K] -> [T, N]
    return (x.float() @ fp8_dequantize_ref(w).T).to(x.dtype)
