"""Matrix products for any number of rows, as plain mathematics."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from onebox.kernels.weights import Weight, dequantize


def matmul_ref(x: Tensor, w: Weight) -> Tensor:
    """x [..., K] times w [N, K] transposed: [..., N] in x's dtype, summed in fp32."""
    return F.linear(x.float(), dequantize(w)).to(x.dtype)


def experts_matmul_ref(x: Tensor, gate_up: Weight, down: Weight, weights: Tensor, experts: Tensor) -> Tensor:
    """Weighted sum of the chosen experts' SwiGLU: [T, H].

    x [T, H], gate_up [E, 2I, H] (gate rows before up rows), down [E, H, I], weights [T, k] fp32, experts [T, k].
    """
    first, second = dequantize(gate_up)[experts], dequantize(down)[experts]
    gate, up = (first @ x.float()[:, None, :, None])[..., 0].chunk(2, dim=-1)
    hidden = (F.silu(gate) * up).to(x.dtype).float()
    return ((second @ hidden[..., None])[..., 0] * weights[..., None]).sum(1).to(x.dtype)
