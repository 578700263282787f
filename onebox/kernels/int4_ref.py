"""INT4 weights in groups: what the bytes mean, and the matmul as plain mathematics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Int4Weight:
    """w[n, k] = (nibble - zero) * scale, one scale (and zero) for each row and group of `group` columns.

    Byte j of a row holds column 2j in its low nibble and column 2j+1 in its high nibble. `zero` None means 8 everywhere
    (symmetric). Leading dimensions (experts) are free.
    """

    q: Tensor  # [..., N, K/2] uint8
    scale: Tensor  # [..., N, K/group] float16 or bfloat16
    zero: Tensor | None  # [..., N, K/group] uint8, or None
    group: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.q.shape[-1] * 2)


def int4_dequantize_ref(w: Int4Weight, dtype: torch.dtype = torch.float32) -> Tensor:  # -> [..., N, K]
    q = torch.stack((w.q & 15, w.q >> 4), dim=-1).flatten(-2).unflatten(-1, (-1, w.group)).float()
    zero = 8.0 if w.zero is None else w.zero.unsqueeze(-1).float()
    return ((q - zero) * w.scale.unsqueeze(-1).float()).flatten(-2).to(dtype)


def int4_matmul_ref(x: Tensor, w: Int4Weight) -> Tensor:  # x [T, K], w [N, K] -> [T, N]
    return (x.float() @ int4_dequantize_ref(w).T).to(x.dtype)
