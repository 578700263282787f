"""RMSNorm of prompts' rows, and the residual sum ahead of it, in one launch. A row is one program's in any batch.

The sum of squares is in fp64, as everywhere on a GPU: its order then leaves no trace in a row's bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_kernel(
    x_ptr, y_ptr, sum_ptr, weight_ptr, out_ptr, stride, eps, H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < H
    x = tl.load(x_ptr + t * stride + i, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(y_ptr + t * H + i, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + t * H + i, x, mask=inside)
    x = x.to(tl.float32)
    wide = x.to(tl.float64)
    square = (tl.sum(wide * wide, axis=0) / H).to(tl.float32)
    scale = 1.0 + tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * H + i, (x * tl.rsqrt(square + eps) * scale).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of model/layers.py for rows x [T, H]: x / rms(x) * (1 + weight)."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, width = x.shape
    _norm_kernel[(rows,)](
        x, x, x, weight, out, x.stride(0), eps, H=width, BLOCK=triton.next_power_of_2(width), ADD=False, num_warps=8
    )
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y as rows [T, H], and the norm of that."""
    total, out = torch.empty_like(y), torch.empty_like(y)
    rows, width = y.shape
    assert x.is_contiguous() and y.is_contiguous()
    _norm_kernel[(rows,)](
        x, y, total, weight, out, width, eps, H=width, BLOCK=triton.next_power_of_2(width), ADD=True, num_warps=8
    )
    return total, out
