"""INT8 rows, the format of the LM head: a 16- or 32-bit matrix -> Int8Weight."""

from __future__ import annotations

import torch
from torch import Tensor

from onebox.kernels.int8_ref import Int8Weight


def quantize_int8(w: Tensor) -> Int8Weight:
    """Symmetric, a row's largest magnitude becomes 127: [..., N, K] -> Int8Weight."""
    x = w.float()
    scale = x.abs().amax(-1) / 127.0
    divisor = torch.where(scale == 0, 1.0, scale)[..., None]
    return Int8Weight((x / divisor).round_().clamp_(-127, 127).to(torch.int8), scale)
