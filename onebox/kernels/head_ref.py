"""LM head, as plain mathematics."""

from __future__ import annotations

import torch
from torch import Tensor

from onebox.kernels.weights import Weight, dequantize


def head_ref(hidden: Tensor, w: Weight, with_logits: bool = True) -> tuple[Tensor, Tensor | None]:
    """hidden [T, H], w [V, H] -> (best token [T] int64, lowest id on ties; logits [T, V] fp32)."""
    logits = hidden.float() @ dequantize(w).T
    best = (logits == logits.amax(-1, keepdim=True)).to(torch.int32).argmax(-1)
    return best, logits if with_logits else None
