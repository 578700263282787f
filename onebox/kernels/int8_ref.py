"""INT8 weights, one scale a row: what the bytes mean, and the matmul as plain mathematics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Int8Weight:
    """w[n, k] = q[n, k] * scale[n]; symmetric, q in [-127, 127]. The format of the LM head."""

    q: Tensor  # [..., N, K] int8
    scale: Tensor  # [..., N] float32

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.q.shape)


def int8_dequantize_ref(w: Int8Weight, dtype: torch.dtype = torch.float32) -> Tensor:  # -> [..., N, K]
    return (w.q.float() * w.scale.unsqueeze(-1).float()).to(dtype)


def int8_matmul_ref(x: Tensor, w: Int8Weight) -> Tensor:  # x [T, K], w [N, K] -> [T, N]
    return (x.float() @ int8_dequantize_ref(w).T).to(x.dtype)
